"""The router's HTTP surface over made-up slices and a real simulated engine, without Ray: what the page is shown."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from fastapi import FastAPI

from serving.config import ModelSpec, RouterSpec
from serving.metrics.recorder import Recorder
from serving.planning import plan
from serving.router.admission.controller import AdmissionController
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.http.api import Api
from serving.router.http.auth import KeyFile
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.journal import Journal
from serving.state.records import (
    BatchRecord,
    DecisionRecord,
    Demand,
    RefusedDeploy,
    SliceFailures,
    SliceRecord,
    SliceState,
    Snapshot,
    Suspicion,
    UsageRecord,
)
from serving.status.document import Status, status
from serving.status.rates import STEP_S, Rates
from support.servers import asgi_server

GIB = 2**30


def entry(model: str, number: int, state: SliceState = SliceState.SERVING, **changes: object) -> SliceRecord:
    """A slice of two hosts with four chips each, as its replica would describe it."""
    made = SliceRecord(
        replica=f"replica-{number}",
        model=model,
        state=state,
        phase=str(state),
        shape="v6e 2x4 (2 hosts x 4 chips)",
        slice=f"slice-{number}",
        hosts=(f"127.100.{number}.0", f"127.100.{number}.1"),
        simulated=True,
        max_model_len=2048,
        chips_per_host=4,
        hbm_bytes=31 * GIB,
        weight_bytes=2 * GIB,
        cache_bytes=26 * GIB,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@dataclass
class Shown:
    """A service whose board a test writes. `keys` are the lines of a file of keys."""

    models: Sequence[str]
    entries: list[SliceRecord] = field(default_factory=list)
    demands: list[Demand] = field(default_factory=list)
    decisions: list[DecisionRecord] = field(default_factory=list)
    suspicions: dict[str, Suspicion] = field(default_factory=dict)
    failures: list[SliceFailures] = field(default_factory=list)
    refused_deploys: list[RefusedDeploy] = field(default_factory=list)
    batches: list[BatchRecord] = field(default_factory=list)
    usage: list[UsageRecord] = field(default_factory=list)
    wanted: int = 1
    why: str = ""  # slices are missing
    window: Rates = field(default_factory=Rates)
    keys: str | None = None
    private_status: bool = False
    now_s: float = 0.0
    address: str = ""

    def __post_init__(self) -> None:
        slice_ = {"generation": "v6e", "topology": "2x4", "hosts": 2}
        spec = {"model": "meta-llama/Llama-3.1-8B-Instruct", "slice": slice_}
        self.plans = [plan(ModelSpec.model_validate({"name": name, **spec})) for name in self.models]
        self.table = SliceTable(
            dict.fromkeys(self.models, self.wanted), {one.model.name: str(one.slice) for one in self.plans}
        )

    def step(self, seconds: float = STEP_S) -> None:
        """Time passes, and the router looks at the board."""
        self.now_s += seconds
        self.table.update(self.entries, self.now_s)
        self.window.observe(self.entries, self.demands, self.now_s)

    def status(self) -> Status:
        seen = Snapshot(
            slices=tuple(self.entries),
            demands=tuple(self.demands),
            wanted=tuple(replace(entry, why=self.why) for entry in self.table.wanted(self.now_s)),
            decisions=tuple(self.decisions),
            suspicions={"router": self.suspicions},
            slice_failures=tuple(self.failures),
            refused_deploys=tuple(self.refused_deploys),
            batches=tuple(self.batches),
            usage=tuple(self.usage),
        )
        return status(seen, self.window, self.now_s)

    def app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(outer: FastAPI) -> AsyncIterator[None]:
            relay = Dispatcher(self.table)
            spec = RouterSpec(private_status=self.private_status)
            gate = AdmissionController(spec, self.plans, self.table, KeyFile(None, self.keys))
            beating = asyncio.create_task(gate.run(beat_s=0.02))
            outer.mount(
                "/",
                Api(
                    self.plans, self.table, relay, gate, Journal(Recorder("default")), self.status, no_metrics
                ).app(),
            )
            yield
            beating.cancel()
            await relay.close()

        return FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)


async def no_metrics() -> str:
    """Those are Ray's agents' business, and there are none here."""
    return ""


@contextmanager
def shown(service: Shown, port: int = 0) -> Iterator[Shown]:
    service.step()
    with asgi_server(service.app(), port) as address:
        service.address = address
        yield service
