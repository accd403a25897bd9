"""Two models of one budget through any history: load, losses, deploys, a store that is away, clocks, processes that come back."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from ray.serve._private.common import ReplicaState
from support.controlled_fleet import RATE, ControlledFleet, Model, pool

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),  # Ray's
]

Event = tuple[str, int, float]  # what happens, to which model, and a number whose meaning is the event's
# Pools of one shape: Ray places the slices of each on whatever is free.
shared = partial(pool, hardware="h")


def happen(fleet: ControlledFleet, event: Event) -> None:
    what, at, number = event
    model = fleet.models[at % len(fleet.models)]
    if what == "load":
        model.rate = number
    elif what in ("losses", "notice", "hosts"):
        befall(fleet, model, what, number)
    elif what in ("scaling", "controller", "router"):
        come_back(fleet, what, number)
    elif what == "stock-out":
        fleet.cluster.closed ^= {model.pools[0].key}
    elif what == "clock":
        fleet.jumped_s += 3600 if number > 20 else -5
    elif what == "store":
        fleet.away_s = 3 * int(number) % 70
    elif what == "silence":
        fleet.silent |= {entry.replica: entry.beat for entry in fleet.records()[: int(number) % 3]}
    else:
        deploy(fleet, model, what, number)


def befall(fleet: ControlledFleet, model: Model, what: str, number: float) -> None:
    if what == "hosts":
        fleet.cluster.faulty |= {str(int(number) % 4), str(int(number) % 3)}
        return
    serving = [(each, replica) for each in fleet.of(model) for replica in each.replicas(ReplicaState.RUNNING)]
    for each, replica in serving[: 1 + int(number) % 3]:
        if what == "losses":
            each.lose(replica)
        else:
            each.notice(replica, in_s=number)


def come_back(fleet: ControlledFleet, what: str, number: float) -> None:
    if what == "scaling":
        fleet.restart()
    elif what == "controller":
        fleet.recover()
    else:
        fleet.restart_router(away_s=int(number) % 40)


def deploy(fleet: ControlledFleet, model: Model, what: str, number: float) -> None:
    if what == "engine":
        model.version = f"version {number}"
        fleet.cluster.broken ^= {model.version} if number > 45 else set()
    elif what == "pools":
        model.pools = tuple(replace(each, max=1 + int(number) % 6) for each in reversed(model.pools))
    elif len(fleet.models) > 1:
        fleet.models.remove(model)
    else:
        fleet.models.append(Model("third", (shared("y"), shared("z"))))
    fleet.deploy()


events = st.tuples(
    st.sampled_from(
        [
            *("load", "load", "losses", "notice", "scaling", "controller", "router", "hosts"),
            *("stock-out", "clock", "store", "silence", "engine", "pools", "models"),
        ]
    ),
    st.integers(0, 1),
    st.sampled_from([0.0, 3.0, 20.0, 45.0, 90.0]),
)
histories = st.lists(st.tuples(events, st.sampled_from([1, 7, 40])), min_size=1, max_size=7)


@example(6, 4, [(("load", 0, 45.0), 80)])  # orders went to the other pool for a second and came back
@pytest.mark.slow
@examples(max_examples=4)
@given(st.sampled_from([None, 3, 6]), st.sampled_from([4, 20]), histories)
def test_after_any_history_the_needed_slices_serve_and_stay(
    budget: int | None, hardware: int, history: Sequence[tuple[Event, int]]
) -> None:
    """Never above the budget; once the world is quiet, every model has what it needs and the limits give, and nothing moves."""
    models = [Model("first", (shared("x"), shared("y"))), Model("second", (shared("x"),))]
    fleet = ControlledFleet(models, hardware=hardware, budget=budget, start_s=5, drain_s=3)
    for event, seconds in history:
        happen(fleet, event)
        fleet.run(seconds)
    fleet.cluster.closed, fleet.cluster.broken, fleet.silent = set(), set(), {}
    fleet.cluster.faulty, fleet.cluster.failures = set(), {}
    for model in fleet.models:
        model.rate = min(model.rate, 45.0)
    fleet.run(240)
    moved = len(fleet.ended)
    fleet.run(60)
    assert max(slices for slices, _ in fleet.cluster.held) <= (budget or hardware * 9)
    assert len(fleet.ended) == moved
    assert sum(before != after for before, after in pairwise(fleet.targets[-60:])) <= 1
    limit = min(hardware, budget or hardware)
    serving = {model.name: fleet.serving(model) for model in fleet.models}
    for model in fleet.models:
        needed = min(math.ceil(model.rate / RATE), sum(each.max for each in model.pools))
        assert serving[model.name] >= min(needed, 1)
        assert serving[model.name] >= needed or sum(serving.values()) >= limit


def test_orders_that_no_pool_delivers_stay_in_each_for_its_patience() -> None:
    """Both pools were tried again at once: the second one's orders came and went within a second."""
    model = Model("first", (shared("x"), shared("y")), rate=45.0)
    fleet = ControlledFleet([model], hardware=4, budget=6, start_s=5, drain_s=3)
    fleet.run(1200)
    moves = [at for at, (before, after) in enumerate(pairwise(fleet.targets)) if before != after]
    turns = [after - before for before, after in pairwise(move for move in moves if move > 60)]
    assert len(turns) >= 4
    assert min(turns) >= 60
    assert {wanted["first-y"] for wanted in fleet.targets[-600:]} == {0, 2}
    assert not fleet.ended


