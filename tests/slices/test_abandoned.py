"""The controller and the records of applications that nobody keeps any more, on the real store's keys."""

import dataclasses
import gc
import time
from typing import Any

import pytest
from support.memory_store import MemoryStore, MemoryTable

from serving.slices import abandoned
from serving.slices.abandoned import AbandonedRecords, applications
from serving.slices.quarantine import FORGOTTEN_S
from serving.state.abandoned import ABANDONED_S, LOOK_S
from serving.state.records import (
    BatchRecord,
    DecisionRecord,
    Demand,
    Release,
    Rollout,
    SliceFailures,
    SliceRecord,
    SliceState,
    Suspicion,
    UsageRecord,
    Wanted,
    deployment,
)

pytestmark = pytest.mark.unit
FAILURES = SliceFailures("slice-0", "10.0.0.1", "v6e-8", 2, 0.0, "", "", "r")


def filled(table: MemoryTable, application: str) -> None:
    """All that routers, slices, scaling and the controller keep of an application."""
    store, model = MemoryStore(table), "meta/llama"
    replica = application.encode().hex()  # as Ray names actors
    record = SliceRecord(replica, model, SliceState.SERVING, "serving", "v6e", application=application)
    store.put_slice(record)
    store.put_phase(replica, "serving")
    store.put_verdict(replica, "wrong")
    store.put_stop(replica)
    store.put_compiling(replica, "worker/0", 1.0)
    store.put_demand(Demand("router", model, application=application))
    store.put_wanted(Wanted(model, "v6e", 1, 1, 0.0, application))
    store.put_decisions(application, [DecisionRecord(0.0, model, "pool", 1, "", application)])
    store.put_ordered(application, {model: 1})
    store.put_suspicions(application, "router", {"name": Suspicion(0.0, False, model)})
    store.claim(application, "something", "router", 0.0, 1.0)
    store.put_batches(application, [BatchRecord("b", "running", 1, 0, 0, 0.0, 0.0, application)])
    store.put_usage(application, [UsageRecord("k", "day", 1, 1, 0, 1, 0.0, 0.0, application)])
    owner = deployment(application, "llama")
    store.put_release(owner, Release("v1", "pool"))
    rollout = Rollout(application, owner, model, "pool", "v1", 1, 0)
    store.put_rollout(rollout)
    store.put_retry(rollout)


class Controller:
    """Looks every minute at a store, of which other processes write what they like."""

    def __init__(self, table: MemoryTable, *deployed: str) -> None:
        self.now_s = 0.0
        self.deployed = set(deployed)
        self.store = MemoryStore(table)
        self.records = AbandonedRecords(lambda: self.store, lambda: self.deployed, lambda: self.now_s)

    def looks(self, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_S) + 1):
            self.now_s += LOOK_S
            self.records.look()


def test_every_record_of_an_application_that_is_gone_leaves_the_store_and_no_other() -> None:
    table, others = MemoryTable(), MemoryTable()
    for application in ("app", "app two/#1"):
        filled(table, application)
        filled(others, application)
    filled(table, "ap")
    Controller(table, "app", "app two/#1").looks(2 * ABANDONED_S)
    assert table.values.keys() == others.values.keys()
    Controller(table, "app").looks(ABANDONED_S)
    alone = MemoryTable()
    filled(alone, "app")
    assert table.values.keys() == alone.values.keys()


def test_nothing_goes_while_a_process_of_the_application_beats() -> None:
    table = MemoryTable()
    filled(table, "app")
    controller, before = Controller(table), set(table.values)
    for beat in range(50):
        MemoryStore(table).put_demand(Demand("router", "meta/llama", application="app", beat=beat))
        controller.looks(0)
    assert set(table.values) == before


def test_an_application_that_comes_back_while_its_records_are_deleted_keeps_the_rest() -> None:
    class Slow(MemoryTable):
        def internal_kv_del(self, key: bytes, by_prefix: bool, namespace: bytes) -> int:
            controller.deployed.add("app")
            return super().internal_kv_del(key, by_prefix, namespace)

    table = Slow()
    filled(table, "app")
    before = len(table.values)
    controller = Controller(table)
    controller.looks(2 * ABANDONED_S)
    assert len(table.values) == before - 1


def test_failures_on_hosts_stay_for_a_day_for_the_hosts_serve_others() -> None:
    table = MemoryTable()
    today = dataclasses.replace(FAILURES, at=time.time(), application="app")
    old = dataclasses.replace(today, at=time.time() - FORGOTTEN_S - 1, slice="slice-1")
    for failed in (today, old):
        MemoryStore(table).put_slice_failures(failed)
    Controller(table).looks(ABANDONED_S)
    assert MemoryStore(table).read().slice_failures == (today,)


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # Ray's
def test_serve_s_own_applications_are_known_from_when_they_are_made_until_they_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.serve._private.application_state import ApplicationState

    monkeypatch.setattr(ApplicationState, abandoned.POINT, ApplicationState.__init__)
    deployed = applications(ApplicationState)
    none: Any = None
    states = {name: ApplicationState(name, none, none, none, none, False) for name in ("a", "b")}
    assert deployed() == {"a", "b"}
    del states["a"]
    gc.collect()
    assert deployed() == {"b"}
