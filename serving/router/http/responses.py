"""What OpenAI's Responses API remembers: answers by id, and the conversation that led to each. Pure.

Engines remember nothing. Where the YAML names a store, the router puts the earlier part of a conversation into `input`, in the
place of `previous_response_id`. It keeps what comes back (serving.router.http.response_store).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from serving.errors import BadRequestError, PreviousResponseError, UnknownItemError
from serving.paging import limit_of, newest_first

PATH = "/v1/responses"
_USUAL, _MOST = 20, 100  # items of one answer, as OpenAI's


@dataclass(frozen=True)
class Kept:
    """One response as it was given, and the items of the conversation before it: both as JSON."""

    response: bytes
    items: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.response) + len(self.items)


@dataclass(frozen=True)
class Keeping:
    """What to keep an answer with: whose it is, the items that it answers as JSON, and the response that they follow."""

    key: str
    items: bytes
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


def items(fields: Mapping[str, Any]) -> bytes:
    """What a request says itself, as a list of items; raises BadRequestError."""
    asked = fields.get("input")
    if isinstance(asked, str):
        asked = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": asked}]}]
    if not isinstance(asked, list | None):
        raise BadRequestError("input is neither a text nor a list of items; send one of these.")
    return to_json(asked or [])


def references(fields: Mapping[str, Any]) -> list[str]:
    """The ids of items that a request names and does not send; raises BadRequestError."""
    asked = fields.get("input")
    names = [str(item.get("id")) for item in asked if _is_reference(item)] if isinstance(asked, list) else []
    if len(set(names)) < len(names):
        raise BadRequestError("input names an item twice; name each once.")
    return names


def with_items(fields: Mapping[str, Any], holders: Iterable[bytes]) -> tuple[dict[str, Any], bytes]:
    """Fields and body with the items of these responses in the place of references; raises UnknownItemError."""
    items = dict.fromkeys(references(fields))
    for response in holders:
        items |= {item["id"]: item for item in from_json(response)["output"] if item.get("id") in items}
    if unknown := next((name for name, item in items.items() if item is None), None):
        raise UnknownItemError(
            f"input: no stored response of this key has the item {unknown[:64]!r}; send the item itself."
        )
    whole = [items[str(item.get("id"))] if _is_reference(item) else item for item in fields["input"]]
    resolved = {**fields, "input": whole}
    return resolved, to_json(resolved)


def following(fields: Mapping[str, Any], previous: Kept) -> tuple[bytes, bytes]:
    """The body that a client without a memory would have sent, and the items in it: all of the conversation is in `input`."""
    output = to_json(from_json(previous.response).get("output", []))
    whole = _joined(previous.items, output, items(fields))
    rest = {name: value for name, value in fields.items() if name not in ("previous_response_id", "input")}
    return to_json(rest)[:-1] + (b"," if rest else b"") + b'"input":' + whole + b"}", whole


def listed(items: bytes, query: Mapping[str, str]) -> bytes:
    """A page of a response's input items, the latest first unless `order` is asc; raises BadRequestError."""
    most = limit_of(query.get("limit"), _USUAL, _MOST)
    latest_first = newest_first(query.get("order"))
    named = _named(from_json(items))
    if latest_first:
        named.reverse()
    ids = [item["id"] for item in named]
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise BadRequestError("after names no item of this response.")
        named = named[ids.index(after) + 1 :]
    page = named[:most]
    return to_json(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(named) > len(page),
        }
    )


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference"


def _joined(*lists: bytes) -> bytes:
    return b"[" + b",".join(within for items in lists if (within := items.strip()[1:-1].strip())) + b"]"


def _named(items: list[Any]) -> list[dict[str, Any]]:
    """The items, each with an id of its own: a client may have sent one again, and pages go on after an id."""
    named: list[dict[str, Any]] = []
    taken: set[str] = set()
    for at, item in enumerate(items):
        fields = item if isinstance(item, dict) else {}
        name = str(fields.get("id") or "")
        if not name or name in taken:
            name = f"item_{at}"
        while name in taken:  # a client may have chosen that one too
            name += f"_{at}"
        taken.add(name)
        named.append({"type": "message" if "role" in fields else "item", **fields, "id": name})
    return named
