"""A client's request for a model: read once, then handed to admission, scheduling and forwarding. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

# A client's credentials are for the router alone.
_CREDENTIALS = (b"authorization", b"x-api-key", b"cookie")


@dataclass(frozen=True)
class InferenceRequest:
    """A POST for one model. `body` goes to the slice as it came, `headers` without credentials; `fields` are the parsed body."""

    model: str
    path: str
    body: bytes
    fields: Mapping[str, Any]
    query: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def streams(self) -> bool:
        return self.fields.get("stream") is True

    @classmethod
    def of(cls, request: Any, model: str, path: str, body: bytes, fields: Mapping[str, Any]) -> Self:
        """`request` is Starlette's."""
        raw: Iterable[tuple[bytes, bytes]] = request.headers.raw
        headers = tuple(header for header in raw if header[0] not in _CREDENTIALS)
        return cls(model, path, body, fields, request.url.query, headers)
