import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from support.servers import SSE_HEAD, chunk

from serving.config import FailoverSpec
from serving.errors import SliceLostError
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.forwarding.response import Forwarding
from serving.router.http.downstream import OverAsgi
from serving.router.http.protocol import InferenceRequest
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
    return SimpleNamespace(failover=FailoverSpec(), tries=lambda: None, open=opened, sentinel=sentinel)


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


Serve = Callable[
    [Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]], Awaitable[Dispatcher]
]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts the only slice of model m, which answers each connection as it is told; its Dispatcher."""
    async with contextlib.AsyncExitStack() as ends:

        async def started(engine: Any) -> Dispatcher:
            server = await asyncio.start_server(engine, "127.0.0.1", 0)
            ends.callback(server.close)
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            table = SliceTable({"m": 1}, {"m": "v6e 2x4"})
            table.update(
                [SliceRecord("a", "m", SliceState.SERVING, "serving", "v6e 2x4", address=address)], 0.0
            )
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
    async with asyncio.timeout(5):
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
    async with asyncio.timeout(20):
        await answering
    assert client.ended


CREATED, GOES_ON, WORD, COMPLETED = (
    b"event: response.%s\ndata: {}\n\n" % kind
    for kind in (b"created", b"in_progress", b"output_text.delta", b"completed")
)


@pytest.mark.http
@pytest.mark.parametrize(
    "opening",
    [[CREATED + GOES_ON], [CREATED, GOES_ON], [CREATED[:30], CREATED[30:]]],
    ids=["one", "two", "cut"],
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
    async with asyncio.timeout(10):
        while client.got != b"".join(opening):  # noqa: ASYNC110  the client has no event for it
            await asyncio.sleep(0.005)
        (stream,) = dispatcher._streams
        client.source.pause()
        client.source.resume()  # as over ASGI after each piece
        assert (record.first_s, stream.heard_s) == (0.0, 0.0)
        assert not stream.movable
        read.set()
        await answering
    assert client.got == b"".join(opening) + WORD + COMPLETED
    assert record.first_s > 0
    assert record.sent_bytes == len(client.got)


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
    async with asyncio.timeout(20):
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
