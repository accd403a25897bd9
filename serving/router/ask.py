"""What a client asks of a model: read once, then handed to admission, to the choice of a slice, and to the relay."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from starlette.requests import Request

from serving.router.record import RequestRecord

# What a client proves itself with is between it and the router.
_CREDENTIALS = (b"authorization", b"x-api-key", b"cookie")


@dataclass(frozen=True)
class Ask:
    """A POST for one model. `body` goes to the slice as it came, `headers` without credentials; `fields` is what it says.

    `record` is where each part says what it did for it.
    """

    model: str
    path: str
    body: bytes
    fields: Mapping[str, Any]
    query: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    record: RequestRecord = field(default_factory=lambda: RequestRecord(""), compare=False)

    @property
    def streams(self) -> bool:
        return self.fields.get("stream") is True

    @classmethod
    def of(
        cls,
        request: Request,
        model: str,
        path: str,
        body: bytes,
        fields: Mapping[str, Any],
        record: RequestRecord | None = None,
    ) -> Self:
        raw: Iterable[tuple[bytes, bytes]] = request.headers.raw
        headers = tuple(header for header in raw if header[0] not in _CREDENTIALS)
        record = record or RequestRecord(path)
        return cls(model, path, body, fields, request.url.query, headers, record)
