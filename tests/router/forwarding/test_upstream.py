"""The connection to a slice, byte by byte: its protocol is driven without a socket, and with real ones."""

import asyncio
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from support.servers import PATIENCE_S, SSE_HEAD, RawServers, Script, chunk, free_address, until, whole

from serving.router.forwarding.connecting import NotConnectedError, UpstreamError
from serving.router.forwarding.upstream import SliceResponse, Upstream, _Connection, returned
from serving.router.http.protocol import InferenceRequest
from serving.state.records import Peer, SliceRecord, SliceState

ADDRESS = "http://127.0.0.1:1"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = b"data: 1\n\ndata: 22\n\n"
ANSWERS = {
    "content-length": (whole(BODY), True),
    "no body": (whole(b""), True),
    "chunked": (CHUNKED + chunk(BODY[:9]) + chunk(BODY[9:]) + b"0\r\n\r\n", True),
    "chunked with extensions and trailers": (
        CHUNKED + b"9;a=b\r\ndata: 1\n\n\r\n" + chunk(BODY[9:]) + b"0\r\nx: y\r\n\r\n",
        True,
    ),
    "after two interim answers": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + whole(BODY),
        True,
    ),
    "that closes": (whole(BODY, b"Connection: close"), False),
    "in HTTP/1.0": (whole(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"), False),
    "in HTTP/1.0 that stays": (
        whole(BODY, b"Connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0"),
        True,
    ),
}
UNTIL_EOF = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n" + BODY
NO_ANSWERS = {
    "both lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a chunk of no size": CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
    "a chunk that is longer than it says": CHUNKED + b"2\r\nhello\r\n0\r\n\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
    "whitespace before a colon": b"HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\nhello",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\nx",
    "a status that HTTP has not": b"HTTP/1.1 600 Odd\r\nContent-Length: 5\r\n\r\nhello",
    "a word to ask elsewhere": b"HTTP/1.1 307 Elsewhere\r\nLocation: http://10.0.0.7:1/\r\nContent-Length: 0\r\n\r\n",
    "headers without an end": b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * (80 << 10),
    "headers beyond count": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (20 << 10),
}


class Wire(asyncio.Transport):
    """A transport to nowhere, which notes what is done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.open = True
        self.reading = True
        self.aborted = asyncio.Event()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ARG002  as asyncio has it
        return self

    def setsockopt(self, *_: Any) -> None:
        """Nowhere needs no keepalive."""

    def write(self, data: Any) -> None:
        self.sent += data

    def writelines(self, list_of_data: Any) -> None:
        self.sent += b"".join(list_of_data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.open = False
        self.aborted.set()

    def is_closing(self) -> bool:
        return not self.open


class Asked:
    """A connection that has just been asked."""

    def __init__(self) -> None:
        self.pool = Upstream(1)
        self.wire = Wire()
        self.connection = _Connection(self.pool, Peer(ADDRESS))
        self.connection.connection_made(self.wire)
        self.task = asyncio.create_task(self._body())
        self.pieces: list[bytes] = []

    async def _body(self) -> tuple[int, bytes]:
        response = await self.connection.ask(b"POST / HTTP/1.1\r\n\r\n", b"")
        await response.pipe(self._take)
        return response.status, b"".join(self.pieces)

    def _take(self, data: bytes) -> bool:
        self.pieces.append(data)
        return True

    async def feed(self, *pieces: bytes) -> None:
        await asyncio.sleep(0)
        for piece in pieces:
            if self.wire.open:
                self.connection.data_received(piece)
                await asyncio.sleep(0)

    @property
    def kept(self) -> bool:
        return self.wire.open and bool(self.pool._idle)


@pytest.mark.unit
@pytest.mark.parametrize("answer", ANSWERS)
async def test_an_answer_is_the_same_wherever_it_is_cut(answer: str) -> None:
    raw, keeps = ANSWERS[answer]
    expected = (200, b"" if answer == "no body" else BODY)
    for at in range(1, len(raw)):
        asked = Asked()
        await asked.feed(raw[:at], raw[at:])
        assert await asked.task == expected
        assert asked.kept == keeps
    asked = Asked()
    await asked.feed(*(raw[at : at + 1] for at in range(len(raw))))
    assert await asked.task == expected


@pytest.mark.unit
async def test_a_trailer_and_what_the_connection_names_are_no_headers_of_an_answer() -> None:
    asked = Asked()
    asked.task.cancel()
    asking = asyncio.create_task(asked.connection.ask(b"POST / HTTP/1.1\r\n\r\n", b""))
    named = b"Connection: keep-alive, X-Hop\r\nconnection: x-other\r\nX-Hop: 1\r\nX-Other: 1\r\nx-kept: 1\r\n"
    await asked.feed(CHUNKED.replace(b"\r\n\r\n", b"\r\n" + named + b"\r\n"), b"0\r\nx-trailer: 1\r\n\r\n")
    assert returned(await asking) == [(b"x-kept", b"1")]


@pytest.mark.unit
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("error", [None, ConnectionResetError()], ids=["closed", "reset"])
async def test_an_answer_that_ends_at_any_byte_before_its_last_is_an_error(
    answer: str, error: Exception | None
) -> None:
    raw, _ = ANSWERS[answer]
    for at in range(len(raw)):
        asked = Asked()
        await asked.feed(raw[:at])
        asked.connection.connection_lost(error)
        with pytest.raises(UpstreamError):
            await asked.task
        assert not asked.pool._idle


@pytest.mark.unit
async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    asked = Asked()
    await asked.feed(UNTIL_EOF)
    asked.connection.connection_lost(None)
    assert await asked.task == (200, BODY)
    asked = Asked()
    await asked.feed(UNTIL_EOF)
    asked.connection.connection_lost(ConnectionResetError())
    with pytest.raises(UpstreamError):
        await asked.task


@pytest.mark.unit
@pytest.mark.parametrize("answer", NO_ANSWERS)
async def test_what_is_no_answer_is_an_error_and_ends_the_connection(answer: str) -> None:
    raw = NO_ANSWERS[answer]
    for pieces in ([raw], [raw[at : at + 1000] for at in range(0, len(raw), 1000)]):
        asked = Asked()
        await asked.feed(*pieces)
        with pytest.raises(UpstreamError):
            await asked.task
        assert not asked.wire.open


@pytest.mark.unit
async def test_an_answer_to_nothing_ends_the_connection() -> None:
    asked = Asked()
    await asked.feed(whole(BODY) + whole(b"another's"))
    assert await asked.task == (200, BODY)
    assert not asked.wire.open
    asked = Asked()
    await asked.feed(whole(BODY))
    await asked.task
    asked.connection.data_received(whole(b"another's"))
    assert not asked.wire.open


@pytest.mark.unit
async def test_a_reader_that_has_enough_or_fails_ends_the_reading() -> None:
    def fails(_: bytes) -> bool:
        raise ZeroDivisionError

    for sink in (lambda _: False, fails):
        asked = Asked()
        asked.task.cancel()
        asking = asyncio.create_task(asked.connection.ask(b"GET / HTTP/1.1\r\n\r\n", b""))
        await asked.feed(CHUNKED)
        response = await asking
        reading = asyncio.create_task(response.pipe(sink))
        await asked.feed(chunk(BODY))
        if sink is fails:
            with pytest.raises(ZeroDivisionError):
                await reading
        else:
            assert await reading is False
        response.close()
        assert not asked.wire.open


@pytest.mark.unit
@pytest.mark.parametrize("ends", [True, False])
async def test_a_connection_is_used_again_where_an_answer_that_is_read_ends_soon(ends: bool) -> None:
    asked = Asked()
    asked.task.cancel()
    asking = asyncio.create_task(asked.connection.ask(b"GET / HTTP/1.1\r\n\r\n", b""))
    await asked.feed(CHUNKED)
    response = await asking
    reading = asyncio.create_task(response.pipe(lambda _: False))
    await asked.feed(chunk(BODY))
    await reading
    response.complete = True
    response.close()
    assert asked.wire.open
    assert not asked.kept
    if ends:
        await asked.feed(chunk(b"more"), b"0\r\n\r\n")
        assert asked.kept
    else:
        asked.connection.await_end(0.0)
        async with asyncio.timeout(PATIENCE_S):
            await asked.wire.aborted.wait()
        assert not asked.wire.open


@pytest.mark.unit
async def test_what_nobody_has_asked_for_yet_stays_with_the_slice() -> None:
    asked = Asked()
    asked.task.cancel()
    asking = asyncio.create_task(asked.connection.ask(b"GET / HTTP/1.1\r\n\r\n", b""))
    await asked.feed(CHUNKED)
    response: SliceResponse = await asking
    piece = chunk(b"x" * (100 << 10))
    await asked.feed(piece, piece)
    assert asked.wire.reading
    await asked.feed(piece)
    assert not asked.wire.reading
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        response.pause()
        return True

    piping = asyncio.create_task(response.pipe(take))
    await asyncio.sleep(0)
    assert len(b"".join(taken)) == 300 << 10
    assert not asked.wire.reading
    response.resume()
    assert asked.wire.reading
    await asked.feed(b"0\r\n\r\n")
    assert await piping is True


@pytest.mark.unit
@given(
    st.sampled_from([raw for raw, _ in ANSWERS.values()] + [UNTIL_EOF]),
    st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=3)), max_size=3),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_whatever_comes_the_request_ends_and_a_broken_connection_is_not_kept(
    raw: bytes, changes: list[tuple[int, bytes]], sizes: list[int]
) -> None:
    for at, with_ in changes:
        raw = raw[:at] + with_ + raw[at + 1 :]
    pieces = []
    for size in sizes:
        pieces.append(raw[:size])
        raw = raw[size:]

    async def run() -> None:
        asked = Asked()
        await asked.feed(*filter(None, [*pieces, raw]))
        open_before = asked.wire.open
        asked.connection.connection_lost(None)
        try:
            status, _ = await asked.task
            assert 200 <= status < 1000
        except UpstreamError:
            pass
        assert open_before or not asked.pool._idle

    asyncio.run(run())


def entry(address: str) -> SliceRecord:
    return SliceRecord("a", "llama", SliceState.SERVING, "", "v6e 2x4", address=address)


REQUEST = InferenceRequest("llama", "/v1/completions", b"{}", {}, headers=((b"x-a", b"\xff"), (b"te", b"x")))


@pytest.mark.http
async def test_what_a_client_s_connection_names_goes_no_further(raw: RawServers) -> None:
    asked: list[bytes] = []

    async def answer(request: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(request)
        writer.write(whole(BODY))

    headers = (
        (b"x-hop", b"1"),
        (b"x-kept", b"1"),
        (b"connection", b"X-Hop, close"),
        (b"connection", b"x-other"),
        (b"x-other", b"1"),
    )
    upstream = Upstream(1)
    request = InferenceRequest("llama", "/v1/completions", b"{}", {}, headers=headers)
    response = await upstream.post(entry(raw.start(answer)), request, b"{}", {})
    assert await response.read() == BODY
    lines = asked[0].split(b"\r\n\r\n")[0].split(b"\r\n")[1:]
    assert b"x-kept: 1" in lines
    assert not [line for line in lines if line.startswith((b"x-hop", b"x-other", b"connection"))]
    await upstream.close()


@pytest.mark.http
async def test_a_request_that_is_given_up_closes_its_connection_and_others_are_used_again(
    raw: RawServers,
) -> None:
    gone = asyncio.Event()
    connections: list[asyncio.StreamWriter] = []
    loop = asyncio.get_running_loop()

    def script(first: bytes) -> Script:
        async def hold(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)
            writer.write(first)
            if not first.endswith(BODY):
                await reader.read()
                loop.call_soon_threadsafe(gone.set)
                writer.close()

        return hold

    upstream = Upstream(1)
    holds = entry(raw.start(script(b"")))
    asking = asyncio.create_task(upstream.post(holds, REQUEST, b"{}", {}))
    await asyncio.to_thread(until, lambda: connections, "asked")
    asking.cancel()
    await asyncio.wait_for(gone.wait(), 5)
    connections.clear()
    answers = entry(raw.start(script(whole(BODY))))
    for _ in range(3):
        response = await upstream.post(answers, REQUEST, b"{}", {})
        assert await response.read() == BODY
    assert len(set(connections)) == 1
    await upstream.close()


@pytest.mark.http
async def test_a_slow_reader_holds_the_slice_up_and_nothing_grows(raw: RawServers) -> None:
    """The slice can't send more than sockets hold while the client takes nothing."""
    sent = 0
    piece = chunk(b"x" * (64 << 10))

    async def script(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(SSE_HEAD)
        for _ in range(1000):
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
        writer.write(b"0\r\n\r\n")

    upstream = Upstream(1)
    response = await upstream.post(entry(raw.start(script)), REQUEST, b"{}", {})
    size = 0

    def take(data: bytes) -> bool:
        nonlocal size
        size += len(data)
        response.pause()
        return True

    piping = asyncio.create_task(response.pipe(take))
    before = -1
    while sent != before:
        before = sent
        await asyncio.sleep(0.2)
    assert size < 1 << 20
    assert sent < 30 << 20

    while not piping.done():
        response.resume()
        await asyncio.sleep(0)
    assert size == 1000 * 64 << 10
    await upstream.close()


@pytest.mark.http
async def test_where_nobody_listens_no_connection_is_made() -> None:
    with pytest.raises(NotConnectedError):
        await Upstream(1).post(entry(free_address()), REQUEST, b"{}", {})


@pytest.fixture
def raw() -> Any:
    servers = RawServers()
    yield servers
    servers.stop()


@pytest.mark.http
def test_it_runs_on_the_loop_that_serve_runs_routers_on(raw: RawServers) -> None:
    """uvloop's transports are of no class of asyncio's."""

    async def answered(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(BODY))

    async def ask() -> bytes:
        upstream = Upstream(1)
        response = await upstream.post(entry(raw.start(answered)), REQUEST, b"{}", {})
        body = await response.read()
        await upstream.close()
        return body

    assert uvloop.run(ask()) == BODY
