"""Connections that have yet to show whose they are: they have seconds, a few bytes of headers, and places of their own.

uvicorn waits for a head for as long as its client likes, and keeps headers of any length. It takes connections until the process
has no file left. Whoever reaches a port in the pods' network could end a slice that way, without its secret.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving import secret

_WITHIN_S = 15.0  # as at the front door
_READ_S = 1.0  # a busy process takes connections faster than it reads what has come with them
_MOST = 1024
_AT_ONCE = 8  # times as many where all have just come
_MOST_HEAD_BYTES = 64 << 10


class Strangers:
    """Those of one port. Each is cut off after `within_s`.

    Of more than `most` the oldest go once each has been there for `read_s`, at eight times as many at once.
    """

    def __init__(self, within_s: float = _WITHIN_S, most: int = _MOST, read_s: float = _READ_S) -> None:
        self._within_s = within_s
        self._most = most
        self._read_s = read_s
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # the oldest first

    def came(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        while len(self._timers) >= self._most:
            oldest, timer = next(iter(self._timers.items()))
            came_s = timer.when() - self._within_s
            if loop.time() - came_s < self._read_s and len(self._timers) < self._most * _AT_ONCE:
                break
            self.left(oldest)
            oldest.abort()
        self._timers[transport] = loop.call_later(self._within_s, transport.abort)

    def left(self, transport: asyncio.Transport) -> None:
        """It is known now, or gone; a second call changes nothing."""
        if timer := self._timers.pop(transport, None):
            timer.cancel()

    def __contains__(self, transport: asyncio.Transport) -> bool:
        return transport in self._timers


class GuardedHttp(HttpToolsProtocol):
    """uvicorn's protocol on a port that asks for a secret: who shows it once is no stranger any more.

    `functools.partial(GuardedHttp, strangers, expected)` is uvicorn's option `http`. Without a secret every whole head will do.
    """

    def __init__(self, strangers: Strangers, expected: str, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._strangers = strangers
        self._expected = expected
        self._head_bytes = 0  # of heads, and of what in a body is none: trailers, extensions of chunks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._strangers.came(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.left(self.transport)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport in self._strangers:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self.transport.abort()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if secret.is_shown(self.headers, self._expected):
            self._strangers.left(self.transport)

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= len(body)
        super().on_body(body)
