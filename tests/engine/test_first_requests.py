"""What a replica tells of its engine's start, and of what its first requests compiled; the engine is a stand-in."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from support.doctor_facts import llama

from serving.engine.replica import SliceReplica
from serving.engine.server import Load
from serving.state.records import FIRST_REQUESTS, StartRecord, WorkerStart, dump

pytestmark = pytest.mark.unit
WORKER = WorkerStart(0, 0, 8, 8, 0, 8, {"model": 8}, "flax_nnx", 1000, 1 << 30, 60, 250.0, 0)


class Engine:
    """Has compiled 60 programs at its start, and `late` more for its first requests."""

    def __init__(self, found: tuple[WorkerStart, ...] = (WORKER,), late: int = 0) -> None:
        self._found = found
        self._programs = iter((60, 60 + late))
        self.load = Load(finished=FIRST_REQUESTS + 7)

    async def found(self) -> tuple[WorkerStart, ...]:
        return self._found

    async def programs(self) -> int:
        return next(self._programs)


class SilentEngine(Engine):
    async def found(self) -> tuple[WorkerStart, ...]:
        raise RuntimeError("a worker is gone")


class Store:
    def __init__(self) -> None:
        self.told: list[tuple[str, StartRecord]] = []

    def put_start(self, replica: str, record: StartRecord) -> None:
        self.told.append((replica, record))


def replica(engine: Engine) -> tuple[Any, Store]:
    """A replica whose engine has just come up, without Ray."""
    made: Any = SliceReplica.__new__(SliceReplica)
    store = Store()
    made._plan, made._server, made._store = llama(), engine, store
    made._record = SimpleNamespace(record=SimpleNamespace(replica="r"))
    made._enter = lambda _: None
    return made, store


async def test_what_workers_found_is_told_and_after_a_hundred_requests_what_was_compiled_for_them() -> None:
    made, store = replica(Engine(late=2))
    await made._tell_start()
    await made._first_requests()
    assert store.told == [
        ("r", StartRecord((WORKER,))),
        ("r", StartRecord((WORKER,), requests=FIRST_REQUESTS + 7, late_programs=2)),
    ]


@pytest.mark.parametrize("engine", [Engine(found=()), SilentEngine()])
async def test_an_engine_that_tells_nothing_starts_all_the_same(engine: Engine) -> None:
    made, store = replica(engine)
    await made._tell_start()
    await made._first_requests()
    assert store.told == []


def test_a_record_is_read_as_it_was_written() -> None:
    record = StartRecord((WORKER,), requests=100, late_programs=0)
    assert StartRecord.of(json.loads(dump(record))) == record
