"""The door byte by byte, beside uvicorn's own protocol in front of an ASGI app that does the same."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send
from support.servers import PATIENCE_S, asgi_server, until
from support.wire import Wire
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from serving.errors import BadRequestError
from serving.router.http.door import Door, Relay
from serving.router.http.downstream import Downstream, OverAsgi, respond
from serving.router.http.errors import error_response
from serving.strangers import Strangers

pytestmark = pytest.mark.http

PATH = b"/v1/completions"
ID = b"x-request-id: 7\r\n"
BIG = b"x" * (1 << 20)


@dataclass
class Echo:
    """Answers with the request's body, as its body says: in chunks, slowly, with an error, or not at all."""

    began: int = 0
    ended: int = 0
    waiting: int = 0
    written: int = 0
    pauses: int = 0
    errors: list[str] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)

    async def answer(self, request: Request, client: Downstream) -> None:
        try:
            body = await request.body()
        except ClientDisconnect:
            return
        if body.startswith(b"refuse"):
            respond(client, error_response(BadRequestError("no")))
            return
        if body.startswith(b"break"):
            client.start(200, [(b"content-type", b"text/event-stream")])
            client.write(b"half")
            raise ZeroDivisionError
        if body.startswith(b"wait"):
            self.waiting += 1
            try:
                while not self.go.is_set():  # noqa: ASYNC110  set by a thread
                    await asyncio.sleep(0.005)
            finally:
                self.waiting -= 1
        if body.startswith(b"flood"):
            await self._flood(client)
        elif body.startswith((b"chunks", b"data: ")):
            size = 3 if body.startswith(b"chunks") else len(body)
            client.start(200, [(b"content-type", b"text/event-stream")])
            for at in range(0, len(body), size):
                client.write(body[at : at + size])
            client.end()
        else:
            client.start(200, [(b"content-length", b"%d" % len(body))])
            if body:
                client.write(body)
            client.end()

    async def _flood(self, client: Downstream) -> None:
        client.source = self
        client.start(200, [(b"content-type", b"text/event-stream")])
        for _ in range(200):
            client.write(BIG)
            self.written += len(BIG)
            while client.paused:  # noqa: ASYNC110  `resume` may come before the wait
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
        client.end()

    def pause(self) -> None:
        self.pauses += 1

    def resume(self) -> None:
        """The client has read on."""

    def done(self, _: str, __: float, error: BaseException | None) -> None:
        self.ended += 1
        if error:
            self.errors.append(type(error).__name__)


@dataclass
class Doors:
    door: tuple[str, int]
    plain: tuple[str, int]
    echo: Echo


