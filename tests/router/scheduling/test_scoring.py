import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.router.scheduling import scoring
from serving.router.scheduling.scoring import REQUEST_TOKENS, Candidate

pytestmark = pytest.mark.unit

finite = st.floats(0, 1000)
anything = st.one_of(finite, st.sampled_from([math.nan, math.inf, -math.inf, -1.0]))


def candidates(number: st.SearchStrategy[float]) -> st.SearchStrategy[list[Candidate]]:
    each = st.builds(
        Candidate,
        replica=st.text("abcdef", min_size=1, max_size=3),
        load=number,
        prefill_tokens=number,
        waiting=number,
        kv_usage=number,
        pool=st.integers(0, 2),
        saved_tokens=number.map(lambda value: value * 100),
        draw=st.integers(0, 2**64 - 1),
    )
    return st.lists(each, min_size=1, max_size=8, unique_by=lambda candidate: candidate.replica)


@settings(max_examples=25, deadline=None)
@given(candidates(finite), finite, st.randoms())
def test_the_choice_depends_on_the_numbers_alone(
    given_: list[Candidate], at_home: float, random: "Callable[..., None]"
) -> None:
    """Not on the order in which slices are listed."""
    chosen = scoring.choose(given_, at_home)
    random.shuffle(given_)
    assert scoring.choose(given_, at_home).replica == chosen.replica


@settings(max_examples=25, deadline=None)
@given(candidates(finite), finite)
def test_nothing_cached_takes_a_request_past_the_brake(given_: list[Candidate], at_home: float) -> None:
    chosen = scoring.choose(given_, at_home)
    pools = {each.pool for each in given_ if not each.full}
    beside = [each for each in given_ if each.pool == min(pools)] if pools else given_
    least = min(each.load for each in beside)
    assert chosen.replica in {each.replica for each in beside}
    assert chosen.load == least or chosen.load < scoring.most_load(least)


@settings(max_examples=25, deadline=None)
@given(candidates(anything), anything)
def test_numbers_that_are_no_numbers_are_survived(given_: list[Candidate], at_home: float) -> None:
    assert scoring.choose(given_, at_home).replica in {each.replica for each in given_}


def test_a_report_of_nan_is_no_reason_to_take_a_slice_and_none_to_leave_it() -> None:
    assert scoring.choose([Candidate("a", load=1, kv_usage=math.nan), Candidate("b", load=2)]).replica == "a"
    assert (
        scoring.choose([Candidate("a", load=2, saved_tokens=math.nan), Candidate("b", load=1)]).replica == "b"
    )


@settings(max_examples=25, deadline=None)
@given(candidates(finite))
def test_where_nothing_is_cached_the_least_loaded_of_the_preferred_pool_is_chosen(
    given_: list[Candidate],
) -> None:
    plain = [Candidate(each.replica, load=each.load, draw=each.draw) for each in given_]
    assert scoring.choose(plain).load == min(each.load for each in plain)


def test_a_request_more_is_worth_it_for_the_prefill_it_saves() -> None:
    idle = Candidate("idle")
    for more, chosen in ((1, "warm"), (-1, "idle")):
        warm = Candidate("warm", load=2, saved_tokens=2 * REQUEST_TOKENS + more)
        assert scoring.choose([idle, warm]).replica == chosen


def test_of_slices_with_as_many_requests_the_one_with_less_prefill_before_it_is_chosen() -> None:
    slices = [Candidate("a", load=3, prefill_tokens=900), Candidate("b", load=3, prefill_tokens=300)]
    assert scoring.choose(slices).replica == "b"


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2**64 - 1), st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=9, unique=True))
def test_a_slice_less_moves_only_the_conversations_it_had(home: int, slices: list[int]) -> None:
    first = max(slices, key=lambda each: scoring.draw(home, each))
    for gone in slices:
        rest = [each for each in slices if each != gone]
        if gone != first:
            assert max(rest, key=lambda each: scoring.draw(home, each)) == first


def test_conversations_are_drawn_evenly() -> None:
    homes = [scoring.draw(1 << 40 | number, 0) for number in range(4000)]  # neighbours, as bad as names get
    slices = [everywhere * 0x1234567 for everywhere in range(1, 5)]
    taken = [max(range(4), key=lambda index: scoring.draw(home, slices[index])) for home in homes]
    assert all(850 < taken.count(index) < 1150 for index in range(4))


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), anything))
def test_a_slow_slice_weighs_at_most_four_times_and_a_fast_one_never_less(paces: dict[str, float]) -> None:
    found = scoring.weights(paces)
    assert all(1 <= weight <= 4 for weight in found.values())
    assert found.keys() <= paces.keys()


def test_an_idle_slice_keeps_the_pace_it_had() -> None:
    pace = scoring.paced(None, 100, 2, 0.5)
    assert pace == 100
    assert scoring.paced(pace, 0, 0, 0.5) == pace
    assert scoring.paced(pace, -7, 2, 0.5) == pace  # it has restarted
    assert scoring.paced(pace, 200, 2, 0.5) == pytest.approx(120)
