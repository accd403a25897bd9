"""How many slices start and stop while a changed engine goes through a fleet, and when failed starts are tried again."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from benchmarks.fleet.rolling import Roller
from serving.slices.rollout import Pace, Retry, Roll, cost_to_drain, to_start, to_stop
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.unit

ONE = Pace(at_once=1, spare=1, surge_s=30)
TEN = Pace(at_once=10, spare=1, surge_s=30)
BEGUN = Roll(wanted=100, old=100, leaving=0, serving=0, loading=0)


def test_a_new_version_starts_with_one_slice_beyond_the_wanted() -> None:
    assert (to_start(BEGUN, TEN), to_stop(BEGUN, TEN)) == (1, 0)
    waiting = replace(BEGUN, waited_s=(0.0,))
    assert (to_start(waiting, TEN), to_stop(waiting, TEN)) == (0, 0)


def test_once_it_serves_a_wave_replaces_as_many_as_the_yaml_allows() -> None:
    proven = replace(BEGUN, serving=1)
    assert to_stop(proven, TEN) == 9  # and the spare is the tenth
    wave = replace(BEGUN, old=90, leaving=10, serving=1)
    assert to_start(wave, TEN) == 10
    assert to_stop(replace(wave, waited_s=(0.0,) * 10), TEN) == 0


@pytest.mark.parametrize("waited_s", [0.0, 29.0])
def test_no_old_slice_makes_room_before_the_new_one_has_waited(waited_s: float) -> None:
    assert to_stop(replace(BEGUN, waited_s=(waited_s,)), ONE) == 0


def test_without_spare_hardware_an_old_slice_makes_room_for_the_one_that_has_waited() -> None:
    waiting = replace(BEGUN, waited_s=(30.0,))
    assert to_stop(waiting, ONE) == 1
    assert to_stop(replace(waiting, old=99, leaving=1, quiet_s=0), ONE) == 0


def test_hardware_that_was_just_left_is_waited_for_before_another_slice_makes_room() -> None:
    left = replace(BEGUN, old=99, waited_s=(95.0, 60.0), quiet_s=1.0)
    assert to_stop(left, ONE) == 0
    assert to_stop(replace(left, quiet_s=30.0), ONE) == 1


def test_a_fleet_that_lacks_hardware_rolls_on() -> None:
    """Forty of a hundred slices are not to be had."""
    short = Roll(wanted=100, old=60, leaving=0, serving=0, loading=0, waited_s=(300.0,) * 41)
    assert (to_start(short, TEN), to_stop(short, TEN)) == (0, 1)


def test_with_no_spare_to_order_old_slices_go_first() -> None:
    assert to_stop(BEGUN, Pace(1, 0, 30)) == 1


def test_a_version_that_fails_takes_no_more_than_one_slice_at_a_time() -> None:
    failing = replace(BEGUN, old=95, serving=2, failed=2)
    assert to_start(failing, TEN) + to_stop(failing, TEN) <= 5
    assert to_stop(replace(failing, loading=1), TEN) == 0


def test_growth_is_not_held_up_by_a_roll() -> None:
    assert to_start(replace(BEGUN, wanted=150), TEN) == 51


def test_a_share_of_the_slices_is_rounded_up() -> None:
    assert [Pace.of("10%", 1, 30, slices).at_once for slices in (1, 10, 11, 1000)] == [1, 1, 2, 100]
    assert Pace.of(7, 1, 30, 1000).at_once == 7


paces = st.builds(Pace, st.integers(1, 20), st.integers(0, 5), st.sampled_from([5.0, 30.0]))


@examples(max_examples=20, deadline=None)
@given(st.integers(1, 12), paces, st.integers(0, 3), st.integers(1, 40), st.integers(0, 40))
def test_every_roll_ends_and_never_takes_more_slices_than_allowed(
    slices: int, pace: Pace, spare: int, start_s: int, drain_s: int
) -> None:
    rolled = Roller(slices, pace, spare, start_s, drain_s).run(longest_s=40 * 300.0)
    assert rolled.changed == slices
    assert rolled.lowest >= slices - pace.at_once


@examples(max_examples=20, deadline=None)
@given(st.integers(1, 12), paces, st.integers(0, 3), st.integers(1, 90))
def test_a_version_that_cannot_start_costs_one_slice_at_most(
    slices: int, pace: Pace, spare: int, start_s: int
) -> None:
    rolled = Roller(slices, pace, spare, start_s, fails=True).run(longest_s=3600.0)
    assert rolled.stopped
    assert rolled.lowest >= slices - 1


@examples(max_examples=20, deadline=None)
@given(st.integers(2, 40), st.integers(0, 300))
def test_undoing_touches_nothing_that_is_still_old(slices: int, after_s: int) -> None:
    roller = Roller(slices, Pace.of("10%", 1, 30, slices), 1, 60)
    for _ in range(after_s):
        roller.look()
    untouched = roller.old
    roller.undo()
    assert roller.changed == untouched
    assert roller.run().changed == slices


def test_a_thousand_slices_take_less_than_twenty_times_what_one_takes() -> None:
    rolled = Roller(1000, Pace.of("10%", 1, 30, 1000), start_s=36, drain_s=6).run()
    print(f"1,000 slices in {rolled.seconds / 36:.0f} times what one takes, {rolled.lowest} serving at least")
    assert rolled.seconds < 20 * 36
    assert rolled.lowest >= 900


def test_pauses_between_rounds_of_failed_starts_grow_and_never_end() -> None:
    retry, now_s, pauses = Retry(), 0.0, []
    for _ in range(8):
        failed_s = now_s
        retry = retry.given_up(now_s)
        while retry.failed_s is not None:
            now_s += 1
            retry = retry.given_up(now_s)
        pauses.append(now_s - failed_s)
        now_s += 300  # the round that fails
    assert pauses == [30, 60, 120, 240, 480, 600, 600, 600]


def test_a_removed_pool_makes_room_only_where_its_hardware_is_what_is_missing() -> None:
    roll = Roll(wanted=4, old=4, leaving=0, serving=0, loading=0, waited_s=(60.0,) * 4)
    assert to_stop(roll, ONE) == 1
    assert to_stop(roll, ONE, room=False) == 0
    assert to_stop(replace(roll, serving=3), ONE, room=False) == 3


def test_idle_and_young_slices_go_first() -> None:
    def entry(**load: float) -> SliceRecord:
        return SliceRecord("r", "m", SliceState.SERVING, "", "", **load)  # type: ignore[arg-type]

    busy, cached, old, young = entry(running=1), entry(kv_usage=0.1), entry(since=1), entry(since=5)
    assert sorted([busy, cached, old, young], key=cost_to_drain) == [young, old, cached, busy]
    assert math.isinf(BEGUN.quiet_s)