def place(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("http://").split(":")
    return host, int(port)


def over_asgi(echo: Echo) -> ASGIApp:
    """The same as an ASGI app."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            body = await Request(
                scope, receive
            ).body()  # before the watch over the client begins, as in the router's app

            async def again() -> Any:
                return {"type": "http.request", "body": body, "more_body": False}

            await OverAsgi(partial(echo.answer, Request(scope, again)))(scope, receive, send)

    return app


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    echo = Echo()

    def began() -> None:
        echo.began += 1

    relay = Relay(
        echo.answer, left_out=frozenset([b"x-request-timeout-seconds"]), began=began, ended=echo.done
    )
    with ExitStack() as running:
        door = running.enter_context(
            asgi_server(over_asgi(echo), http=partial(Door, relay), access_log=False)
        )
        plain = running.enter_context(asgi_server(over_asgi(echo), http="httptools", access_log=False))
        yield Doors(place(door), place(plain), echo)


@pytest.fixture(autouse=True)
def every_request_ends(doors: Doors) -> Iterator[None]:
    doors.echo.errors.clear()
    doors.echo.go.clear()
    yield
    doors.echo.go.set()
    until(lambda: doors.echo.began == doors.echo.ended and not doors.echo.waiting, "every request has ended")


def talk(address: tuple[str, int], *pieces: bytes, timeout_s: float = PATIENCE_S) -> bytes:
    """Everything that comes back for these pieces, each sent by itself, until the server closes."""
    answer = b""
    with socket.create_connection(address, timeout=timeout_s) as client, suppress(ConnectionError):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        while piece := client.recv(1 << 16):
            answer += piece
    return answer


def read(answer: bytes) -> list[tuple[int, bytes, bool]]:
    """Status, body and whether it was chunked, of every answer of a connection."""
    answers = []
    while answer:
        head, end, answer = answer.partition(b"\r\n\r\n")
        if not end:
            answers.append((0, head, False))
            break
        lines = head.lower().split(b"\r\n")
        status = int(lines[0].split()[1])
        lengths = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
        if lengths:
            answers.append((status, answer[: lengths[0]], False))
            answer = answer[lengths[0] :]
        elif b"transfer-encoding: chunked" in lines:
            body = b""
            while answer:
                size, _, answer = answer.partition(b"\r\n")
                piece, answer = answer[: int(size, 16)], answer[int(size, 16) + 2 :]
                if not piece:
                    break
                body += piece
            else:
                body += b"(cut)"
            answers.append((status, body, True))
        elif status < 200:
            answers.append((status, b"", False))
        else:
            answers.append((status, answer, False))
            answer = b""
    return answers


def post(body: bytes, *lines: bytes, path: bytes = PATH, close: bool = True) -> bytes:
    more = b"".join(line + b"\r\n" for line in lines) + (b"Connection: close\r\n" if close else b"")
    head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\n" + ID + more
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(*pieces: bytes, trailer: bytes = b"", path: bytes = PATH) -> bytes:
    head = (
        b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return (
        head
        + b"".join(b"%x\r\n" % len(piece) + piece + b"\r\n" for piece in pieces)
        + b"0\r\n"
        + trailer
        + b"\r\n"
    )


CLOSE = post(b"last")
LINE = b"POST " + PATH + b" HTTP/1.1\r\nHost: x\r\n"
ALIKE = {
    "a length": post(b"hello"),
    "no body": post(b""),
    "an answer in chunks": post(b"chunks and chunks"),
    "chunks": chunked(b"hel", b"lo"),
    "chunks with a trailer": chunked(b"hello", trailer=b"x-a: 1\r\n"),
    "chunks with extensions": chunked(b"hello").replace(b"5\r\n", b"5;a=b\r\n"),
    "a query": post(b"hello", path=PATH + b"?a=1&b=%2F"),
    "two on one connection": post(b"first", close=False) + CLOSE,
    "three, one of them in chunks": post(b"chunks", close=False) + post(b"second", close=False) + CLOSE,
    "a path of the app between two": post(b"first", close=False)
    + post(b"second", path=b"/other", close=False)
    + CLOSE,
    "empty lines before": b"\r\n\r\n" + CLOSE,
    "HTTP/1.0": CLOSE.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "both lengths": LINE + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + CLOSE,
    "both lengths, the other way": LINE
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"
    + CLOSE,
    "two lengths": LINE + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello" + CLOSE,
    "a length in words": LINE + b"Content-Length: five\r\n\r\nhello",
    "a negative length": LINE + b"Content-Length: -5\r\n\r\nhello",
    "a length with a sign": LINE + b"Content-Length: +5\r\n\r\nhello",
    "a chunk of no size": LINE + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\nhello\r\n0\r\n\r\n",
    "a chunk longer than its size": LINE + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n",
    "a chunk of a huge size": LINE + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello",
    "chunked that is not last": LINE + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "an unknown encoding": LINE + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + CLOSE,
    "a folded header": LINE
    + b"X-A: 1\r\n Content-Length: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "whitespace before a colon": LINE + b"Content-Length : 5\r\n\r\nhello",
    "whitespace before a header": LINE + b" Content-Length: 5\r\n\r\nhello",
    "a header without a colon": LINE + b"Content-Length\r\n\r\n",
    "a header with a zero": LINE + b"X-A: a\0b\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
    "lines that end in LF alone": CLOSE.replace(b"\r\n", b"\n"),
    "a bare CR in a header": LINE + b"X-A: a\rb: c\r\nContent-Length: 0\r\n\r\n",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
    "another version": CLOSE.replace(b"HTTP/1.1", b"HTTP/3.0"),
    "an unknown method": CLOSE.replace(b"POST", b"BREW"),
    "GET": CLOSE.replace(b"POST", b"GET"),
    "PUT": CLOSE.replace(b"POST", b"PUT"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_requests_and_what_is_none_fare_as_with_uvicorn(doors: Doors, name: str) -> None:
    """One piece, or cut anywhere: the same statuses and bodies, and a closed connection."""
    sent = ALIKE[name]
    expected = read(talk(doors.plain, sent))
    assert expected
    assert read(talk(doors.door, sent)) == expected
    for at in range(1, len(sent), 1 + len(sent) // 8):
        assert read(talk(doors.door, sent[:at], sent[at:])) == expected


def test_the_door_answers_by_itself_and_leaves_the_rest(doors: Doors) -> None:
    before = doors.echo.began
    for sent, itself in (
        (post(b"x"), True),
        (post(b"x", path=b"/other"), False),
        (post(b"x", path=b"/v1/completion%73"), False),
        (post(b"x", path=b"http://x" + PATH), False),
        (post(b"x", b"X-Request-Timeout-Seconds: 5"), False),
    ):
        answer = talk(doors.door, sent)
        assert read(answer) == [(200, b"x", False)]
        assert (ID in answer) == itself
        before += itself
        assert doors.echo.began == before


def test_a_client_that_asks_first_is_told_to_go_on(doors: Doors) -> None:
    sent = post(b"hello", b"Expect: 100-continue")
    head, body = sent[:-5], sent[-5:]
    with socket.create_connection(doors.door, timeout=PATIENCE_S) as client:
        client.sendall(head)
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        answer = b""
        while piece := client.recv(1000):
            answer += piece
    assert read(answer) == [(200, b"hello", False)]


def test_an_http_1_0_client_is_not_told_to_go_on(doors: Doors) -> None:
    """It knows no interim answers, and would take one for the answer."""
    sent = post(b"hello", b"Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
    assert read(talk(doors.door, sent[:-5], sent[-5:])) == [(200, b"hello", False)]
    assert talk(doors.door, sent).startswith(b"HTTP/1.1 200")


def test_an_http_1_0_client_gets_no_chunks(doors: Doors) -> None:
    """uvicorn sends it chunks, which it can't read."""
    answer = talk(doors.door, post(b"chunks", close=False).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert b"chunked" not in answer
    assert answer.endswith(b"\r\n\r\nchunks")


def test_an_error_is_whole_and_in_the_route_s_shape(doors: Doors) -> None:
    ((status, body, _),) = read(talk(doors.door, post(b"refuse")))
    assert (status, body[:11]) == (400, b'{"error": {')
    ((status, body, _),) = read(talk(doors.door, post(b"refuse", path=b"/v1/messages")))
    assert (status, body[:16]) == (400, b'{"type": "error"')


@pytest.mark.parametrize("before", [b"", b'data: {"a": 1}\n\n'], ids=["alone", "behind an event"])
def test_an_engine_s_failure_in_a_stream_is_told_without_its_words(doors: Doors, before: bytes) -> None:
    failure = b'data: {"error": {"message": "CUDA at 0x7f3", "code": 500}}\n\ndata: [DONE]\n\n'
    ((_, body, _),) = read(talk(doors.door, post(before + failure)))
    assert body.startswith(before + b'data: {"error":{"message":"The engine failed on this request."')
    assert body.endswith(b"}\n\ndata: [DONE]\n\n")


def test_an_answer_that_fails_half_way_looks_cut(doors: Doors) -> None:
    assert read(talk(doors.door, post(b"break", close=False)))[0][1].endswith(b"(cut)")
    assert doors.echo.errors == ["ZeroDivisionError"]


def test_what_is_behind_a_request_ends_with_it(doors: Doors) -> None:
    began = doors.echo.began
    client = socket.create_connection(doors.door, timeout=PATIENCE_S)
    client.sendall(post(b"wait", close=False) + post(b"second", close=False))
    until(lambda: doors.echo.waiting, "it waits")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    client.close()
    until(lambda: not doors.echo.waiting, "it has ended")
    assert doors.echo.errors == ["CancelledError"]
    assert doors.echo.began == began + 1


@pytest.mark.parametrize("end", ["close", "reset", "half"])
def test_a_client_that_goes_ends_its_request(doors: Doors, end: str) -> None:
    client = socket.create_connection(doors.door, timeout=PATIENCE_S)
    client.sendall(post(b"wait"))
    until(lambda: doors.echo.waiting, "it waits")
    if end == "half":
        client.shutdown(socket.SHUT_WR)
    if end == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    if end != "half":
        client.close()
    until(lambda: not doors.echo.waiting, "it has ended")
    assert doors.echo.errors == ["CancelledError"]
    client.close()


def test_a_request_that_breaks_off_at_any_byte_leaves_nothing(doors: Doors) -> None:
    sent = chunked(b"hel", b"lo")
    for at in range(len(sent)):
        client = socket.create_connection(doors.door, timeout=PATIENCE_S)
        client.sendall(sent[:at])
        if at % 2:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.close()
    until(lambda: doors.echo.began == doors.echo.ended, "every request has ended")


def test_a_slow_client_holds_the_answer_up_and_nothing_grows(doors: Doors) -> None:
    doors.echo.written = doors.echo.pauses = 0
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        client.settimeout(PATIENCE_S)
        client.connect(doors.door)
        client.sendall(post(b"flood"))
        until(lambda: doors.echo.pauses, "it is held up")
        before = -1
        while before != doors.echo.written:
            before = doors.echo.written
            threading.Event().wait(0.1)
        assert before < 3 * len(BIG)  # the kernel itself would take four
        size = 0
        while piece := client.recv(1 << 20):
            size += len(piece)
    assert size > 200 * len(BIG)


@pytest.mark.parametrize(
    "line", [b"X-A: " + b"a" * (100 << 10), b"X-A: a\r\n" * (20 << 10)], ids=["one", "many"]
)
def test_headers_have_a_limit(doors: Doors, line: bytes) -> None:
    assert talk(doors.door, LINE + line).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("before", [[], [post(b"first", close=False)]], ids=["first", "second"])
@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"X-A: " + b"a" * (100 << 10), 431),
        (b"\r\n".join([b"X-A: " + b"a" * 1000] * 100), 431),
        (b"\r\n".join([b"A:"] * (14 << 10)), 431),  # 56 KiB of them; blanks are added on the way
        (b"X-A: " + b"a" * (56 << 10), 200),
    ],
    ids=["one", "many", "empty", "shorter"],
)
async def test_a_head_in_one_piece_has_its_limit(before: list[bytes], line: bytes, status: int) -> None:
    """A slice would cut the connection, as if it were broken: on every slice, by one client."""
    echo = Echo()
    pieces = [*before, post(b"hello", line)]
    answers, closed = await said(partial(Door, Relay(echo.answer, ended=echo.done)), over_asgi(echo), pieces)
    assert answers[-1][0] == status
    assert closed
    assert echo.errors == []


