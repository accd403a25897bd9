"""The answer of /v1/responses on its way to a client, noted for the store of responses."""

import json
from http import HTTPStatus
from typing import Any

from serving.router.http import sse
from serving.router.http.downstream import Downstream, Headers, PassesOn

_NONE_BEFORE = b'"previous_response_id":null'
_OVER = (b"event: response.completed\n", b"event: response.incomplete\n")
_WHOLE = ("completed", "incomplete")
_LENGTH = b"content-length"
_EVENTS = sse.MEDIA_TYPE.encode()
# A megabyte takes 35 ms to parse, here and with every request that follows it, and only logprobs make an answer longer.
_MOST_BYTES = 1 << 20


class Keeper(PassesOn):
    """Notes the response on its way to `client`, and holds its end back until `finish`.

    So a client that has the end finds the response kept. One that is too long goes on as it comes, and is not.
    """

    def __init__(self, client: Downstream, previous_id: str) -> None:
        super().__init__(client)
        self.response: dict[str, Any] | None = None  # once it is whole
        self._before = b'"previous_response_id":' + json.dumps(previous_id or None).encode()
        self._head: tuple[int, Headers] | None = None
        self._streams = False
        self._passes = False
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._over = False

    def start(self, status: int, headers: Headers) -> None:
        headers = list(headers)
        media = next((value for name, value in headers if name == b"content-type"), b"")
        self._streams = media.startswith(_EVENTS)
        self._passes = status != HTTPStatus.OK
        if self._passes or self._streams:
            self.client.start(status, headers)
        else:
            self._head = status, headers

    def write(self, data: bytes) -> None:
        data = data.replace(_NONE_BEFORE, self._before)
        if self._passes or (self._streams and not self._held and not any(mark in data for mark in _OVER)):
            self.client.write(data)
        else:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes > _MOST_BYTES:
                self._let_go()

    def end(self, data: bytes = b"") -> None:
        if data and not self._passes:
            self.write(data)
            data = b""
        if self._passes:
            self.client.end(data)
        else:
            self._over = True
            self.response = self._read(b"".join(self._held))

    def finish(self) -> None:
        """Send what was held back."""
        body = b"".join(self._held)
        if self._head:
            status, headers = self._head
            kept = [header for header in headers if header[0] != _LENGTH]
            self.client.start(status, [*kept, (_LENGTH, b"%d" % len(body))])
        if self._over:
            self.client.end(body)

    def _let_go(self) -> None:
        self._passes = True
        if self._head:
            status, headers = self._head
            self._head = None
            self.client.start(status, [header for header in headers if header[0] != _LENGTH])
        self.client.write(b"".join(self._held))
        self._held.clear()

    def _read(self, held: bytes) -> dict[str, Any] | None:
        if self._streams:
            last = next((event for event in sse.split(held) if event.startswith(_OVER)), b"")
            held = json.dumps(sse.body(last.partition(b"\n")[2]).get("response")).encode()
        try:
            response = json.loads(held)
        except ValueError:
            return None
        whole = isinstance(response, dict) and response.get("status") in _WHOLE
        return response if whole and isinstance(response.get("id"), str) else None
