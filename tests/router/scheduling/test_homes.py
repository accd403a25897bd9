import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.router.scheduling.homes import Homes
from serving.router.scheduling.prefix_index import everywhere

pytestmark = pytest.mark.unit


def ring(names: list[str], numbers: Sequence[int] = ()) -> Homes:
    made = Homes()
    for number, name in zip(numbers or map(int, names), names, strict=True):
        made.join(number, everywhere(name.encode()))
    return made


def among(names: list[str]) -> int:
    return sum(1 << int(name) for name in names)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**64 - 1), st.sets(st.integers(0, 60), min_size=2, max_size=20), st.randoms())
def test_a_slice_less_moves_only_the_conversations_it_had(
    conversation: int, slices: set[int], draw: random.Random
) -> None:
    names = [str(number) for number in slices]
    gone = draw.choice(names)
    rest = [name for name in names if name != gone]
    home = ring(names).of(conversation, among(names))
    if home != int(gone):
        assert ring(rest).of(conversation, among(rest)) == home


def test_a_slice_that_comes_or_goes_leaves_the_ring_as_if_it_had_always_been_so() -> None:
    names = [str(number) for number in range(9)]
    homes = ring(names[:8])
    homes.of(1, 1)
    homes.leave(3)
    homes.join(8, everywhere(b"8"))
    rest = [name for name in names if name != "3"]
    afresh = ring(rest)
    for talk in range(200):
        conversation = everywhere(str(talk).encode())
        assert homes.of(conversation, among(rest)) == afresh.of(conversation, among(rest))


def test_every_router_names_the_same_home_whatever_its_own_numbers_are() -> None:
    names = [f"slice-{number}" for number in range(30)]
    here, there = ring(names, range(30)), ring(names, range(99, 69, -1))
    for conversation in map(everywhere, (b"one", b"two", b"three")):
        home = here.of(conversation, (1 << 30) - 1)
        assert home is not None
        assert there.of(conversation, (1 << 100) - 1) == 99 - home


def test_conversations_are_spread() -> None:
    names = [str(number) for number in range(10)]
    homes = ring(names)
    taken = Counter(homes.of(everywhere(str(talk).encode()), among(names)) for talk in range(5000))
    assert len(taken) == 10
    assert max(taken.values()) < 1.4 * 500


def test_no_home_is_named_that_is_not_among_the_slices_asked_for() -> None:
    homes = ring(["0", "1", "2"])
    assert homes.of(7, 0) is None
    assert {homes.of(everywhere(str(talk).encode()), 0b010) for talk in range(50)} <= {1, None}
    assert Homes().of(7, 1) is None
