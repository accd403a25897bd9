from importlib.metadata import version
from typing import Any

import pytest

from serving.engine.known_faults import FAULTS, refuse
from serving.errors import BadRequestError

pytestmark = pytest.mark.unit

ENDS: dict[str, list[dict[str, Any]]] = {
    "prompt-logprobs-over-hosts": [
        {"prompt": "Hello", "max_tokens": 2, "echo": True, "logprobs": 2},
        {"prompt": "Hello", "echo": True, "logprobs": 0},
        {"messages": [], "echo": True, "logprobs": True, "top_logprobs": 1},
        {"messages": [], "prompt_logprobs": 1},
        {"token_ids": [1], "sampling_params": {"prompt_logprobs": 0}},
    ],
    "allowed-token-ids": [
        {"prompt": "Hello", "allowed_token_ids": [5, 6]},
        {"token_ids": [1], "sampling_params": {"allowed_token_ids": [5]}},
    ],
}
HARMLESS: list[dict[str, Any]] = [
    {"prompt": "Hello", "echo": True},
    {"prompt": "Hello", "logprobs": 2},
    {"prompt": "Hello", "echo": False, "logprobs": 2},
    {"messages": [], "logprobs": True, "top_logprobs": 2},
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
