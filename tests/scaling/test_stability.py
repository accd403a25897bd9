"""The policy under any load, delays, losses, restarts of its controller and clocks: bounded, steady, and back in time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.fleet_of import Fleet, pool, settings

from serving.scaling.policy import Room, start

pytestmark = [pytest.mark.unit, pytest.mark.slow]

RATE = 10.0  # requests a second that a slice of these tests takes


@dataclass(frozen=True)
class Phase:
    """A while of steady load, at whose beginning something happens."""

    rate: int
    seconds: int
    lost: int = 0  # slices that are preempted
    restart: bool = False  # of the controller: what the policy remembers is gone
    jump_s: float = 0.0  # of its clock
    broken: bool = False  # starts in the first pool fail
    missed: float = 0.0  # the p90 of the time to the first token; the target is 1 s


phases = st.builds(
    Phase,
    rate=st.integers(0, 120),
    seconds=st.integers(1, 120),
    lost=st.integers(0, 3),
    restart=st.booleans(),
    jump_s=st.sampled_from([0.0, 0.0, -3600.0, 5.0, 86400.0]),
    broken=st.booleans(),
    missed=st.sampled_from([0.0, 0.5, 3.0]),
)


def play(fleet: Fleet, played: Sequence[Phase]) -> None:
    for phase in played:
        for _ in range(phase.lost):
            at = max(range(len(fleet.slices)), key=lambda index: len(fleet.slices[index]))
            if fleet.slices[at]:
                fleet.lose(at)
        if phase.restart:
            wanted = zip(fleet.settings.pools, fleet.slices, fleet.orders, strict=True)
            fleet.state = start(
                fleet.settings, {one.key: len(there) + len(orders) for one, there, orders in wanted}
            )
        fleet.jump(phase.jump_s)
        fleet.failing = frozenset([0]) if phase.broken else frozenset()
        fleet.ttft_p90_s = phase.missed
        fleet.run(phase.rate, phase.seconds)


def fleet_of(least: int, most: int, budget: int, delivery_s: int, start_s: int) -> Fleet:
    near, far = pool("near", least=least, most=most, patience_s=60), pool("far", least=0, most=most)
    return Fleet(
        settings(near, far, cool_down_s=30, ttft_s=1.0),
        delivery_s=delivery_s,
        start_s=start_s,
        room=Room(slices=max(budget, least)),
    )


fleets = st.builds(
    fleet_of, st.integers(0, 2), st.integers(2, 8), st.integers(1, 12), st.integers(1, 60), st.integers(1, 30)
)


@examples(max_examples=60, deadline=None)
@given(fleets, st.lists(phases, min_size=1, max_size=6))
def test_never_above_max_never_above_the_budget_never_below_min(fleet: Fleet, played: list[Phase]) -> None:
    play(fleet, played)
    for decision in fleet.decisions:
        assert sum(decision.wanted) <= (fleet.room.slices or 0)
        for count, bounds in zip(decision.wanted, fleet.settings.pools, strict=True):
            assert bounds.min <= count <= bounds.max


@examples(max_examples=40, deadline=None)
@given(fleets, st.lists(phases, max_size=4), st.integers(1, 70))
def test_a_steady_load_is_settled_for_once_and_back_within_a_bound(
    fleet: Fleet, played: list[Phase], rate: int
) -> None:
    """Whatever went before: once delivered, started and cooled down, the number is the needed one and stays."""
    play(fleet, played)
    fleet.failing, fleet.ttft_p90_s = frozenset(), 0.0
    needed = math.ceil((rate + 2 * math.sqrt(rate * 1.0)) / RATE)
    allowed = min(needed, int(fleet.room.slices or 0), sum(one.max for one in fleet.settings.pools))
    least = sum(one.min for one in fleet.settings.pools)
    worked_off = fleet.queue / max(1.0, allowed * RATE - rate) if allowed * RATE > rate else 0.0
    fleet.queue = min(fleet.queue, 500.0)  # what clients do not wait for
    settled_s = 8 * (fleet.delivery_s + fleet.start_s) + 60 + 4 * 30 + min(worked_off, 60)
    fleet.run(rate, int(settled_s) + 300)
    wanted = [sum(decision.wanted) for decision in fleet.decisions[-300:]]
    assert min(wanted) >= min(allowed, max(needed - 1, least))
    assert max(wanted) <= max(needed + 1, least)
    assert sum(before != after for before, after in pairwise(wanted)) <= 1


@examples(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), st.integers(1, 40), st.integers(1, 20))
def test_lost_slices_are_back_within_their_delivery_and_start(
    rate: int, lost: int, delivery_s: int, start_s: int
) -> None:
    fleet = Fleet(settings(pool(most=40), cool_down_s=30), delivery_s=delivery_s, start_s=start_s)
    fleet.run(rate, 400)
    before = fleet.serving
    for _ in range(min(lost, before)):
        fleet.lose(0)
    fleet.run(rate, delivery_s + start_s + 5)
    assert fleet.serving >= before - 1


@examples(max_examples=40, deadline=None)
@given(fleets, st.lists(st.tuples(st.integers(0, 120), st.integers(1, 90), st.integers(0, 8)), max_size=5))
def test_slices_of_pools_that_were_taken_out_have_their_part_of_the_budget_until_they_go(
    fleet: Fleet, played: list[tuple[int, int, int]]
) -> None:
    """Nothing is ordered beside them that the budget has no room for, and nobody runs out of patience meanwhile."""
    budget = int(fleet.room.slices or 0)
    for rate, seconds, leaving in played:
        fleet.leaving = leaving
        for _ in range(seconds):
            counts = fleet.counts()
            decision = fleet.step(rate)
            least = sum(max(one.min, there) for one, there in zip(fleet.settings.pools, counts, strict=True))
            assert sum(decision.wanted) + leaving <= max(budget, least + leaving)
            assert sum(decision.state.in_full) <= budget
            assert sum(decision.wanted) <= sum(decision.state.in_full) or leaving
    fleet.leaving = 0
    decision = fleet.step(10)
    assert decision.wanted == decision.state.in_full
