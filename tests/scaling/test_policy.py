import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.fleet_of import Fleet, pool, settings

from serving.scaling.policy import Report, Room, Settings, aligned, decide, start
from serving.state.records import Demand, SliceRecord, SliceState

pytestmark = pytest.mark.unit


def test_load_beyond_a_slice_orders_more_and_idleness_gives_them_back_one_cool_down_later() -> None:
    fleet = Fleet(settings(cool_down_s=60))
    assert fleet.run(2, 120).wanted == (1,)
    grown = fleet.run(25, 120).wanted[0]
    assert grown in (4, 5)
    assert fleet.run(25, 300).wanted == (4,)
    assert fleet.run(2, 30).wanted == (4,)
    assert fleet.run(2, 180).wanted == (1,)


def test_slices_whose_answers_run_for_hours_are_kept_though_no_request_comes() -> None:
    """Without arrivals the rate is nothing: one slice was left, and 35 of its requests had no seat."""
    wanted, state, now_s = settings(pool(least=0), cool_down_s=60), None, 0.0
    for running, slices in ((45, 5), (45, 5), (25, 3), (0, 0)):
        for _ in range(200):
            now_s += 1
            state = state or start(wanted, {"near": 5})
            entries = [
                SliceRecord(
                    f"slice-{at}", "m", SliceState.SERVING, "", "near", pool="near", running=running // 5
                )
                for at in range(5)
            ]
            demand = Demand("r", "m", arrived=45, in_flight=running, beat=int(now_s))
            decision = decide(wanted, state, Report(entries, [demand]), now_s)
            state = decision.state
        assert decision.wanted == (slices,)


def test_batches_that_fill_every_slice_change_no_decision_and_the_reason_says_so() -> None:
    alone, filled = Fleet(settings(cool_down_s=60)), Fleet(settings(cool_down_s=60), filling=30)
    for rate, seconds in ((2, 120), (25, 420), (2, 240)):
        assert filled.run(rate, seconds).wanted == alone.run(rate, seconds).wanted
    assert "30 lines of batches left out" in filled.decisions[-1].reason
    assert "left out" not in alone.decisions[-1].reason


def test_batches_alone_hold_no_slice() -> None:
    fleet = Fleet(settings(pool(least=0), cool_down_s=60), filling=30)
    fleet.run(2, 120)
    assert fleet.run(0, 240).wanted == (0,)
    assert any("30 lines of batches keep no slice" in decision.reason for decision in fleet.decisions)


def test_batches_that_may_scale_wake_slices_and_are_ordered_for_by_their_rate_until_they_are_done() -> None:
    fleet = Fleet(settings(pool(least=0), cool_down_s=60), due=25)
    assert fleet.run(25, 300).wanted[0] in (3, 4, 5)
    assert "lines of batches among them (batch.may_scale)" in fleet.decisions[-1].reason
    fleet.due = 0
    assert fleet.run(0, 240).wanted == (0,)


def test_a_queue_that_grows_while_slices_are_awaited_is_not_ordered_for_again() -> None:
    fleet = Fleet(settings(pool(most=50)), delivery_s=300, start_s=100)
    fleet.run(5, 60)
    ordered = fleet.run(30, 120).wanted
    assert fleet.queue > 1000
    assert fleet.run(30, 270).wanted == ordered
    assert fleet.queue > 5000
    assert fleet.decisions[-1].wanted[0] <= 6


def test_a_queue_that_stays_after_what_was_ordered_came_is_ordered_for() -> None:
    fleet = Fleet(settings(pool(most=50)), delivery_s=20, start_s=10)
    fleet.run(18, 60)
    before = fleet.run(18, 120).wanted
    fleet.queue = 3000
    assert fleet.run(18, 5).wanted > before


