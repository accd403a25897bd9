"""The walk over request parameters leaves none out that vLLM's request models have."""

from typing import Any

import pytest

from benchmarks.parameters import ALONE, ROUTES, SAMPLING_PARAMS, contains, requests


def models() -> dict[str, Any]:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    return {
        "completions": CompletionRequest,
        "chat": ChatCompletionRequest,
        "responses": ResponsesRequest,
        "messages": AnthropicMessagesRequest,
        "generate": GenerateRequest,
    }


@pytest.mark.engine
def test_every_parameter_of_every_request_model_is_walked_and_no_other() -> None:
    """A newer vLLM has parameters that nobody has sent to an engine yet."""
    from vllm.sampling_params import SamplingParams

    named = models()
    assert named.keys() == ROUTES.keys()
    for name, (_, base, table) in ROUTES.items():
        fields = {*named[name].model_fields} - {"model"}
        assert {*base, *table} == fields, name
        assert {*ALONE.get(name, {})} <= fields, name
    named_by_clients = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert SAMPLING_PARAMS.keys() == named_by_clients


@pytest.mark.unit
def test_pairs_are_of_two_parameters_and_singles_of_one() -> None:
    table: dict[str, list[Any]] = {"a": [1, 2], "b": [3]}
    assert list(requests(table, pairs=False)) == [{"a": 1}, {"a": 2}, {"b": 3}]
    assert list(requests(table, pairs=True)) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert contains({"a": 1, "b": 3}, {"a": 1})
    assert not contains({"a": 1, "b": 3}, {"a": 2})
