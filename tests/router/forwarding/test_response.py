import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.servers import PATIENCE_S, SSE_HEAD, chunk

from serving.config import FailoverSpec
from serving.errors import SliceLostError
from serving.router.admission.usage import Usage, used_tokens
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.forwarding.response import Forwarding, _EventRelay
from serving.router.forwarding.stalls import Stream
from serving.router.forwarding.upstream import SliceResponse
from serving.router.http.downstream import OverAsgi
from serving.router.http.protocol import InferenceRequest
from serving.router.http.validation import Checked, Estimate
from serving.router.http.work import Work
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.record import RequestRecord
from serving.state.records import SliceRecord, SliceState

EVENTS = (
    b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n',
    b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"token_ids":[1]}]}\n\n',
    b"data: [DONE]\n\n",
)


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


def relay(opened: Any) -> Any:
    sentinel = SimpleNamespace(samples=lambda _: False)
    return SimpleNamespace(
        failover=FailoverSpec(),
        tries=lambda: None,
        open=opened,
        sentinel=sentinel,
        look_at_kind=lambda _: None,
    )


@pytest.mark.unit
async def test_a_client_whose_leaving_serve_sees_first_counts_as_gone() -> None:
    """Serve then cancels the whole call; left to itself the record would say that we failed."""
    asked = InferenceRequest("m", "/v1/completions", b"{}", {})
    record = RequestRecord(asked.path)
    answering = asyncio.create_task(OverAsgi(Forwarding(relay(never), asked, record).run)({}, never, never))
    await asyncio.sleep(0)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert (record.outcome, record.status) == ("cancelled", 499)


@pytest.mark.unit
async def test_an_error_of_the_relay_is_answered_and_kept() -> None:
    sent = []

    async def lost(*_: Any) -> Any:
        raise SliceLostError("gone")

    async def send(message: Any) -> None:
        sent.append(message)

    asked = InferenceRequest("m", "/v1/completions", b"{}", {})
    record = RequestRecord(asked.path)
    await OverAsgi(Forwarding(relay(lost), asked, record).run)({"type": "http"}, never, send)
    assert sent[0]["status"] == 503
    assert record.outcome == "slice_lost"


class Client:
    """A client that takes everything."""

    def __init__(self) -> None:
        self.source: Any = None
        self.more_headers: Any = None
        self.started = self.ended = self.paused = False
        self.got = b""

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:  # noqa: ARG002  as Downstream has it
        self.started = True

    def write(self, data: bytes) -> None:
        self.got += data

    def end(self, data: bytes = b"") -> None:
        self.got += data
        self.ended = True

    def cut(self) -> None:
        raise NotImplementedError


