"""The router's own HTTP server protocol: uvicorn's, which answers relayed requests itself and leaves all others to ASGI.

A relayed request, a POST of one of the routes, becomes one task, no ASGI call and no message per chunk. Pipelining, body
buffers, keep-alive and shutdown are uvicorn's: an Exchange takes the place of uvicorn's own cycle for one request.
"""

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from serving.router.http import sse
from serving.router.http.downstream import Downstream, Headers, Source
from serving.router.http.envelope import ID_HEADER, Shape, id_headers, with_id
from serving.router.http.feeding import Feeder, PacedProtocol
from serving.router.http.routes import ROUTES, Dialect, dialect_of
from serving.router.http.starts import Starts
from serving.strangers import Strangers

logger = logging.getLogger("ray.serve")

_MOST_UNREAD_BYTES = 64 << 10  # of a head that is not whole yet
# Of a whole one, whose last piece may be long. A slice cuts connections with heads of 64 KiB, to which the router adds its own.
_MOST_HEAD_BYTES = 60 << 10
_CALLS_OF_HEAD = 32  # what a request costs beside its headers, in calls of the parser
_MOST_HEADERS = 256  # each costs a microsecond: 15,000 fit a head
_TOO_MANY = f"The request has more than {_MOST_HEADERS} headers."
# Of a body, beyond which they have to have a few bytes each.
_MOST_CHUNKS = 1024
_LEAST_CHUNK_BYTES = 16
_TOO_SMALL = "The body's chunks are too small: send more of it in each."
_TOO_LONG = "The request's headers or trailers are too long."
# Of an answer, that its client's host has no room for yet. The kernel itself takes 4 MB of each answer that nobody reads: ten thousand events
# are relayed for nobody, and the slow reader is noticed only then.
_MOST_UNSENT_BYTES = 64 << 10
_JOINED_BYTES = 64 << 10  # a longer piece is not copied behind the head
_CONTENT_LENGTH = b"content-length"
_OF_BODY = (_CONTENT_LENGTH, b"transfer-encoding")
_UPGRADE = b"upgrade"
_HTTP_2 = b"h2c"  # HTTP/2 without TLS
_HEALTH = "/-/healthz"  # Serve's own path: HAProxy takes a router that does not answer it for gone


