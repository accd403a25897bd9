import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.servers import RawServers, free_address
from support.simulated_engine import small_plan

from serving.router.core import Outputs, RouterCore, Served
from serving.router.forwarding.suspects import Flight
from serving.router.http.auth import KeyFile
from serving.router.store_loop import StoreLoop
from serving.router.telemetry.request_log import RequestLog
from serving.slices.tpu_hosts import TpuHost
from serving.state import board
from serving.state.board import Board
from serving.state.gcs import Found
from serving.state.records import SliceRecord, SliceState, Snapshot, Suspicion
from serving.timings import Timings

pytestmark = pytest.mark.http

QUICK = Timings(beat_s=0.01, silent_s=0.1, stale_s=0.2, forgotten_s=60.0, well_s=20.0, waiting_look_s=0.01)


class StandingStore:
    """A store whose records of slices stand still; `away` while nobody can read it."""

    def __init__(self, *records: SliceRecord) -> None:
        self.away = False
        self.looks = 0
        self._beats = {record.replica: board.beat(record, 1) for record in records}
        self._fixed = {record.replica: board.fixed_part(record, 1) for record in records}

    def look(self, known: Board, application: str) -> Found:
        assert application == "app"
        self.looks += 1
        if self.away:
            raise ConnectionError("the head restarts")
        fixed = {name: self._fixed[name] for name in known.changed(self._beats)}
        return Found(self._beats, fixed, Snapshot())

    now = staticmethod(time.time)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Whatever a router writes is taken and forgotten."""
        assert name.startswith(("put_", "delete_"))
        return lambda *_: None


async def no_metrics() -> str:
    return ""


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110  nothing sets an event
            await asyncio.sleep(0.01)


async def test_a_router_asks_slices_whose_records_stand_still_and_goes_on_while_the_store_is_away() -> None:
    async def never(*_: Any) -> None:
        raise AssertionError

    servers, plan = RawServers(), small_plan()
    model = plan.model.name
    records = [
        SliceRecord(name, model, SliceState.SERVING, "serving", "v6e 2x4", address=address, beat=1)
        for name, address in (("well", servers.start(never)), ("gone", free_address()))
    ]
    store: Any = StandingStore(*records)
    core = RouterCore(Served([plan]), KeyFile(None), no_metrics, application="app", timings=QUICK)
    loop = StoreLoop(core, store, lambda *_: None, QUICK)

    def states() -> dict[str, SliceState]:
        return {entry.replica: entry.state for entry in core.table.entries(model)}

    await loop.start()
    assert set(states().values()) == {SliceState.SERVING}
    await until(lambda: states()["gone"] is SliceState.LOST)
    store.away, before = True, store.looks
    await until(lambda: store.looks > before + 3)
    assert states()["well"] is SliceState.SERVING
    store.away, before = False, store.looks
    await until(lambda: store.looks > before + 50)
    assert states()["well"] is SliceState.SERVING
    await loop.close()
    await core.close()
    servers.stop()


async def test_a_slice_at_whose_address_nobody_listens_is_lost_long_before_its_record_is_stale() -> None:
    plan, address = small_plan(), free_address()
    model = plan.model.name
    store: Any = StandingStore(
        SliceRecord("a", model, SliceState.SERVING, "serving", "v6e 2x4", address=address)
    )
    timings = replace(QUICK, stale_s=600.0, forgotten_s=900.0)
    core = RouterCore(Served([plan]), KeyFile(None), no_metrics, application="app", timings=timings)
    loop = StoreLoop(core, store, lambda *_: None, timings)
    await loop.start()
    await until(lambda: [entry.state for entry in core.table.entries(model)] == [SliceState.LOST])
    await loop.close()
    await core.close()


async def test_a_router_says_why_its_model_waits_and_keeps_that_while_hosts_cannot_be_listed() -> None:
    plan = small_plan()
    listed = [TpuHost("n0", "10.0.0.1", chips=8)]
    looks = 0

    def hosts() -> list[TpuHost]:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise ConnectionError("the head restarts")
        return listed

    store: Any = StandingStore()
    core = RouterCore(Served([plan]), KeyFile(None), no_metrics, application="app", timings=QUICK)
    loop = StoreLoop(core, store, lambda *_: None, QUICK, hosts=hosts)

    def why() -> str:
        (wanted,) = core.wanted(0.0)
        return wanted.why

    await loop.start()
    await until(lambda: why().startswith("1 host without TPU_NAME (10.0.0.1)"))
    await until(lambda: looks > 3)
    listed[0] = TpuHost("n0", "10.0.0.1", 0, "slice-0", 0, "v6e-8", "2x4", 8, is_head=True)
    await until(lambda: why() == "")
    assert core.status().models[0].missing_why == ""
    await loop.close()
    await core.close()


async def test_a_router_tells_again_whom_it_suspects_for_others_may_have_taken_it_for_gone() -> None:
    """As after a pause of half a minute: what it suspected was deleted, and never written again."""
    plan, told = small_plan(), list[Mapping[str, Suspicion]]()

    class Kept(StandingStore):
        def put_suspicions(
            self, _application: str, _router: str, suspicions: Mapping[str, Suspicion]
        ) -> None:
            told.append(suspicions)

    store: Any = Kept()
    core = RouterCore(Served([plan]), KeyFile(None), no_metrics, application="app", timings=QUICK)
    loop = StoreLoop(core, store, lambda *_: None, QUICK)
    now = time.time()
    core.dispatcher.suspects.died("a", [Flight("f00d", plan.model.name, now)], now, 0.0)
    await loop.start()
    await until(lambda: len(told) > 2)
    assert all("f00d" in suspicions for suspicions in told)
    await loop.close()
    await core.close()


async def test_the_record_of_a_lonely_request_is_written_within_a_beat(tmp_path: Path) -> None:
    store: Any = StandingStore()
    log = RequestLog(tmp_path / "requests.jsonl")
    core = RouterCore(
        Served([small_plan()]),
        KeyFile(None),
        no_metrics,
        application="app",
        outputs=Outputs(log),
        timings=QUICK,
    )
    loop = StoreLoop(core, store, lambda *_: None, QUICK)
    await loop.start()
    core.journal.begin("/v1/completions", {"x-request-id": "lonely"}).end()
    await until(lambda: log.path.exists() and b'"lonely"' in log.path.read_bytes())
    await loop.close()
    core.journal.begin("/v1/completions", {"x-request-id": "last"}).end()
    await core.close()
    assert b'"last"' in log.path.read_bytes()