async def test_a_long_body_is_not_counted_with_the_head_that_begins_behind_it() -> None:
    echo, after = Echo(), post(b"hello")
    pieces = [post(b"a" * (100 << 10), close=False) + after[:20], after[20:]]
    answers, _ = await said(partial(Door, Relay(echo.answer, ended=echo.done)), over_asgi(echo), pieces)
    assert [status for status, *_ in answers] == [200, 200]


async def test_a_head_that_begins_behind_another_message_has_its_limit() -> None:
    echo = Echo()
    pieces = [post(b"hello", close=False) + LINE, b"X-A: a\r\n" * (10 << 10)]
    answers, closed = await said(partial(Door, Relay(echo.answer, ended=echo.done)), over_asgi(echo), pieces)
    assert [status for status, *_ in answers] == [200, 431]
    assert closed


async def test_a_trailer_is_no_header() -> None:
    """Whether it came with the head or later, who asks and for what stands in the head alone."""
    names: list[list[bytes]] = []

    async def answer(request: Request, client: Downstream) -> None:
        names.append([name for name, _ in request.headers.raw])
        client.start(200, [(b"content-length", b"0")])
        client.end()

    sent = chunked(b"hello", trailer=b"authorization: Bearer other\r\nexpect: 100-continue\r\n")
    for pieces in ([sent], [sent[:-20], sent[-20:]]):
        answers, _ = await said(partial(Door, Relay(answer)), None, pieces)
        assert [status for status, *_ in answers] == [200]
    assert names == [[b"host", b"connection", b"transfer-encoding", b"x-request-id"]] * 2


