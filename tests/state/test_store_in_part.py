"""A GCS that answers late, in part or not at all, under the real store: nothing that lives is lost, stopped or deleted."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.fleet_of import STEPS
from support.memory_store import MemoryStore, MemoryTable

from serving.router.scheduling.slice_table import SliceTable
from serving.scaling.capacity import Pool
from serving.scaling.policy import Room, Settings
from serving.scaling.scaler import Scaler
from serving.slices.recovery import Starting
from serving.state.board import Board
from serving.state.liveness import Liveness
from serving.state.records import Demand, SliceRecord, SliceState
from serving.timings import TIMINGS

pytestmark = pytest.mark.unit

MODEL, APP, SLICES, ROUTERS = "llama", "app", 6, 3
LOOKS = 3  # nobody can ask a router: one that is missing in more of them in a row is gone


class PoorTable(MemoryTable):
    """A GCS whose answers lack some entries, or do not come."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.lacks, self.fails, self.deleted = 0.0, 0.0, list[bytes]()
        self._draw = draw

    def _answer(self) -> None:
        if self._draw.random() < self.fails:
            raise ConnectionError("the GCS does not answer")

    def internal_kv_keys(self, prefix: bytes, namespace: bytes) -> list[bytes]:
        self._answer()
        return [
            key for key in super().internal_kv_keys(prefix, namespace) if self._draw.random() >= self.lacks
        ]

    def internal_kv_multi_get(self, keys: Sequence[bytes], namespace: bytes) -> dict[bytes, bytes]:
        self._answer()
        found = super().internal_kv_multi_get(keys, namespace)
        return {key: value for key, value in found.items() if self._draw.random() >= self.lacks}

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> bool:
        self._answer()
        return super().internal_kv_put(key, value, overwrite, namespace)

    def internal_kv_del(self, key: bytes, by_prefix: bool, namespace: bytes) -> int:
        self.deleted.append(key)
        return super().internal_kv_del(key, by_prefix, namespace)


class Reader:
    """What a router makes of the store; slices answer when they are asked."""

    def __init__(self, table: PoorTable) -> None:
        self.store, self.board = MemoryStore(table), Board()
        self.liveness = Liveness(asks=True)
        self.table = SliceTable({MODEL: SLICES}, {MODEL: "v6e 2x4"})
        self.routers: set[str] = set()
        self.gone: list[Any] = []
        self._looks = 0
        self._moved: dict[str, tuple[int, int]] = {}  # each router's beat, and which look found it first

    def look(self, now_s: float) -> None:
        try:
            found = self.store.look(self.board, APP)
        except ConnectionError:
            return
        for _ in self.board.take(found.beats, found.fixed):
            pass
        entries, forgotten = self.liveness.slices(self.board.slices, now_s)
        self._looks += 1
        for demand in found.others.demands:
            if self._moved.get(demand.router, (None, 0))[0] != demand.beat:
                self._moved[demand.router] = demand.beat, self._looks
        demands, gone = self.liveness.routers(found.others.demands, now_s)
        self.gone += [*forgotten, *(demand for demand in gone if demand.router in self.heard())]
        self.table.update(entries, now_s)
        self.routers = {demand.router for demand in demands}
        for record in self.liveness.silent:
            self.liveness.answered(record.replica, now_s)

    def heard(self) -> set[str]:
        """Routers of which one of the last looks found a new beat."""
        return {router for router, (_, look) in self._moved.items() if self._looks - look <= LOOKS}

    def serving(self) -> set[str]:
        return {entry.replica for entry in self.table.entries(MODEL) if entry.serves}


class World:
    """Slices of which the last one starts, routers and scaling on one GCS, in steps of a beat."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.table = PoorTable(self.draw)
        self.now_s, self.beat, self.slow = 0.0, 0, 1
        self.writer = MemoryStore(self.table)
        self.names = [f"slice-{at}" for at in range(SLICES)]
        self.write()
        self.readers = [Reader(self.table) for _ in range(ROUTERS)]
        self.starting = Starting(lambda: MemoryStore(self.table).slices(), lambda: self.now_s)
        self.scaler = Scaler(APP, lambda: MemoryStore(self.table), lambda: self.now_s)
        self.scaler._thread = SimpleNamespace(is_alive=lambda: True)  # type: ignore[assignment]
        pool = Pool("pool", "pool", SLICES, 2 * SLICES, STEPS, 1e9, 1e9)
        self.settings = Settings(MODEL, (pool,))
        self.wanted = self.call()
        self.run(8)

    def call(self) -> int:
        return self.scaler.wanted(self.settings, "pool", SLICES, Room())

    def write(self) -> None:
        self.beat += 1
        for at, name in enumerate(self.names):
            state = SliceState.STARTING if at == SLICES - 1 else SliceState.SERVING
            record = SliceRecord(
                name, MODEL, state, "", "v6e 2x4", APP, name, address=f"http://{name}", pool="pool", tag=name
            )
            self.attempt(partial(self.writer.put_slice, dataclasses.replace(record, beat=self.beat)))
        for at in range(ROUTERS):
            demand = Demand(f"router-{at}", MODEL, beat=self.beat, application=APP)
            self.attempt(partial(self.writer.put_demand, demand))

    def attempt(self, work: Callable[[], None]) -> None:
        """As everybody does who beats: the next beat tries again."""
        with contextlib.suppress(ConnectionError):
            work()

    def run(self, beats: int) -> None:
        for _ in range(beats):
            self.now_s += TIMINGS.beat_s
            beat = round(self.now_s / TIMINGS.beat_s)
            if beat % self.slow == 0:
                self.write()
            for at, reader in enumerate(self.readers):
                if (beat + at) % self.slow == 0:
                    reader.look(self.now_s)
            self.attempt(self.scaler.step)
            self.wanted = self.call()


@pytest.mark.parametrize(
    ("lacks", "slow", "fails"), [(0.05, 1, 0.0), (0.05, 4, 0.0), (0.0, 1, 0.05), (0.02, 12, 0.0)]
)
@examples(max_examples=5)
@given(st.integers(0, 1000))
@example(419)  # four looks in a row lack a router
def test_whatever_a_gcs_leaves_out_no_slice_is_lost_or_stopped_and_nothing_is_deleted(
    lacks: float, slow: int, fails: float, seed: int
) -> None:
    """A look that lacked a slice's entry took the slice from its router, and one without the other routers gave it all shares."""
    world = World(seed)
    world.table.lacks, world.table.fails, world.slow = lacks, fails, slow
    for _ in range(30):
        world.run(1)
        for reader in world.readers:
            assert reader.serving() == set(world.names[:-1])
            assert reader.routers >= reader.heard()
        assert world.wanted == SLICES
        assert world.starting.state(world.names[-1]) is SliceState.STARTING
    assert not any(reader.gone for reader in world.readers)
    assert not world.table.deleted
    assert world.scaler._models[MODEL].state.pools[0].failed == 0  # type: ignore[union-attr]


def test_a_slice_whose_entry_has_gone_and_that_does_not_answer_is_lost_and_then_forgotten() -> None:
    liveness = Liveness(asks=True)
    record = SliceRecord("gone", MODEL, SliceState.SERVING, "", "", address="http://gone")
    assert liveness.slices([record], 0.0)[0] == [record]
    states = []
    for look in range(1, 24):
        marked, _ = liveness.slices([], look * TIMINGS.beat_s)
        states += [entry.state for entry in marked]
        for silent in liveness.silent:
            liveness.unanswered(silent.replica)
    assert (states[0], states[-1]) == (SliceState.SERVING, SliceState.LOST)
    assert liveness.slices([], 12.0) == ([], [])
