"""The router's HTTP connections to slices: asyncio's protocols, httptools' parser, and a few idle connections per slice.

Every streamed chunk passes here, so a chunk costs one call: the connection hands what it read to a function, and no task
wakes up. Headers go on as they came.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from http import HTTPStatus
from typing import cast
from urllib.parse import quote, urlsplit

import httptools

from serving import secret
from serving.router.forwarding.connecting import (
    NobodyListensError,
    UntrustedError,
    UpstreamError,
    connected,
    probed,
)
from serving.router.http.protocol import InferenceRequest
from serving.state.records import Peer, SliceRecord

logger = logging.getLogger("ray.serve")

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    b"content-length expect".split()
)
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server"}  # the HTTP server in front sends its own
# Half of what engines keep a connection for, so that no request meets one that its engine is just closing.
_IDLE_S = 60.0
_MOST_HEAD_BYTES = 64 << 10
# What came of a body before anybody asked for it; more stays in the kernel.
_MOST_WAITING_BYTES = 256 << 10
_END_S = 1.0  # between an answer's last event and the end of its body
_TLS_BUFFER_BYTES = 64 << 10
_JOINED_BYTES = 64 << 10  # a longer body is not copied behind its head

Headers = list[tuple[bytes, bytes]]


class Health(Enum):
    """What a slice's health route says."""

    WELL = "well"
    FAILING = "failing"  # an answer that is none of a healthy one
    SILENT = "silent"
    GONE = "gone"  # nobody listens


class WrongSecretError(UpstreamError):
    """The slice has another secret of the cluster than this router."""


class SliceResponse:
    """A slice's answer, from its headers on. `read` or `pipe` takes the body, once. Names of `headers` are in lower case.

    `complete`: the reader has all of the answer, and what HTTP still brings of it only ends it.
    """

    __slots__ = (
        "_connection",
        "_ended",
        "_error",
        "_most",
        "_over",
        "_paused",
        "_pieces",
        "_sink",
        "_size",
        "complete",
        "headers",
        "status",
    )

    def __init__(self, connection: "_Connection") -> None:
        self.status = 0
        self.headers: Headers = []
        self.complete = False
        self._connection: _Connection | None = connection
        self._pieces: list[bytes] = []
        self._size = 0
        self._most = math.inf
        self._sink: Callable[[bytes], bool] | None = None
        self._over = False
        self._paused = False
        self._error: BaseException | None = None
        self._ended: asyncio.Future[None] | None = None

    @property
    def content_type(self) -> bytes:
        """The media type alone, in lower case."""
        value = next((value for name, value in self.headers if name == b"content-type"), b"")
        return value.partition(b";")[0].strip().lower()

    async def read(self) -> bytes:
        """The whole body; raises UpstreamError where it breaks off."""
        self._sink = _keep
        self.resume()
        await self._end()
        return b"".join(self._pieces)

    async def read_if_within(self, most_bytes: int) -> bytes | None:
        """The whole body; None where it is longer, and all of it is for `pipe`. Raises UpstreamError where it breaks off."""
        self._sink, self._most = _keep, most_bytes
        self.resume()
        if self._size <= most_bytes:
            await self._end()
        return b"".join(self._pieces) if self._size <= most_bytes else None

    async def pipe(self, sink: Callable[[bytes], bool]) -> bool:
        """Hand every piece of the body to `sink` as it comes, until `sink` returns false.

        True where the body came to its end. Raises UpstreamError where the body breaks off, and what `sink` raises.
        """
        self._sink = sink
        self.resume()  # before `sink` has anything: it may pause
        if self._pieces:
            waiting, self._pieces = b"".join(self._pieces), []
            self._hand_over(waiting, sink)
        await self._end()
        return self._sink is sink

    def pause(self) -> None:
        """Read nothing more of the slice, until `resume`."""
        if self._connection and not self._paused:
            self._paused = True
            self._connection.transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self._connection:
                self._connection.transport.resume_reading()

    def cut(self, error: UpstreamError) -> None:
        """End the body for its reader, as if the connection had broken."""
        self.finish(error)
        self.close()

    def close(self) -> None:
        """Give the answer up. Where it has not ended its connection closes, and the engine aborts the request.

        Where it is complete, its end has a second to come, and the connection may be used again.
        """
        self._sink = None  # its reader mostly knows this answer: no circle keeps the request
        if connection := self._connection:
            self._connection = None
            if self.complete and not self._paused:
                connection.await_end(_END_S)
            else:
                connection.abandon()

    def take(self, data: bytes) -> None:
        """A piece of the body has come."""
        sink = self._sink
        if self._over:
            return
        if sink is None or sink is _keep:
            self._pieces.append(data)
            self._size += len(data)
            if self._size > (_MOST_WAITING_BYTES if sink is None else self._most):
                self.pause()
                self._wake()
        else:
            self._hand_over(data, sink)

    def released(self) -> None:
        """The answer is complete; its connection is another's now."""
        self._connection = None

    def finish(self, error: BaseException | None = None) -> None:
        """The body has ended, well or with an error."""
        if not self._over:
            self._over = True
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._ended and not self._ended.done():
            self._ended.set_result(None)

    def _hand_over(self, data: bytes, sink: Callable[[bytes], bool]) -> None:
        try:
            if not sink(data):
                self._sink = None
                self.finish()
        except Exception as error:  # noqa: BLE001  raised again for the reader
            self.finish(error)

    async def _end(self) -> None:
        if not self._over:
            self._ended = asyncio.get_running_loop().create_future()
            await self._ended
        if self._error:
            raise self._error