def test_the_time_slices_took_to_arrive_is_learned() -> None:
    fleet = Fleet(settings(), delivery_s=100, start_s=50)
    fleet.run(25, 300)
    assert fleet.state is not None
    assert fleet.state.pools[0].lead_s == pytest.approx(150, abs=5)
    assert "in 1" in fleet.decisions[-1].reason


def test_rising_load_is_ordered_for_before_it_is_there() -> None:
    fleet = Fleet(settings(pool(most=50)), delivery_s=60, start_s=30)
    fleet.run(5, 300)
    for second in range(600):
        fleet.step(5 + second * 0.1)
    assert fleet.queue < 50  # half a minute of one slice's work would be 300


def test_zero_slices_wake_for_a_held_request_and_sleep_when_nothing_came_for_a_cool_down() -> None:
    fleet = Fleet(settings(pool(least=0)))
    assert fleet.run(0, 120).wanted == (0,)
    waking = fleet.step(1)
    assert waking.wanted == (1,)
    fleet.run(0, 50)
    assert fleet.queue == 0
    assert fleet.run(0, 30).wanted == (1,)
    assert fleet.run(0, 60).wanted == (0,)


def test_a_restarted_controller_keeps_the_slices_that_are_there_until_it_knows_the_load() -> None:
    fleet = Fleet(settings(cool_down_s=60))
    there = fleet.run(40, 200).wanted
    fleet.state = start(fleet.settings, {"near": there[0]})
    for _ in range(100):
        assert fleet.step(40).wanted >= there
    assert fleet.run(40, 60).wanted == there


class TestPools:
    """The preferred pool first, the next when it does not deliver."""

    def test_what_the_preferred_pool_does_not_deliver_is_sought_in_the_next_and_given_back_when_it_returns(
        self,
    ) -> None:
        near = pool("near", least=0, most=5, patience_s=100)
        far = pool("far", least=0, most=5)
        fleet = Fleet(settings(near, far, cool_down_s=30), undeliverable=frozenset([0]))
        assert fleet.run(12, 90).wanted[1] == 0
        waited = fleet.run(12, 100)
        assert waited.wanted == (2, 2)
        assert "near: 2 on order" in waited.reason
        assert "out of patience" in waited.reason
        assert fleet.run(12, 60).wanted == (2, 2)
        assert fleet.counts() == [0, 2]
        fleet.undeliverable = frozenset()
        back = [fleet.step(12).wanted for _ in range(200)]
        assert fleet.counts()[1] == 0
        assert back[-1][1] == 0
        assert min(sum(one) for one in back) >= 2

    def test_starts_that_fail_again_and_again_lead_to_the_next_pool_and_are_told(self) -> None:
        near = pool("near", least=0, most=5, patience_s=1000)
        fleet = Fleet(
            settings(near, pool("far", least=0, most=5)), failing=frozenset([0]), delivery_s=5, start_s=20
        )
        fleet.run(1, 60)
        assert fleet.decisions[-1].wanted == (1, 0)
        fleet.run(1, 60)
        assert fleet.decisions[-1].wanted == (1, 1)
        assert fleet.decisions[-1].failing
        assert "near: 4 starts failed, the last: the weights are gone" in fleet.decisions[-1].reason
        fleet.failing = frozenset()
        fleet.run(1, 60)
        assert fleet.decisions[-1].wanted == (1, 0)
        assert not fleet.decisions[-1].failing
        assert "failed" not in fleet.decisions[-1].reason

    def test_a_start_that_fails_does_not_begin_the_patience_anew(self) -> None:
        near = pool("near", least=0, most=5, patience_s=45)
        fleet = Fleet(
            settings(near, pool("far", least=0, most=5)), failing=frozenset([0]), delivery_s=20, start_s=20
        )
        fleet.run(1, 75)
        assert fleet.decisions[-1].wanted == (1, 1)

    def test_starting_slices_that_nobody_wants_any_more_have_not_failed(self) -> None:
        fleet = Fleet(settings(cool_down_s=10), delivery_s=5, start_s=200)
        fleet.run(60, 60)
        assert fleet.counts()[0] > 3
        fleet.queue = 0
        fleet.run(1, 130)
        assert fleet.counts() == [1]
        assert fleet.state is not None
        assert fleet.state.pools[0].failed == 0

    def test_no_slice_goes_before_the_one_in_its_place_serves(self) -> None:
        near = pool("near", least=0, most=5, patience_s=30)
        far = pool("far", least=0, most=5)
        fleet = Fleet(settings(near, far, cool_down_s=10), undeliverable=frozenset([0]), start_s=60)
        fleet.run(5, 300)
        assert fleet.counts() == [0, 1]
        fleet.undeliverable = frozenset()
        for _ in range(200):
            fleet.step(5)
            assert fleet.serving >= 1
        assert fleet.counts() == [1, 0]

    def test_a_later_pool_s_least_counts_before_the_preferred_is_asked(self) -> None:
        fleet = Fleet(settings(pool("near", least=0), pool("far", least=1)))
        assert fleet.run(5, 200).wanted == (0, 1)


