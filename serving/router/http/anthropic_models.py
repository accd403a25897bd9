"""The list of models as Anthropic's clients read it: `GET /v1/models` with the header `anthropic-version`. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from serving.errors import BadRequestError
from serving.paging import limit_of

# Every request of Anthropic's clients has it, and no request of OpenAI's.
VERSION = "anthropic-version"
_USUAL, _MOST = 20, 1000  # models of one answer, as Anthropic's


def card(name: str, created_s: float, max_model_len: int | None) -> dict[str, Any]:
    """One model."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(created_s), UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def page(cards: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The part of the list that `limit`, `after_id` and `before_id` ask for; raises BadRequestError."""
    most, names = limit_of(query.get("limit"), _USUAL, _MOST), [card["id"] for card in cards]
    first, last = 0, len(cards)
    if "after_id" in query:
        first = _place(names, "after_id", query) + 1
    if "before_id" in query:
        last = _place(names, "before_id", query)
    if "before_id" in query and "after_id" not in query:
        shown, has_more = cards[max(first, last - most) : last], last - most > first
    else:
        shown, has_more = cards[first : min(last, first + most)], first + most < last
    return {
        "data": list(shown),
        "has_more": has_more,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }


def _place(names: list[str], parameter: str, query: Mapping[str, str]) -> int:
    try:
        return names.index(query[parameter])
    except ValueError:
        raise BadRequestError(f"{parameter} names no model of this service.") from None