@pytest.mark.parametrize("endless", [b"X-A: a\r\n" * 1000, b"X-A: " + b"a" * 8000], ids=["many", "one"])
async def test_trailers_have_a_limit(endless: bytes) -> None:
    echo = Echo()
    pieces = [chunked(b"hello").removesuffix(b"\r\n"), *[endless] * 10]
    answers, closed = await said(partial(Door, Relay(echo.answer, ended=echo.done)), over_asgi(echo), pieces)
    assert [status for status, *_ in answers] == [431]
    assert closed


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c, websocket", b"h2c\r\nUpgrade: any"])
def test_an_upgrade_is_refused(doors: Doors, upgrade: bytes, caplog: pytest.LogCaptureFixture) -> None:
    sent = post(b"hello", b"Connection: Upgrade", b"Upgrade: " + upgrade, close=False)
    for before in (b"", post(b"first", close=False)):
        *_, (status, body, _) = read(talk(doors.door, before + sent + CLOSE))
        assert (status, body[:21]) == (400, b"A request with a body")
    assert "Fatal error" not in caplog.text  # a traceback for each, whoever sends it


@pytest.mark.parametrize("method", [b"POST", b"GET", b"DELETE"])
def test_a_body_behind_an_upgrade_is_no_request(doors: Doors, method: bytes) -> None:
    """The front door keeps its connections for the next client, who got the answer to what another had hidden in a body."""
    hidden = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"
    head = method + b" /v1/files HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: any\r\n"
    for length in (
        b"Content-Length: 99\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n63\r\nx",
        b"Transfer-Encoding: \xff, chunked\r\n\r\n63\r\nx",
    ):
        with socket.create_connection(doors.door, timeout=PATIENCE_S) as client:
            client.sendall(head + length)
            answer = client.recv(1000)
            with suppress(ConnectionError):
                client.sendall(b"\r\n" + hidden)
                while piece := client.recv(1 << 16):
                    answer += piece
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.startswith(b"HTTP/1.1 400 ")


