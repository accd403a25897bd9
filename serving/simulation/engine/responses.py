"""OpenAI's Responses as vLLM 0.26 reads and writes them: a chat, whose answer is one item, a message or a function's call."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from serving.simulation.engine.orders import Order, RequestError
from serving.simulation.engine.requests import Body, Formatted
from serving.simulation.engine.steps import SteppedReply, compact, event_of, order_of_chat

_ROLES = {"developer": "system"}
_Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
]


class _Prompt(Body):
    id: str


class _Read(Body):
    """Fields of a response's request by vLLM's types, also those that have no meaning here."""

    background: bool | None = False
    cache_salt: str | None = Field(default=None, min_length=1)
    ignore_eos: bool = False
    include: list[_Include] | None = None
    instructions: str | None = None
    logit_bias: dict[str, float] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    prompt: _Prompt | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    stop: str | list[str] | None = None
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    text: Formatted | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_k: int | None = None
    top_logprobs: int | None = 0
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = None
    vllm_xargs: dict[str, Any] | None = None


def order_of(fields: Mapping[str, Any], max_model_len: int, seed: int, *, parses_tools: bool = True) -> Order:
    """What a response asks for; raises RequestError."""
    return order_of_chat(_chat_fields(fields), fields, max_model_len, seed, parses_tools=parses_tools)


def _chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A response's fields as those of a chat; raises RequestError."""
    _Read.read(fields)
    form = (fields.get("text") or {}).get("format") or {}
    chat = {
        "model": fields.get("model"),
        "messages": _messages(fields),
        "max_tokens": fields.get("max_output_tokens"),
        "temperature": fields.get("temperature"),
        "seed": fields.get("seed"),
        "stop": fields.get("stop"),
        "ignore_eos": bool(fields.get("ignore_eos")),
        "stream": fields.get("stream"),
        "vllm_xargs": fields.get("vllm_xargs"),
    }
    if form.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    elif form.get("type") == "json_object":
        chat["response_format"] = form
    if tools := fields.get("tools"):
        choice = fields.get("tool_choice", "auto")
        chat["tools"] = [
            {"function": {"name": tool.get("name"), "parameters": tool.get("parameters")}} for tool in tools
        ]
        chat["tool_choice"] = (
            {"function": {"name": choice.get("name")}} if isinstance(choice, Mapping) else choice
        )
    return chat


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    asked = fields.get("input")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list):
        raise RequestError("Input should be a valid string or a valid list", param="input")
    messages = [{"role": "system", "content": fields["instructions"]}] if fields.get("instructions") else []
    for item in asked:
        match item.get("type", "message") if isinstance(item, dict) else None:
            case "message":
                role = str(item.get("role"))
                messages.append({"role": _ROLES.get(role, role), "content": item.get("content")})
            case "function_call":
                messages.append({"role": "assistant", "content": compact(item)})
            case "function_call_output":
                messages.append({"role": "tool", "content": str(item.get("output"))})
            case "reasoning":
                pass
            case _:
                raise RequestError(
                    "the simulated engine reads messages, function calls, their outputs and reasoning alone",
                    param="input",
                )
    return messages


class ResponsesReply(SteppedReply):
    """How the answer to one request for a response is written. Ids of items differ from engine to engine."""

    at_once = True  # the first events come before the engine has seen the request

    def __init__(
        self, order: Order, fields: Mapping[str, Any], model: str, request_id: str, created: int
    ) -> None:
        super().__init__(order)
        self._fields = fields
        self._model = model
        self._created = created
        self.id = f"resp_{request_id}"
        # As if the tokens of another engine had been written here.
        self._sequence = (2 + len(order.wish.continued)) if order.wish.continued else 0

    def _begun(self) -> bytes:
        response = self._response([], "in_progress", None)
        kinds = "response.created", "response.in_progress"
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def _ended(self) -> bytes:
        events = self._closed() if self._open else b""
        response = self._response(
            [self._item("completed")] if self._open else [], self._status, self._usage()
        )
        return events + self._event("response.completed", response=response)

    def failure(self, _: str) -> bytes | None:
        """vLLM has no event for it, and breaks off."""
        return None

    def whole(self) -> dict[str, Any]:
        """The response at once."""
        return self._response([self._item("completed")], self._status, self._usage())

    def _opened(self) -> bytes:
        empty: dict[str, Any] = {"content": []} if self._order.tool is None else {"arguments": ""}
        item = {**self._item("in_progress"), **empty}
        events = self._event("response.output_item.added", output_index=0, item=item)
        if self._order.tool is None:
            events += self._part("response.content_part.added", part={**self._text_part(""), "logprobs": []})
        return events

    def _delta(self, text: str) -> bytes:
        if self._order.tool is None:
            return self._part("response.output_text.delta", delta=text, logprobs=[])
        return self._of_item("response.function_call_arguments.delta", delta=text)

    def _closed(self) -> bytes:
        text = self._text
        if self._order.tool is None:
            events = self._part("response.output_text.done", text=text, logprobs=[])
            events += self._part("response.content_part.done", part=self._text_part(text))
        else:
            events = self._of_item(
                "response.function_call_arguments.done", arguments=text, name=self._order.tool
            )
        item = self._item("completed")
        return events + self._event("response.output_item.done", output_index=0, item=item)

    def _item(self, status: str) -> dict[str, Any]:
        if self._order.tool is None:
            parts = [self._text_part(self._text)]
            return {
                "id": self._item_id,
                "content": parts,
                "role": "assistant",
                "status": status,
                "type": "message",
            }
        return {
            "arguments": self._text,
            "call_id": f"call_{self._item_id}",
            "name": self._order.tool,
            "type": "function_call",
            "id": self._item_id,
            "status": status,
        }

    def _text_part(self, text: str) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def _part(self, kind: str, **more: Any) -> bytes:
        return self._of_item(kind, content_index=0, **more)

    def _of_item(self, kind: str, **more: Any) -> bytes:
        return self._event(kind, output_index=0, item_id=self._item_id, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        fields = {"type": kind, "sequence_number": self._sequence, **more}
        self._sequence += 1
        return event_of(fields)

    @property
    def _item_id(self) -> str:
        return f"msg_{self.id[-24:]}_{self._created}"

    @property
    def _status(self) -> str:
        return "incomplete" if self._answer.finish == "length" else "completed"

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": self._written,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": self._prompt_tokens + self._written,
        }

    def _response(
        self, output: list[dict[str, Any]], status: str, usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        fields = self._fields
        most = self._order.max_model_len - self._prompt_tokens
        return {
            "id": self.id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.get("instructions"),
            "metadata": fields.get("metadata"),
            "model": self._model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": fields.get("parallel_tool_calls", True),
            "temperature": fields.get("temperature", 1.0),
            "tool_choice": fields.get("tool_choice", "auto") if fields.get("tools") else "none",
            "tools": fields.get("tools") or [],
            "top_p": fields.get("top_p", 1.0),
            "background": False,
            "max_output_tokens": min(fields.get("max_output_tokens") or most, most),
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": fields.get("text"),
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage,
            "user": fields.get("user"),
        }
