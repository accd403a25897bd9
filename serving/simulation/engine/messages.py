"""Anthropic's Messages as vLLM 0.26 reads and writes them: a chat, whose answer is one block of text or of a tool's input."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serving.engine.protocol import CONTINUED, tokens_event
from serving.simulation.engine.orders import Order
from serving.simulation.engine.requests import Body, ChatBody, Formatted
from serving.simulation.engine.steps import compact, end_of, text_before

_CHOICES = {"any": "required", "auto": "auto", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class _Read(Body):
    """What of a message is looked into before it is a chat."""

    output_config: Formatted | None = None
    tools: list[dict[str, Any]] | None = None
    vllm_xargs: dict[str, Any] | None = None


def order_of(fields: Mapping[str, Any], max_model_len: int, seed: int, *, parses_tools: bool = True) -> Order:
    """What a message asks for; raises RequestError."""
    chat = _chat_fields(fields)
    continued = (chat["vllm_xargs"] or {}).get(CONTINUED)
    if isinstance(continued, list) and isinstance(chat["max_tokens"], int):
        chat["max_tokens"] = max(1, chat["max_tokens"] - len(continued))
    return replace(
        ChatBody.read(chat).to_order(max_model_len, seed, parses_tools=parses_tools), **end_of(fields)
    )


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


class MessagesReply:
    """How the answer to one message is written."""

    at_once = False  # the first event comes with the first token

    def __init__(self, order: Order, model: str, request_id: str) -> None:
        self._order = order
        self._answers = order.answers()
        self._model = model
        self.id = f"chatcmpl-{request_id}"
        self._before = text_before(order)
        self._open = bool(self._before)

    @property
    def answers(self) -> list[tuple[list[int], Any]]:
        return self._answers

    def opening(self) -> bytes:
        """What comes before the first token; the client of an answer that goes on has it."""
        head = tokens_event().encode() if self._order.tells else b""
        if self._order.wish.continued:
            return head
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
        return head + _event({"type": "message_start", "message": message})

    def chunks(self, _: int, start: int, end: int) -> bytes:
        """The events of the tokens from `start` up to `end`."""
        return b"".join(self._step(position) for position in range(start, end))

    def ending(self) -> bytes:
        """The end of a stream."""
        events = _event({"type": "content_block_stop", "index": 0}) if self._open else b""
        delta = {name: value for name, value in self._reasons().items() if value is not None}
        events += _event({"type": "message_delta", "delta": delta, "usage": self._usage(self._tokens())})
        events += _event({"type": "message_stop"})
        return events + (tokens_event().encode() if self._order.tells else b"")

    def failure(self, _: str) -> bytes:
        """vLLM reads its own error as if it were a chunk of a chat, and says what is wrong with that."""
        error = {"type": "internal_error", "message": "4 validation errors for ChatCompletionStreamResponse"}
        return _event({"type": "error", "error": error})

    def whole(self) -> dict[str, Any]:
        """The message at once."""
        text = self._text()
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
            "usage": self._usage(self._tokens()),
        }

    def _step(self, position: int) -> bytes:
        _, answer = self._answers[0]
        text, events = answer.texts[position], b""
        if text and not self._open:
            self._open = True
            events += _event({"type": "content_block_start", "index": 0, "content_block": self._block("")})
        if text:
            delta = (
                {"type": "text_delta", "text": text}
                if self._order.tool is None
                else {"type": "input_json_delta", "partial_json": text}
            )
            events += _event({"type": "content_block_delta", "index": 0, "delta": delta})
        if not self._order.tells:
            return events
        facts: dict[str, Any] = {"prompt_tokens": self._prompt_tokens()} if position == 0 else {}
        if position == len(answer.tokens) - 1:
            facts |= {"finish_reason": answer.finish, "stop_reason": answer.stop_reason}
        return events + tokens_event([answer.tokens[position]], **facts).encode()

    def _block(self, text: str) -> dict[str, Any]:
        if self._order.tool is None:
            return {"type": "text", "text": text}
        name = f"chatcmpl-tool-{self.id[-16:]}"
        return {"type": "tool_use", "id": name, "name": self._order.tool, "input": {}}

    def _reasons(self) -> dict[str, Any]:
        _, answer = self._answers[0]
        if self._order.tool is not None and not self._order.tool_named and answer.finish == "stop":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if answer.finish == "stop" and isinstance(answer.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        return {"stop_reason": _REASONS[answer.finish], "stop_sequence": None}

    def _text(self) -> str:
        return self._before + "".join(self._answers[0][1].texts)

    def _prompt_tokens(self) -> int:
        return self._order.prompt_tokens - len(self._order.wish.continued)

    def _tokens(self) -> int:
        return len(self._order.wish.continued) + len(self._answers[0][1].tokens)

    def _usage(self, written: int) -> dict[str, int]:
        return {"input_tokens": self._prompt_tokens(), "output_tokens": written}


def _event(fields: dict[str, Any]) -> bytes:
    return f"event: {fields['type']}\ndata: {compact(fields)}\n\n".encode()
