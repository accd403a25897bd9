"""What a connection sends is parsed a piece at a time, and others' in between."""

import asyncio
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from support.servers import PATIENCE_S
from support.wire import Wire
from uvicorn.server import ServerState

from serving.router.http.door import Door, Relay
from serving.router.http.downstream import Downstream

pytestmark = pytest.mark.unit

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class Client(Wire):
    """Sends what it is given while it is read, by 256 KiB as the kernel gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.to_send = b""
        self.door: Any = None

    def send(self, data: bytes) -> None:
        self.to_send += data
        asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        if self.to_send and not self.paused and not self.closed:
            piece, self.to_send = self.to_send[: 256 << 10], self.to_send[256 << 10 :]
            self.door.data_received(piece)
            asyncio.get_running_loop().call_soon(self._send)

    def resume_reading(self) -> None:
        super().resume_reading()
        asyncio.get_running_loop().call_soon(self._send)


class Answers:
    """Answers each request with its body's size, and says in what order."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.bodies: list[bytes] = []

    async def __call__(self, request: Request, client: Downstream) -> None:
        body = await request.body()
        self.sizes.append(len(body))
        self.bodies.append(body)
        client.start(200, [(b"content-length", b"0")])
        client.end()


async def connected(relay: Relay) -> Client:
    config = uvicorn.Config(None, http=partial(Door, relay), access_log=False, log_config=None)  # type: ignore[arg-type]  # no app is asked
    wire = Client()
    wire.door = Door(
        relay, config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop()
    )
    wire.door.connection_made(wire)
    return wire


async def until(wire: Client, condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition() and not wire.closed:  # noqa: ASYNC110  turn by turn
            await asyncio.sleep(0)


def over(*wires: Client) -> None:
    for wire in wires:
        wire.door.connection_lost(None)
        if wire.door.timeout_keep_alive_task:
            wire.door.timeout_keep_alive_task.cancel()


async def test_pipelined_requests_are_parsed_as_those_before_them_are_answered() -> None:
    """Each takes some kilobytes once it is parsed: 8,000 came in one piece, and others' pieces behind it."""
    answers = Answers()
    wire = await connected(Relay(answers))
    waiting = 0
    wire.send((HEAD + b"Content-Length: 2\r\n\r\n{}") * 10_000)

    def is_over() -> bool:
        nonlocal waiting
        waiting = max(waiting, len(wire.door.pipeline))
        return len(answers.sizes) == 10_000

    await until(wire, is_over)
    assert answers.sizes == [2] * 10_000
    assert wire.sent.count(b"HTTP/1.1 200 OK") == 10_000
    assert waiting < 64
    over(wire)


async def test_a_client_that_has_sent_much_waits_for_those_that_have_just_come() -> None:
    answers = Answers()
    relay = Relay(answers)
    crowd = [await connected(relay) for _ in range(20)]
    for wire in crowd:
        wire.send(CHUNKED + b"40\r\n" + b" " * 64 + b"\r\n" + (b"20\r\n" + b" " * 32 + b"\r\n") * 50_000)
    for _ in range(5):
        await asyncio.sleep(0)
    one = await connected(relay)
    turns = 0
    one.send(HEAD + b"Content-Length: 5\r\n\r\nhello")

    def is_answered() -> bool:
        nonlocal turns
        turns += 1
        return bool(one.sent)

    await until(one, is_answered)
    assert answers.sizes == [5]
    assert turns < 30
    assert all(wire.door._unfed for wire in crowd)  # they have a long way to go
    over(*crowd, one)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(CHUNKED + b"1\r\n \r\n" * 200_000, b"400", id="chunks of a byte"),
        pytest.param(CHUNKED + (b"1;" + b"a" * 100 + b"\r\n \r\n") * 20_000, b"400", id="chunks with notes"),
        pytest.param(HEAD + b"a:\r\n" * 14_000, b"431", id="headers"),
    ],
)
async def test_what_is_made_to_cost_is_refused_where_that_is_seen(sent: bytes, status: bytes) -> None:
    answers = Answers()
    delays = iter((0.01,))
    wire = await connected(Relay(answers, delay_s=lambda: next(delays)))
    wire.send(sent)
    await until(wire, lambda: False)
    assert wire.sent.startswith(b"HTTP/1.1 " + status)
    assert wire.sent.count(b"HTTP/1.1 ") == 1
    assert not answers.sizes
    over(wire)


@pytest.mark.parametrize("size", [1, 20, 1000, 300_000])
async def test_a_body_in_ordinary_chunks_is_read_as_it_was_sent(size: int) -> None:
    body = bytes(range(256)) * 4000
    pieces = [body[at : at + size] for at in range(0, 1000 * size, size) if body[at : at + size]]
    answers = Answers()
    wire = await connected(Relay(answers))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    wire.send((CHUNKED + chunks + b"0\r\n\r\n") * 2)
    await until(wire, lambda: len(answers.sizes) == 2)
    assert answers.bodies == [b"".join(pieces)] * 2
    over(wire)


async def test_while_a_request_with_a_body_in_chunks_is_answered_its_connection_is_read() -> None:
    """Else nobody would see its client go."""
    going = asyncio.Event()

    async def answer(request: Request, _: Downstream) -> None:
        await request.body()
        going.set()
        await asyncio.Event().wait()

    wire = await connected(Relay(answer))
    wire.send(CHUNKED)
    for _ in range(10):
        await asyncio.sleep(0)  # it waits for its body
    wire.send(b"%x\r\n%b\r\n0\r\n\r\n" % (200_000, b" " * 200_000))
    await until(wire, going.is_set)
    assert not wire.paused
    over(wire)


async def test_a_long_body_behind_another_request_is_read_as_it_was_sent() -> None:
    body = bytes(range(256)) * 4000
    answers = Answers()
    wire = await connected(Relay(answers))
    sent = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    wire.send((HEAD + b"Content-Length: 2\r\n\r\n{}" + sent) * 3)
    await until(wire, lambda: len(answers.sizes) == 6)
    assert answers.bodies == [b"{}", body] * 3
    over(wire)