@dataclass(frozen=True)
class Relay:
    """What a door does with the requests that it answers itself.

    `prefix` stands before the paths of the routes. A request with one of the headers `left_out` goes to the ASGI app. `began`
    and `ended` hear of every request; `ended` gets the path, the seconds that it took, and what it was ended by, if not by its
    answer. `strangers` are the connections without a whole head yet. While `leaving`, connections end with their answers: clients come
    back elsewhere before the port is closed. Where many requests come at once they begin in turn, by `whose` they are, and questions
    for the router's health beside them. Who sends what is no request hears of it after `delay_s`.
    """

    answer: Callable[[Request, Downstream], Awaitable[None]]
    prefix: str = ""
    left_out: frozenset[bytes] = frozenset()
    began: Callable[[], None] = lambda: None
    ended: Callable[[str, float, BaseException | None], None] = lambda _path, _seconds, _error: None
    strangers: Strangers = field(default_factory=Strangers)
    leaving: Callable[[], bool] = lambda: False
    whose: Callable[[Headers], str] = lambda _headers: ""
    starts: Starts = field(default_factory=Starts)
    feeder: Feeder = field(default_factory=Feeder)
    delay_s: Callable[[], float] = lambda: 0.0
    paths: Mapping[bytes, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", {(self.prefix + path).encode(): path for path in ROUTES})


class Door(PacedProtocol):
    """One connection. `functools.partial(Door, relay)` is uvicorn's option `http`."""

    cycle: Any  # uvicorn's own cycle, or an Exchange

    def __init__(self, relay: Relay, **uvicorns: Any) -> None:
        super().__init__(relay.feeder, **uvicorns)
        self.relay = relay
        self._refused = False
        self._headers = self._chunks = self._chunk_bytes = 0  # of this request
        self.answering: Exchange | None = None
        self._turn: Any = None  # the cycle or Exchange that is answered now; later ones wait in the pipeline
        self._in_head = False
        self._head_bytes = 0
        self._unread_bytes = 0  # of a head, or of what in a body is none: trailers, extensions of chunks
        self._came_on = False  # whether the piece that was read last ended a head or a message, or brought bytes of a body
        self._left_out = False
        self._passes_upgrade_by = False
        self._head_end: int | None = None  # in the piece that is read, of a head whose upgrade is passed by

    # asyncio's

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if connection := transport.get_extra_info("socket"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT_BYTES)
        self.relay.strangers.came(transport)

    @property
    def is_over(self) -> bool:
        return self._refused or super().is_over

    def feed(self, data: bytes) -> None:
        self._came_on = False
        super().feed(data)
        rest = memoryview(data)
        while self._head_end is not None:
            rest, self._head_end = rest[self._head_end :], None
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            super().feed(head)
            if rest:
                super().feed(rest)  # type: ignore[arg-type]  # httptools takes both
        if not self._came_on:  # a piece with the end of another message is not this head's
            self._unread_bytes += len(data)
            if self._unread_bytes > _MOST_UNREAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LONG)

    def connection_lost(self, exc: Exception | None) -> None:
        self.relay.strangers.left(self.transport)
        super().connection_lost(exc)
        self.pipeline.clear()
        if self.answering:
            self.answering.lost()
        # They know this door: the circle would keep what it read until a garbage collection.
        self.cycle = self._turn = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.answering and self.answering.source:
            self.answering.source.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.answering and self.answering.source:
            self.answering.source.resume()

    # httptools'

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._unread_bytes, self._left_out = True, 0, 0, False
        self._headers = self._chunks = self._chunk_bytes = self.body_left = 0
        self._passes_upgrade_by = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.calls += 1
        if not self._in_head:
            return  # a trailer, which comes after the request was taken for what its head says
        self._headers += 1
        if self._headers > _MOST_HEADERS:
            if self._headers == _MOST_HEADERS + 1:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_MANY)
            return
        self._head_bytes += len(name) + len(value) + 4  # with the signs around them
        name = name.lower()
        if not value.isascii() and not _is_text(value) and name not in _OF_BODY:
            return  # Serve decodes some, as ids, and would answer with a 500
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name in self.relay.left_out:
            self._left_out = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.calls += _CALLS_OF_HEAD
        self._in_head = False
        self.relay.strangers.left(self.transport)
        if self.is_over:
            return
        self._moved()
        upgrades = self.parser.should_upgrade()
        if upgrades and self._asks_for_http_2():
            self._passes_upgrade_by = True
            return
        if self._head_bytes + len(self.url) > _MOST_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LONG)
            return
        self.body_left = _length(self.headers)
        path, _, query = self.url.partition(b"?")
        route = self.relay.paths.get(path)
        if b"#" in query or self.parser.get_method() != b"POST":
            route = None
        # httptools then reads no body, and takes what comes of it later for the next request: of HAProxy's connection, whose next
        # client would get the answer.
        if upgrades and (route or any(name in _OF_BODY for name, _ in self.headers)):
            self._refuse(
                HTTPStatus.BAD_REQUEST,
                "A request with a body upgrades no connection; send it without Upgrade.",
            )
            return
        if route is None or self._left_out:
            super().on_headers_complete()
            return
        before = self.cycle
        exchange = self.cycle = Exchange(self, route, query)
        if before is None or before.response_complete:
            self._start_asgi_task(exchange, None)
        else:  # pipelined: its turn comes after the answer before it
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, None))  # type: ignore[arg-type]  # see _start_asgi_task

    def on_body(self, body: bytes) -> None:
        self.calls += 1
        self._moved()
        if self.is_over:
            return  # a refused request has no cycle
        if self.body_left:
            self.body_left -= len(body)
        else:
            self._chunks += 1
            self._chunk_bytes += len(body)
            if self._chunks > _MOST_CHUNKS and self._chunk_bytes < _LEAST_CHUNK_BYTES * self._chunks:
                self._refuse(HTTPStatus.BAD_REQUEST, _TOO_SMALL)
                return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._moved()
        # There is no cycle where the connection's first request was refused.
        if self.cycle and not self.is_over and not self._passes_upgrade_by:
            super().on_message_complete()
            if not self.pipeline:
                # A long last piece of a body pauses the reading, and nobody asks for more: a client that goes would not be seen.
                self.flow.resume_reading()

    # uvicorn's

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Answer a request whose turn it is on this connection."""
        self._turn = cycle
        self.relay.starts.put(partial(self._begin, cycle, app), partial(self._owner, cycle.scope))

    def _owner(self, scope: Mapping[str, Any]) -> str:
        """Whose turn a request takes. One that is relayed has no path before it begins."""
        return _HEALTH if scope.get("path") == _HEALTH else self.relay.whose(scope["headers"])

    def _begin(self, cycle: Any, app: Any) -> None:
        if self.is_over:
            return  # it has gone while it waited
        if isinstance(cycle, Exchange):
            cycle.begin()
        else:
            super()._start_asgi_task(cycle, app)

    def handle_websocket_upgrade(self) -> None:
        if not self.is_over:  # a refused request has no scope
            super().handle_websocket_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        if self._passes_upgrade_by:
            upgrade = sys.exception()
            assert isinstance(upgrade, httptools.HttpParserUpgrade)  # noqa: S101  uvicorn calls this where it catches one
            self._head_end = upgrade.args[0]
        else:
            super()._unsupported_upgrade_warning()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _asks_for_http_2(self) -> bool:
        """Java's client does so with each first request to a port without TLS, and takes HTTP/1.1 for an answer."""
        wanted = {value.lower() for name, value in self.headers if name == _UPGRADE}
        return wanted == {_HTTP_2} and self.parser.get_method() != b"CONNECT"

    def _head_without_upgrade(self) -> bytes:
        """The head that was read last. httptools would read no body behind it as it came."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != _UPGRADE]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _moved(self) -> None:
        """A head or a message has ended, or bytes of a body have come."""
        self._came_on, self._unread_bytes = True, 0

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """Answer what is no request, and close: at once, or later where many are refused. Not in the middle of another answer, which has
        to look cut.
        """
        if self.is_over:
            return
        asked = self._turn if self._turn and not self._turn.response_complete else None
        delay_s = self.relay.delay_s()
        if delay_s and not (asked and asked.response_started):
            self._refused = True
            self.hold()
            self.loop.call_later(delay_s, self._close, status, why, asked)
        else:
            self._close(status, why, asked)

    def _close(self, status: HTTPStatus, why: str, asked: Any) -> None:
        """`asked`: the request that was being answered when this was refused, whose answer may have begun since."""
        if self.transport.is_closing():
            return
        if asked and asked.response_started:
            if not asked.response_complete:
                self.transport.abort()
        else:
            body = why.encode()
            head = (
                b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()


def _length(headers: Headers) -> int:
    """The bytes of a body of a known length, 0 of any other. The parser has refused two lengths, and what is no number."""
    return next((int(value) for name, value in headers if name == _CONTENT_LENGTH and value.isdigit()), 0)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


class Exchange(RequestResponseCycle):
    """One relayed request and its answer. A Downstream, which gives errors the shape of the route's clients."""

    def __init__(self, door: Door, path: str, query: bytes) -> None:
        version = door.parser.get_http_version()
        super().__init__(
            scope=door.scope,
            transport=door.transport,
            flow=door.flow,
            logger=door.logger,
            access_logger=door.access_logger,
            access_log=False,
            default_headers=door.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=door.expect_100_continue and version != "1.0",
            keep_alive=version != "1.0" and door.parser.should_keep_alive(),
            on_response=door.on_response_complete,
        )
        self.source: Source | None = None
        self.more_headers: Callable[[], Headers] | None = None
        self._door = door
        self._path = path
        self._query = query
        self._can_chunk = version != "1.0"
        self._measured = False  # whether the answer has a length, and so is no stream
        self._id = b""
        self._anthropic = dialect_of(path) is Dialect.ANTHROPIC
        self._head = b""  # waits for the first piece
        self._error: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._error_body = b""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start to answer."""
        door = self._door
        door.answering = self
        self._task = door.loop.create_task(self._run())
        door.tasks.add(self._task)
        self._task.add_done_callback(door.tasks.discard)

    def lost(self) -> None:
        """The client has gone."""
        self.disconnected = True
        if self._task and not self.response_complete:
            self._task.cancel()

    async def _run(self) -> None:
        relay, began_s = self._door.relay, time.monotonic()
        scope: Any = self.scope  # of this request alone
        scope.update(method="POST", path=self._path, root_path="", query_string=self._query)
        scope, self._id = with_id(scope)
        relay.began()
        ended_by: BaseException | None = None
        try:
            await relay.answer(Request(scope, self.receive), self)  # type: ignore[arg-type]  # uvicorn's own types of messages
        except asyncio.CancelledError as error:
            ended_by = error
            raise
        except Exception as error:
            ended_by = error
            logger.exception("unhandled error on %s, request %s", self._path, self._id.decode())
        finally:
            if not self.response_complete:
                self.transport.abort()  # to the client the answer must not look complete
            if self._door.answering is self:
                self._door.answering = None
            relay.ended(self._path, time.monotonic() - began_s, ended_by)
            # The task keeps the error, and the error this frame, from which the request's body is reached.
            ended_by = self._task = None

    # Downstream

    @property
    def started(self) -> bool:
        return self.response_started

    @property
    def paused(self) -> bool:
        return self.flow.write_paused

    def start(self, status: int, headers: Headers) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        added = self.more_headers() if self.more_headers else ()
        whole = [*(header for header in headers if header[0] != ID_HEADER), *added]
        whole += id_headers(self._id, anthropic=self._anthropic)
        if status >= HTTPStatus.BAD_REQUEST:
            self._error = status, whole  # an error goes out once it is whole
        else:
            self._head = self._head_of(status, whole)

    def write(self, data: bytes) -> None:
        if self._error:
            self._error_body += data
        else:
            self._send(data)

    def end(self, data: bytes = b"") -> None:
        if self._error:
            (status, headers), self._error = self._error, None
            headers, data = self._shape().error(status, headers, self._error_body + data)
            self._head = self._head_of(status, headers)
        self._send(data, last=True)
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self._door.answering = None
        self.on_response()

    def cut(self) -> None:
        self.transport.abort()  # the door then hears that the client has gone

    def _shape(self) -> Shape:
        return Shape(self._id, anthropic=self._anthropic)

    def _send(self, data: bytes, *, last: bool = False) -> None:
        """Write a piece of the body, with the head where it has not gone out, in one call: each is one of the kernel's."""
        head, self._head = self._head, b""
        end = b""
        if not self._measured and sse.has_error(data):
            data = self._shape().events(data)
        if self.chunked_encoding:
            if data:
                head += b"%x\r\n" % len(data)
                end = b"\r\n"
            if last:
                end += b"0\r\n\r\n"
        if self.disconnected:
            return
        if len(data) < _JOINED_BYTES:
            if whole := b"".join((head, data, end)):
                self.transport.write(whole)
        else:
            self.transport.writelines((head, data, end))

    def _head_of(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        lines = [STATUS_LINE[status]]
        has_length = closes = False
        for name, value in (*self.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
            if name == _CONTENT_LENGTH:
                has_length = True
            elif name == b"connection":
                closes = True
        leaves = closes or self._door.relay.leaving()
        self.keep_alive = self.keep_alive and not leaves and (has_length or self._can_chunk)
        self._measured = has_length
        self.chunked_encoding = not has_length and self._can_chunk
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)
