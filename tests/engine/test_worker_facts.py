"""What a replica tells of its engine's start, and of what was compiled while it served; the engine is a stand-in."""

import asyncio
import json
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine.late_programs import Late, LateProgram, Step, StepRequest
from serving.engine.server import Load
from serving.engine.worker_facts import WorkerFacts
from serving.state.records import FIRST_REQUESTS, StartRecord, WorkerStart, dump
from serving.timings import TIMINGS

pytestmark = pytest.mark.unit
WORKER = WorkerStart(0, 0, 8, 8, 0, 8, {"model": 8}, "flax_nnx", 1000, 1 << 30, 60, 250.0, 0)
AS_REQUESTS_COME = WorkerStart(0, 0, 8, 8, 0, 8, {"model": 8}, "flax_nnx", 1000, 1 << 30, 60, 250.0, 0, False)
STEP = Step(1, 12, (StepRequest("cmpl-abc", 12, 12),))
TWO = Late(2, 3.5, (LateProgram("step_fun", 3.0, False, STEP), LateProgram("sample", 0.5, True, STEP)))


class Engine:
    """Finds `found` at its start, and tells of `late` programs once it is asked for the second time, and again and again."""

    def __init__(self, found: tuple[WorkerStart, ...] = (WORKER,), late: Late = Late()) -> None:  # noqa: B008  frozen
        self._found = found
        self._late = [Late(), late]
        self.load = Load(finished=FIRST_REQUESTS + 7)

    async def worker_starts(self) -> tuple[WorkerStart, ...]:
        return self._found

    async def late_programs(self) -> Late:
        late, *rest = self._late
        self._late = rest or [late]
        self.load.last_output_s += 1
        return late


class SilentEngine(Engine):
    async def worker_starts(self) -> tuple[WorkerStart, ...]:
        raise RuntimeError("a worker is gone")


class Store:
    def __init__(self) -> None:
        self.told: list[tuple[str, StartRecord]] = []

    def put_start(self, replica: str, record: StartRecord) -> None:
        self.told.append((replica, record))


class Record:
    def __init__(self) -> None:
        self.record = SimpleNamespace(replica="r", slice="slice-0")
        self.changes: list[dict[str, Any]] = []

    def update(self, **changes: Any) -> None:
        self.changes.append(changes)


def facts(engine: Any) -> tuple[WorkerFacts, Store, Record]:
    """Of an engine that has just come up."""
    store, record = Store(), Record()
    return WorkerFacts("llama", engine, store, record), store, record  # type: ignore[arg-type]  # no Ray


async def looked(made: WorkerFacts, monkeypatch: pytest.MonkeyPatch, times: int = 2) -> None:
    """Start, and look so many times for what was compiled since."""
    looks = 0

    async def sleep(seconds: float) -> None:
        nonlocal looks
        looks += seconds == TIMINGS.late_programs_look_s
        if looks == times:
            raise asyncio.CancelledError

    await made.tell_start()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await made.follow()


async def test_what_workers_found_is_told_and_after_a_hundred_requests_what_was_compiled_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, store, _ = facts(Engine(late=TWO))
    await looked(made, monkeypatch)
    assert store.told == [
        ("r", StartRecord((WORKER,))),
        ("r", StartRecord((WORKER,), FIRST_REQUESTS + 7, late_programs=2, late_compile_s=3.5)),
    ]


async def test_programs_compiled_while_it_serves_are_counted_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, _, record = facts(Engine(late=TWO))
    with caplog.at_level(logging.WARNING, "ray.serve"):
        await looked(made, monkeypatch, times=4)
    assert record.changes == [{"late_programs": 2, "late_compile_s": 3.5}]
    assert [line.getMessage() for line in caplog.records] == [
        (
            "llama on slice slice-0 compiled while it served: step_fun (3.00 s), sample (0.50 s, from the "
            "cache), for a step of 1 request and 12 tokens: cmpl-abc (12 tokens, new, prompt of 12)"
        )
    ]


async def test_an_engine_that_compiles_as_requests_come_was_started_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, store, record = facts(Engine((AS_REQUESTS_COME,), late=TWO))
    await looked(made, monkeypatch)
    assert record.changes == []
    assert not caplog.records
    assert store.told[-1][1].late_programs == 2


async def test_an_engine_without_devices_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made, store, record = facts(Engine((), late=TWO))
    await looked(made, monkeypatch)
    assert record.changes == [{"late_programs": 2, "late_compile_s": 3.5}]
    assert store.told == []


async def test_an_engine_that_takes_no_steps_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    asked = 0

    async def late_programs() -> Late:
        nonlocal asked
        asked += 1
        return Late()

    made, _, _ = facts(engine)
    engine.late_programs = late_programs  # type: ignore[method-assign]
    await looked(made, monkeypatch, times=5)
    assert asked == 2  # at the start, and at the first look


async def test_an_engine_that_tells_nothing_starts_all_the_same() -> None:
    made, store, _ = facts(SilentEngine())
    await made.tell_start()
    assert store.told == []


def test_a_record_is_read_as_it_was_written() -> None:
    record = StartRecord((WORKER,), requests=100, late_programs=0)
    assert StartRecord.of(json.loads(dump(record))) == record


async def test_a_store_that_hangs_or_is_away_holds_up_neither_the_replica_nor_what_is_told_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop, by which Serve asks for its health, stood still; after one failed write nothing was counted any more."""
    made, store, record = facts(Engine(late=TWO))
    threads = []
    monkeypatch.setattr(record, "update", lambda **_: threads.append(threading.current_thread()))
    put, tries = store.put_start, []

    def away(name: str, start: StartRecord) -> None:
        tries.append(start)
        if len(tries) == 2:
            raise ConnectionError("the head restarts")
        put(name, start)

    monkeypatch.setattr(store, "put_start", away)
    await looked(made, monkeypatch, times=3)
    assert threading.main_thread() not in threads
    assert len(threads) == 1
    assert [start.late_programs for _, start in store.told] == [None, 2]