def test_requests_whose_clients_left_while_they_waited_are_not_taken_for_short_ones() -> None:
    """They counted as answered without a token: slices seemed quick, and three of five stayed while 300 requests waited."""
    model = Model("first", (pool("x"),))
    fleet = ControlledFleet([model], hardware=8, start_s=15)
    model.rate = 45.0
    fleet.cluster.closed = {"x"}
    fleet.run(100)
    fleet.cluster.closed = set()
    fleet.run(60)
    assert fleet.serving(model) >= 5
    fleet.run(60)
    assert model.queue < 1


def test_starts_of_a_pool_that_fails_and_orders_of_the_next_do_not_end_each_other_for_ever() -> None:
    """Each second pool's order that the budget let in was given up for the first pool's start that it had just ended."""
    model = Model("first", (pool("x"), pool("y")), rate=15.0)
    fleet = ControlledFleet([model], hardware=20, budget=4, start_s=3)
    fleet.run(60)
    model.rate = 45.0
    fleet.cluster.faulty = {str(slice_) for slice_ in range(20)}
    fleet.run(30)
    fleet.cluster.faulty, fleet.cluster.failures = set(), {}
    fleet.run(60)
    assert fleet.serving(model) == 4


def fewest_serving(fleet: ControlledFleet, model: Model, seconds: int) -> int:
    """How few slices of a model served at any time of what follows."""
    fewest = fleet.serving(model)
    for _ in range(seconds):
        fleet.run(1)
        fewest = min(fewest, fleet.serving(model))
    return fewest


def test_a_pool_that_the_yaml_has_no_more_serves_until_another_that_had_no_slice_does() -> None:
    """What scaling had said of the other counted on the slices of the first: all of them went in the same look."""
    first, other = pool("x"), pool("y")
    model = Model("first", (first, other), rate=25.0)
    fleet = ControlledFleet([model], hardware=20, start_s=20)
    fleet.run(150)
    before = fleet.serving(model)
    model.pools = (other,)
    fleet.deploy()
    assert fewest_serving(fleet, model, 100) == before >= 3
    assert fleet.serving(model) == before


def test_the_only_pool_that_serves_and_leaves_the_yaml_does_so_though_the_controller_ends_meanwhile() -> None:
    """Scaling that had lost its memory wanted one slice of the other before it knew a rate: three of four went at once."""
    first, other = pool("x"), pool("y")
    model = Model("first", (first, other), rate=25.0)
    fleet = ControlledFleet([model], hardware=20, start_s=40)
    fleet.run(250)
    before = len([entry for entry in fleet.records() if entry.serves])
    model.pools = (other,)
    fleet.deploy()
    fleet.run(1)
    fleet.recover()
    fewest = before
    for _ in range(150):
        fleet.run(1)
        fewest = min(fewest, len([entry for entry in fleet.records() if entry.serves]))
    assert fewest == before >= 3
    assert fleet.serving(model) == before


@pytest.mark.parametrize("in_front", [True, False])
def test_slices_of_a_pool_serve_until_those_that_the_min_of_another_asks_for_do(in_front: bool) -> None:
    """Two of three went as soon as the YAML had a pool more with a `min`, minutes before its slices could serve."""
    first = pool("x")
    model = Model("first", (first,), rate=25.0)
    fleet = ControlledFleet([model], hardware=20, start_s=20)
    fleet.run(150)
    before = fleet.serving(model)
    more = pool("y", 2, 4)
    model.pools = (more, first) if in_front else (first, more)
    fleet.deploy()
    assert fewest_serving(fleet, model, 100) == before >= 3
    assert fleet.serving(model) == before


def test_requests_of_routers_that_are_out_of_sight_are_not_taken_for_ever_shorter_ones() -> None:
    """Their slices gave no token meanwhile: 4,000 requests a second of none. A slice then passed for fifty, for ten minutes."""
    model = Model("first", (pool("x"),), rate=20.0)
    fleet = ControlledFleet([model], hardware=6, start_s=3)
    fleet.run(120)
    before = fleet.serving(model)
    assert before >= 2
    fleet.restart_router(away_s=20)
    fleet.run(120)
    assert {wanted["first-x"] for wanted in fleet.targets[-120:]} == {before}


@pytest.mark.parametrize("away_s", [50, 70])
def test_slices_stay_where_routers_restart_while_the_store_is_away(away_s: int) -> None:
    """The routers' new counters showed no request for a minute, and the need of before was older than a cool-down."""
    model = Model("first", (pool("x"),), rate=25.0)
    fleet = ControlledFleet([model], hardware=20, start_s=3)
    fleet.run(200)
    before = fleet.serving(model)
    assert before >= 3
    fleet.away_s = away_s
    fleet.run(20)
    fleet.restart_router(away_s=1)
    fleet.run(away_s + 30)
    assert {wanted["first-x"] for wanted in fleet.targets[-away_s - 50 :]} == {before}
    assert not [ended_s for ended_s, _ in fleet.ended if ended_s > 200]
