import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.slices.rollout import Yielding
from serving.state.records import Release, SliceRecord, SliceState

pytestmark = pytest.mark.unit

SHAPE = "v6e 2x4"
POOL = "v6e-2x4-2h-on-demand"
NEW = Release("new", POOL)


def entry(
    replica: str, state: SliceState = SliceState.SERVING, version: str = "old", **more: Any
) -> SliceRecord:
    fields = {
        "phase": "",
        "shape": SHAPE,
        "pool": POOL,
        "deployment": "app#llama",
        "address": "http://x",
    } | more
    return SliceRecord(replica, "llama", state, version=version, **fields)


def after(
    own: SliceRecord,
    *beside: SliceRecord,
    release: Release | None = NEW,
    times: tuple[float, ...] = (0, 60),
    waiting: bool = True,
) -> bool:
    """Whether a replica with a patience of 30 s makes room after looking at these times."""
    seen = Yielding()
    for now_s in times:
        seen = seen.next(own, [own, *beside], release, now_s, waiting=waiting)
    return seen.due(times[-1], 30)


def test_an_old_slice_makes_room_once_the_new_version_has_waited() -> None:
    assert after(entry("a"))
    assert not after(entry("a"), times=(0, 29))


def test_a_new_version_that_has_its_hardware_needs_no_room() -> None:
    assert not after(entry("a"), waiting=False)


def test_nothing_changed_nothing_ends() -> None:
    assert not after(entry("a"), release=Release("old", POOL))
    assert not after(entry("a"), release=None)


def test_a_slice_of_another_pool_would_make_no_room() -> None:
    assert not after(entry("a"), release=Release("new", "v6e-4x4-4h-on-demand"))


@pytest.mark.parametrize("state", [SliceState.STARTING, SliceState.DRAINING])
def test_while_one_is_under_way_the_others_serve(state: SliceState) -> None:
    assert not after(entry("a"), entry("n", state, "new", address=""))


def test_a_version_that_failed_to_start_gets_no_more_slices() -> None:
    own, failed = entry("a"), entry("n", SliceState.LOST, "new", address="")
    seen = Yielding().next(own, [own, failed], NEW, 0, waiting=True)
    for now_s in (30, 60, 90):
        seen = seen.next(own, [own], NEW, now_s, waiting=True)
        assert not seen.due(now_s, 30)
    mended = Release("mended", POOL)
    seen = seen.next(own, [own], mended, 100, waiting=True).next(own, [own], mended, 200, waiting=True)
    assert seen.due(200, 30)


def test_a_new_slice_that_served_and_was_lost_is_no_failed_start() -> None:
    assert after(entry("a"), entry("n", SliceState.LOST, "new"))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 3))
def test_exactly_one_of_the_old_slices_makes_room(running: list[int], new: int) -> None:
    old = [entry(f"o{i}", running=load) for i, load in enumerate(running)]
    beside = old + [entry(f"n{i}", version="new") for i in range(new)]
    ends = [one for one in old if after(one, *(other for other in beside if other is not one))]
    assert len(ends) == 1
    assert ends[0].running == min(running)


def test_other_deployments_do_not_matter() -> None:
    other = dataclasses.replace(entry("n", SliceState.STARTING), deployment="app#qwen")
    assert after(entry("a"), other)