def _keep(_: bytes) -> bool:
    """The sink of `read`, which wants all of the body at once."""
    raise NotImplementedError


class _Connection(asyncio.BaseProtocol):
    """One connection to a slice: one answer at a time. `keeps`: for other requests too."""

    def __init__(self, pool: "Upstream", peer: Peer) -> None:
        self.transport: asyncio.Transport
        self.peer = peer
        self.idle_since_s = 0.0
        self.keeps = True
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._response: SliceResponse | None = None
        self._arrived: asyncio.Future[None]
        self._headers: Headers = []
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._interim = False  # a 1xx answer, which announces the real one
        self._headed = False
        self._complete = False
        self._until_eof = False
        self._reusable = True
        self._ending: asyncio.TimerHandle | None = None

    # What the pool and the response ask of it

    async def ask(self, head: bytes, body: bytes) -> SliceResponse:
        """Send a request; returns with the headers of its answer. Raises UpstreamError."""
        response = self._response = SliceResponse(self)
        self._headed = self._complete = self._interim = self._until_eof = False
        self._head_bytes = 0
        self._arrived = asyncio.get_running_loop().create_future()
        if len(body) < _JOINED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        try:
            await self._arrived
        except BaseException:
            response.close()
            raise
        return response

    def abandon(self) -> None:
        """Close, whatever is under way."""
        self._response = None
        self.transport.abort()

    def await_end(self, within_s: float) -> None:
        """Close unless the answer ends in time."""
        self._ending = asyncio.get_running_loop().call_later(within_s, self.abandon)

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's, on which Serve runs routers, is of no such class.
        self.transport = cast("asyncio.Transport", transport)
        probed(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            self.transport.abort()  # nothing was asked
            return
        error: UpstreamError | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as problem:
            self._reusable = False
            if not self._complete:
                error = UpstreamError(f"what came is no HTTP answer: {problem}")
        if not self._headed and error is None:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                error = UpstreamError(f"the headers of the answer are longer than {_MOST_HEAD_BYTES} bytes")
        self._deliver(response, error)

    def eof_received(self) -> None:
        """Have the transport close: a slice that has ended its half answers nothing more."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self)
        del self._parser  # knows this connection
        if response := self._response:
            self._complete = self._headed and self._until_eof and exc is None
            self._reusable = False
            self._deliver(
                response, None if self._complete else UpstreamError(str(exc or "closed before the end"))
            )

    # httptools'

    def on_message_begin(self) -> None:
        if self._complete:
            raise UpstreamError("an answer to nothing")
        self._headers = []
        self._interim = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:  # else a trailer, which is no header of the answer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._interim = status < HTTPStatus.OK
        if self._interim or self._response is None:
            return
        if not _is_an_engine_s(status):
            raise UpstreamError(f"an answer of status {status}")
        self._headed = True
        self._response.status = status
        self._response.headers = self._headers
        self._reusable = self._parser.should_keep_alive()
        self._until_eof = not any(
            name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked"))
            for name, value in self._headers
        )

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self._complete = not self._interim

    # its own

    def _deliver(self, response: SliceResponse, error: UpstreamError | None) -> None:
        """Tell the response what the last bytes brought."""
        if self._complete or error:
            self._response = None
            if self._ending:
                self._ending.cancel()
                self._ending = None
            response.released()
            if self._reusable and self.keeps and error is None:
                self._pool.give_back(self)
            else:
                self.transport.abort()
        if not self._arrived.done():
            if self._headed:
                self._arrived.set_result(None)
            elif error:
                self._arrived.set_exception(error)
        if body := self._body:
            response.take(body[0] if len(body) == 1 else b"".join(body))
            self._body = []
        if self._complete or error:
            response.finish(error)


class _TlsConnection(_Connection):
    """As uvloop reads TLS at half the price: into a buffer. Otherwise every read allocates 256 KiB, which a router maps anew."""

    _buffer = memoryview(bytearray(_TLS_BUFFER_BYTES))  # of all: what is read is taken out in the same call

    def get_buffer(self, _: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))


class Upstream:
    """Connections to slices, kept for the next request."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._secret = _encoded(secret.headers(secret.of_this_process()))
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Peer, deque[_Connection]] = {}
        self._open: set[_Connection] = set()

    async def post(
        self, entry: SliceRecord, request: InferenceRequest, body: bytes, carried: Mapping[str, str]
    ) -> SliceResponse:
        """A slice's answer up to its headers; `carried` are headers of the router's own.

        Raises UpstreamError.
        """
        target = _quoted(request.path)  # as it came: no /v1/.. is resolved on the way
        if request.query:
            target += b"?" + request.query.encode("utf-8", "surrogateescape")
        ours = {**_encoded(carried), **self._secret} if carried else self._secret
        head = _head(b"POST", target, entry.address, request.headers, ours, body)
        try:
            response = await self._ask(entry.peer, head, body)
        except UntrustedError as error:
            logger.error("slice %s of %s gets no request: %s", entry.slice, entry.model, error)  # noqa: TRY400  no traceback
            raise
        if response.status == HTTPStatus.UNAUTHORIZED:  # a client would take it for a word on its own key
            response.close()
            logger.error(
                "slice %s of %s refuses this router: %s is not the same in both",
                entry.slice,
                entry.model,
                secret.VARIABLE,
            )
            raise WrongSecretError
        return response

    async def health(self, entry: SliceRecord, within_s: float) -> Health:
        """What a slice says of itself. A kept connection counts where it answers: it may have ended since, and tells less."""
        # The address of a slice that ended may be another's: who listens there is told the secret where a certificate says who it is.
        # A connection that has not shown it is cut off after some seconds: it is kept for no request.
        ours = self._secret if entry.certificate else {}
        try:
            async with asyncio.timeout(within_s):
                status = await self._status_of_kept(entry, within_s / 2)
                if status is None:
                    connection = await self._connect(entry.peer)
                    connection.keeps = bool(entry.certificate)
                    status = await _status(connection, entry, ours)
        except NobodyListensError:
            return Health.GONE
        except (UpstreamError, TimeoutError):
            return Health.SILENT
        return Health.WELL if status < HTTPStatus.BAD_REQUEST else Health.FAILING

    async def call(
        self, peer: Peer, method: bytes, path: str, body: bytes = b"", *, most_bytes: int
    ) -> bytes:
        """The body that another process of the cluster answers with; raises UpstreamError, also where it refuses or tells more."""
        head = _head(method, path.encode(), peer.address, (), self._secret, body)
        response = await self._ask(peer, head, body)
        try:
            whole = await response.read_if_within(most_bytes)
        finally:
            response.close()
        if response.status != HTTPStatus.OK:
            raise UpstreamError(f"{peer.address}{path} answers {response.status}")
        if whole is None:
            raise UpstreamError(f"{peer.address}{path} answers with more than {most_bytes} bytes")
        return whole

    def give_back(self, connection: _Connection) -> None:
        connection.idle_since_s = time.monotonic()
        self._idle.setdefault(connection.peer, deque()).append(connection)

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.peer)
        if idle and connection in idle:
            idle.remove(connection)
        if idle is not None and not idle:
            del self._idle[connection.peer]

    async def close(self) -> None:
        for connection in list(self._open):
            connection.transport.abort()

    async def _ask(self, peer: Peer, head: bytes, body: bytes) -> SliceResponse:
        connection = self._kept(peer) or await self._connect(peer)
        return await connection.ask(head, body)

    async def _status_of_kept(self, entry: SliceRecord, within_s: float) -> int | None:
        """The status of an answer on a connection that was kept; None where there is none, or it brings none in time."""
        if (connection := self._kept(entry.peer)) is None:
            return None
        try:
            async with asyncio.timeout(within_s):
                return await _status(connection, entry, {})
        except (UpstreamError, TimeoutError):
            return None

    def _kept(self, peer: Peer) -> _Connection | None:
        """The connection that was used last, where it has not been idle for too long."""
        idle = self._idle.get(peer)
        oldest_s = time.monotonic() - _IDLE_S
        while idle:
            connection = idle.pop()
            if connection.idle_since_s >= oldest_s and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def _connect(self, peer: Peer) -> _Connection:
        kind = _TlsConnection if peer.certificate else _Connection
        connection = await connected(peer, lambda: kind(self, peer), self._connect_timeout_s)
        self._open.add(connection)
        return connection


