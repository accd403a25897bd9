"""What answers in Anthropic's and in the Responses API's events have in common."""

import json
from collections.abc import Mapping
from typing import Any

from serving.engine.protocol import CONTINUED_FINISH, CONTINUED_STOP, TELLS_TOKENS
from serving.simulation.engine.orders import Order
from serving.simulation.engine.text import Answer, text_of


def end_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What of a body only our engines know, as fields of an Order: whether tokens are told, and how another engine ended."""
    extra = fields.get("vllm_xargs") or {}
    finish = extra.get(CONTINUED_FINISH)
    return {
        "tells": bool(fields.get(TELLS_TOKENS)),
        "ended": Answer([], [], finish, extra.get(CONTINUED_STOP)) if finish else None,
    }


def text_before(order: Order) -> str:
    """The text of an answer's tokens that another engine gave, without a stop string that ended it."""
    text = "".join(map(text_of, order.wish.continued))
    stop = order.ended.stop_reason if order.ended else None
    if isinstance(stop, str) and (at := text.find(stop, max(0, len(text) - 2 * len(stop)))) >= 0:
        text = text[:at]
    return text


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
