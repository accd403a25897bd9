import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import NoSliceError, UnknownModelError
from serving.router.table import SliceTable
from serving.slices.board import Entry, State

pytestmark = pytest.mark.unit

LLAMA = "llama"
SHAPE = "v6e 2x4 (2 hosts x 4 chips)"


def table(*entries: Entry, **wanted: int) -> SliceTable:
    wanted = wanted or {LLAMA: 1}
    made = SliceTable(wanted, dict.fromkeys(wanted, SHAPE))
    made.update(entries, 0.0)
    return made


def entry(replica: str, state: State = State.SERVING, **more: Any) -> Entry:
    fields = {"model": LLAMA, "phase": "serving", "shape": SHAPE, "beat": 1} | more
    return Entry(replica, state=state, **fields)


def test_the_slice_with_the_fewest_requests_of_this_router_is_chosen() -> None:
    found = table(entry("a"), entry("b", running=9))
    assert found.choose(LLAMA).replica == "a"
    found.begin("a")
    assert found.choose(LLAMA).replica == "b"
    found.end("a")
    assert found.choose(LLAMA).replica == "a"


def test_what_slices_say_of_themselves_decides_between_equals() -> None:
    assert table(entry("a", running=1, waiting=1), entry("b", running=1)).choose(LLAMA).replica == "b"


@given(st.lists(st.sampled_from(["begin", "end"]), max_size=60))
def test_requests_spread_evenly_over_equal_slices(steps: list[str]) -> None:
    """Whatever begins and ends, a new request goes to a slice that has no more in flight than any other."""
    found = table(entry("a"), entry("b"), entry("c"))
    running: list[str] = []
    for step in steps:
        if step == "begin":
            chosen = found.choose(LLAMA).replica
            assert found.in_flight(chosen) == min(found.in_flight(replica) for replica in "abc")
            found.begin(chosen)
            running.append(chosen)
        elif running:
            found.end(running.pop(0))
        assert {replica: found.in_flight(replica) for replica in "abc"} == {
            replica: running.count(replica) for replica in "abc"
        }


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING, State.LOST])
def test_only_a_slice_that_serves_is_chosen(state: State) -> None:
    assert table(entry("a", state), entry("b")).choose(LLAMA).replica == "b"


def test_a_slice_of_another_model_is_never_chosen() -> None:
    found = table(entry("a", model="qwen"), entry("b"), llama=1, qwen=1)
    assert found.choose("qwen").replica == "a"
    assert found.choose(LLAMA).replica == "b"


def test_a_slice_tried_already_is_not_tried_again() -> None:
    found = table(entry("a"), entry("b"))
    assert found.choose(LLAMA, ["a"]).replica == "b"
    with pytest.raises(NoSliceError):
        found.choose(LLAMA, ["a", "b"])


def test_a_suspect_is_left_out_until_its_second_beat_from_then() -> None:
    """The next beat may have been on its way already when the slice failed."""
    found = table(entry("a", beat=7))
    found.suspect("a")
    for beat, chosen in ((7, False), (8, False), (9, True)):
        found.update([entry("a", beat=beat)], 1.0)
        if chosen:
            assert found.choose(LLAMA).replica == "a"
        else:
            with pytest.raises(NoSliceError):
                found.choose(LLAMA)


def test_suspecting_a_slice_that_has_left_does_nothing() -> None:
    found = table(entry("a"))
    found.suspect("gone")
    assert found.choose(LLAMA).replica == "a"


@pytest.mark.parametrize("name", ["gpt-4", 7, ["llama"], True])
def test_an_unknown_model_is_answered_with_those_there_are(name: object) -> None:
    with pytest.raises(UnknownModelError) as refusal:
        table(llama=1, qwen=1).resolve(name)
    assert refusal.value.message == f"The model {name!r} does not exist. Models served here: llama, qwen."


def test_a_very_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(UnknownModelError) as refusal:
        table().resolve("x" * 1_000_000)
    assert len(refusal.value.message) < 300


def test_a_request_without_a_model_means_the_only_one() -> None:
    assert table().resolve(None) == LLAMA
    with pytest.raises(UnknownModelError, match="names no model"):
        table(llama=1, qwen=1).resolve(None)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([], f"No slice of 'llama' is ready: it waits for a free {SHAPE} slice."),
        (
            [entry("a", State.STARTING, phase="loading weights", slice="slice-0")],
            "No slice of 'llama' is ready: one on slice slice-0 is loading weights; try again shortly.",
        ),
        (
            [entry("a", State.LOST, slice="slice-0", reason="host 1 is gone")],
            f"No slice of 'llama' is ready: one on slice slice-0 was lost (host 1 is gone); it waits for a free {SHAPE} slice.",
        ),
    ],
)
def test_where_no_slice_is_ready_the_error_says_what_is_waited_for(entries: list[Entry], says: str) -> None:
    with pytest.raises(NoSliceError) as refusal:
        table(*entries).choose(LLAMA)
    assert refusal.value.message == says


def test_a_suspect_is_not_waited_for_as_if_no_slice_were_free() -> None:
    found = table(entry("a", slice="slice-0"))
    found.suspect("a")
    with pytest.raises(NoSliceError) as refusal:
        found.choose(LLAMA)
    assert refusal.value.message == (
        "No slice of 'llama' is ready: one on slice slice-0 has just failed to answer; try again shortly."
    )


def test_missing_slices_are_counted_from_when_they_went() -> None:
    """A lost slice counts as missing, one that starts or drains as there."""
    found = table(entry("a"), entry("b"), llama=2)
    assert found.wanted(5.0)[0].missing == 0
    found.update([entry("a"), entry("b", State.LOST)], 10.0)
    found.update([entry("a")], 11.0)
    assert dataclasses.astuple(found.wanted(14.5)[0]) == (LLAMA, SHAPE, 2, 1, 4.5)
    found.update([entry("a"), entry("c", State.STARTING)], 20.0)
    assert dataclasses.astuple(found.wanted(21.0)[0]) == (LLAMA, SHAPE, 2, 0, 0.0)
    found.update([entry("a")], 30.0)
    assert found.wanted(31.0)[0].missing_for_s == 1.0
