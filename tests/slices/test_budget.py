"""The budget holds whatever asks for slices: rolls, spares, pools that are handed over. On Serve's own DeploymentState."""

import math

import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.serve_deployment import APPLICATION, Cluster

from serving.slices import controller
from serving.slices.rollout import Budget

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),  # Ray's
]


def serving(slices: int, **cluster: object) -> Cluster:
    """A cluster with hardware enough on which so many slices serve version `a`."""
    there = Cluster(hardware=100, start_s=40, **cluster)  # type: ignore[arg-type]
    there.deployed().deploy("a", slices)
    there.run(60, 5)
    assert there.deployed().serving("a") == slices
    there.held.clear()
    return there


def test_a_pool_is_handed_over_within_the_budget() -> None:
    there = serving(6, budget={"slices": 6})
    following = there.deployed("next")
    following.deploy("b", 6, pool="other")
    there.configure("next")
    there.run(10)
    assert following.serving() + there.deployed().serving() == 5
    there.run(6 * 80)
    assert following.serving() == 6
    assert there.deleted == ["llama"]
    assert max(slices for slices, _ in there.held) == 6


def test_a_spare_slice_that_the_budget_has_no_room_for_is_not_ordered_and_the_roll_goes_on() -> None:
    there = serving(4, budget={"slices": 4})
    there.deployed().deploy("b", 4)
    there.run(4 * 80)
    assert there.deployed().serving("b") == 4
    assert there.deployed().lowest == 3
    assert max(slices for slices, _ in there.held) == 4


def test_a_pool_whose_successor_can_not_start_loses_one_slice_to_it() -> None:
    there = serving(6, budget={"slices": 6})
    there.broken = {"b"}
    there.deployed("next").deploy("b", 6, pool="other")
    there.configure("next")
    there.run(3000, 5)
    assert there.deployed().serving() == 5


def test_a_pool_whose_successor_gets_no_hardware_loses_one_slice_to_it() -> None:
    there = serving(6, budget={"slices": 6})
    there.hardware = 5
    there.deployed("next").deploy("b", 6, pool="other")
    there.configure("next")
    there.run(3000, 5)
    assert there.deployed().serving() == 5


def test_a_pool_stays_where_all_of_it_would_make_no_room() -> None:
    """Another model has what the budget does not give to this one."""
    there = serving(2, budget={"dollars_per_hour": 100.0}, prices={"pool": 10.0, "other": 30.0, "big": 80.0})
    there.deployed("another").deploy("x", 1, pool="big")
    there.run(60, 5)
    there.deployed("next").deploy("b", 2, pool="other")
    there.configure("next", "another")
    there.run(600, 5)
    assert there.deployed().serving() == 2
    assert max(dollars for _, dollars in there.held) <= 100


def test_scaling_is_told_of_slices_that_leave() -> None:
    there = serving(6, budget={"slices": 9}, prices={"pool": 2.0})
    following = there.deployed("next")
    following.deploy("b", 1, pool="other", most=9)
    there.configure("next")
    there.in_full["next"] = 6
    there.run(1)
    (deployments,) = [each for each in controller._INSTALLED if there.deployed().state in each._states]
    assert deployments.leaving(APPLICATION) == (6, 12.0)
    assert deployments.leaving("another") == (0, 0.0)
    there.configure("llama", "next")  # it is back, beside the other
    assert deployments.leaving(APPLICATION) == (0, 0.0)


def test_what_scaling_wanted_of_a_pool_goes_with_it() -> None:
    there = serving(1)
    controller.tell_wanted(APPLICATION, "llama", 7)
    there.configure("router")
    there.run(1)
    assert (APPLICATION, "llama") not in controller._WANTED


@examples(max_examples=15, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from([1, "30%", 4]),
    st.sampled_from([None, 1.0, 3.0]),
    st.sets(st.sampled_from(["b", "c"]), max_size=1),
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
)
@example(3, 0, 6, 3, 4, None, set(), [1])
@example(6, 0, 2, 3, 4, 3.0, {"b"}, [60, 1])
def test_no_roll_and_no_handover_takes_more_than_the_budget(
    first: int,
    free: int,
    following: int,
    spare: int,
    at_once: int | str,
    price: float | None,
    broken: set[str],
    waits_s: list[int],
) -> None:
    """Pools and versions in any order, at any moment of those before; and in the end all slices of the last one serve."""
    most = max(first, following) + free
    prices = {"pool": 1.0, "other": price or 0.0}
    dollars = max(first * 1.0, following * (price or 1.0)) + free if price else math.inf
    budget = {"slices": most} | ({"dollars_per_hour": dollars} if price else {})
    there = serving(first, budget=budget, prices=prices)
    there.broken = set(broken)
    pools = [("llama", "b", first, "pool"), ("next", "b", following, "other"), ("llama", "c", first, "pool")]
    for (name, version, slices, pool), wait_s in zip(pools, waits_s, strict=False):
        there.deployed(name).deploy(version, slices, pool, at_once=at_once, spare=spare)
        there.configure(name)
        there.deleted.clear()
        there.run(wait_s, 5)
    name, _, slices, _ = pools[min(len(pools), len(waits_s)) - 1]
    there.broken = set()
    there.run(4000, 20)
    assert there.deployed(name).serving() == slices
    assert max(count for count, _ in there.held) <= most
    assert max(cost for _, cost in there.held) <= dollars + 1e-6


@given(
    st.integers(0, 20),
    st.floats(0, 100),
    st.floats(0.1, 10),
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 50))),
)
def test_room_is_what_the_budget_leaves(
    most: int, dollars: float, price: float, held: list[tuple[int, float]]
) -> None:
    room = Budget(most, dollars).room(price, held)
    assert room >= 0
    if room:
        assert sum(slices for slices, _ in held) + room <= most
        assert sum(each for _, each in held) + room * price <= dollars * (1 + 1e-6) + 1e-6
    assert Budget().room(price, held) == math.inf
