"""Bodies of chat and completion requests as vLLM reads them, and the order each comes down to.

Fields that only a model could honour (temperature, penalties) are taken and change nothing. A seed is refused as tpu-inference does.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from serving.engine.protocol import CONTINUED
from serving.simulation.engine import tokenizer
from serving.simulation.engine.orders import Order, RequestError, check_length, document
from serving.simulation.engine.text import Wish

_MOST_CHOICES = 64
_MOST_LOGPROBS = 20
_COMPLETION_TOKENS = 16  # of a completion that names no max_tokens, or null

_IDS = 2**63
TokenId = Annotated[int, Field(ge=0, lt=_IDS)]


class Body(BaseModel):
    """Fields of a request, and all others as they came."""

    model_config = ConfigDict(extra="allow")

    @classmethod
    def read(cls, fields: Any) -> Self:
        """Raises RequestError with pydantic's problems, in vLLM's words."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
            lines = "".join(f"  {problem}\n" for problem in problems).rstrip()
            label = "error" if len(problems) == 1 else "errors"
            raise RequestError(
                f"{len(problems)} validation {label}:\n{lines}",
                kind=HTTPStatus.BAD_REQUEST.phrase,
                param=".".join(str(step) for step in problems[0]["loc"]) or None,
            ) from None


class Formatted(Body):
    """A field that may name the format of the answer."""

    format: dict[str, Any] | None = None


class _StreamOptions(Body):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


def _as_list(raw: Any) -> Any:
    return [raw] if isinstance(raw, str) else raw or []


class _Generation(Body):
    """The fields that chat and completions share."""

    model: str | None = None
    n: int | None = 1
    seed: int | None = None
    temperature: float | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    stop: Annotated[list[str], BeforeValidator(_as_list)] = []
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    def order(self, prompts: list[list[int]], most: int | None, max_model_len: int, seed: int) -> Order:
        choices = self.n or 1
        if not 1 <= choices <= _MOST_CHOICES:
            raise RequestError(f"n must be at least 1 and at most {_MOST_CHOICES}, got {choices}.", param="n")
        if self.seed is not None and self.temperature != 0:
            raise RequestError("JAX does not support per-request seed.")
        if most is not None and most < 1:
            raise RequestError(f"max_tokens must be at least 1, got {most}.", param="max_tokens")
        if self.stream_options and not self.stream:
            raise RequestError(
                "Stream options can only be defined when `stream=True`.", param="stream_options"
            )
        continued = self._continued(prompts)
        prompts = [[*prompt, *continued] for prompt in prompts]
        for prompt in prompts:
            check_length(len(prompt), most, max_model_len)
        options = self.stream_options or _StreamOptions()
        return Order(
            prompts=prompts,
            most=most,
            choices=choices,
            max_model_len=max_model_len,
            wish=Wish(
                most=0,
                least=self.min_tokens,
                ignore_end=self.ignore_eos,
                stop=tuple(self.stop),
                stop_tokens=tuple(self.stop_token_ids or ()),
                keep_stop=self.include_stop_str_in_output,
                seed=seed,
                continued=continued,
            ),
            stream=bool(self.stream),
            usage=bool(options.include_usage),
            usage_always=bool(options.include_usage and options.continuous_usage_stats),
            token_ids=bool(self.return_token_ids),
            names_ids=bool(self.return_tokens_as_token_ids),
            request_id=self.request_id,
            cache_salt=self.cache_salt,
            recited=self._document(),
        )

    def _continued(self, prompts: list[list[int]]) -> tuple[int, ...]:
        """Tokens of the answer that another engine has already written."""
        ids = (self.vllm_xargs or {}).get(CONTINUED) or []
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < _IDS for token in ids):
            raise RequestError(f"{CONTINUED} are ids of tokens.", param="vllm_xargs")
        if ids and (len(prompts) > 1 or (self.n or 1) > 1):
            raise RequestError(f"{CONTINUED} goes with one prompt and one answer.", param="vllm_xargs")
        return tuple(ids)

    def _document(self) -> str | None:
        """The JSON or the choice that the client asked for, if it asked for one."""
        response_format, schema = self.response_format or {}, self.structured_outputs or {}
        match response_format.get("type"):
            case None | "text":
                pass
            case "json_object":
                return '{"answer": "slice"}'
            case "json_schema":
                form = response_format.get("json_schema")
                return document(form.get("schema") if isinstance(form, Mapping) else form)
            case other:
                raise RequestError(
                    f"the simulated engine has no response format {other!r}", param="response_format"
                )
        if "json" in schema:
            return document(schema["json"])
        if schema.get("json_object"):
            return '{"answer": "slice"}'
        if schema.get("choice"):
            return str(schema["choice"][0])
        if unknown := [key for key in ("regex", "grammar", "structural_tag") if schema.get(key)]:
            raise RequestError(
                f"the simulated engine has no structured output by {unknown[0]}", param="structured_outputs"
            )
        return None