Serve = Callable[..., Awaitable[Dispatcher]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts the slices of model m, a and b and so on, which answer each connection as they are told; their Dispatcher."""
    answering: list[tuple[asyncio.Task[None] | None, asyncio.StreamWriter]] = []

    async def answer(engine: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append((asyncio.current_task(), writer))
        with contextlib.suppress(asyncio.CancelledError):
            await engine(reader, writer)

    async def end_all() -> None:
        for task, writer in answering:
            if task:
                task.cancel()
            if not writer.is_closing() or writer.transport.get_write_buffer_size():
                writer.transport.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # transports close a turn later

    async with contextlib.AsyncExitStack() as ends:
        ends.push_async_callback(end_all)

        async def started(*engines: Any) -> Dispatcher:
            entries = []
            for name, engine in zip("abc", engines, strict=False):
                server = await asyncio.start_server(partial(answer, engine), "127.0.0.1", 0)
                ends.callback(server.close)
                address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                entries.append(
                    SliceRecord(name, "m", SliceState.SERVING, "serving", "v6e 2x4", address=address)
                )
            table = SliceTable({"m": len(entries)}, {"m": "v6e 2x4"})
            table.update(entries, 0.0)
            dispatcher = Dispatcher(table)
            ends.push_async_callback(dispatcher.close)
            return dispatcher

        yield started


@pytest.mark.http
async def test_a_client_has_a_stream_s_end_though_the_slice_keeps_its_answer_open(serve: Serve) -> None:
    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + b"".join(map(chunk, EVENTS)))
        await reader.read()
        writer.close()

    dispatcher, client = await serve(engine), Client()
    asked = InferenceRequest("m", "/v1/chat/completions", b"{}", {"stream": True})
    async with asyncio.timeout(PATIENCE_S):
        await Forwarding(dispatcher, asked).run(client)
    assert client.ended
    assert client.got.count(b"data: ") == len(EVENTS)
    assert not dispatcher._table.in_flight("a")


@pytest.mark.http
async def test_a_client_that_was_slow_before_its_slice_was_asked_holds_that_slice_up(serve: Serve) -> None:
    """As after a move: the transport said that it is full to the slice before."""
    sent = 0
    event = b'data: {"id":"x","choices":[{"index":0,"text":"%s","token_ids":[1]}]}\n\n' % (b"w" * (64 << 10))

    async def engine(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(SSE_HEAD)
        for _ in range(500):
            writer.write(chunk(event))
            await writer.drain()
            sent += len(event)
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        writer.close()

    dispatcher, client = await serve(engine), Client()
    client.paused = True
    asked = InferenceRequest("m", "/v1/completions", b"{}", {"stream": True, "prompt": "x"})
    answering = asyncio.create_task(Forwarding(dispatcher, asked).run(client))
    before = -1
    while not sent or sent != before:
        before = sent
        await asyncio.sleep(0.2)
    assert len(client.got) < 1 << 20
    client.paused = False
    client.source.resume()
    async with asyncio.timeout(PATIENCE_S):
        await answering
    assert client.ended


CREATED, GOES_ON, WORD, COMPLETED = (
    b"event: response.%s\ndata: {}\n\n" % kind
    for kind in (b"created", b"in_progress", b"output_text.delta", b"completed")
)


@pytest.mark.http
@pytest.mark.parametrize(
    "opening",
    [[CREATED + GOES_ON], [CREATED, GOES_ON], [CREATED[:30], CREATED[30:]], [CREATED[:9], CREATED[9:]]],
    ids=["one", "two", "cut", "cut early"],
)
async def test_a_response_has_its_first_token_after_what_only_says_that_it_was_created(
    opening: list[bytes], serve: Serve
) -> None:
    """vLLM says so before an engine has seen the request: it tells nothing of the slice, nor of the time to the first token."""
    read = asyncio.Event()

    async def engine(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for piece in opening:
            writer.write(chunk(piece))
            await writer.drain()
            await asyncio.sleep(0.01)
        await read.wait()
        writer.write(chunk(WORD) + chunk(COMPLETED) + b"0\r\n\r\n")
        writer.close()

    dispatcher, client = await serve(engine), Client()
    asked = InferenceRequest("m", "/v1/responses", b"{}", {"stream": True, "input": "x"})
    record = RequestRecord(asked.path)
    answering = asyncio.create_task(Forwarding(dispatcher, asked, record).run(client))
    async with asyncio.timeout(PATIENCE_S):
        while not (client.source and client.source.rest == b"".join(opening)):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        (stream,) = dispatcher._streams
        client.source.pause()
        client.source.resume()  # as over ASGI after each piece
        assert (record.first_s, stream.heard_s) == (0.0, 0.0)
        assert not client.started
        assert stream.movable
        read.set()
        await answering
    assert client.got == b"".join(opening) + WORD + COMPLETED
    assert record.first_s > 0
    assert record.sent_bytes == len(client.got)


def saying(answer: bytes, *, closes: bool = True) -> Any:
    """A slice that is well, and gives this answer to whatever it is asked."""

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.read(1 << 16)
        writer.write(
            answer if asked.startswith(b"POST ") else b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
        )
        if not closes:
            await reader.read()
        writer.close()

    return engine


@pytest.mark.http
@pytest.mark.parametrize("size", [1, 7, 1 << 16])
async def test_events_whose_lines_end_as_on_windows_are_events(size: int, serve: Serve) -> None:
    """None was seen to end: the client had nothing until the answer's end, and then another slice was asked."""
    raw = b"".join(EVENTS).replace(b"\n", b"\r\n")
    pieces = [chunk(raw[at : at + size]) for at in range(0, len(raw), size)]
    dispatcher, client = await serve(saying(SSE_HEAD + b"".join(pieces) + chunk(b""))), Client()
    asked = InferenceRequest("m", "/v1/chat/completions", b"{}", {"stream": True, "return_token_ids": True})
    record = RequestRecord(asked.path)
    async with asyncio.timeout(PATIENCE_S):
        await Forwarding(dispatcher, asked, record).run(client)
    assert client.got == b"".join(EVENTS)
    assert record.retries == 0


@pytest.mark.http
@pytest.mark.parametrize(
    ("path", "code", "outcome"),
    [
        ("/v1/chat/completions", 400, "client_error"),
        ("/inference/v1/generate", 400, "client_error"),
        ("/inference/v1/generate", 500, "error"),
    ],
)
@pytest.mark.parametrize("apart", [True, False], ids=["in pieces", "in one piece"])
async def test_a_stream_that_ends_with_an_engine_s_error_did_not_go_well(
    path: str, code: int, outcome: str, apart: bool, serve: Serve
) -> None:
    """Log, metrics and budgets had it among the answers that did."""
    error = b'data: {"error": {"message": "no", "type": "X", "param": null, "code": %d}}\n\n' % code
    events = [*EVENTS[:2], error, EVENTS[2]]
    pieces = events if apart else [b"".join(events)]
    dispatcher, client = await serve(saying(SSE_HEAD + b"".join(map(chunk, [*pieces, b""])))), Client()
    asked = InferenceRequest("m", path, b"{}", {"stream": True, "return_token_ids": True})
    record = RequestRecord(path)
    async with asyncio.timeout(PATIENCE_S):
        await Forwarding(dispatcher, asked, record).run(client)
    record.end()
    assert client.got == b"".join(events)
    told = {400: "bad_request", 500: "internal_server_error"}[code]
    assert (record.outcome, record.code) == (outcome, told)


@pytest.mark.http
async def test_a_response_whose_slice_is_lost_before_its_first_token_comes_from_another(serve: Serve) -> None:
    """Its client reads of one response only: it has nothing of the first."""
    whole = b"".join(map(chunk, (CREATED, GOES_ON, WORD, COMPLETED, b"")))
    dispatcher = await serve(saying(SSE_HEAD + chunk(CREATED) + chunk(GOES_ON)), saying(SSE_HEAD + whole))
    for _ in range(2):
        client = Client()
        asked = InferenceRequest("m", "/v1/responses", b"{}", {"stream": True, "input": "x"})
        async with asyncio.timeout(PATIENCE_S):
            await Forwarding(dispatcher, asked).run(client)
        assert client.got == CREATED + GOES_ON + WORD + COMPLETED


class Wanted:
    """A seat that is free again at once; `pause` is called meanwhile."""

    wanted = False

    def __init__(self, pause: Callable[[], None]) -> None:
        self._pause = pause

    def runs(self, stream: Any) -> None:
        self.stream = stream

    def stops(self) -> None:
        pass

    async def regain(self, tell: Callable[[], None]) -> None:  # noqa: ARG002
        self.wanted = False
        self._pause()


@pytest.mark.http
async def test_a_paused_stream_waits_for_a_slice_where_the_last_one_was_lost_meanwhile(serve: Serve) -> None:
    """It failed at once, though a slice that comes within `wait_s` could go on with it."""
    dispatcher = await serve(
        saying(SSE_HEAD + b"".join(map(chunk, EVENTS[:2])), closes=False),
        saying(SSE_HEAD + b"".join(map(chunk, (*EVENTS, b"")))),
    )
    table = dispatcher._table
    first, coming = table.entries("m")
    table.update([first], 0.0)

    def pause() -> None:
        table.update([], 0.0)
        asyncio.get_running_loop().call_later(0.05, table.update, [coming], 0.0)

    seat, client = Wanted(pause), Client()
    asked = InferenceRequest("m", "/v1/chat/completions", b"{}", {"stream": True})
    answering = asyncio.create_task(Forwarding(dispatcher, asked).run(client, seat))
    async with asyncio.timeout(PATIENCE_S):
        while b'"a"' not in client.got:  # noqa: ASYNC110  the client has no event for it
            await asyncio.sleep(0.005)
        seat.wanted = True
        seat.stream.preempt()
        await answering
    assert client.got.endswith(b"data: [DONE]\n\n")
    assert b"error" not in client.got


LONG = (
    b'{"choices":['
    + b'{"text":"words"},' * 600_000
    + b'{}],"usage":{"prompt_tokens":7,"completion_tokens":9},'
)
LONG += b'"prompt_logprobs":"' + b"x" * (1 << 20) + b'"}'


@pytest.mark.http
@pytest.mark.parametrize("breaks_at", [None, 6 << 20])
async def test_a_long_answer_in_one_piece_is_passed_on_at_its_client_s_pace(
    breaks_at: int | None, serve: Serve
) -> None:
    """Held whole, the answers of a request for 128 of them with logprobs filled a router's memory."""
    sent = 0

    async def engine(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(LONG)
        )
        for at in range(0, breaks_at or len(LONG), 1 << 18):
            writer.write(LONG[at : at + (1 << 18)])
            await writer.drain()
            sent = at
        writer.close()

    dispatcher, client = await serve(engine), Client()
    asked = InferenceRequest("m", "/v1/completions", b"{}", {"prompt": "x"})
    record = RequestRecord(asked.path)
    client.paused = True
    answering = asyncio.create_task(Forwarding(dispatcher, asked, record).run(client))
    async with asyncio.timeout(PATIENCE_S):
        while not client.source:  # noqa: ASYNC110  the client has no event for it
            await asyncio.sleep(0.005)
        held = len(client.got)
        assert 4 << 20 < held < 6 << 20
        await asyncio.sleep(0.05)
        assert len(client.got) == held
        client.paused = False
        client.source.resume()
        await answering
    assert client.ended == (breaks_at is None)
    if breaks_at:
        assert LONG.startswith(client.got)
        assert record.outcome == "slice_lost"
    else:
        assert client.got == LONG
        record.end()
        assert (record.outcome, record.prompt_tokens, record.output_tokens) == ("ok", 7, 9)


@pytest.mark.http
async def test_a_refusal_of_any_length_is_a_short_one(serve: Serve) -> None:
    """vLLM repeats a wrong field once for each type that it could have had: a router held, joined and read all of it."""
    sent = 0

    async def engine(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(
            b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (1 << 30)
        )
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 30:
                writer.write(b"x" * (1 << 18))
                await writer.drain()
                sent += 1 << 18
        writer.close()

    dispatcher, client = await serve(engine), Client()
    asked = InferenceRequest("m", "/v1/completions", b"{}", {"prompt": "x"})
    async with asyncio.timeout(PATIENCE_S):
        await Forwarding(dispatcher, asked).run(client)
    assert client.ended
    assert b"refuses the request" in client.got
    assert len(client.got) < 1000
    assert sent < 64 << 20


def an_event(of_bytes: int) -> Any:
    """A slice that answers a stream with one event of about so many bytes, as vLLM does an echo with logprobs."""
    head, end = b'data: {"choices":[{"text":"', b'"}]}\n\n'
    pieces = of_bytes >> 16

    async def engine(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(SSE_HEAD + b"%x\r\n" % (len(head) + (pieces << 16) + len(end)) + head)
            for _ in range(pieces):
                writer.write(b"a" * (1 << 16))
                await writer.drain()
            writer.write(end + b"\r\n" + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            await writer.drain()
        writer.close()

    return engine


ECHO = InferenceRequest("m", "/v1/completions", b"{}", {"stream": True, "echo": True, "logprobs": 20})


@pytest.mark.unit
async def test_an_event_of_megabytes_is_neither_parsed_nor_joined_piece_by_piece() -> None:
    """One of 50 MB took a router's loop 5 s and 600 MB."""
    client, response = Client(), SliceResponse(SimpleNamespace())  # type: ignore[arg-type]  no connection is asked
    forwarding = Forwarding(relay(never), ECHO)
    forwarding._client = client
    forwarding._dispatcher = SimpleNamespace(  # type: ignore[assignment]
        timing=SimpleNamespace(gap=lambda *_: None, first=lambda *_: None),
        answered=lambda *_: None,
        tries=lambda: None,
    )
    entry = SliceRecord("a", "m", SliceState.SERVING, "serving", "v6e 2x4")
    relay_ = _EventRelay(forwarding, Stream(entry, ECHO, response, 0.0, trial=False))
    assert relay_.take(b'data: {"choices":[{"text":"')
    for _ in range(1 << 13):
        assert relay_.take(b"a" * (1 << 10))
    assert len(relay_._beginning) == 1 + (1 << 13)  # each as it came
    assert relay_.take(b"no JSON}]}\n\n")
    assert client.got.count(b"a") > 8 << 20


@pytest.mark.http
async def test_an_event_that_no_router_holds_ends_the_stream_and_its_prompt_is_counted(serve: Serve) -> None:
    dispatcher, client, record = await serve(an_event(20 << 20)), Client(), RequestRecord(ECHO.path)
    async with asyncio.timeout(PATIENCE_S):
        await Forwarding(dispatcher, ECHO, record).run(client)
    assert b"An event of the answer has more than 16 MiB" in client.got
    assert client.ended
    assert record.status == 413
    estimate = Estimate.of(Checked(Work(1), 500.0, 2000.0), 16.0, 4096)
    used = used_tokens(record, estimate, Usage(), 4096, record.last_s)
    assert used == (500.0, 0.0)