async def _status(connection: _Connection, entry: SliceRecord, ours: Mapping[bytes, bytes]) -> int:
    """The status of a slice's health route, whose answer is read to its end; raises UpstreamError."""
    response = await connection.ask(_head(b"GET", b"/health", entry.address, (), ours, b""), b"")
    try:
        await response.read()
    finally:
        response.close()
    return response.status


def _is_an_engine_s(status: int) -> bool:
    """Whether an engine answers so: it sends no client elsewhere, where slices alone are known, and HTTP has no 600."""
    return status < HTTPStatus.MULTIPLE_CHOICES or HTTPStatus.BAD_REQUEST <= status < 600


def returned(response: SliceResponse) -> Headers:
    """A slice's headers as they go to the client."""
    left_out = _and_named(_NOT_RETURNED, response.headers)
    return [header for header in response.headers if header[0] not in left_out]


def _head(
    method: bytes,
    target: bytes,
    address: str,
    headers: Collection[tuple[bytes, bytes]],
    ours: Mapping[bytes, bytes],
    body: bytes,
) -> bytes:
    """A request's head: the client's headers, except where the router sets its own."""
    left_out = _and_named(_HOP_BY_HOP, headers)
    lines = [method + b" " + target + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in ours.items()]
    hosted = False
    for name, value in headers:
        if name not in left_out and name not in ours:
            hosted = hosted or name == b"host"
            lines.append(name + b": " + value)
    if not hosted:
        lines.append(b"host: " + urlsplit(address).netloc.encode())
    if method == b"POST":
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _and_named(usual: frozenset[bytes], headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The `usual` headers, and those that `Connection` names: they are for the next hop alone (RFC 9110, 7.6.1)."""
    named = [value for name, value in headers if name == b"connection"]
    return usual.union(name.strip().lower() for name in b",".join(named).split(b",")) if named else usual


def _encoded(headers: Mapping[str, str]) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in headers.items()}


@lru_cache(maxsize=256)
def _quoted(path: str) -> bytes:
    return quote(path).encode()
