"""What models of one budget give up for one another, as a function of their shares, and in a controller."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.controlled_fleet import ControlledFleet, Model, pool

from serving.scaling.capacity import Pool
from serving.scaling.policy import Room
from serving.scaling.sharing import Share
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
