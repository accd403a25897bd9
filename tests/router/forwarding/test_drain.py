"""A slice that stops, as its replica stops it: out of the table, finish what fits, and the rest goes on elsewhere."""

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from support.simulated_engine import MODEL, small_plan
from support.two_engines import CHAT, HELLO, STEPS_OF_3_MS

from serving import pinned_tls
from serving.http_server import HttpServer
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.forwarding.response import Forwarding
from serving.router.http.downstream import OverAsgi
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.simulation.engine.engine import Engine
from serving.simulation.engine.http import EngineApi
from serving.simulation.engine.physics import Physics
from serving.state.records import Peer, SliceRecord, SliceState

pytestmark = pytest.mark.http

DRAIN_S = 1


class Slice:
    def __init__(self, *, tls: bool = False) -> None:
        plan = small_plan()
        self.engine = Engine(plan, Physics(plan, STEPS_OF_3_MS))
        self.http = HttpServer(EngineApi(plan, self.engine).app(), "127.0.0.1", tls=tls)
        self.running = asyncio.create_task(self.engine.run())
        self.http.start()

    def entry(self, name: str, state: SliceState = SliceState.SERVING) -> SliceRecord:
        return SliceRecord(name, MODEL, state, "", "v6e 2x4", **self.http.peer._asdict())

    async def stop(self) -> None:
        """As a replica leaves: what is open may end in time, then the engine is killed."""
        until_s = time.monotonic() + DRAIN_S
        while self.http.requests_open and time.monotonic() < until_s:  # noqa: ASYNC110  the server has no event for it
            await asyncio.sleep(0.05)
        self.engine.die("stopped")
        await self.running
        self.http.uvicorn.should_exit = True
        await self.http.ended()


@pytest.mark.parametrize("tls", [False, True])
async def test_streams_end_in_time_or_go_on_elsewhere_and_new_ones_stay_away(*, tls: bool) -> None:
    table = SliceTable({MODEL: 2}, {MODEL: "v6e 2x4"})
    relay = Dispatcher(table)

    async def forward(request: Request) -> Response:
        body = await request.body()
        return OverAsgi(
            Forwarding(
                relay, InferenceRequest.of(request, MODEL, request.scope["path"], body, json.loads(body))
            ).run
        )

    a, b = Slice(tls=tls), Slice(tls=tls)
    front = HttpServer(Starlette(routes=[Route(CHAT, forward, methods=["POST"])]), "127.0.0.1")
    front.start()
    table.update([a.entry("a")], 0.0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:

        async def ask(tokens: int, peer: Peer) -> tuple[str, float]:
            fields = {"model": MODEL, **HELLO, "max_tokens": tokens, "stream": True}
            trusted = pinned_tls.of(peer.certificate)
            async with session.post(f"{peer.address}{CHAT}", json=fields, ssl=trusted) as answer:
                events = (await answer.read()).split(b"\n\n")
            assert events[-2] == b"data: [DONE]"
            return "".join(map(text_of, events[:-2])), time.monotonic()

        expected = [(await ask(tokens, b.http.peer))[0] for tokens in (50, 900)]
        long = asyncio.create_task(ask(900, front.peer))
        while a.engine.scheduler.totals.written_tokens < 20:  # noqa: ASYNC110  an engine tells nobody
            await asyncio.sleep(0.01)
        short = asyncio.create_task(ask(50, front.peer))
        while a.http.requests_open < 2:  # noqa: ASYNC110  nor does a server
            await asyncio.sleep(0.01)
        before = b.engine.scheduler.totals.written_tokens
        table.update([a.entry("a", SliceState.DRAINING), b.entry("b")], 1.0)
        assert (await ask(5, front.peer))[0]
        assert b.engine.scheduler.totals.written_tokens == before + 5
        stopping = asyncio.create_task(a.stop())
        assert [(await short)[0], (await long)[0]] == expected
        await stopping
        took_on = b.engine.scheduler.totals.written_tokens - before - 5
        assert 0 < took_on < 900
        assert a.engine.scheduler.totals.written_tokens >= 50 + 900 - took_on
    await relay.close()
    front.uvicorn.should_exit = True
    await front.ended()
    await b.stop()


def text_of(event: bytes) -> str:
    body: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return "".join(choice["delta"].get("content", "") for choice in body["choices"])
