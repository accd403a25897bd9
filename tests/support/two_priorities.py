"""A router before two simulated engines of few seats, and two keys: one goes before the other."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from serving.config import RouterSpec
from serving.metrics.recorder import Recorder
from serving.router.admission.controller import AdmissionController
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.http.api import Api
from serving.router.http.auth import KeyFile, new
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.journal import Journal
from serving.router.telemetry.record import RequestRecord
from serving.simulation.engine.engine import Engine
from serving.state.records import SliceRecord, SliceState, Snapshot
from serving.status.document import Status, status
from serving.status.rates import Rates
from support.doors import LateDoor
from support.servers import asgi_server, until
from support.simulated_engine import MODEL, serving, small_plan
from support.two_engines import STEPS_OF_3_MS

SEATS = 2  # of each engine


@dataclass
class Answer:
    """A streamed answer as its client had it. `comments`: how many lines were no event."""

    status: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    comments: int = 0

    @property
    def text(self) -> str:
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
        )


@dataclass
class TwoPriorities:
    """Where the router listens, its parts, and what it recorded."""

    address: str
    gate: AdmissionController
    table: SliceTable
    engines: list[tuple[str, Engine]]
    records: list[RequestRecord]
    keys: dict[str, str]
    dispatcher: Dispatcher = field(init=False)

    async def ask(
        self, client: httpx.AsyncClient, key: str, path: str = "/v1/completions", **fields: Any
    ) -> Answer:
        """Stream one answer to its end."""
        answer = Answer()
        body = {"model": MODEL, "stream": True, "ignore_eos": True, **fields}
        headers = {"authorization": f"Bearer {self.keys[key]}"}
        async with client.stream("POST", self.address + path, json=body, headers=headers) as response:
            answer.status = response.status_code
            async for line in response.aiter_lines():
                if line.startswith(":"):
                    answer.comments += 1
                elif line == "data: [DONE]":
                    answer.done = True
                elif line:
                    answer.events.append(json.loads(line.removeprefix("data: ")))
        return answer

    @property
    def idle(self) -> bool:
        queue = self.gate._queue
        left = queue.seats_taken(MODEL), queue.seats_wanted(MODEL), queue._models[MODEL].paused
        return not any(left) and not any(engine.scheduler.running for _, engine in self.engines)

    def slow(self, times: float) -> None:
        """Have the engines' steps take so many times as long."""
        for address, _ in self.engines:
            httpx.post(f"{address}/simulator/faults", json={"slow": times}).raise_for_status()

    def paused(self) -> int:
        return self.gate._queue._models[MODEL].paused


@contextmanager
def two_priorities(folder: Path, **spec: Any) -> Iterator[TwoPriorities]:
    """The keys are `low` and `high`; `spec` is what the YAML says of the router."""
    lines = {name: new(name, priority=priority) for name, priority in (("low", 0), ("high", 10))}
    (folder / "keys.yaml").write_text("\n".join(line for _, line in lines.values()))
    one = small_plan(max_num_seqs=SEATS)
    table = SliceTable({MODEL: 2}, {MODEL: str(one.slice)})
    gate = AdmissionController(RouterSpec.model_validate(spec), [one], table, KeyFile(folder / "keys.yaml"))
    records: list[RequestRecord] = []
    door = LateDoor()
    dispatchers: list[Dispatcher] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        dispatcher = Dispatcher(table, gate.spec.failover)
        dispatchers.append(dispatcher)
        beating = asyncio.create_task(gate.run(0.05))
        api = Api(
            [one], table, dispatcher, gate, Journal(Recorder("default"), records.append), _status, _metrics
        )
        door.answer = api.inference.relay
        yield
        beating.cancel()
        await dispatcher.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    with ExitStack() as running:
        engines = [running.enter_context(serving(STEPS_OF_3_MS, max_num_seqs=SEATS)) for _ in range(2)]
        entries = [
            SliceRecord(name, MODEL, SliceState.SERVING, "serving", "v6e 2x4", address=address, pool=one.pool)
            for name, (address, _) in zip("ab", engines, strict=True)
        ]
        table.update(entries, 0.0)
        gate.refresh()
        keys = {name: key for name, (key, _) in lines.items()}
        found = TwoPriorities("", gate, table, engines, records, keys)
        # Also where the router has just ended.
        running.callback(lambda: until(lambda: found.idle, "no seat taken, engines idle"))
        found.address = running.enter_context(asgi_server(app, **door.options))
        found.dispatcher = dispatchers[0]
        yield found


def _status() -> Status:
    return status(Snapshot(), Rates(), 0.0)


async def _metrics() -> str:
    return "# nothing\n"
