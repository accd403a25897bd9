"""What is put into the store is found by who reads it, for every kind of record."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.memory_store import MemoryStore, MemoryTable

from serving.router.store_loop import StoreClaims
from serving.state import key_names
from serving.state.records import (
    BatchRecord,
    DecisionRecord,
    Demand,
    RefusedDeploy,
    Release,
    Rollout,
    SliceFailures,
    SliceRecord,
    SliceState,
    Snapshot,
    Suspicion,
    UsageRecord,
    Wanted,
)

pytestmark = pytest.mark.unit


def test_a_snapshot_has_every_kind_of_record() -> None:
    store = MemoryStore(MemoryTable())
    written = Snapshot(
        slices=(SliceRecord("a", "m", SliceState.SERVING, "serving", "v6e 2x4", application="app"),),
        demands=(Demand("r", "m", application="app"),),
        wanted=(Wanted("m", "v6e 2x4", slices=2, missing=1, missing_for_s=3.0, application="app"),),
        decisions=(DecisionRecord(1.0, "m", "p", 2, "load"),),
        ordered={"app": {"m": 2}},
        suspicions={"r": {"f00d": Suspicion(1.0, guilty=True, model="m", replica="a")}},
        slice_failures=(SliceFailures("s", "10.0.0.1", "TPU", 2, 1.0, "why", "", "a", application="app"),),
        rollouts=(Rollout("app", "app#m", "m", "p", "v2", slices=10, changed=3),),
        refused_deploys=(RefusedDeploy("app", "why", 1.0),),
        batches=(BatchRecord("b", "in_progress", 10, 1, 0, created=0.0, at=1.0, application="app"),),
        usage=(UsageRecord("k", "2026-11-22", 1, 2, 0, 3, 0.5, at=1.0, application="app"),),
    )
    assert all(getattr(written, field.name) for field in dataclasses.fields(Snapshot))
    store.put_slice(written.slices[0])
    store.put_demand(written.demands[0])
    store.put_wanted(written.wanted[0])
    store.put_decisions("app", written.decisions)
    store.put_refused_deploy(written.refused_deploys[0])
    store.put_ordered("app", written.ordered["app"])
    store.put_suspicions("app", "r", written.suspicions["r"])
    store.put_slice_failures(written.slice_failures[0])
    store.put_rollout(written.rollouts[0])
    store.put_batches("app", written.batches)
    store.put_usage("app", written.usage)
    assert store.read("app") == store.read() == written
    assert store.read("other") == Snapshot()


def test_records_of_another_version_of_this_service_are_read_as_far_as_they_are_known() -> None:
    """Redis outlives an upgrade, and a way back: every reader failed at the first record with a field more."""
    table = MemoryTable()
    store = MemoryStore(table)
    record = SliceRecord("a", "m", SliceState.SERVING, "serving", "v6e 2x4", application="app", running=3)
    demand = Demand("r", "m", application="app")
    failed = SliceFailures("s", "10.0.0.1", "TPU", 2, 1.0, "why", "", "a", application="app")
    store.put_slice(record)
    store.put_demand(demand)
    store.put_slice_failures(failed)
    store.put_release("app#m", Release("v1", "p"))
    for key, raw in table.values.items():
        fields = json.loads(raw)
        later = [*fields, 7.0] if isinstance(fields, list) else {**fields, "later": [1]}
        table.values[key] = json.dumps(later).encode()
    found = store.read("app")
    assert (found.slices, found.demands, found.slice_failures) == ((record,), (demand,), (failed,))
    assert store.release("app#m") == Release("v1", "p")
    for key, raw in table.values.items():
        fields = json.loads(raw)
        fields.pop(-2) if isinstance(fields, list) else fields.pop("failures", None)
        table.values[key] = json.dumps(fields).encode()
    found = store.read("app")
    assert (found.slices[0].running, found.slice_failures) == (3, ())


@pytest.mark.parametrize(("field", "value"), [("state", "paused"), ("hosts", None), ("phases", 1)])
def test_a_record_that_another_version_wrote_otherwise_hides_no_other(field: str, value: Any) -> None:
    """After a way back from a version with one more state no reader saw any slice, until somebody emptied the store."""
    table = MemoryTable()
    store = MemoryStore(table)
    records = [
        SliceRecord(name, "m", SliceState.SERVING, "serving", "v6e 2x4", application="app") for name in "ab"
    ]
    for record in records:
        store.put_slice(record)
    suspicions = {
        "f00d": Suspicion(1.0, guilty=True, model="m"),
        "dead": Suspicion(2.0, guilty=False, model="m"),
    }
    store.put_suspicions("app", "r", suspicions)
    fixed, told = key_names.fixed("a"), key_names.key("app", "suspicions", "r").encode()
    table.values[fixed] = json.dumps(json.loads(table.values[fixed]) | {field: value}).encode()
    of_router = json.loads(table.values[told])
    del of_router["suspicions"]["dead"]["model"]
    table.values[told] = json.dumps(of_router).encode()
    found = store.read("app")
    assert found.slices == (records[1],)
    assert found.suspicions == {"r": {"f00d": suspicions["f00d"]}}


def test_a_claim_is_one_router_s_until_it_is_given_back_or_over() -> None:
    store = MemoryStore(MemoryTable())
    assert store.claim("app", "slice", "one", 0.0, 90.0)
    assert store.claim("app", "slice", "one", 1.0, 91.0)
    assert not store.claim("app", "slice", "two", 89.0, 99.0)
    store.unclaim("app", "slice", "two")
    assert not store.claim("app", "slice", "two", 90.0, 99.0)
    assert store.claim("app", "slice", "two", 91.0, 99.0)
    store.unclaim("app", "slice", "two")
    assert store.claim("app", "slice", "one", 92.0, 99.0)


async def test_a_router_claims_a_suspect_with_the_slice_that_it_is_tried_on() -> None:
    table = MemoryTable()
    one, two = (StoreClaims(MemoryStore(table), "app", router) for router in ("one", "two"))
    assert await one.take("a", "poison", 60.0)
    assert not await two.take("b", "poison", 60.0)
    assert not await two.take("a", "other", 60.0)
    assert await two.take("b", "other", 60.0)
    await one.give_back("a", "poison")
    await two.give_back("b", "other")
    assert not table.values


def record(**fields: Any) -> SliceRecord:
    return SliceRecord("a", "m", SliceState.SERVING, "serving", "v6e 2x4", application="app", **fields)


class Interrupted(MemoryTable):
    """A GCS in which something happens before a call of a given number."""

    def __init__(self, at: int, what: Callable[[], None]) -> None:
        super().__init__()
        self._at, self._what = at, what

    def internal_kv_del(self, key: bytes, by_prefix: bool, namespace: bytes) -> int:
        self._at -= 1
        if self._at == 0:
            self._what()
        return super().internal_kv_del(key, by_prefix, namespace)


@pytest.mark.parametrize("at", range(1, 8))
def test_a_slice_that_lives_is_back_at_its_next_beat_whenever_it_writes_while_its_record_is_deleted(
    at: int,
) -> None:
    """Its description went after its beat, and nobody saw it any more: it serves on without a request."""
    slice_store: list[MemoryStore] = []
    table = Interrupted(at, lambda: slice_store[0].put_slice(record(beat=2)))
    slice_store.append(MemoryStore(table))
    slice_store[0].put_slice(record(beat=1))
    MemoryStore(table).delete_slice(record())
    slice_store[0].put_slice(record(beat=3))
    assert MemoryStore(table).slices("app") == [record(beat=3)]


def test_a_store_that_came_back_without_its_last_writes_has_them_again_within_half_a_minute() -> None:
    """A slice that had begun to serve was taken for one that starts, for ever."""
    table = MemoryTable()
    store = MemoryStore(table)
    starting = replace(record(beat=1), state=SliceState.STARTING)
    store.put_slice(starting)
    before = dict(table.values)
    store.put_slice(record(beat=2))
    table.values = before
    for beat in range(3, 62):
        store.put_slice(record(beat=beat))
    assert MemoryStore(table).slices("app") == [record(beat=61)]


def test_what_serve_refused_is_kept_by_application_until_it_is_taken_back() -> None:
    store = MemoryStore(MemoryTable())
    refused = RefusedDeploy("app", "why", 1.0)
    store.put_refused_deploy(refused)
    store.put_refused_deploy(RefusedDeploy("other", "why", 2.0))
    assert store.read("app").refused_deploys == (refused,)
    store.delete_refused_deploy("app")
    assert [entry.application for entry in store.read().refused_deploys] == ["other"]
