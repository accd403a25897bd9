"""Slices beyond the need: bounded, given up where they do not help, and gone with their cause."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.fleet_of import Fleet, pool, settings

from serving.scaling.boost import Boost, most_boost, next_boost

pytestmark = pytest.mark.unit


def run(
    boost: Boost, missed: float, seconds: int, start_s: float = 0, need: float = 4, most: int = 2
) -> Boost:
    for now_s in range(int(start_s), int(start_s) + seconds):
        boost = next_boost(boost, missed, need, most, now_s, 300, settled=True)
    return boost


@pytest.mark.parametrize(
    ("need", "room", "most"),
    [(0.04, 8, 0), (0.5, 8, 0), (0.6, 8, 1), (4, 8, 2), (100, 300, 50), (4, 1, 1), (4, -2, 0)],
)
def test_the_boost_is_half_of_the_need_at_most_and_none_for_a_small_part_of_a_slice(
    need: float, room: float, most: int
) -> None:
    assert most_boost(need, room) == most


def test_a_target_that_is_missed_adds_a_slice_once_a_minute_was_measured() -> None:
    assert run(Boost(), 2.0, 89).slices == 0
    assert run(Boost(), 2.0, 95).slices == 1


def test_slices_that_change_nothing_go_and_the_next_try_waits_twice_as_long() -> None:
    boost, tried = Boost(), []
    for now_s in range(20000):
        before = boost.slices
        boost = next_boost(boost, 2.0, 4, 2, now_s, 300, settled=True)
        if boost.slices > before:
            tried.append(now_s)
        assert boost.slices <= 1
    pauses = [after - before for before, after in pairwise(tried)]
    assert all(longer > 1.5 * shorter for shorter, longer in pairwise(pauses))
    assert len(tried) <= 7


def test_slices_that_help_stay_until_the_target_was_kept_for_a_cool_down_and_then_go_at_once() -> None:
    boost = run(Boost(), 2.0, 95)
    boost = run(boost, 1.5, 95, start_s=95)
    assert boost.slices == 2
    boost = run(boost, 0.8, 290, start_s=190)
    assert boost.slices == 2
    assert run(boost, 0.8, 20, start_s=480).slices == 0


def test_a_boost_that_is_needed_again_and_again_stays_longer_each_time() -> None:
    boost, changes = Boost(), 0
    for now_s in range(86400):
        before = boost.slices
        boost = next_boost(boost, 0.8 if before else 1.5, 4, 2, now_s, 300, settled=True)
        changes += boost.slices != before
    assert changes <= 20


def test_a_need_that_falls_takes_its_boost_along() -> None:
    boost = Boost(slices=5)
    assert next_boost(boost, 2.0, 2, most_boost(2, 9), 0, 300, settled=False).slices == 1


def test_prompts_that_are_long_order_no_slices_and_leave_none_behind() -> None:
    """A fifth of a request a second, whose prompts take longer than the target: all eight slices had been ordered."""
    fleet = Fleet(settings(pool(most=8), ttft_s=1.0, cool_down_s=60), ttft_p90_s=3.0)
    for second in range(1500):
        fleet.step(1 if second % 5 == 0 else 0)
    assert {decision.wanted for decision in fleet.decisions} == {(1,)}


def test_a_busy_fleet_whose_prompts_are_long_gives_up_what_did_not_help() -> None:
    fleet = Fleet(settings(pool(most=40), ttft_s=1.0, cool_down_s=60), ttft_p90_s=3.0)
    fleet.run(30, 1500)
    wanted = [decision.wanted[0] for decision in fleet.decisions[300:]]
    needed = min(wanted)
    assert max(wanted) == needed + 1
    assert sum(count > needed for count in wanted) < 600
    assert any("more slices did not change" in decision.reason for decision in fleet.decisions)


def test_slices_help_where_the_load_is_what_misses_the_target() -> None:
    fleet = Fleet(settings(pool(most=40), ttft_s=1.0, cool_down_s=60))
    for _ in range(1500):
        fleet.ttft_p90_s = 6.0 / max(1, fleet.serving)
        fleet.step(30)
    assert fleet.serving >= 6


@examples(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 400), st.booleans()), max_size=20),
    st.floats(0, 50),
    st.floats(-5, 60),
)
def test_the_boost_stays_within_its_bound(
    phases: list[tuple[float, int, bool]], need: float, room: float
) -> None:
    boost, now_s, most = Boost(), 0.0, most_boost(need, room)
    for missed, seconds, settled in phases:
        now_s += seconds
        boost = next_boost(boost, missed, need, most, now_s, 300, settled=settled)
        assert 0 <= boost.slices <= most
