"""The simulated engine's app on a real server in a thread, without Ray."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from serving import secret
from serving.config import ModelSpec
from serving.planning import Plan, plan
from serving.simulation.engine.engine import Engine
from serving.simulation.engine.http import EngineApi
from serving.simulation.engine.physics import Factors, Physics
from serving.simulation.engine.spans import EngineSpans
from support.servers import PATIENCE_S, asgi_server

MODEL = "llama"
# Steps of some 0.2 ms: the engine's own time is not what these tests wait for.
QUICK = Factors(0.01, 0.01, 0.01, 0.01)


def small_plan(**engine: Any) -> Plan:
    spec = {
        "name": MODEL,
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
        "engine": {"max_model_len": 2048, "tool_call_parser": "llama3_json", **engine},
    }
    return plan(ModelSpec.model_validate(spec))


@contextmanager
def serving(
    factors: Factors = QUICK, spans: EngineSpans | None = None, *, cluster_secret: str = "", **engine: Any
) -> Iterator[tuple[str, Engine]]:
    """Behind `cluster_secret` where there is one."""
    found = small_plan(**engine)
    made = Engine(found, Physics(found, factors), chance=lambda: 0.5)
    app = _Running(EngineApi(found, made, spans).app(), made)
    with asgi_server(secret.guarded(app, cluster_secret)) as address:
        try:
            yield address, made
        finally:
            app.end()


class _Running:
    """The app, and its engine in the same loop from the first request on."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self._app = app
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.create_task(self._engine.run())
            self._task.add_done_callback(lambda _: self._ended.set())
        await self._app(scope, receive, send)

    def end(self) -> None:
        if self._loop:
            self._loop.call_soon_threadsafe(self._engine.die, "the test is over")
            assert self._ended.wait(PATIENCE_S)