class TestBudget:
    """No more than the budget holds, however much is asked."""

    def test_slices_are_capped_and_the_reason_says_so(self) -> None:
        fleet = Fleet(settings(), room=Room(slices=2))
        decision = fleet.run(80, 60)
        assert decision.wanted == (2,)
        assert "the budget allows 2 of 10" in decision.reason
        assert decision.short

    def test_dollars_are_capped(self) -> None:
        fleet = Fleet(settings(pool(dollars_per_hour=10)), room=Room(dollars_per_hour=35))
        assert fleet.run(80, 60).wanted == (3,)

    def test_a_pool_that_was_taken_out_is_waited_for_and_no_other_pool_is_asked_meanwhile(self) -> None:
        pools = (pool("near", least=4, most=8, patience_s=60), pool("far", least=0, most=8))
        fleet = Fleet(settings(*pools), delivery_s=1e9, room=Room(slices=6), leaving=6)
        decision = fleet.run(40, 300)
        assert decision.wanted == (4, 0)
        assert decision.state.in_full == (6, 0)
        assert "2 more once slices of pools that were taken out have gone" in decision.reason
        fleet.leaving = 0
        assert fleet.run(40, 59).wanted == (6, 0)
        assert fleet.run(40, 5).wanted[1] > 0  # now its patience runs

    def test_late_orders_make_room_for_the_pool_that_delivers(self) -> None:
        near = pool("near", least=0, most=5, patience_s=60)
        fleet = Fleet(
            settings(near, pool("far", least=0, most=5)), undeliverable=frozenset([0]), room=Room(slices=2)
        )
        fleet.run(15, 200)
        assert fleet.counts() == [0, 2]


