"""Kept ledgers against tpu-inference's own bucket functions, which are read from its source: importing them takes JAX."""

import ast
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.config import load
from serving.planning import Plan
from serving.planning.cache import separate_batches
from serving.planning.compiled import entries
from serving.planning.plan import plan

pytestmark = pytest.mark.unit
DEPLOYMENTS = sorted((Path(__file__).parents[2] / "deployments").glob("*.yaml"))
MIN_TOKEN_BUCKET = 16  # tpu_inference/envs.py


@cache
def upstream() -> dict[str, Any]:
    """The functions that make buckets, and what they call, out of tpu_inference/runner/utils.py."""
    package = importlib.util.find_spec("tpu_inference")
    assert package
    assert package.submodule_search_locations
    source = (Path(package.submodule_search_locations[0]) / "runner" / "utils.py").read_text()
    wanted = {
        "get_attn_req_paddings",
        "get_padded_num_reqs_with_upper_limit",
        "get_req_paddings",
        "get_token_paddings",
    }
    body = [
        node
        for node in ast.parse(source).body
        if (isinstance(node, ast.FunctionDef) and node.name in wanted)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MIN_NUM_SEQS")
    ]
    names: dict[str, Any] = {"logger": logging.getLogger("upstream")}
    exec(compile(ast.Module(body, []), "utils.py", "exec"), names)  # noqa: S102  the pinned engine's own source
    return names


@dataclass(frozen=True)
class Buckets:
    """Tokens, requests, and the requests of a step's attention, each padded up to the next of these."""

    tokens: list[int]
    requests: list[int]
    attention: list[int]


def buckets(
    tokens: int,
    sequences: int,
    copies: int = 1,
    cache_itemsize: int = 2,
    variables: Mapping[str, str] | None = None,
) -> Buckets:
    """As TPUModelRunner makes them for `copies` groups that schedule apart, each of so many tokens and sequences."""
    functions, variables = upstream(), variables or {}
    custom = variables.get("ATTN_CUSTOM_NUM_REQS_BUCKETS", "")
    functions["envs"] = SimpleNamespace(
        ATTN_BUCKETIZED_NUM_REQS=variables.get("ATTN_BUCKETIZED_NUM_REQS") == "true",
        ATTN_CUSTOM_NUM_REQS_BUCKETS=[int(size) for size in custom.split(",") if size],
    )
    packing = 4 // cache_itemsize
    return Buckets(
        functions["get_token_paddings"](
            max(MIN_TOKEN_BUCKET, power_of_two(copies * packing)), tokens * copies, 0
        ),
        functions["get_req_paddings"](
            max(functions["MIN_NUM_SEQS"], power_of_two(copies)), sequences * copies
        ),
        functions["get_attn_req_paddings"](functions["MIN_NUM_SEQS"], sequences),
    )


def power_of_two(number: int) -> int:
    """The next one that is no smaller."""
    return 1 << (number - 1).bit_length()


def programs(found: Buckets, *, grammars: bool = True, pictures: bool = False) -> int:
    """How many programs a model without drafts has at these buckets (CompilationManager.capture_model), but those of an encoder."""
    tokens, requests = found.tokens, found.requests
    sizes = sorted({*tokens, *requests})
    substitutes = len(sizes) * (len(sizes) + len(requests))
    selects = sum(request <= token for token, request in product(tokens, requests))
    samples = 4 * len(requests)  # greedy or not, with logprobs or not
    by_token = (len(found.attention) + 1) * len(tokens)  # steps, prompt logprobs
    if pictures:  # steps of embeddings, and what makes these of text with pictures and without
        by_token += (len(found.attention) + 2) * len(tokens)
    by_request = (2 + grammars) * len(requests)  # logits, logprobs, grammars
    return by_token + by_request + samples + substitutes + selects


def test_the_count_is_that_of_a_small_engine() -> None:
    """Llama on one simulated chip, as its own log had it."""
    found = buckets(256, 32)
    assert found == Buckets([16, 32, 64, 128, 256], [8, 16, 32], [32])
    assert programs(found) == 99


def test_copies_pad_tokens_further_and_buckets_of_attention_multiply_steps() -> None:
    """Qwen3.5 397B on v7x 2x2x1: eight groups of devices, four buckets of requests; 338 programs in the runner's own list."""
    found = buckets(
        1024,
        64,
        8,
        1,
        {"ATTN_BUCKETIZED_NUM_REQS": "true", "ATTN_CUSTOM_NUM_REQS_BUCKETS": "8,16,32,64"},
    )
    assert (found.tokens[0], found.attention) == (32, [8, 16, 32, 64])
    assert programs(found, grammars=False) == 338


def kept() -> dict[str, tuple[Plan, dict[str, Any]]]:
    found = {}
    for path in DEPLOYMENTS:
        for service in load(path).services.values():
            for spec in (pool for model in service.models for pool in model.per_pool()):
                planned = plan(spec, estimated=True)
                entry = entries().get(planned.version)
                if entry and entry["programs"]:
                    found[f"{path.stem} {planned.slice.topology}"] = (planned, entry)
    return found


KEPT = kept()


@pytest.mark.parametrize(("planned", "entry"), KEPT.values(), ids=KEPT)
def test_a_kept_ledger_has_the_engine_s_own_buckets(planned: Plan, entry: dict[str, Any]) -> None:
    copies = separate_batches(planned.layout)
    sizes = planned.sizes
    found = buckets(sizes.batched_tokens, sizes.sequences, copies, sizes.cache_itemsize, planned.environment)
    expected = programs(found, grammars=copies == 1, pictures=sizes.towers)
    print(entry["programs_at_start"], expected)
    of_steps = {
        program["bucket"]["num_tokens"] for program in entry["programs"] if program["name"] == "backbone"
    }
    decode = next(size for size in found.tokens if size >= min(planned.most_sequences, found.tokens[-1]))
    assert of_steps == {decode, found.tokens[-1]}
    assert entry["programs_at_start"] == expected
