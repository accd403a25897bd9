"""A client's `seed`: `router: {seed: refuse | ignore}`. Pure.

tpu-inference 0.26 draws the tokens of all requests of a step from one random state, and refuses a request that has a seed
(tpu_inference.platforms.tpu_platform, validate_request). A greedy request may have one: nothing is drawn for it.
"""

from collections.abc import Mapping
from typing import Any

from serving.config import Seeds
from serving.engine.protocol import sampling_holders
from serving.errors import SeedError
from serving.router.http.routes import Route


def seeded(route: Route, fields: Mapping[str, Any]) -> bool:
    """Whether an engine would have to draw by a seed of the request's own."""
    # Speech is heard greedily unless its form says otherwise; the engine refuses the rest.
    return not route.form and any(map(_draws_by_seed, sampling_holders(fields)))


def without(fields: Mapping[str, Any], seeds: Seeds) -> dict[str, Any]:
    """The fields of a seeded request, without its seed; raises SeedError where seeds are refused."""
    if seeds is Seeds.REFUSE:
        raise SeedError(
            "seed is not supported: TPU engines don't draw tokens by a request's own seed. Leave it out, or send temperature 0."
        )
    kept = {name: value for name, value in fields.items() if name != "seed"}
    if isinstance(sampling := kept.get("sampling_params"), Mapping):
        kept["sampling_params"] = {name: value for name, value in sampling.items() if name != "seed"}
    return kept


def _draws_by_seed(holder: Mapping[str, Any]) -> bool:
    # vLLM raises a temperature between 0 and 0.01 to 0.01: 0 alone is greedy.
    return holder.get("seed") is not None and holder.get("temperature") != 0
