"""Routers keep the store clean: what is left there of models, slices and routers that are gone."""

import dataclasses
import time

import pytest
from support.memory_store import MemoryStore, MemoryTable
from support.simulated_engine import MODEL, small_plan

from serving.planning import Plan
from serving.router.core import Forgotten, RouterCore, Served
from serving.router.forwarding.suspects import Flight
from serving.router.http.auth import KeyFile
from serving.router.store_loop import StoreLoop
from serving.slices.quarantine import EARLY_S, FORGOTTEN_S
from serving.state.records import Demand, SliceFailures, SliceRecord, SliceState, Suspicion
from serving.timings import TIMINGS, Timings

pytestmark = pytest.mark.unit
AT_ONCE = Timings(forgotten_s=0.0)


async def no_metrics() -> str:
    return ""


def named(plan: Plan, name: str) -> Plan:
    return dataclasses.replace(plan, model=plan.model.model_copy(update={"name": name}))


def router(table: MemoryTable, name: str, *plans: Plan, timings: Timings = TIMINGS) -> StoreLoop:
    core = RouterCore(Served(plans), KeyFile(None), no_metrics, application="app", name=name, timings=timings)
    return StoreLoop(core, MemoryStore(table), lambda *_: None, timings)


def wanted(table: MemoryTable) -> list[str]:
    return [record.model for record in MemoryStore(table).read("app").wanted]


async def test_routers_that_end_together_leave_no_record() -> None:
    table = MemoryTable()
    routers = [router(table, name, small_plan()) for name in ("a", "b")]
    for one in [*routers, *routers]:
        await one._beat()
    await routers[0].close()
    assert wanted(table) == [MODEL]
    await routers[1].close()
    assert not table.values


async def test_a_model_that_is_taken_out_leaves_no_record_while_new_routers_beat() -> None:
    table, plan = MemoryTable(), small_plan()
    old = router(table, "old", plan, named(plan, "second"))
    new = router(table, "new", plan)
    for one in (old, new, new):
        await one._beat()
    assert wanted(table) == [MODEL, "second"]
    await old.close()
    assert wanted(table) == [MODEL]


async def test_the_record_of_a_model_whose_routers_ended_without_a_word_goes_with_the_next_look() -> None:
    table, plan = MemoryTable(), small_plan()
    old = router(table, "old", plan, named(plan, "second"))
    await old._beat()
    for demand in MemoryStore(table).read("app").demands:
        MemoryStore(table).delete_demand(demand)
    await router(table, "new", plan)._beat()
    assert wanted(table) == [MODEL]


async def test_a_router_s_status_has_its_application_s_slices() -> None:
    table = MemoryTable()
    of_ours = SliceRecord("ours", MODEL, SliceState.SERVING, "serving", "v6e", application="app", beat=1)
    for record in (of_ours, dataclasses.replace(of_ours, replica="theirs", application="other")):
        MemoryStore(table).put_slice(record)
    loop = router(table, "router", small_plan())
    await loop._beat()
    (model,) = loop._core.status().models
    assert [slice_.replica for slice_ in model.slices] == ["ours"]
    assert (model.application, model.slices_serving) == ("app", 1)


def starting(replica: str) -> SliceRecord:
    return SliceRecord(
        replica,
        MODEL,
        SliceState.STARTING,
        "loading weights",
        "v6e",
        application="app",
        slice=f"slice of {replica}",
        hosts=("10.0.0.1",),
        beat=1,
    )


async def test_a_start_that_serve_stopped_is_no_failure_of_its_slice_and_one_that_died_is() -> None:
    table = MemoryTable()
    store = MemoryStore(table)
    for name in ("stopped", "died"):
        store.put_slice(starting(name))
    store.put_stop("stopped")
    loop = router(table, "router", small_plan(), timings=AT_ONCE)
    for _ in range(50):  # what stands still at one look, or at a late one, need not have ended
        await loop._beat()
        if not store.slices("app"):
            break
    assert [failed.replica for failed in store.read("app").slice_failures] == ["died"]
    assert not [key for key in table.values if b"stopped" in key]


