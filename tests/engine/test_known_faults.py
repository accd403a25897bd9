from importlib.metadata import version
from typing import Any

import pytest

from serving.config import ModelSpec
from serving.engine.known_faults import FAULTS, refuse, refuse_too_large
from serving.errors import BadRequestError
from serving.planning.fit import GIB, Fit
from serving.planning.plan import plan

pytestmark = pytest.mark.unit

ENDS: dict[str, list[dict[str, Any]]] = {
    "prompt-logprobs-over-hosts": [
        {"prompt": "Hello", "max_tokens": 2, "echo": True, "logprobs": 2},
        {"prompt": "Hello", "echo": True, "logprobs": 0},
        {"messages": [], "echo": True, "logprobs": True, "top_logprobs": 1},
        {"messages": [], "echo": True},
        {"messages": [], "prompt_logprobs": 1},
        {"token_ids": [1], "sampling_params": {"prompt_logprobs": 0}},
    ],
    "allowed-token-ids": [
        {"prompt": "Hello", "allowed_token_ids": [5, 6]},
        {"token_ids": [1], "sampling_params": {"allowed_token_ids": [5]}},
    ],
    "logprob-token-ids": [
        {"messages": [], "logprobs": True, "logprob_token_ids": [5, 6]},
        {"prompt": "Hello", "logprobs": 1, "logprob_token_ids": [5]},
        {"token_ids": [1], "sampling_params": {"logprob_token_ids": [5]}},
    ],
}
HARMLESS: list[dict[str, Any]] = [
    {"prompt": "Hello", "echo": True},
    {"prompt": "Hello", "logprobs": 2},
    {"prompt": "Hello", "echo": False, "logprobs": 2},
    {"messages": [], "logprobs": True, "top_logprobs": 2},
    {"messages": [], "echo": False},
    {"messages": [], "echo": True, "top_logprobs": None},
    {"messages": [], "prompt_logprobs": None, "allowed_token_ids": None},
    {"token_ids": [1], "sampling_params": {"logprobs": 1}},
    {"token_ids": [1], "sampling_params": "nonsense"},
]


def test_every_known_fault_has_requests_that_show_it() -> None:
    assert ENDS.keys() == {fault.name for fault in FAULTS}


def test_every_known_fault_is_one_of_the_engine_that_is_installed() -> None:
    """A newer engine has to be walked anew: a row that does not name it refuses what may work."""
    assert all(version("tpu-inference") in fault.versions for fault in FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_request_that_would_end_its_engine_is_refused_with_what_to_do_instead(fault: Any) -> None:
    for fields in ENDS[fault.name]:
        with pytest.raises(BadRequestError, match=fault.instead[:20]):
            refuse(fields, hosts=2)


@pytest.mark.parametrize("fields", HARMLESS)
def test_what_only_looks_like_it_passes(fields: dict[str, Any]) -> None:
    refuse(fields, hosts=2)


@pytest.mark.parametrize("fields", ENDS["prompt-logprobs-over-hosts"])
def test_one_host_takes_prompt_logprobs(fields: dict[str, Any]) -> None:
    refuse(fields, hosts=1)


def fit_of(model: str, **engine: Any) -> Fit:
    spec = {"model": model, "slice": {"generation": "v6e", "topology": "1x1"}}
    options = {"max_model_len": 2048, "max_num_batched_tokens": 1024, "max_num_seqs": 64, **engine}
    return plan(ModelSpec.model_validate({**spec, "engine": options})).fit


# As libtpu's compiler says for 1,024 tokens of prompts on one v6e chip (`serving compile`).
@pytest.mark.parametrize(
    ("model", "compiled_gib"), [("Qwen/Qwen3-4B", 1.739), ("meta-llama/Llama-3.1-8B-Instruct", 1.468)]
)
def test_logprobs_of_a_prompt_take_what_the_compiler_says(model: str, compiled_gib: float) -> None:
    planned = fit_of(model).workspace.prompt_logprobs_bytes / GIB
    assert planned == pytest.approx(compiled_gib, rel=0.01)


@pytest.mark.parametrize("fields", ENDS["prompt-logprobs-over-hosts"])
def test_logprobs_of_a_prompt_that_do_not_fit_are_refused_with_both_figures(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match=r"1\.74 GiB .* gpu_memory_utilization 0\.98 leaves 0\.62 GiB"):
        refuse_too_large(fields, [fit_of("Qwen/Qwen3-4B", gpu_memory_utilization=0.98)])
    refuse_too_large(fields, [fit_of("Qwen/Qwen3-4B", gpu_memory_utilization=0.92)])


@pytest.mark.parametrize("fields", HARMLESS)
def test_what_asks_for_none_passes_where_they_do_not_fit(fields: dict[str, Any]) -> None:
    refuse_too_large(fields, [fit_of("Qwen/Qwen3-4B", gpu_memory_utilization=0.98)])
