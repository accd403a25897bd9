"""Kept ledgers against tpu-inference's own bucket functions, which are read from its source: importing them takes JAX."""

import ast
import importlib.util
import logging
from functools import cache
from itertools import product
from pathlib import Path
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
    """get_token_paddings, get_req_paddings and what they call, out of tpu_inference/runner/utils.py."""
    package = importlib.util.find_spec("tpu_inference")
    assert package
    assert package.submodule_search_locations
    source = (Path(package.submodule_search_locations[0]) / "runner" / "utils.py").read_text()
    wanted = {"get_padded_num_reqs_with_upper_limit", "get_req_paddings", "get_token_paddings"}
    body = [
        node
        for node in ast.parse(source).body
        if (isinstance(node, ast.FunctionDef) and node.name in wanted)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MIN_NUM_SEQS")
    ]
    names: dict[str, Any] = {"logger": logging.getLogger("upstream")}
    exec(compile(ast.Module(body, []), "utils.py", "exec"), names)  # noqa: S102  the pinned engine's own source
    return names


def buckets(tokens: int, sequences: int) -> tuple[list[int], list[int]]:
    functions = upstream()
    return functions["get_token_paddings"](MIN_TOKEN_BUCKET, tokens, 0), functions["get_req_paddings"](
        8, sequences
    )


def programs(tokens: list[int], requests: list[int], *, grammars: bool = True) -> int:
    """How many programs a text model without drafts has at these buckets (CompilationManager.capture_model)."""
    sizes = sorted({*tokens, *requests})
    substitutes = len(sizes) * (len(sizes) + len(requests))
    selects = sum(request <= token for token, request in product(tokens, requests))
    samples = 4 * len(requests)  # greedy or not, with logprobs or not
    by_token = 2 * len(tokens)  # steps, prompt logprobs
    by_request = (2 + grammars) * len(requests)  # logits, logprobs, grammars
    return by_token + by_request + samples + substitutes + selects


def test_the_count_is_that_of_a_small_engine() -> None:
    """Llama on one simulated chip, as its own log had it."""
    assert buckets(256, 32) == ([16, 32, 64, 128, 256], [8, 16, 32])
    assert programs(*buckets(256, 32)) == 99


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
    tokens, requests = buckets(planned.sizes.batched_tokens * copies, planned.sizes.sequences * copies)
    expected = programs(tokens, requests, grammars=copies == 1)
    print(entry["programs_at_start"], expected)
    of_steps = {
        program["bucket"]["num_tokens"] for program in entry["programs"] if program["name"] == "backbone"
    }
    decode = next(size for size in tokens if size >= min(planned.most_sequences, tokens[-1]))
    assert of_steps == {decode, tokens[-1]}
    assert entry["programs_at_start"] == expected
