"""The ports in the pods' network, before those who do not know their secret."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from support.servers import PATIENCE_S

from serving import secret
from serving.http_server import HttpServer
from serving.pinned_tls import trusting
from serving.strangers import Strangers

SECRET = "of-the-cluster"


class Wire:
    """What of a transport strangers need."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.unit
async def test_a_stranger_has_a_time_and_one_that_is_known_has_none() -> None:
    strangers, silent, known = Strangers(within_s=0.01), Wire(), Wire()
    strangers.came(silent)  # type: ignore[arg-type]
    strangers.came(known)  # type: ignore[arg-type]
    strangers.left(known)  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE_S):
        while not silent.aborted:  # noqa: ASYNC110  a timer does it
            await asyncio.sleep(0.005)
    assert not known.aborted


@pytest.mark.unit
async def test_of_too_many_strangers_the_oldest_goes() -> None:
    strangers, wires = Strangers(most=2, read_s=0), [Wire() for _ in range(4)]
    for wire in wires:
        strangers.came(wire)  # type: ignore[arg-type]
    assert [wire.aborted for wire in wires] == [True, True, False, False]
    for wire in wires:
        strangers.left(wire)  # type: ignore[arg-type]


@pytest.mark.unit
async def test_of_many_that_came_at_once_none_goes_before_it_was_read() -> None:
    """A busy process takes a thousand connections before it reads the first one's head."""
    strangers, wires = Strangers(most=2, read_s=PATIENCE_S), [Wire() for _ in range(18)]
    for wire in wires:
        strangers.came(wire)  # type: ignore[arg-type]
    assert [wire.aborted for wire in wires] == [True] * 2 + [False] * 16
    strangers._read_s = 0
    last = Wire()
    strangers.came(last)  # type: ignore[arg-type]
    assert [wire.aborted for wire in wires] == [True] * 17 + [False]
    for wire in (*wires, last):
        strangers.left(wire)  # type: ignore[arg-type]


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
async def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HttpServer]:
    """A slice's HTTP server that says how many bytes a body has."""

    async def measured(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    monkeypatch.setenv(secret.VARIABLE, SECRET)
    routes = [Route("/work", measured, methods=["POST"]), Route("/health", measured)]
    server = HttpServer(Starlette(routes=routes), "127.0.0.1", tls=request.param)
    server.start()
    yield server
    server.uvicorn.should_exit = True
    await server.ended()


async def connected(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    trusted = trusting(server.peer.certificate) if server.peer.certificate else None
    return await asyncio.open_connection("127.0.0.1", server.port, ssl=trusted)


@pytest.mark.http
@pytest.mark.parametrize(
    ("head", "more"),
    [
        (b"POST /work HTTP/1.1\r\n", b"a: " + b"b" * 1000 + b"\r\n"),
        (
            b"GET /health HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
            b"a: " + b"b" * 1000 + b"\r\n",
        ),
    ],
)
async def test_a_stranger_can_send_no_endless_headers(server: HttpServer, head: bytes, more: bytes) -> None:
    reader, writer = await connected(server)
    writer.write(head)
    sent = 0
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionError):
            while sent < 64 << 20:
                writer.write(more * 64)
                await writer.drain()
                sent += 64 * len(more)
            pytest.fail(f"the slice has taken {sent} bytes")
        with suppress(ConnectionError):
            await reader.read()
    writer.close()


@pytest.mark.http
async def test_who_shows_the_secret_may_send_much_and_who_does_not_is_told(server: HttpServer) -> None:
    body = b"x" * (1 << 20)
    for shown, status in ((SECRET, b"200 OK"), ("another", b"401 Unauthorized")):
        reader, writer = await connected(server)
        head = f"POST /work HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {shown}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(PATIENCE_S):
            assert status in await reader.readline()
        writer.close()
