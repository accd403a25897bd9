"""Anthropic's Messages as vLLM 0.26 reads and writes them: a chat, whose answer is one block of text or of a tool's input."""

import json
from collections.abc import Mapping
from typing import Any

from serving.simulation.engine.orders import Order
from serving.simulation.engine.requests import Body, ChatBody, Formatted
from serving.simulation.engine.steps import SteppedReply, event_of, order_of_chat

_CHOICES = {"any": "required", "auto": "auto", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class _Read(Body):
    """What of a message is looked into before it is a chat."""

    output_config: Formatted | None = None
    tools: list[dict[str, Any]] | None = None
    vllm_xargs: dict[str, Any] | None = None


def order_of(fields: Mapping[str, Any], max_model_len: int, seed: int, *, parses_tools: bool = True) -> Order:
    """What a message asks for; raises RequestError."""
    return order_of_chat(_chat_fields(fields), fields, max_model_len, seed, parses_tools=parses_tools)


def prompt_of(fields: Mapping[str, Any]) -> list[int]:
    """The tokens of a message's prompt; raises RequestError."""
    return ChatBody.read(_chat_fields(fields)).prompt()


def _chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A message's fields as those of a chat; raises RequestError."""
    _Read.read(fields)
    system = fields.get("system")
    asked = fields.get("messages")
    choice = fields.get("tool_choice") or {}
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    form = (fields.get("output_config") or {}).get("format") or {}
    chat = {
        "model": fields.get("model"),
        "messages": [*([{"role": "system", "content": system}] if system else []), *asked]
        if isinstance(asked, list)
        else asked,
        "max_tokens": fields.get("max_tokens"),
        "stop": fields.get("stop_sequences"),
        "temperature": fields.get("temperature"),
        "stream": fields.get("stream"),
        "vllm_xargs": fields.get("vllm_xargs"),
    }
    if form.get("schema"):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    if tools := fields.get("tools"):
        chat["tools"] = [
            {"function": {"name": tool.get("name"), "parameters": tool.get("input_schema")}} for tool in tools
        ]
        chat["tool_choice"] = (
            {"function": {"name": choice.get("name")}} if kind == "tool" else _CHOICES.get(str(kind), "auto")
        )
    return chat


class MessagesReply(SteppedReply):
    """How the answer to one message is written."""

    at_once = False  # the first event comes with the first token

    def __init__(self, order: Order, model: str, request_id: str) -> None:
        super().__init__(order)
        self._model = model
        self.id = f"chatcmpl-{request_id}"

    def _begun(self) -> bytes:
        message: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0),
        }
        return event_of({"type": "message_start", "message": message})

    def _ended(self) -> bytes:
        events = event_of({"type": "content_block_stop", "index": 0}) if self._open else b""
        delta = {name: value for name, value in self._reasons().items() if value is not None}
        events += event_of({"type": "message_delta", "delta": delta, "usage": self._usage(self._written)})
        return events + event_of({"type": "message_stop"})

    def failure(self, _: str) -> bytes:
        """vLLM reads its own error as if it were a chunk of a chat, and says what is wrong with that."""
        error = {"type": "internal_error", "message": "4 validation errors for ChatCompletionStreamResponse"}
        return event_of({"type": "error", "error": error})

    def whole(self) -> dict[str, Any]:
        """The message at once."""
        text = self._text
        block = self._block(text) if text or self._order.tool is None else self._block("{}")
        if self._order.tool is not None:
            block["input"] = json.loads(text or "{}")
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [block],
            "model": self._model,
            **{name: value for name, value in self._reasons().items() if value is not None},
            "usage": self._usage(self._written),
        }

    def _opened(self) -> bytes:
        return event_of({"type": "content_block_start", "index": 0, "content_block": self._block("")})

    def _delta(self, text: str) -> bytes:
        delta = (
            {"type": "text_delta", "text": text}
            if self._order.tool is None
            else {"type": "input_json_delta", "partial_json": text}
        )
        return event_of({"type": "content_block_delta", "index": 0, "delta": delta})

    def _block(self, text: str) -> dict[str, Any]:
        if self._order.tool is None:
            return {"type": "text", "text": text}
        name = f"chatcmpl-tool-{self.id[-16:]}"
        return {"type": "tool_use", "id": name, "name": self._order.tool, "input": {}}

    def _reasons(self) -> dict[str, Any]:
        answer = self._answer
        if self._order.tool is not None and not self._order.tool_named and answer.finish == "stop":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if answer.finish == "stop" and isinstance(answer.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        return {"stop_reason": _REASONS[answer.finish], "stop_sequence": None}

    def _usage(self, written: int) -> dict[str, int]:
        return {"input_tokens": self._prompt_tokens, "output_tokens": written}
