"""A request once it is understood: prompts as token ids, how their answers are cut, and the answers."""

import json
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from serving.simulation.engine.schema import SchemaError, instance
from serving.simulation.engine.text import Answer, Wish, answer, recite


class RequestError(Exception):
    """The client's request can't be answered, in vLLM's words."""

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": int(status)}}


@dataclass(frozen=True)
class Order:
    """A request once it is understood: prompts, and how their answers are cut and shown.

    `tells`: events of tokens are asked for. `ended`: another engine wrote the whole answer, and ended it so.
    """

    prompts: list[list[int]]
    most: int | None
    choices: int
    max_model_len: int
    wish: Wish
    stream: bool
    usage: bool
    usage_always: bool
    token_ids: bool
    request_id: str | None
    names_ids: bool = False  # tokens in logprobs by id
    recited: str | None = None
    cache_salt: str | None = None
    chat: bool = False
    logprobs: int | None = None
    tool: str | None = None
    tool_named: bool = False
    tells: bool = False
    ended: Answer | None = None
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_tokens", sum(map(len, self.prompts)))

    def answers(self) -> list[tuple[list[int], Answer]]:
        """(prompt, answer) for every choice, in the order of their indices."""
        if self.ended:
            return [(self.prompts[0], self.ended)]
        answers = []
        for prompt in self.prompts:
            room = self.max_model_len - len(prompt)
            for choice in range(self.choices):
                wish = replace(self.wish, most=min(self.most or room, room), choice=choice)
                written = answer(prompt, wish) if self.recited is None else recite(prompt, self.recited, wish)
                answers.append((prompt, written))
        return answers


def document(schema: Any) -> str:
    """The JSON that answers a schema, or a schema's text; raises RequestError."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        return json.dumps(instance(parsed), ensure_ascii=False)
    except SchemaError as error:
        raise RequestError(f"no document fits the schema: {error}", param="response_format") from None
    # A client may send anything as a schema.
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RequestError(f"this is no JSON schema: {error}", param="response_format") from None


def check_length(prompt: int, most: int | None, max_model_len: int) -> None:
    if prompt + (most or 1) > max_model_len:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {most or 0} "
            f"output tokens and your prompt contains {prompt} input tokens, for a total of {prompt + (most or 0)} "
            "tokens. Please reduce the length of the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )
