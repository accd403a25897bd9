import dataclasses

import pytest
from support.page_service import GIB, entry

from serving.state.records import (
    DecisionRecord,
    Demand,
    SliceFailures,
    SliceState,
    Snapshot,
    Suspicion,
    Wanted,
)
from serving.status.document import status
from serving.status.rates import Rates

pytestmark = pytest.mark.unit
LLAMA = "llama"
WANTED = Wanted(LLAMA, "v6e 2x4 (2 hosts x 4 chips)", slices=3, missing=1, missing_for_s=12.5)


def test_a_model_is_summed_over_its_slices_and_routers() -> None:
    entries = [
        entry(LLAMA, 0, running=5, waiting=2),
        entry(LLAMA, 1, running=3),
        entry(LLAMA, 2, SliceState.LOST, running=9, waiting=9, reason="host 1 is gone"),
        entry("other", 3, running=100),
    ]
    demands = [Demand("a", LLAMA, held=2, ttft_p50_s=0.2), Demand("b", LLAMA, held=1, in_flight=9, refused=4)]
    (model,) = status(Snapshot(tuple(entries), tuple(demands), (WANTED,)), Rates(), 0.0).models
    assert (model.running, model.waiting, model.held, model.refused) == (8, 2, 3, 4)
    assert model.in_flight == 9
    assert (model.slices_wanted, model.slices_serving, model.slices_missing) == (3, 2, 1)
    assert (model.missing_for_s, model.ttft_p50_s, model.ttft_p90_s) == (12.5, 0.2, None)
    assert [one.slice for one in model.slices] == ["slice-0", "slice-1", "slice-2"]
    assert [one.running for one in model.slices] == [
        5,
        3,
        0,
    ]  # what a lost slice last said is not true any more
    assert model.simulated


def test_applications_of_one_model_are_strangers() -> None:
    names = ("blue", "green")
    entries = [entry(LLAMA, number, application=names[number % 2], running=5) for number in range(5)]
    demands = [
        Demand(f"router-{name}", LLAMA, held=2, ttft_p50_s=0.2, ttft_p90_s=0.3, application=name)
        for name in names
    ]
    window = Rates()
    for second in (0.0, 2.0):
        window.observe(entries, demands[:1], second)
    wanted = [dataclasses.replace(WANTED, application=name) for name in names]
    blue, green = status(Snapshot(tuple(entries), tuple(demands), tuple(wanted)), window, 2.0).models
    assert (blue.application, blue.slices_serving, blue.running, blue.held) == ("blue", 3, 15, 2)
    assert (green.application, green.slices_serving, green.running, green.held) == ("green", 2, 10, 2)
    assert [one.slice for one in green.slices] == ["slice-1", "slice-3"]
    assert (blue.history.ttft_p50_s, green.history.ttft_p50_s) == ((0.2,), (None,))


def test_why_a_slice_is_missing_is_in_the_document_in_words() -> None:
    why = "2 hosts without TPU_NAME (10.0.0.1, 10.0.0.2)"
    (model,) = status(Snapshot(wanted=(dataclasses.replace(WANTED, why=why),)), Rates(), 0.0).models
    assert model.missing_why == why


def test_hbm_is_the_plans_with_the_share_of_the_cache_in_use() -> None:
    entries = [
        entry(LLAMA, 0, kv_usage=0.5),
        entry(LLAMA, 1, SliceState.STARTING),
        entry(LLAMA, 2, hbm_bytes=0),
    ]
    (model,) = status(Snapshot(tuple(entries), wanted=(WANTED,)), Rates(), 0.0).models
    serving, starting, unplanned = (one.hbm_planned for one in model.slices)
    assert serving
    assert (serving.usable, serving.used) == (31 * GIB, (2 + 13) * GIB)
    assert starting
    assert starting.used == 0
    assert unplanned is None


def test_a_slice_is_hosts_with_chips_in_worker_order() -> None:
    (model,) = status(Snapshot((entry(LLAMA, 0),), wanted=(WANTED,)), Rates(), 0.0).models
    assert [(host.ip, host.chips) for host in model.slices[0].hosts] == [
        ("127.100.0.0", 4),
        ("127.100.0.1", 4),
    ]


def test_only_a_starting_slice_says_how_far_it_is() -> None:
    entries = [entry(LLAMA, 0), entry(LLAMA, 1, SliceState.STARTING, phases=(("placing", 0.5),))]
    (model,) = status(Snapshot(tuple(entries), wanted=(WANTED,)), Rates(), 0.0).models
    serving, starting = model.slices
    assert serving.start is None
    assert starting.start
    assert starting.start.elapsed_s == 0.5


def test_the_last_decisions_come_first_and_the_old_ones_not_at_all() -> None:
    decisions = tuple(DecisionRecord(at, LLAMA, "v6e 2x4", at, "load") for at in range(50))
    shown_ones = status(Snapshot(decisions=decisions), Rates(), 0.0).decisions
    assert [one.at for one in shown_ones] == list(range(49, 29, -1))


def test_a_slice_says_for_how_long_it_has_been_in_its_state() -> None:
    entered = dataclasses.replace(entry(LLAMA, 0), since=100.0)
    (model,) = status(Snapshot((entered,), wanted=(WANTED,)), Rates(), 130.0).models
    assert model.slices[0].for_s == 30
    (model,) = status(
        Snapshot((entered,), wanted=(WANTED,)), Rates(), 90.0
    ).models  # a clock that was put back
    assert model.slices[0].for_s == 0


def test_a_request_that_is_refused_for_ending_slices_is_shown_once_and_a_suspect_is_not() -> None:
    guilty, suspect = Suspicion(90.0, guilty=True, model=LLAMA), Suspicion(95.0, guilty=False, model=LLAMA)
    routers = {"a": {"f00d": guilty, "beef": suspect}, "b": {"f00d": guilty}}
    (refused,) = status(Snapshot(suspicions=routers), Rates(), 100.0).refused
    assert (refused.fingerprint, refused.model, refused.for_s) == ("f00d", LLAMA, 10.0)


def failures(count: int, at: float, **changes: str) -> SliceFailures:
    made = SliceFailures("slice-3", "10.0.0.7", "v6e-8", count, at, "its chips are held", "", "r")
    return dataclasses.replace(made, **changes)


def test_only_slices_that_are_left_out_now_are_called_quarantined() -> None:
    known = (failures(1, 90), failures(3, 0, slice="slice-4"), failures(2, 90, slice="slice-5", version="v"))
    found = status(Snapshot(slice_failures=known), Rates(), 100.0).quarantined
    assert [(entry.slice, entry.for_s, entry.engine_only) for entry in found] == [
        ("slice-4", 20.0, False),
        ("slice-5", 50.0, True),
    ]
    assert found[0].reason == "its chips are held"
    assert found[0].failures == 3