HTTP_2 = b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


@pytest.mark.parametrize("name", ALIKE)
def test_a_client_that_offers_http_2_is_answered_in_http_1(doors: Doors, name: str) -> None:
    """Java's client offers it with each first request, body and all."""
    expected = read(talk(doors.door, ALIKE[name]))
    sent = ALIKE[name].replace(b"Host: x\r\n", HTTP_2)
    assert read(talk(doors.door, sent)) == expected
    for at in range(1, len(sent), 1 + len(sent) // 8):
        assert read(talk(doors.door, sent[:at], sent[at:])) == expected


def test_many_offers_of_http_2_in_one_piece_are_as_many_requests(doors: Doors) -> None:
    sent = post(b"a", close=False) * 2000 + CLOSE
    answers = read(talk(doors.door, sent.replace(b"Host: x\r\n", HTTP_2)))
    assert answers == [(200, b"a", False)] * 2000 + [(200, b"last", False)]


async def test_connect_is_no_offer_of_http_2() -> None:
    sent = b"CONNECT x:1 HTTP/1.1\r\n" + HTTP_2 + b"Content-Length: 4\r\n\r\nPOST"
    answers, closed = await said(partial(Door, Relay(Echo().answer)), None, [sent, CLOSE])
    assert [status for status, *_ in answers] == [400]
    assert closed


@pytest.mark.parametrize("queued", [b"", post(b"second", close=False)], ids=["next", "behind another"])
def test_no_answer_lands_in_another(doors: Doors, queued: bytes) -> None:
    """What is no request comes while an answer is on its way: the answer looks cut, and no second status is in it."""
    with socket.create_connection(doors.door, timeout=PATIENCE_S) as client:
        client.sendall(post(b"flood", close=False))
        answer = bytearray(client.recv(1000))
        client.sendall(queued + b"NO HTTP\r\n\r\n" * 10)
        with suppress(ConnectionError):
            while piece := client.recv(1 << 20):
                answer += piece
    assert answer.count(b"HTTP/1.1 ") == 1
    assert not answer.endswith(b"0\r\n\r\n")


async def said(
    protocol: type[HttpToolsProtocol] | partial[Door], app: Any, pieces: list[bytes]
) -> tuple[Any, bool]:
    """The answers of a protocol to these pieces, and whether it closes, before the client goes."""
    config = uvicorn.Config(app, http=protocol, access_log=False, log_config=None)  # type: ignore[arg-type]  # uvicorn calls it
    wire, loop = Wire(), asyncio.get_running_loop()
    config.load()
    connection = protocol(config=config, server_state=ServerState(), app_state={}, _loop=loop)
    connection.connection_made(wire)
    for piece in pieces:
        if not wire.closed:
            connection.data_received(piece)
        for _ in range(30):  # turns of the loop, of which no request takes so many
            await asyncio.sleep(0)
    answers, closed = read(wire.sent), wire.closed
    connection.connection_lost(None)
    await asyncio.sleep(0)
    if connection.timeout_keep_alive_task:
        connection.timeout_keep_alive_task.cancel()
    return answers, closed


async def connected(door: partial[Door], app: Any = None) -> HttpToolsProtocol:
    """A connection without a client."""
    config = uvicorn.Config(app, http=door, access_log=False, log_config=None)  # type: ignore[arg-type]  # as above
    if app:
        config.load()
    connection = door(
        config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop()
    )
    connection.connection_made(Wire())
    return connection


@pytest.mark.parametrize("gone", [False, True], ids=["all", "some gone"])
async def test_of_many_requests_at_once_those_of_another_key_wait_for_few(*, gone: bool) -> None:
    """Those whose clients go while they wait are never begun."""
    began: list[str] = []

    async def answer(request: Request, client: Downstream) -> None:
        began.append(request.headers["x-key"])
        await request.body()
        client.start(200, [(b"content-length", b"0")])
        client.end()

    door = partial(Door, Relay(answer, whose=lambda headers: dict(headers)[b"x-key"].decode()))
    connections = [await connected(door) for _ in range(51)]
    for connection, key in zip(connections, ["crowd"] * 50 + ["one"], strict=True):
        connection.data_received(post(b"hello", b"x-key: " + key.encode()))
    lost = connections[10:40] if gone else []
    for connection in lost:
        connection.transport.close()
        connection.connection_lost(None)
    async with asyncio.timeout(PATIENCE_S):
        while len(began) < len(connections) - len(lost):  # noqa: ASYNC110  turn by turn
            await asyncio.sleep(0)
    assert began.index("one") < 10
    assert len(began) == len(connections) - len(lost)
    for connection in connections:
        connection.connection_lost(None)


async def test_a_health_check_waits_for_no_crowd_without_a_key() -> None:
    """HAProxy takes a router that does not answer it for gone."""
    began: list[str] = []

    async def answer(_request: Request, client: Downstream) -> None:
        began.append("of the crowd")
        client.start(200, [(b"content-length", b"0")])
        client.end()

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        began.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    door = partial(Door, Relay(answer))
    connections = [await connected(door, app) for _ in range(101)]
    requests = [post(b"hello"), b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"] * 50
    check = b"GET /-/healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    for connection, request in zip(connections, [*requests, check], strict=True):
        connection.data_received(request)
    async with asyncio.timeout(PATIENCE_S):
        while len(began) < len(connections):  # noqa: ASYNC110  turn by turn
            await asyncio.sleep(0)
    assert began.index("/-/healthz") < 20
    assert (began.count("of the crowd"), began.count("/v1/models")) == (50, 50)
    await asyncio.sleep(0)
    for connection in connections:
        connection.connection_lost(None)
        if connection.timeout_keep_alive_task:
            connection.timeout_keep_alive_task.cancel()


@pytest.mark.parametrize("pieces", [1, 2])
async def test_while_a_request_is_answered_its_connection_is_read(pieces: int) -> None:
    """Else nobody would see its client go. uvicorn pauses the reading at a long piece, until more of the body is asked for."""
    going = asyncio.Event()

    async def answer(request: Request, _: Downstream) -> None:
        assert await request.body() == BIG
        going.set()
        await asyncio.Event().wait()

    connection = await connected(partial(Door, Relay(answer)))
    sent = post(BIG)
    for piece in [sent] if pieces == 1 else [sent[: -len(BIG)], BIG]:
        connection.data_received(piece)
        for _ in range(30):  # turns of the loop: the answer waits for the body
            await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await going.wait()
    assert isinstance(connection.transport, Wire)
    assert not connection.transport.paused
    connection.connection_lost(None)


def changed(sent: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    for at, with_ in changes:
        sent = sent[:at] + with_ + sent[at + 1 :]
    return sent


def cut(sent: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(sent[:size])
        sent = sent[size:]
    return [piece for piece in (*pieces, sent) if piece]


anything = given(
    st.sampled_from(sorted(ALIKE)),
    st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=4)), max_size=3),
    st.lists(st.integers(1, 60), max_size=5),
)


@settings(deadline=None)
@anything
def test_whatever_is_sent_the_door_says_what_uvicorn_says(
    name: str, changes: list[tuple[int, bytes]], sizes: list[int]
) -> None:
    pieces = cut(changed(ALIKE[name], changes), sizes)
    echo = Echo()

    async def run() -> None:
        door = partial(Door, Relay(echo.answer, ended=echo.done))
        itself = await said(door, over_asgi(echo), pieces)
        assert itself == await said(HttpToolsProtocol, over_asgi(echo), pieces)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)

    asyncio.run(run())