async def test_who_beats_while_a_router_stands_still_between_look_and_write_keeps_his_records() -> None:
    """A router that was paused there for a minute blamed a slice for a start that had not failed, and deleted its record."""
    table, plan = MemoryTable(), small_plan()
    store, slice_, demand = MemoryStore(table), starting("late"), Demand("other", MODEL, application="app")
    loop = router(table, "router", plan)
    silent = Forgotten((slice_,), (demand,), (), ())
    store.put_slice(dataclasses.replace(slice_, beat=2))
    store.put_demand(dataclasses.replace(demand, beat=2))
    store.put_suspicions("app", "other", {"name": Suspicion(0.0, False, MODEL)})
    before = dict(table.values)
    loop._write([], [], silent)
    assert table.values == before
    store.put_slice(slice_)
    store.put_demand(demand)
    loop._write([], [], silent)
    left = store.read("app")
    assert (left.slices, left.demands, left.suspicions) == ((), (), {})
    assert [failed.replica for failed in left.slice_failures] == ["late"]


def test_a_record_that_another_router_took_away_meanwhile_is_no_failure() -> None:
    store = MemoryStore(MemoryTable())
    record = starting("stopped")
    store.put_slice(record)
    assert store.ended_alone(record)
    store.put_stop(record.replica)
    assert not store.ended_alone(record)
    store.delete_slice(record)
    assert not store.ended_alone(record)


async def test_a_replica_that_ends_without_a_word_soon_after_it_began_to_serve_failed_and_a_later_one_did_not() -> (
    None
):
    table, now = MemoryTable(), time.time()
    store = MemoryStore(table)
    for name, state, served_s in (
        ("early", SliceState.SERVING, 60),
        ("late", SliceState.SERVING, EARLY_S + 60),
        ("leaving", SliceState.DRAINING, 60),
    ):
        store.put_slice(dataclasses.replace(starting(name), state=state, since=now - served_s))
    loop = router(table, "router", small_plan())
    loop._write([], [], Forgotten(store.slices("app"), (), (), ()))
    (failed,) = store.read("app").slice_failures
    assert (failed.replica, failed.early) == ("early", True)


async def test_a_death_that_a_request_is_guilty_of_counts_against_no_slice() -> None:
    table, now = MemoryTable(), time.time()
    store = MemoryStore(table)
    once = SliceFailures("slice-0", "10.0.0.1", "v6e-8", 1, now, "", "", "first", "app", early=True)
    twice = dataclasses.replace(once, slice="slice-1", failures=2, replica="second")
    for failed in (once, twice):
        store.put_slice_failures(failed)
    loop = router(table, "router", small_plan())
    suspects, there = loop._core.dispatcher.suspects, [Flight("f00d", MODEL, now)]
    suspects.died("first", there, now, now - 5)
    await loop._beat()
    assert set(store.read("app").slice_failures) == {once, twice}
    suspects.tried("f00d", "second", now)
    assert suspects.died("second", there, now, now - 5) == ["f00d"]
    for _ in range(3):
        await loop._beat()
    assert store.read("app").slice_failures == (dataclasses.replace(twice, failures=1, replica=""),)


async def test_failures_of_a_slice_that_nobody_tried_for_a_day_leave_the_store() -> None:
    table, now = MemoryTable(), time.time()
    of_today = SliceFailures("slice-0", "10.0.0.1", "v6e-8", 1, now, "", "", "r", "app")
    of_last_month = dataclasses.replace(of_today, slice="slice-1", at=now - FORGOTTEN_S - 1)
    for failed in (of_today, of_last_month):
        MemoryStore(table).put_slice_failures(failed)
    await router(table, "router", small_plan())._beat()
    assert MemoryStore(table).read("app").slice_failures == (of_today,)
