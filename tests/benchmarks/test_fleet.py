"""The fleet simulator: conservation of requests, what slices cost, and rivals held to what they stand for."""

import random
from types import SimpleNamespace

import pytest
from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from support.fleet_of import pool

from benchmarks.fleet import __main__ as benchmark
from benchmarks.fleet import fluid, requests, traces
from benchmarks.fleet.rivals import Fixed, Ours, QueueLength, ServeDefault, View
from benchmarks.fleet.supply import DRAIN_S, Market, Supply
from serving.scaling.capacity import Lengths
from serving.scaling.policy import Report, Settings

pytestmark = pytest.mark.unit
MARKET = Market(delivery_s=60, start_s=30)


def world(market: Market = MARKET) -> fluid.World:
    return fluid.World(
        (pool(most=20, dollars_per_hour=10),), (market,), Lengths(100, 100), ttft_s=1, itl_s=0.02
    )


def test_a_fleet_that_is_large_enough_answers_everything_in_time() -> None:
    found = fluid.run(world(), traces.steady(20, 0.2), Fixed(5), [5])
    assert found.goodput == 1
    assert found.slice_hours == pytest.approx(1.0, abs=0.01)
    assert found.dollars == pytest.approx(10, abs=0.1)


def test_a_fleet_half_as_large_as_its_load_refuses_half() -> None:
    found = fluid.run(world(), traces.steady(40, 0.2), Fixed(2), [2])
    assert found.refused / found.arrived == pytest.approx(0.5, abs=0.05)
    assert found.goodput < 0.1


def test_the_fluid_and_single_requests_agree_on_both_sides_of_what_a_fleet_takes() -> None:
    for slices, load in ((4, 20), (2, 40)):
        trace = traces.steady(load, 0.02)
        flowing = fluid.run(world(), trace, Fixed(slices), [slices])
        single = requests.run(world(), trace, Fixed(slices), [slices])
        assert single.goodput == pytest.approx(flowing.goodput, abs=0.1)


def test_our_policy_follows_a_load_that_doubles() -> None:
    there = world()
    trace = traces.Trace("step", 1200, lambda at: 15 if at < 300 else 40)
    found = fluid.run(there, trace, Ours(Settings("model", there.pools), [2]), [2])
    assert found.timeline[4].serving <= 3
    assert 5 <= found.timeline[-1].serving <= 7


def test_slices_come_late_go_at_once_and_are_paid_for_while_they_drain() -> None:
    supply = Supply([pool()], [Market(delivery_s=100, start_s=50)], random.Random(1))
    supply.want([2], 0.0)
    assert [len(each) for each in supply.orders] == [2]
    for second in range(200):
        supply.advance(float(second), 1.0)
    assert supply.serving == [2]
    paid_s = supply.slice_s
    supply.want([1], 200.0)
    assert supply.slice_s == paid_s + DRAIN_S
    supply.advance(201.0, 0.0)
    assert supply.serving == [1]


def test_a_pool_that_is_away_delivers_nothing_until_it_is_back() -> None:
    supply = Supply([pool()], [Market(delivery_s=10, start_s=0, away=((0, 500),))], random.Random(1))
    supply.want([1], 0.0)
    for second in range(499):
        supply.advance(float(second), 1.0)
    assert supply.units == [[]]
    supply.advance(500.0, 1.0)
    assert len(supply.units[0]) == 1


def view(now_s: float, ongoing: float, serving: int, queued: float = 0) -> View:
    return View(now_s, Report([]), serving, ongoing, queued)


@pytest.mark.parametrize(("ongoing", "replicas"), [(3, 1), (35, 2), (80, 4), (9, 8)])
def test_serve_s_default_wants_what_serve_s_own_code_wants(ongoing: float, replicas: int) -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 10, get_upscaling_factor=lambda: 1)
    context = SimpleNamespace(
        current_num_replicas=replicas, target_num_replicas=replicas, total_num_requests=ongoing, config=config
    )
    desired, _ = replica_queue_length_autoscaling_policy(context)
    rival = ServeDefault(1, 100, target=10, current=replicas, upscale_delay_s=0, downscale_delay_s=0)
    assert rival.wanted(view(0, ongoing, replicas))[0] == -(-desired // 1)


def test_serve_s_default_waits_before_it_grows_and_longer_before_it_shrinks() -> None:
    rival = ServeDefault(1, 100, target=10, current=2)
    counts = [rival.wanted(view(at, 50 if at < 100 else 0, 2))[0] for at in range(0, 900, 10)]
    assert counts[2] == 2
    assert counts[4] == 5
    assert counts[60] == 5
    assert counts[-1] == 1


def test_the_autoscaler_on_queues_at_most_doubles_and_keeps_the_most_of_five_minutes() -> None:
    rival = QueueLength(1, 100, target=2, current=8)
    assert rival.wanted(view(0, 0, 8, queued=1000)) == (16,)
    assert rival.wanted(view(200, 0, 16, queued=0)) == (16,)
    assert rival.wanted(view(400, 0, 16, queued=0)) == (1,)


@pytest.mark.parametrize(
    "trace",
    [traces.steady(10), traces.diurnal(10), traces.bursts(10), traces.spike(10)],
    ids=lambda one: one.name,
)
def test_traces_are_the_same_each_time_and_never_negative(trace: traces.Trace) -> None:
    rates = [trace.rate(float(at)) for at in range(0, int(trace.seconds), 600)]
    assert min(rates) > 0
    assert rates == [trace.rate(float(at)) for at in range(0, int(trace.seconds), 600)]


def test_the_benchmark_s_world_is_a_deployment_of_this_repository() -> None:
    (priced,) = benchmark.world(most=7).pools
    assert priced.max == 7
    assert priced.dollars_per_hour > 0