@settings(deadline=None)
@anything
def test_an_offer_of_http_2_changes_nothing(
    name: str, changes: list[tuple[int, bytes]], sizes: list[int]
) -> None:
    pieces, echo = cut(changed(ALIKE[name], changes), sizes), Echo()

    async def run() -> None:
        door = partial(Door, Relay(echo.answer, ended=echo.done))
        offers = [piece.replace(b"Host: x\r\n", HTTP_2) for piece in pieces]
        assert await said(door, over_asgi(echo), offers) == await said(door, over_asgi(echo), pieces)

    asyncio.run(run())


async def test_a_connection_without_a_whole_head_counts_as_a_strangers_and_is_cut_off() -> None:
    async def never(_request: Request, _client: Downstream) -> None:
        raise AssertionError

    strangers = Strangers(within_s=PATIENCE_S)
    relay = Relay(never, strangers=strangers)

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    with asgi_server(app, http=partial(Door, relay), lifespan="off") as address:
        host, port = address.removeprefix("http://").split(":")
        whole = await asyncio.open_connection(host, int(port))
        whole[1].write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert b"200 OK" in await whole[0].readuntil(b"\r\n\r\n")
            assert not strangers._timers
            strangers._within_s = 0.1
            cut = await asyncio.open_connection(host, int(port))
            cut[1].write(b"GET / HTTP/1.1\r\nhost: a\r\n")
            with suppress(ConnectionError):
                assert not await cut[0].read()
            whole[1].write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert b"200 OK" in await whole[0].readline()
        for _, writer in (whole, cut):
            writer.close()