class TestNonsense:
    """Reports that can't be true hold the last good decision and say so."""

    @pytest.mark.parametrize(
        "wrong",
        [
            {"running": -1},
            {"waiting": math.nan},
            {"kv_usage": math.nan},
            {"kv_usage": -0.5},
            {"output_tokens": math.inf},
            {"prompt_tokens": None},
            {"running": "many"},
        ],
    )
    def test_of_a_slice(self, wrong: dict[str, object]) -> None:
        fleet = Fleet(settings())
        before = fleet.run(25, 120).wanted
        report = fleet.report(1)
        broken = replace(report.entries[0], slice="slice-9", **wrong)  # type: ignore[arg-type]
        decision = fleet.step(1, replace(report, entries=[broken, *report.entries[1:]]))
        assert decision.held
        assert decision.wanted == before
        assert f"holding {before[0]}: slice slice-9 reports" in decision.reason
        assert not fleet.step(25).held

    @pytest.mark.parametrize("wrong", [{"arrived": -5}, {"held": math.nan}, {"in_flight": None}])
    def test_of_a_router(self, wrong: dict[str, object]) -> None:
        fleet = Fleet(settings())
        before = fleet.run(25, 120).wanted
        decision = fleet.step(1, replace(fleet.report(1), demands=[Demand("r", "m", **wrong)]))  # type: ignore[arg-type]
        assert (decision.held, decision.wanted) == (True, before)

    def test_what_was_counted_meanwhile_is_no_burst_afterwards(self) -> None:
        fleet = Fleet(settings())
        assert fleet.run(2, 120).wanted == (1,)
        for _ in range(300):
            report = fleet.report(2)
            assert fleet.step(2, replace(report, demands=[Demand("r", "m", held=-1)])).held
        assert {fleet.step(2).wanted for _ in range(60)} == {(1,)}

    @pytest.mark.parametrize("jump_s", [-500.0, 86400.0])
    def test_of_the_clock(self, jump_s: float) -> None:
        fleet = Fleet(settings(), delivery_s=1000)
        before = fleet.run(25, 60).wanted
        assert fleet.state is not None
        waited_s = fleet.now_s - fleet.state.pools[0].orders[0]
        fleet.now_s += jump_s
        decision = fleet.step(25)
        assert (decision.held, decision.wanted) == (True, before)
        assert f"the clock jumped by {jump_s + 1:.0f} s" in decision.reason
        assert fleet.now_s - fleet.state.pools[0].orders[0] == pytest.approx(waited_s + 1, abs=2)
        assert fleet.step(25).wanted == before


rates = st.lists(st.tuples(st.floats(0, 200), st.integers(1, 20)), min_size=1, max_size=4)


@examples(max_examples=20, deadline=None)
@given(rates, st.integers(0, 3), st.integers(0, 5), st.integers(1, 12))
def test_wanted_stays_within_bounds_and_budget(
    load: list[tuple[float, int]], least: int, more: int, budget: int
) -> None:
    most = max(1, least + more)
    fleet = Fleet(
        settings(pool(least=least, most=most), cool_down_s=10), room=Room(slices=max(budget, least))
    )
    for rate, seconds in load:
        fleet.run(rate, seconds)
    for decision in fleet.decisions:
        assert least <= decision.wanted[0] <= min(most, max(budget, least))


@examples(max_examples=20, deadline=None)
@given(rates, st.floats(1, 3))
def test_more_load_never_wants_fewer_slices(load: list[tuple[float, int]], times: float) -> None:
    """Of two fleets that deliver nothing, so that only the load differs."""
    fewer, more = (
        Fleet(settings(pool(most=1000), cool_down_s=30), undeliverable=frozenset([0])) for _ in range(2)
    )
    for rate, seconds in load:
        fewer.run(round(rate), seconds)
        more.run(round(rate) * math.ceil(times), seconds)
    for low, high in zip(fewer.decisions, more.decisions, strict=True):
        assert high.wanted >= low.wanted


@examples(max_examples=10, deadline=None)
@given(st.integers(1, 150), st.integers(30, 300))
def test_a_steady_load_is_never_ordered_for_twice(rate: int, delivery_s: int) -> None:
    """However long delivery takes and however the queue grows meanwhile, no more is wanted than the load needs."""
    fleet = Fleet(settings(pool(most=1000)), delivery_s=delivery_s)
    fleet.run(1, 120)
    fleet.run(rate, delivery_s)
    ahead = 1.25 * rate  # a step looks like a trend
    needed = (ahead + 2 * math.sqrt(ahead)) / 10
    assert max(one.wanted[0] for one in fleet.decisions) <= math.ceil(1.1 * needed) + 1


def replaced_pools(old: str, new: str) -> tuple[Settings, Settings]:
    return settings(pool(old, most=50)), settings(pool(new, most=50))


