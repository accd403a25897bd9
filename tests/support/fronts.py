"""The router's app before a real simulated engine, over real HTTP, without Ray."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from serving.config import RouterSpec
from serving.metrics.recorder import Recorder
from serving.planning import Plan
from serving.router.admission.controller import AdmissionController
from serving.router.core import Outputs, RouterCore, Served
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.http.api import Api
from serving.router.http.auth import KeyFile
from serving.router.http.response_store import ResponseStore
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.journal import Journal
from serving.router.telemetry.request_log import RequestLog
from serving.simulation.engine.engine import Engine
from serving.state.records import SliceRecord, SliceState, Snapshot
from serving.status.document import Status, status
from serving.status.rates import Rates
from support.doors import LateDoor
from support.servers import asgi_server
from support.simulated_engine import MODEL, serving, small_plan


@dataclass
class Front:
    """Where the router listens, its gate, what it knows of slices, and the engine behind it."""

    address: str
    gate: AdmissionController
    table: SliceTable
    engine: Engine

    @property
    def idle(self) -> bool:
        counts = self.gate.counts(MODEL)
        return not counts["held"] and not counts["in_flight"] and not self.engine.scheduler.running


@contextmanager
def front(
    journal: Journal | None = None, key_file: KeyFile | None = None, *, door: bool = True, **spec: Any
) -> Iterator[Front]:
    """`journal` and `key_file` are the router's; `spec` is what the YAML says of it.

    `door`: behind the router's own protocol, as in a replica of Serve, and not behind an ASGI server.
    """
    one = small_plan()
    late = LateDoor()
    table = SliceTable({MODEL: 1}, {MODEL: str(one.slice)})
    gate = AdmissionController(RouterSpec.model_validate(spec), [one], table, key_file or KeyFile(None))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        dispatcher = Dispatcher(table)
        beating = asyncio.create_task(gate.run(0.05))
        # Not mounted: a mount takes no path with a line break.
        store = ResponseStore(gate.spec.responses_store) if gate.spec.responses_store else None
        api = Api(
            [one], table, dispatcher, gate, journal or Journal(Recorder("default")), _status, _metrics, store
        )
        late.answer = api.inference.relay
        app.router.default = api.app()
        yield
        beating.cancel()
        await dispatcher.close()
        if store:
            await store.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    with serving() as (upstream, engine):
        table.update(
            [SliceRecord("a", MODEL, SliceState.SERVING, "serving", "v6e 2x4", address=upstream)], 0.0
        )
        gate.refresh()
        with asgi_server(app, **(late.options if door else {})) as address:
            yield Front(address, gate, table, engine)


@contextmanager
def router_before(
    plans: list[Plan],
    slices: list[SliceRecord],
    spec: RouterSpec,
    keys: KeyFile | None = None,
    log: RequestLog | None = None,
) -> Iterator[str]:
    """A whole router behind its own protocol, before slices of a test. `log` has all of its lines in the end."""
    door = LateDoor()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        core = RouterCore(Served(plans, spec), keys or KeyFile(None), _metrics, outputs=Outputs(log=log))
        core.table.update(slices, 0.0)
        core.admission.refresh()
        door.answer = core.relay
        app.router.default = core.app()
        yield
        await core.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    with asgi_server(app, **door.options) as address:
        yield address


def _status() -> Status:
    return status(Snapshot(), Rates(), 0.0)


async def _metrics() -> str:
    return "# nothing\n"
