"""The HTTP server of a slice goes over to TLS and back while requests are under way."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from support.servers import PATIENCE_S

from serving import secret
from serving.http_server import HttpServer
from serving.router.forwarding.connecting import NobodyListensError, UpstreamError
from serving.router.forwarding.upstream import SliceResponse, Upstream
from serving.router.http.protocol import InferenceRequest
from serving.state.records import Peer, SliceRecord, SliceState

pytestmark = pytest.mark.http
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param  # type: ignore[no-any-return]


class Slice:
    """A server whose streams end when they are told to."""

    def __init__(self, *, tls: bool = False) -> None:
        self.may_end = asyncio.Event()
        self.schemes: list[str] = []
        self.written = 0
        answers = {"/stream": self._stream, "/endless": self._endless, "/echo": _echo}
        routes = [Route(path, answer, methods=["POST"]) for path, answer in answers.items()]
        self.http = HttpServer(Starlette(routes=routes), "127.0.0.1", tls=tls)
        self.http.start()
        self.router = Upstream(1)

    async def ask(self, path: str, body: bytes = b"{}", peer: Peer | None = None) -> SliceResponse:
        fields = (peer or self.http.peer)._asdict()
        entry = SliceRecord("a", "llama", SliceState.SERVING, "", "v6e 2x4", **fields)
        async with asyncio.timeout(PATIENCE_S):
            return await self.router.post(entry, InferenceRequest("llama", path, body, {}), body, {})

    async def stop(self) -> None:
        await self.router.close()
        self.http.uvicorn.should_exit = True
        async with asyncio.timeout(PATIENCE_S):
            await self.http.ended()

    async def _endless(self, _: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * (64 << 10)
                self.written += 64 << 10
                await asyncio.sleep(0)  # as an engine does, which awaits its next token

        return StreamingResponse(pieces())

    async def _stream(self, request: Request) -> StreamingResponse:
        self.schemes.append(request.url.scheme)

        async def pieces() -> AsyncIterator[bytes]:
            yield b"first, "
            await self.may_end.wait()
            yield b"last"

        return StreamingResponse(pieces())


@pytest.mark.parametrize("tls", [False, True])
def test_an_engine_writes_no_further_than_its_router_reads(run: Run, *, tls: bool) -> None:
    async def scenario() -> None:
        slice_ = Slice(tls=tls)
        response = await slice_.ask("/endless")
        before = -1
        while slice_.written != before:
            before = slice_.written
            await asyncio.sleep(0.2)
        assert 0 < slice_.written < 30 << 20
        response.close()
        async with asyncio.timeout(PATIENCE_S):
            while slice_.http.requests_open:  # noqa: ASYNC110  the server has no event for it
                await asyncio.sleep(0.01)
        await slice_.stop()

    run(scenario())


async def _echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


def test_a_slice_changes_to_tls_and_back_and_no_stream_notices(run: Run) -> None:
    async def scenario() -> None:
        slice_ = Slice()
        peers, streams, closes = [], [], []
        for tls in (False, True, False, True):
            close_former = await slice_.http.speak(tls=tls)
            assert (close_former is None) is (tls is False and not peers)
            closes += filter(None, [close_former])
            peers.append(slice_.http.peer)
            assert slice_.http.peer.address.startswith("https:" if tls else "http:")
            assert bool(slice_.http.peer.certificate) is tls
            streams.append(await slice_.ask("/stream"))
            assert await slice_.http.speak(tls=tls) is None
        assert len(set(peers)) == 4
        assert slice_.schemes == ["http", "https", "http", "https"]
        for peer in peers:  # routers that have not read of the change yet
            assert await (await slice_.ask("/echo", b"hello", peer)).read() == b"hello"
        assert slice_.http.requests_open == 4

        for close_former in closes:
            close_former()
        for peer in peers[:-1]:
            with pytest.raises(NobodyListensError):
                await Slice.ask(_fresh(slice_), "/echo", b"hello", peer)
        slice_.may_end.set()
        assert [await stream.read() for stream in streams] == [b"first, last"] * 4
        assert await (await slice_.ask("/echo", b"hello")).read() == b"hello"
        await slice_.stop()
        with pytest.raises(NobodyListensError):
            await slice_.ask("/echo")

    run(scenario())


def _fresh(slice_: Slice) -> Slice:
    """The slice, asked by a router that has no connections yet."""
    asked = object.__new__(Slice)
    asked.http, asked.router = slice_.http, Upstream(1)
    return asked


def test_a_slice_asks_for_the_secret_by_tls_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setenv(secret.VARIABLE, "of-the-cluster")
        slice_ = Slice(tls=True)
        assert await (await slice_.ask("/echo", b"x" * (1 << 20))).read() == b"x" * (1 << 20)
        monkeypatch.setenv(secret.VARIABLE, "another")
        with pytest.raises(UpstreamError):
            await _fresh(slice_).ask("/echo")
        await slice_.stop()

    run(scenario())


def test_a_server_leaves_nothing_behind(run: Run) -> None:
    async def scenario() -> None:
        for tls in (True, False):
            slice_ = Slice(tls=tls)
            await slice_.ask("/echo")
            await slice_.http.speak(tls=not tls)
            await slice_.ask("/echo")
            await slice_.stop()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario())
    before = len(list(Path("/proc/self/fd").iterdir()))
    run(scenario())
    assert len(list(Path("/proc/self/fd").iterdir())) == before