class _Function(Body):
    name: str
    parameters: dict[str, Any] | None = None


class _Tool(Body):
    function: _Function


class _Named(Body):
    function: _Function


_TEXTS = {"refusal": "refusal", "thinking": "thinking"}  # where parts of these types have their text


class _Message(Body):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The text of a message; parts that are no text are refused, as by a model that reads only text."""
        parts = (
            [{"type": "text", "text": self.content}] if isinstance(self.content, str) else self.content or []
        )
        texts = [part.get(_TEXTS.get(str(part.get("type")), "text")) for part in parts]
        if None in texts:
            raise RequestError("This model takes text only.", param="messages")
        return "".join(map(str, texts)) + (json.dumps(self.tool_calls) if self.tool_calls else "")


class ChatBody(_Generation):
    """POST /v1/chat/completions."""

    messages: list[_Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=0, ge=0, le=_MOST_LOGPROBS)
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Named | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def to_order(self, max_model_len: int, seed: int, *, parses_tools: bool = True) -> Order:
        """`parses_tools`: whether the model has a tool parser."""
        if self._calls_tools and not parses_tools:
            raise RequestError(_no_parser(self.tool_choice))
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            )
        most = self.max_completion_tokens or self.max_tokens
        order = self.order([self.prompt()], most, max_model_len, seed)
        called = self._called()
        return replace(
            order,
            chat=True,
            logprobs=self.top_logprobs if self.logprobs else None,
            tool=called.name if called else None,
            tool_named=isinstance(self.tool_choice, _Named),
            recited=document(called.parameters or {"type": "object"}) if called else order.recited,
        )

    def prompt(self) -> list[int]:
        """The conversation as token ids, after the tools that the model may call."""
        turns = [(message.role, message.text) for message in self.messages]
        if self.tools:
            turns.insert(0, ("tools", json.dumps([tool.model_dump() for tool in self.tools])))
        return tokenizer.render(
            turns, answer=self.add_generation_prompt, unfinished=self.continue_final_message
        )

    @property
    def _calls_tools(self) -> bool:
        """Whether vLLM looks for calls in the answer: tools without a `tool_choice` are `auto`, a null is not."""
        if "tool_choice" not in self.model_fields_set:
            return bool(self.tools)
        return self.tool_choice not in (None, "none")

    def _called(self) -> _Function | None:
        """The tool to call: the named one, the first where one is required, else one that the user mentions."""
        tools = [tool.function for tool in self.tools or []]
        if isinstance(self.tool_choice, _Named):
            name = self.tool_choice.function.name
            if called := next((tool for tool in tools if tool.name == name), None):
                return called
            raise RequestError(f"The tool {name!r} is not among `tools`.", param="tool_choice")
        if self.tool_choice == "required":
            if not tools:
                raise RequestError("When using `tool_choice`, `tools` must be set.", param="tool_choice")
            return tools[0]
        last = self.messages[-1]
        if self.tool_choice == "none" or last.role != "user":
            return None
        return next((tool for tool in tools if tool.name in last.text), None)


def _no_parser(choice: str | _Named | None) -> str:
    """vLLM's own words."""
    if choice in (None, "auto"):
        return '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    asked = f'function "{choice.function.name}"' if isinstance(choice, _Named) else f'"{choice}"'
    return f"tool_choice={asked} requires --tool-call-parser to be set"


class CompletionBody(_Generation):
    """POST /v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=_MOST_LOGPROBS)
    echo: bool | None = False

    def to_order(self, max_model_len: int, seed: int) -> Order:
        if self.echo:
            raise RequestError("the simulated engine does not echo prompts", param="echo")
        most = _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        order = self.order(self._prompts(), most, max_model_len, seed)
        return replace(order, logprobs=self.logprobs)

    def _prompts(self) -> list[list[int]]:
        raw: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if not raw or isinstance(raw[0], int):
            raw = [raw]
        prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in raw]
        if not all(prompts):
            raise RequestError(
                "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt"
            )
        return prompts


class TokenizeBody(Body):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[_Message] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False

    def tokens(self) -> list[int]:
        if self.messages:
            turns = [(message.role, message.text) for message in self.messages]
            unfinished = self.continue_final_message
            return tokenizer.render(turns, answer=self.add_generation_prompt, unfinished=unfinished)
        if self.prompt is None:
            raise RequestError("`prompt` or `messages` is needed.", param="prompt")
        return tokenizer.encode(self.prompt)


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
