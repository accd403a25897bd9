from typing import Any

import pytest

from serving.config import CapacityType, ModelSpec, parse
from serving.errors import ConfigError
from serving.planning import plan

pytestmark = pytest.mark.unit

V6E = {
    "slice": {"generation": "v6e", "topology": "2x4", "hosts": 2, "capacity": "spot"},
    "replicas": {"min": 0, "max": 4},
}
V5E = {
    "slice": {"generation": "v5e", "topology": "4x4", "capacity": "reserved", "reservation": "r"},
    "replicas": 2,
}
MODEL = {"model": "meta-llama/Llama-3.3-70B-Instruct", "engine": {"max_model_len": 4096}}


def test_pools_are_models_of_their_own_in_order_of_preference() -> None:
    spec = ModelSpec.model_validate({**MODEL, "pools": [V6E, V5E]})
    first, second = spec.per_pool()
    assert (first.slice.generation, first.replicas.min, first.replicas.max) == ("v6e", 0, 4)
    assert (second.slice.generation, second.replicas.min, second.replicas.max) == ("v5e", 2, 2)
    assert (spec.slice, spec.replicas) == (first.slice, first.replicas)
    assert [plan(one).slice.chips for one in (first, second)] == [8, 16]


def test_a_model_without_pools_is_its_only_one() -> None:
    spec = ModelSpec.model_validate({**MODEL, **V6E})
    assert spec.per_pool() == (spec,)
    assert spec.slice.capacity == (CapacityType.SPOT,)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({**MODEL, **V6E, "pools": [V5E]}, "pools stand in the place of replicas, slice"),
        ({**MODEL, "pools": [V6E, {"slcie": {}}]}, "pools.1.slcie: unknown key; did you mean 'slice'?"),
        ({**MODEL, "pools": [{**V6E, "slice": {**V6E["slice"], "capacity": "cheap"}}]}, "capacity"),  # type: ignore[dict-item]
        (
            {**MODEL, "slice": {"generation": "v6e", "topology": "4x4", "capacity": "reserved"}},
            "come together",
        ),
        ({**MODEL, "slice": {"generation": "v6e", "topology": "4x4", "reservation": "r"}}, "come together"),
        ({**MODEL}, "models.0.slice: missing"),
    ],
)
def test_pools_that_say_too_much_or_too_little_are_refused(model: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse({"models": [model]})
    assert says in refusal.value.message
