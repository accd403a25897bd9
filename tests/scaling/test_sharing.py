"""What models of one budget give up for one another, as a function of their shares, and in a controller."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.controlled_fleet import ControlledFleet, Model, pool

from serving.scaling.capacity import Pool
from serving.scaling.policy import Room
from serving.scaling.sharing import Given, Share, hardware_given
from serving.scaling.sharing import given as given_up

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),  # Ray's
]


def share(
    asked: int, wanted: int, room: float, *, late: int = 0, least: int = 0, price: float = 0.0
) -> Share:
    pools = (pool("x", least, price=price),)
    return Share(pools, Room(slices=room), (asked,), (wanted,), (late,))


def test_a_model_without_a_slice_gets_its_first_from_the_one_that_has_most() -> None:
    shares = {"a": share(3, 3, 3), "b": share(5, 5, 5), "c": share(4, 0, 0)}
    assert given_up(shares) == {"b": (1, 0)}


def test_a_model_keeps_its_last_slice_and_its_min() -> None:
    assert given_up({"a": share(1, 1, 1), "b": share(1, 0, 0)}) == {}
    assert given_up({"a": share(3, 3, 3, least=3), "b": share(1, 0, 0)}) == {}
    assert given_up({"a": share(2, 2, 2), "b": share(1, 0, 0), "c": share(1, 0, 0)}) == {"a": (1, 0)}


def test_orders_out_of_patience_make_room_for_what_another_lacks() -> None:
    assert given_up({"a": share(5, 5, 5, late=4), "b": share(4, 1, 1)}) == {"a": (3, 0)}
    assert given_up({"a": share(5, 5, 5), "b": share(4, 1, 1)}) == {}


def test_late_orders_do_not_go_where_hardware_does_not_come_either() -> None:
    """Two models whose pools had run out handed the late orders of both to and fro."""
    out = replace(share(4, 1, 1, late=1), out=(True,))
    assert given_up({"a": share(5, 5, 5, late=4), "b": out}) == {}
    assert given_up({"a": share(5, 5, 5, late=4), "b": replace(share(4, 0, 0), out=(True,))}) == {"a": (1, 0)}


def unbounded(wanted: int, present: int, *, late: int = 0, least: int = 0, key: str = "x") -> Share:
    return Share((pool(key, least),), Room(), (wanted,), (wanted,), (late,), present=(present,))


def test_a_model_that_hardware_keeps_at_zero_gets_a_slice_of_its_pool_from_the_one_that_has_most() -> None:
    waits = unbounded(2, 0, late=1)
    others = {"a": unbounded(4, 4), "b": unbounded(7, 6, late=1), "c": unbounded(9, 9, key="other")}
    assert hardware_given({**others, "waits": waits}, {}) == {"waits": Given("b", {"x": 5})}
    assert hardware_given({**others, "waits": waits}, {"waits": Given("b", {"x": 5})}) == {
        "waits": Given("b", {"x": 5})
    }
    assert hardware_given({**others, "waits": unbounded(2, 1, late=1)}, {"waits": Given("b", {"x": 5})}) == {}


def test_no_hardware_is_given_up_for_orders_within_their_patience_for_failed_starts_or_below_min() -> None:
    others = {"a": unbounded(4, 4)}
    assert hardware_given({**others, "waits": unbounded(2, 0)}, {}) == {}
    failed = replace(unbounded(2, 0, late=2), failing=True)
    assert hardware_given({**others, "waits": failed}, {}) == {}
    least = {"a": unbounded(4, 4, least=4), "b": unbounded(1, 1)}
    assert hardware_given({**least, "waits": unbounded(2, 0, late=2)}, {}) == {}


def test_no_slice_stops_where_that_would_not_be_enough() -> None:
    small, large = pool("small", price=10.0), pool("large", price=80.0)

    def dear(pool: Pool, asked: int, wanted: int, room: float) -> Share:
        return Share((pool,), Room(dollars_per_hour=room), (asked,), (wanted,), (0,))

    assert given_up({"a": dear(small, 5, 5, 50), "b": dear(large, 1, 0, 0)}) == {}
    assert given_up({"a": dear(small, 9, 9, 90), "b": dear(large, 1, 0, 0)}) == {"a": (0, 80)}


counts = st.lists(st.integers(0, 6), min_size=2, max_size=2)


@given(
    st.lists(st.tuples(counts, counts, counts, st.integers(0, 2)), min_size=1, max_size=4), st.integers(0, 12)
)
def test_nobody_gives_its_min_or_its_last_slice(
    models: Sequence[tuple[list[int], list[int], list[int], int]], budget: int
) -> None:
    total = sum(sum(wanted) for _, wanted, _, _ in models)
    shares = {
        str(at): Share(
            (pool("x", least), pool("y")), Room(slices=budget - total + sum(wanted)), asked, wanted, late
        )
        for at, (asked, wanted, late, least) in enumerate(models)
    }
    for name, (slices, _) in given_up(shares).items():
        wanted = shares[name].wanted
        beyond = sum(max(0, count - of.min) for count, of in zip(wanted, shares[name].pools, strict=True))
        assert 0 <= slices <= min(beyond, max(0, sum(wanted) - 1))


@examples(max_examples=3)
@given(st.integers(2, 5), st.booleans())
def test_no_model_in_use_stays_without_a_slice_while_another_has_several(
    budget: int, undelivered: bool
) -> None:
    """Orders of the first that its pool does not deliver kept the second at zero for ever; so did slices of it that serve."""
    first, second = Model("first", (pool("x"),)), Model("second", (pool("y"),))
    fleet = ControlledFleet([first, second], budget=budget, start_s=5, drain_s=2)
    first.rate = 80
    fleet.run(20)
    assert fleet.serving(first) == budget
    if undelivered:
        fleet.cluster.closed = {"x"}
        for each in fleet.of(first):
            each.lose(each.state._replicas.get()[0])
    second.rate = 5
    fleet.run(30)
    assert fleet.serving(second) == 1
    assert max(slices for slices, _ in fleet.cluster.held) <= budget
    before = len(fleet.ended)
    fleet.run(20)
    assert len(fleet.ended) == before
    second.rate = 0
    fleet.run(50)
    assert fleet.targets[-1] == {"first-x": budget, "second-y": 0}


@pytest.mark.parametrize("last", [True, False])
def test_one_slice_goes_for_the_first_of_another_model_wherever_that_stands_in_the_yaml(last: bool) -> None:
    """Where the model without one stood first, two slices went: it still lacked the first of them at the next look."""
    gives, lacks = Model("gives", (pool("x"),), rate=45.0), Model("lacks", (pool("x"),))
    fleet = ControlledFleet(
        [gives, lacks] if last else [lacks, gives], hardware=20, budget=5, start_s=5, drain_s=2
    )
    fleet.run(120)
    lacks.rate = 5.0
    fleet.run(60)
    assert (fleet.serving(gives), fleet.serving(lacks)) == (4, 1)
    assert len(fleet.ended) == 1
    assert {wanted["gives-x"] for wanted in fleet.targets[-60:]} == {5, 4}


def test_no_slice_is_given_back_for_a_pool_whose_hosts_are_others() -> None:
    """Where hosts carry the pool that they were bought for, no slice of another pool is placed on them."""
    bought, waits = pool("x", hardware="h"), pool("y", hardware="h")
    waiting = Share([waits], Room(), [1], [1], [1], present=[0])
    shared, apart = (
        Share([bought], Room(), [3], [3], [0], present=[3], apart=apart) for apart in (False, True)
    )
    assert shared.without_one_for(waiting, {}) == {"x": 2}
    assert apart.without_one_for(waiting, {}) == {}
    assert apart.without_one_for(replace(waiting, pools=[bought]), {}) == {"x": 2}


@pytest.mark.parametrize("bought", ["x", "y"])
def test_a_model_gets_hardware_that_another_has_taken_all_of(bought: str) -> None:
    """Without a budget, a model at zero waited for ever beside one that wanted more slices than there are.

    Ray places slices by their shape, however their pools are bought.
    """
    first, second = Model("first", (pool("x"),)), Model("second", (pool(bought, hardware="x"),))
    fleet = ControlledFleet([first, second], hardware=4, start_s=5, drain_s=2)
    first.rate = 90
    fleet.run(20)
    second.rate = 5
    fleet.run(60)
    assert (fleet.serving(first), fleet.serving(second)) == (4, 0)
    fleet.run(60)
    assert (fleet.serving(first), fleet.serving(second)) == (3, 1)
    assert len(fleet.ended) == 1
    said = [decision.reason for decision in fleet.store.decisions]
    assert any("second, which waits for hardware, allows" in reason for reason in said)
    fleet.run(120)
    assert len(fleet.ended) == 1


def test_a_model_with_a_fixed_number_that_lost_its_slice_gets_hardware_from_one_that_scales() -> None:
    """Serve never asks scaling for such a model, and it waited for ever beside one that had taken all hardware."""
    scales, fixed = Model("scales", (pool("x"),)), Model("fixed", (pool("y", 1, 1, hardware="x"),), rate=5)
    fleet = ControlledFleet([scales, fixed], hardware=4, start_s=5, drain_s=2)
    fleet.run(10)
    scales.rate = 90
    fleet.run(20)
    assert (fleet.serving(scales), fleet.serving(fixed)) == (3, 1)
    (lost,) = fleet.of(fixed)
    fleet.cluster.closed = {"y"}
    lost.lose(lost.state._replicas.get()[0])
    fleet.run(10)
    fleet.cluster.closed = set()
    fleet.run(10)
    assert (fleet.serving(scales), fleet.serving(fixed)) == (4, 0)
    fleet.run(100)
    assert (fleet.serving(scales), fleet.serving(fixed)) == (3, 1)
    assert {decision.model for decision in fleet.store.decisions} == {"scales"}


@pytest.mark.parametrize("most", [3, 5])
def test_a_model_that_lost_all_of_its_min_gets_each_slice_of_it_from_one_that_scales(most: int) -> None:
    """It got the first; the others waited for ever, though `min` promises them and the other model had two beyond its own."""
    scales, lost = (
        Model("scales", (pool("x", 1),)),
        Model("lost", (pool("y", 3, most, hardware="x"),), rate=5),
    )
    fleet = ControlledFleet([scales, lost], hardware=6, start_s=5, drain_s=2)
    fleet.run(20)
    scales.rate = 90
    (there,) = fleet.of(lost)
    fleet.cluster.closed = {"y"}
    for replica in there.state._replicas.get():
        there.lose(replica)
    fleet.run(40)
    fleet.cluster.closed = set()
    fleet.run(10)
    assert (fleet.serving(scales), fleet.serving(lost)) == (6, 0)
    fleet.run(200)
    assert (fleet.serving(scales), fleet.serving(lost)) == (3, 3)
    assert min(wanted["scales-x"] for wanted in fleet.targets[-200:]) == 3


def test_the_budget_s_part_of_a_model_with_a_fixed_number_is_nobody_else_s() -> None:
    scales, fixed = Model("scales", (pool("x"),), rate=90), Model("fixed", (pool("y", 3, 3),))
    fleet = ControlledFleet([scales, fixed], budget=5, start_s=5, drain_s=2)
    fleet.run(60)
    assert (fleet.serving(scales), fleet.serving(fixed)) == (2, 3)
    assert fleet.targets[-1] == {"scales-x": 2}
    assert max(slices for slices, _ in fleet.cluster.held) <= 5


def test_a_model_gets_hardware_of_another_s_pool_though_that_one_has_slices_of_a_further_pool() -> None:
    """The slice that would stop first is of the further pool, and the second waited for ever."""
    near, far = pool("near", hardware="x"), pool("far", hardware="y")
    both = Share((near, far), Room(), (6, 4), (5, 2), (0, 0), present=(5, 2))
    waits = Share((near,), Room(), (1,), (1,), (1,), present=(0,))
    assert hardware_given({"both": both, "waits": waits}, {}) == {"waits": Given("both", {"near": 4})}
    same = replace(both, pools=(near, replace(far, hardware="x")))
    assert hardware_given({"both": same, "waits": waits}, {}) == {
        "waits": Given("both", {"near": 5, "far": 1})
    }


def test_what_a_model_gives_does_not_go_to_its_own_orders() -> None:
    first = Model("first", (pool("x", hardware="h"), pool("y", hardware="h")))
    second = Model("second", (pool("x", hardware="h"),))
    fleet = ControlledFleet([first, second], hardware=6, start_s=5, drain_s=2)
    first.rate = 80
    fleet.run(90)
    second.rate = 5
    fleet.run(180)
    assert fleet.serving(second) == 1
    assert len(fleet.ended) == 1
