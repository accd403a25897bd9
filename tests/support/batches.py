"""Files and batches without Ray: the database's owner in a thread, a router that fills, and a simulated engine behind it."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from serving.batches.service import Batches
from serving.config import BatchSpec, RouterSpec, StoreSpec
from serving.database.owner import Owner
from serving.metering.service import Metering
from serving.planning import Plan
from serving.router.core import Outputs, RouterCore, Served
from serving.router.http.auth import KeyFile
from serving.router.telemetry.audit_log import AuditLog
from serving.state.records import SliceRecord, SliceState
from support.doors import LateDoor
from support.servers import PATIENCE_S, asgi_server
from support.simulated_engine import MODEL, serving, small_plan

KEY = "0" * 64
_DAY_S, _NEAR_S = 86_400.0, 2 * 3600.0
_AHEAD_S = _NEAR_S if time.time() % _DAY_S > _DAY_S - _NEAR_S else 0.0


def calendar() -> float:
    """The time of day, or hours later where midnight is near: budgets and sums of a day would begin anew within a test."""
    return time.time() + _AHEAD_S


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = PATIENCE_S) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def owner(
    store: StoreSpec, batch: BatchSpec | None = None, models: Iterable[str] = (MODEL,)
) -> Iterator[Owner]:
    """The process that keeps files and batches, in a thread."""
    loop = Loop()
    make = partial(
        Batches, spec=batch or BatchSpec(), models=tuple(models), most_line_bytes=1 << 20, calendar=calendar
    )
    made = Owner(store, [make, lambda database, _: Metering(database, calendar)])
    try:
        loop.run(made.start())
        try:
            yield made
        finally:
            loop.run(made.close())
    finally:
        loop.end()


Place = Callable[[], tuple[str, str]]


@contextmanager
def filling_router(
    place: Place | None,
    upstream: str,
    *,
    name: str = "router",
    keys: KeyFile | None = None,
    batch: BatchSpec | None = None,
    plans: list[Plan] | None = None,
    graceful: bool = True,
    flush_s: float = 0.25,
    audit: AuditLog | None = None,
    **spec: Any,
) -> Iterator[tuple[str, RouterCore]]:
    """A router that fills the seats of one slice, where there is a store. `graceful`: it gives back what it has when it ends."""
    late = LateDoor()
    made: list[RouterCore] = []

    async def find() -> tuple[str, str]:
        assert place
        return place()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        core = RouterCore(
            Served(plans or [small_plan()], RouterSpec.model_validate(spec), batch or BatchSpec()),
            keys or KeyFile(None),
            _metrics,
            name=name,
            outputs=Outputs(audit=audit),
            store=find if place else None,
        )
        core.keep_time(calendar)
        made.append(core)
        pool = core.plans[0].pool
        core.table.update(
            [SliceRecord("a", MODEL, SliceState.SERVING, "serving", "v6e 2x4", pool=pool, address=upstream)],
            0.0,
        )
        core.admission.refresh()
        late.answer = core.relay
        app.router.default = core.app()
        beating = asyncio.create_task(core.admission.run(0.05))
        if core.usage and core.filler:
            await core.usage.start(flush_s)
            filling = asyncio.create_task(core.filler.run())
        yield
        beating.cancel()
        if core.usage and core.filler:
            filling.cancel()
            await asyncio.wait([filling])
            if graceful:
                await core.filler.close()
            await core.usage.close()
        await core.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    with asgi_server(app, **late.options) as address:
        yield address, made[0]


def line(custom_id: str, content: str = "hello", url: str = "/v1/chat/completions", **body: Any) -> str:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields})


def folder(path: Path) -> StoreSpec:
    return StoreSpec(folder=str(path / "store"))


async def _metrics() -> str:
    return "# nothing\n"


@contextmanager
def batch_service(path: Path) -> Iterator[str]:
    """A router with a store in this folder and a simulated engine behind it; yields its address."""
    with (
        serving() as (upstream, _),
        owner(folder(path)) as keeper,
        filling_router(keeper.place, upstream) as (router, _),
    ):
        yield router
