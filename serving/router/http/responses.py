"""What OpenAI's Responses API remembers: answers by id, and the conversation that led to each. Pure.

Engines remember nothing. The router puts the earlier part of a conversation into `input`, in the place of
`previous_response_id`, and keeps what comes back (serving.router.http.response_store), where the YAML names a store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.errors import BadRequestError, PreviousResponseError

PATH = "/v1/responses"
_USUAL, _MOST = 20, 100  # items of one answer, as OpenAI's


@dataclass(frozen=True)
class Kept:
    """One response as it was given, and the items of the conversation before it."""

    response: dict[str, Any]
    items: list[Any]


@dataclass(frozen=True)
class Keeping:
    """What to keep an answer with: whose it is, the items that it answers, and the response that they follow."""

    key: str
    items: list[Any]
    previous_id: str


def previous_id(fields: Mapping[str, Any]) -> str:
    """The response that a request goes on from; empty where it begins a conversation. Raises BadRequestError."""
    asked = fields.get("previous_response_id")
    if asked is not None and not isinstance(asked, str):
        raise PreviousResponseError("previous_response_id is no text; send the id of a response.")
    if fields.get("conversation"):
        raise BadRequestError(
            "conversation: this service keeps responses by id, and no conversations; send previous_response_id."
        )
    return asked or ""


def following(fields: Mapping[str, Any], previous: Kept | None) -> dict[str, Any]:
    """The fields of a request that an engine without memory answers: all of the conversation is in `input`."""
    items = _items(fields.get("input"))
    if previous:
        items = [*previous.items, *previous.response.get("output", ()), *items]
    merged = {name: value for name, value in fields.items() if name != "previous_response_id"}
    return {**merged, "input": items}


def listed(items: Sequence[Any], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of a response's input items, the latest first unless `order` is asc; raises BadRequestError."""
    limit = query.get("limit", str(_USUAL))
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST:
        raise BadRequestError(f"limit is not a whole number from 1 to {_MOST}.")
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise BadRequestError("order is neither asc nor desc.")
    named = [_named(item, at) for at, item in enumerate(items)]
    if order == "desc":
        named.reverse()
    ids = [item["id"] for item in named]
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise BadRequestError("after names no item of this response.")
        named = named[ids.index(after) + 1 :]
    page = named[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(named) > len(page),
    }


def _items(asked: Any) -> list[Any]:
    if isinstance(asked, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": asked}]}]
    return list(asked) if isinstance(asked, list) else []


def _named(item: Any, at: int) -> dict[str, Any]:
    fields = item if isinstance(item, dict) else {}
    usual = "message" if "role" in fields else "item"
    return {"type": usual, **fields, "id": str(fields.get("id") or f"item_{at}")}
