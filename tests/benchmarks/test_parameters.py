"""The walk over request parameters leaves none out that vLLM's request models have."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.parameters import (
    ALONE,
    KILLS,
    ROUTES,
    SAMPLING_PARAMS,
    Results,
    Walked,
    contains,
    requests,
    wanted,
)


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


@pytest.mark.unit
def test_a_walk_goes_on_behind_the_rows_that_an_earlier_one_kept(tmp_path: Path) -> None:
    path = tmp_path / "walked.jsonl"
    first, second, *_ = wanted("completions", [], pairs=True)
    Results(path).add([Walked("completions", first, "200"), Walked("completions", second, "400")])
    with path.open("a") as file:
        file.write('{"route": "compl')  # killed while it wrote
    results = Results(path)
    results.add([Walked("chat", {"echo": True}, "200")])
    assert [row.fields for row in Results(path).rows] == [first, second, {"echo": True}]
    left = wanted("completions", Results(path).rows, pairs=True)
    assert left == wanted("completions", [], pairs=True)[2:]


@pytest.mark.unit
def test_no_pair_is_sent_with_a_part_that_ends_engines() -> None:
    """Neither by the table of known faults nor by what was walked alone; alone everything is sent."""
    pairs = wanted("completions", [], pairs=True)
    assert not any("allowed_token_ids" in fields or "prompt_logprobs" in fields for fields in pairs)
    assert not any(fields.get("echo") and "logprobs" in fields for fields in pairs)
    assert {"allowed_token_ids": [5, 6]} in wanted("completions", [], pairs=False)
    walked = [Walked("completions", {"suffix": "end"}, KILLS)]
    assert any("suffix" in fields for fields in pairs)
    assert not any("suffix" in fields for fields in wanted("completions", walked, pairs=True))
