"""Server-sent events as bytes: taken apart, looked into, put together. Pure.

vLLM ends every event with an empty line and sends each in one piece; a chunk of a connection may hold several events, or
end inside one.
"""

import json
from collections.abc import Mapping
from typing import Any

import jiter

DATA, END = b"data: ", b"\n\n"
DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream"
# The beginning of an event that reports an engine's failure.
ERROR = b'data: {"error"'
_LATER_ERROR = END + ERROR
# The same in streams whose events have names; no data has a line break in it.
NAMED_ERROR = b"event: error\n"
# What vLLM says of a response before an engine has seen it.
_OPENINGS = (b"event: response.created\n", b"event: response.in_progress\n")


def whole(data: bytes) -> tuple[bytes, bytes]:
    """Split after the last event's end: whole events, and the beginning of the next one."""
    if data.endswith(END):
        return data, b""
    events, end, rest = data.rpartition(END)
    return events + end, rest


def has_error(data: bytes) -> bool:
    """Whether an engine's failure is among events without names: it may come in one piece with events before it."""
    return data.startswith(ERROR) or _LATER_ERROR in data


def opens(data: bytes) -> bool:
    """Whether the last event, or its beginning, comes before the answer's first token."""
    last = data.removesuffix(END).rpartition(END)[2]
    return last.startswith(_OPENINGS) or any(opening.startswith(last) for opening in _OPENINGS)


def split(events: bytes) -> list[bytes]:
    """Whole events one by one, each with its end."""
    return [event + END for event in events.split(END) if event]


def count(events: bytes) -> int:
    return events.count(END)


def body(event: bytes) -> dict[str, Any]:
    """The JSON object of an event; empty where there is none."""
    text = event.removeprefix(DATA)
    try:
        fields = jiter.from_json(text)
    except ValueError:  # jiter takes no half of a surrogate pair
        try:
            fields = json.loads(text)
        except ValueError:
            return {}
    return fields if isinstance(fields, dict) else {}


def event(fields: Mapping[str, Any], name: str = "") -> bytes:
    """An event with these fields, under a name where one is given."""
    raw = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return (
        (f"event: {name}\n".encode() if name else b"") + DATA + raw.encode("utf-8", "backslashreplace") + END
    )
