"""What answers in Anthropic's and in the Responses API's events have in common."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serving.engine.protocol import CONTINUED, CONTINUED_FINISH, CONTINUED_STOP, TELLS_TOKENS, tokens_event
from serving.simulation.engine.orders import Order
from serving.simulation.engine.requests import ChatBody
from serving.simulation.engine.text import Answer, text_of


def order_of_chat(
    chat: dict[str, Any], fields: Mapping[str, Any], max_model_len: int, seed: int, *, parses_tools: bool
) -> Order:
    """What a body asks for whose fields say the same as `chat`; raises RequestError.

    Of the body itself: whether tokens are told, and how another engine ended the answer.
    """
    extra = chat["vllm_xargs"] or {}
    continued = extra.get(CONTINUED)
    if isinstance(continued, list) and isinstance(chat["max_tokens"], int):
        chat["max_tokens"] = max(1, chat["max_tokens"] - len(continued))
    order = ChatBody.read(chat).to_order(max_model_len, seed, parses_tools=parses_tools)
    finish = extra.get(CONTINUED_FINISH)
    ended = Answer([], [], finish, extra.get(CONTINUED_STOP)) if finish else None
    return replace(order, tells=bool(fields.get(TELLS_TOKENS)), ended=ended)


class SteppedReply:
    """How the one answer to an order is written, as events that differ by API."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._answers = order.answers()
        self._before = _text_before(order)
        self._open = bool(self._before)  # an item or a block has begun

    @property
    def answers(self) -> list[tuple[list[int], Answer]]:
        return self._answers

    def opening(self) -> bytes:
        """What comes before the first token; the client of an answer that goes on has it."""
        return self._edge() + (b"" if self._order.wish.continued else self._begun())

    def chunks(self, _: int, start: int, end: int) -> bytes:
        """The events of the tokens from `start` up to `end`."""
        return b"".join(self._step(position) for position in range(start, end))

    def ending(self) -> bytes:
        """The end of a stream."""
        return self._ended() + self._edge()

    def _begun(self) -> bytes:
        raise NotImplementedError

    def _ended(self) -> bytes:
        raise NotImplementedError

    def _opened(self) -> bytes:
        raise NotImplementedError

    def _delta(self, text: str) -> bytes:
        raise NotImplementedError

    def _step(self, position: int) -> bytes:
        answer, events = self._answer, b""
        if text := answer.texts[position]:
            if not self._open:
                self._open = True
                events += self._opened()
            events += self._delta(text)
        if not self._order.tells:
            return events
        facts: dict[str, Any] = {"prompt_tokens": self._prompt_tokens} if position == 0 else {}
        if position == len(answer.tokens) - 1:
            facts |= {"finish_reason": answer.finish, "stop_reason": answer.stop_reason}
        return events + tokens_event([answer.tokens[position]], **facts).encode()

    def _edge(self) -> bytes:
        return tokens_event().encode() if self._order.tells else b""

    @property
    def _answer(self) -> Answer:
        return self._answers[0][1]

    @property
    def _text(self) -> str:
        return self._before + "".join(self._answer.texts)

    @property
    def _prompt_tokens(self) -> int:
        return self._order.prompt_tokens - len(self._order.wish.continued)

    @property
    def _written(self) -> int:
        """Tokens of the answer, those of another engine included."""
        return len(self._order.wish.continued) + len(self._answer.tokens)


def event_of(fields: dict[str, Any]) -> bytes:
    return f"event: {fields['type']}\ndata: {compact(fields)}\n\n".encode()


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _text_before(order: Order) -> str:
    """The text of an answer's tokens that another engine gave, without a stop string that ended it."""
    text = "".join(map(text_of, order.wish.continued))
    stop = order.ended.stop_reason if order.ended else None
    if isinstance(stop, str) and (at := text.find(stop, max(0, len(text) - 2 * len(stop)))) >= 0:
        text = text[:at]
    return text
