import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.exhaustive_choice import Candidate, best

from serving.router.scheduling import scoring
from serving.router.scheduling.bit_columns import members
from serving.router.scheduling.scoring import REQUEST, Loads, Saved

pytestmark = pytest.mark.unit

SESSION, ADAPTER = 32, 64

finite = st.floats(0, 1000)
anything = st.one_of(finite, st.sampled_from([math.nan, math.inf, -math.inf, -1.0]))
# Few values, so that there are equals.
candidates = st.lists(
    st.builds(
        Candidate,
        load=st.integers(0, 30).map(lambda requests: requests * REQUEST // 2),
        prefill=st.sampled_from([0, 0, 4, 30, 190]),
        waiting=st.sampled_from([0, 0, 0, 1, 3, 4, 9]),
        matched=st.sampled_from([0, 0, 4, 32, 40, 250]),
        marks=st.sampled_from([0, 0, 0, SESSION, ADAPTER, SESSION + ADAPTER]),
    ),
    min_size=1,
    max_size=40,
)


def loads(given_: list[Candidate]) -> Loads:
    made = Loads()
    for place, candidate in enumerate(given_):
        made.load.set(place, candidate.load)
        made.cost.set(place, candidate.load + candidate.prefill)
        made.waiting.set(place, candidate.waiting)
    return made


def saved(given_: list[Candidate], home: int | None = None, at_home: int = 0) -> Saved:
    def having(what: str, tokens: int) -> int:
        return sum(1 << place for place, each in enumerate(given_) if getattr(each, what) == tokens)

    levels = sorted({candidate.matched for candidate in given_} - {0}, reverse=True)
    both = having("marks", SESSION + ADAPTER)
    marks = ((SESSION, having("marks", SESSION) | both), (ADAPTER, having("marks", ADAPTER) | both))
    return Saved([(tokens, having("matched", tokens)) for tokens in levels], marks, lambda: home, at_home)


def chosen(given_: list[Candidate], home: int | None = None, at_home: int = 0) -> dict[int, int]:
    """The places of the chosen, and what each is said to save."""
    choice = scoring.choose((1 << len(given_)) - 1, loads(given_), saved(given_, home, at_home))
    return dict.fromkeys(members(choice.slices), choice.saved)


@settings(max_examples=300, deadline=None)
@given(candidates, st.integers(0, 39), st.sampled_from([0, 6, 32, 300]))
def test_the_choice_is_that_of_a_look_at_every_slice(
    given_: list[Candidate], home: int, at_home: int
) -> None:
    expected = best(given_, home, at_home)
    found = chosen(given_, home, at_home)
    assert found.items() <= expected.items()
    assert found


@settings(max_examples=50, deadline=None)
@given(candidates, st.sampled_from([0, 32, 300]))
def test_nothing_cached_takes_a_request_past_the_brake(given_: list[Candidate], at_home: int) -> None:
    least = min(each.load for each in given_)
    for place in chosen(given_, 0, at_home):
        assert given_[place].load == least or given_[place].load < scoring.most_load(least)


def test_slices_that_are_left_out_are_not_chosen() -> None:
    given_ = [Candidate(matched=250), Candidate(load=8), Candidate(load=16)]
    assert members(scoring.choose(0b110, loads(given_), saved(given_)).slices) == [1]


def test_a_request_more_is_worth_it_for_the_prefill_it_saves() -> None:
    idle = Candidate()
    for more, place in ((1, 1), (-1, 0)):
        warm = Candidate(load=2 * REQUEST, matched=2 * REQUEST + more)
        assert set(chosen([idle, warm])) == {place}


def test_of_slices_with_as_many_requests_the_one_with_less_prefill_before_it_is_chosen() -> None:
    assert set(chosen([Candidate(load=24, prefill=56), Candidate(load=24, prefill=19)])) == {1}


def test_of_equals_the_home_is_chosen() -> None:
    assert set(chosen([Candidate()] * 5)) == set(range(5))
    assert set(chosen([Candidate()] * 5, home=3)) == {3}


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), anything))
@example({"a": 0.0, "b": 2.225073858507203e-309})
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