def test_a_pool_that_replaces_another_under_load_is_decided_for() -> None:
    """Slices of the pool that the YAML no longer has give all of the tokens."""
    old, new = replaced_pools("old", "new")
    fleet = Fleet(old)
    fleet.run(95, 300)
    assert fleet.serving > 9
    fleet.state = aligned(new, fleet.state, {"new": 1})  # type: ignore[arg-type]
    decision = decide(new, fleet.state, fleet.report(95), fleet.now_s)
    assert not decision.held
    assert decision.wanted[0] >= 9
    assert decision.state.pools[0].speed == 1.0  # nobody knows what theirs was planned to be


def test_a_slice_that_is_out_of_sight_for_a_while_orders_nothing_when_it_is_back() -> None:
    fleet = Fleet(settings(pool(most=50)))
    fleet.run(15, 600)
    before = fleet.decisions[-1].wanted
    # It has worked for a week.
    fleet.slices = [
        [
            replace(entry, prompt_tokens=entry.prompt_tokens + 4 * 10**8, output_tokens=4 * 10**8)
            for entry in each
        ]
        for each in fleet.slices
    ]
    week = {
        entry.replica: (float(entry.prompt_tokens), float(entry.output_tokens))
        for each in fleet.slices
        for entry in each
    }
    fleet.state = replace(fleet.state, traffic=replace(fleet.state.traffic, tokens=week))  # type: ignore[type-var, union-attr]
    report = fleet.report(15)
    fleet.step(15, replace(report, entries=report.entries[1:]))
    assert {fleet.step(15).wanted for _ in range(60)} == {before}


def test_a_router_that_is_silent_for_a_while_orders_nothing_for_its_batches_when_it_is_back() -> None:
    fleet, other = Fleet(settings(pool(most=50)), due=10.0), Demand("other", "m")

    def second(*, silent: bool = False) -> int:
        report = fleet.report(15)
        return fleet.step(
            15, replace(report, demands=[other] if silent else [*report.demands, other])
        ).wanted[0]

    before = [second() for _ in range(3600)][-1]
    second(silent=True)
    assert max(second() for _ in range(60)) <= before + 1


def test_pools_in_another_order_are_not_ordered_for_by_the_size_of_the_old_first() -> None:
    big = pool("big", least=0, most=60)
    small = replace(pool("small", least=0, most=60), steps=((1.0, 0.01), (2.0, 0.01)))
    fleet = Fleet(settings(small, big, cool_down_s=300))
    fleet.run(40, 1200)
    before = fleet.decisions[-1].wanted[0]
    fleet.settings = settings(big, small, cool_down_s=300)
    assert fleet.state
    fleet.state = aligned(fleet.settings, fleet.state, {})
    fleet.slices.reverse()
    fleet.orders.reverse()
    assert fleet.step(40).wanted[0] < before / 3


def test_pools_in_another_order_keep_their_numbers_where_no_decision_can_be_made() -> None:
    """Serve ended slices of a pool that was taken out by the other pool's number."""
    near, far, new = pool("near", least=0, most=3), pool("far", least=0), pool("new", least=0)
    fleet = Fleet(settings(near, far))
    decided = fleet.run(35, 200).state
    assert decided.in_full == decided.wanted == (3, 2)
    moved = settings(far, new, near)
    held = decide(moved, aligned(moved, decided, {"new": 1}), fleet.report(35), fleet.now_s + 3600)
    assert held.held
    assert held.state.in_full == held.wanted == (2, 1, 3)


def test_starts_that_notices_end_are_no_failures_and_the_next_pool_is_asked_once_patience_is_over() -> None:
    """A notice to a starting slice counted as a failed start: three in a row, on spot hosts, and the pool was given up."""
    near, far = pool("near", least=0, patience_s=120), pool("far", least=0)
    fleet = Fleet(settings(near, far), noticed=frozenset([0]))
    fleet.run(rate=5, seconds=110)
    assert fleet.made > 3
    assert not any(decision.failing or "failed" in decision.reason for decision in fleet.decisions)
    assert fleet.counts()[1] == 0
    fleet.run(rate=5, seconds=120)
    assert fleet.serving >= 1
