"""What a client asks of a model: read once, then handed to admission, to the choice of a slice, and to the relay."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from starlette.requests import Request


@dataclass(frozen=True)
class Ask:
    """A POST for one model. `body` goes to the slice as it came; `fields` is what it says."""

    model: str
    path: str
    body: bytes
    fields: Mapping[str, Any]
    query: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @classmethod
    def of(cls, request: Request, model: str, path: str, body: bytes, fields: Mapping[str, Any]) -> Self:
        raw: Iterable[tuple[bytes, bytes]] = request.headers.raw
        return cls(model, path, body, fields, request.url.query, tuple(raw))
