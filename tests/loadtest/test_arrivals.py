import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrivals
from bad_input import BadInputError

pytestmark = pytest.mark.unit

OPTIONS = {
    "per_s": 2.0,
    "peak_per_s": 8.0,
    "period_s": 60.0,
    "burst_s": 5.0,
    "step_per_s": 3.0,
    "step_s": 10.0,
}


def until(rate: arrivals.Rate, end_s: float, seed: int = 0) -> list[float]:
    return list(itertools.takewhile(lambda second: second < end_s, arrivals.poisson(rate, seed)))


def test_the_same_seed_gives_the_same_arrivals_and_another_others() -> None:
    rate = arrivals.Constant(5)
    assert until(rate, 60, seed=1) == until(rate, 60, seed=1)
    assert until(rate, 60, seed=1) != until(rate, 60, seed=2)


def test_gaps_of_a_constant_rate_are_those_of_a_poisson_process() -> None:
    times = until(arrivals.Constant(10), 2000)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) == pytest.approx(20000, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.03)


@given(
    shape=st.sampled_from(["constant", "ramp", "diurnal", "burst"]),
    seed=st.integers(0, 1000),
    start=st.floats(0, 300),
    length=st.floats(0, 5),
    share=st.floats(0, 1),
)
def test_no_moment_has_a_higher_rate_than_its_window_says(
    shape: str, seed: int, start: float, length: float, share: float
) -> None:
    rate = arrivals.rate(shape, **OPTIONS)
    assert 0 < rate.at(start + share * length) <= rate.most(start, start + length)
    times = until(rate, 20, seed)
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("shape", "seconds", "rates"),
    [
        ("constant", [0, 99], [2, 2]),
        ("ramp", [0, 9.9, 10, 25], [2, 2, 5, 8]),
        ("diurnal", [0, 15, 30, 60], [2, 5, 8, 2]),
        ("burst", [0, 54, 55, 59, 60, 115], [2, 2, 8, 8, 2, 8]),
    ],
)
def test_the_rate_follows_the_shape(shape: str, seconds: list[float], rates: list[float]) -> None:
    rate = arrivals.rate(shape, **OPTIONS)
    assert [rate.at(second) for second in seconds] == pytest.approx(rates)


def test_a_burst_brings_as_many_as_its_rate_says() -> None:
    times = until(arrivals.Burst(1, 50, period_s=10, burst_s=2), 1000)
    inside = [second for second in times if second % 10 >= 8]
    assert len(inside) == pytest.approx(10000, rel=0.05)
    assert len(times) - len(inside) == pytest.approx(800, rel=0.15)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"per_s": 0}, "--rate 0 is not above 0"),
        ({"step_s": 0}, "--step-s 0"),
        ({"burst_s": 60}, "a burst of 60 s"),
        ({"peak_per_s": float("nan")}, "--peak-rate nan"),
    ],
)
def test_options_that_describe_no_rate_are_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        arrivals.rate("burst", **{**OPTIONS, **options})
