"""The simulated engine's JSON, read and written again by vLLM's own classes: not a byte may change."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.servers import PATIENCE_S
from support.simulated_engine import serving

from serving.simulation.engine import responses
from serving.simulation.engine.orders import RequestError

pytestmark = pytest.mark.engine

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
CHATS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 500},
    {"logprobs": True, "top_logprobs": 2},
    {"return_token_ids": True, "n": 2},
    {"tools": [TOOL], "tool_choice": "required", "max_tokens": 50},
    {"response_format": {"type": "json_object"}, "max_tokens": 50},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 500},
    {"logprobs": 2, "prompt": ["One", "Two"]},
    {"return_token_ids": True, "n": 2},
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as (address, _):
        yield address


def chunks(address: str, path: str, fields: dict[str, Any]) -> list[str]:
    answer = httpx.post(f"{address}{path}", json={**fields, "stream": True}, timeout=PATIENCE_S)
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [event.removeprefix("data: ") for event in events[:-2]]


def whole(address: str, path: str, fields: dict[str, Any]) -> str:
    return json.dumps(httpx.post(f"{address}{path}", json=fields, timeout=PATIENCE_S).json())


def test_fields_of_a_response_s_request_have_vllm_s_types() -> None:
    from pydantic import ValidationError
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    base = {"model": "m", "input": "hi"}
    odd: list[Any] = [[], {}, "", "x", 0, 1, 1.5, True, None, ["a"], {"a": 1}]
    left_out = {"model", "input", "tool_choice"}  # whose odd values vLLM refuses later, or by its chats
    differ = []
    for name, value in itertools.product(responses._Read.model_fields.keys() - left_out, odd):
        fields = {**base, name: value}
        taken = []
        for read in (ResponsesRequest.model_validate, responses._Read.read):
            try:
                read(fields)
                taken.append(True)
            except (ValidationError, TypeError, RequestError):
                taken.append(False)
        if taken[0] != taken[1]:
            differ.append((name, value, *taken))
    assert differ == []


@pytest.mark.parametrize("usage", [{}, {"stream_options": USAGE}])
@pytest.mark.parametrize("fields", CHATS)
def test_chat(address: str, fields: dict[str, Any], usage: dict[str, Any]) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionResponse,
        ChatCompletionStreamResponse,
    )

    path, asked = "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5, **fields}
    for chunk in chunks(address, path, {**asked, **usage}):
        assert (
            ChatCompletionStreamResponse.model_validate_json(chunk).model_dump_json(exclude_unset=True)
            == chunk
        )
    answer = whole(address, path, asked)
    assert json.dumps(ChatCompletionResponse.model_validate_json(answer).model_dump()) == answer


@pytest.mark.parametrize("usage", [{}, {"stream_options": USAGE}])
@pytest.mark.parametrize("fields", COMPLETIONS)
def test_completions(address: str, fields: dict[str, Any], usage: dict[str, Any]) -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionStreamResponse

    path, asked = "/v1/completions", {"prompt": "Hello", "max_tokens": 5, **fields}
    for chunk in chunks(address, path, {**asked, **usage}):
        assert (
            CompletionStreamResponse.model_validate_json(chunk).model_dump_json(exclude_unset=True) == chunk
        )
    answer = whole(address, path, asked)
    assert json.dumps(CompletionResponse.model_validate_json(answer).model_dump()) == answer


def test_errors_and_tokens(address: str) -> None:
    from vllm.entrypoints.openai.engine.protocol import ErrorResponse
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeResponse, TokenizeResponse

    for path, fields in (("/v1/completions", {"prompt": ""}), ("/v1/chat/completions", {})):
        answer = whole(address, path, fields)
        assert json.dumps(ErrorResponse.model_validate_json(answer).model_dump()) == answer
    answer = whole(address, "/tokenize", {"prompt": "Hello"})
    assert json.dumps(TokenizeResponse.model_validate_json(answer).model_dump()) == answer
    answer = whole(address, "/detokenize", {"tokens": json.loads(answer)["tokens"]})
    assert json.dumps(DetokenizeResponse.model_validate_json(answer).model_dump()) == answer


def test_metrics_are_among_those_that_vllm_exposes(address: str) -> None:
    from pathlib import Path

    import vllm.v1.metrics

    source = (Path(vllm.v1.metrics.__path__[0]) / "loggers.py").read_text()
    shown = httpx.get(f"{address}/metrics").text
    names = {line.split()[2] for line in shown.splitlines() if line.startswith("# TYPE vllm:")}
    for name in names:
        assert f'"{name.removesuffix("_created").removesuffix("_total")}' in source, name
