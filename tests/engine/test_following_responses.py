"""The conversation that the router puts in the place of `previous_response_id`, read by vLLM's own functions."""

from typing import Any

import pytest
from pydantic_core import to_json

from serving.router.http.responses import Kept, following, items

pytestmark = pytest.mark.engine

ANSWER: dict[str, Any] = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Two", "annotations": [], "logprobs": None}],
    "phase": None,
}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "add",
    "arguments": '{"a": 1}',
    "status": "completed",
}


def messages_of(body: bytes) -> list[Any]:
    """What a chat template gets."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages

    request = ResponsesRequest.model_validate_json(body)
    return list(construct_input_messages(request_input=request.input))


def test_vllm_reads_a_conversation_that_the_router_put_together() -> None:
    second, _ = following(
        {"model": "m", "input": "Three", "previous_response_id": "r"},
        Kept(to_json({"output": [ANSWER]}), items({"input": "One"})),
    )
    asked, answered, asked_next = messages_of(second)
    assert (asked["role"], asked["content"]) == ("user", [{"type": "input_text", "text": "One"}])
    assert (answered["role"], answered["content"]) == ("assistant", "Two")
    assert (asked_next["role"], asked_next["content"][0]["text"]) == ("user", "Three")


def test_vllm_reads_a_tool_s_call_and_its_result() -> None:
    result = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
    second, _ = following(
        {"model": "m", "input": [result], "previous_response_id": "r"},
        Kept(to_json({"output": [CALL]}), items({"input": "One"})),
    )
    _, called, returned = messages_of(second)
    assert called["tool_calls"][0]["function"]["name"] == "add"
    assert (returned["role"], returned["tool_call_id"], returned["content"]) == ("tool", "call_1", "2")
