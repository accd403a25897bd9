"""What is put into the store is found by who reads it, for every kind of record."""

import dataclasses

import pytest

from serving.state import gcs
from serving.state.gcs import Store
from serving.state.records import (
    BatchRecord,
    DecisionRecord,
    Demand,
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


class MemoryKv:
    """Ray's key-value store, as far as the store of records asks it."""

    def __init__(self, address: str) -> None:  # noqa: ARG002
        self.values: dict[bytes, bytes] = {}

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, _: bytes) -> bool:
        new = key not in self.values
        if new or overwrite:
            self.values[key] = value
        return new

    def internal_kv_keys(self, prefix: bytes, _: bytes) -> list[bytes]:
        return [key for key in self.values if key.startswith(prefix)]

    def internal_kv_multi_get(self, keys: list[bytes], _: bytes) -> dict[bytes, bytes]:
        return {key: self.values[key] for key in keys if key in self.values}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(gcs, "GcsClient", MemoryKv)
    monkeypatch.setattr(Store, "check", lambda _: None)
    return Store("nowhere:1")


def test_a_snapshot_has_every_kind_of_record(store: Store) -> None:
    written = Snapshot(
        slices=(SliceRecord("a", "m", SliceState.SERVING, "serving", "v6e 2x4", application="app"),),
        demands=(Demand("r", "m", application="app"),),
        wanted=(Wanted("m", "v6e 2x4", slices=2, missing=1, missing_for_s=3.0, application="app"),),
        decisions=(DecisionRecord(1.0, "m", "p", 2, "load"),),
        ordered={"app": {"m": 2}},
        suspicions={"r": {"f00d": Suspicion(1.0, guilty=True, model="m", replica="a")}},
        slice_failures=(SliceFailures("s", "10.0.0.1", "TPU", 2, 1.0, "why", "", "a", application="app"),),
        rollouts=(Rollout("app", "app#m", "m", "p", "v2", slices=10, changed=3),),
        batches=(BatchRecord("b", "in_progress", 10, 1, 0, created=0.0, at=1.0, application="app"),),
        usage=(UsageRecord("k", "2026-11-22", 1, 2, 0, 3, 0.5, at=1.0, application="app"),),
    )
    assert all(getattr(written, field.name) for field in dataclasses.fields(Snapshot))
    store.put_slice(written.slices[0])
    store.put_demand(written.demands[0])
    store.put_wanted(written.wanted[0])
    store.put_decisions("app", written.decisions)
    store.put_ordered("app", written.ordered["app"])
    store.put_suspicions("app", "r", written.suspicions["r"])
    store.put_slice_failures(written.slice_failures[0])
    store.put_rollout(written.rollouts[0])
    store.put_batches("app", written.batches)
    store.put_usage("app", written.usage)
    assert store.read("app") == store.read() == written
    assert store.read("other") == Snapshot()
