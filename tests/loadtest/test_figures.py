import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from figures import STATISTICS, Counts, Slo, figures, percentile
from plots import plot

pytestmark = pytest.mark.unit

SLO = Slo(ttft_ms=500, itl_ms=50)


@pytest.mark.parametrize(
    ("ttft_s", "latency_s", "good"),
    [(0.5, 1.0, True), (0.51, 0.9, False), (0.1, 0.6, True), (0.1, 0.61, False)],
)
def test_a_streamed_answer_is_good_within_both_targets(ttft_s: float, latency_s: float, good: bool) -> None:
    assert SLO.good(ttft_s=ttft_s, latency_s=latency_s, tokens=11) is good


def test_an_answer_in_one_piece_is_good_where_a_streamed_one_would_be_complete() -> None:
    assert SLO.good(ttft_s=None, latency_s=1.0, tokens=11)
    assert not SLO.good(ttft_s=None, latency_s=1.01, tokens=11)


def test_figures_come_of_counts() -> None:
    counts = Counts(
        ttft=Counter({100.0: 50, 900.0: 50}),
        itl=Counter({10.0: 99, 500.0: 1}),
        start=Counter({1.0: 90, 11.0: 10}),
        requests=100,
        failures=5,
        refused=10,
        dropped=2,
        good=60,
        tokens=4000,
    )
    found = figures(counts, 20)
    expected = {
        "ttft_p50_ms": 100,
        "ttft_p90_ms": 900,
        "itl_p99_ms": 10,
        "latency_p50_ms": None,
        "late_starts": 0.1,
        "start_delay_p99_ms": 11,
        "failures": 0.05,
        "refusals": 0.1,
        "dropped": 0.02,
        "goodput": 0.6,
        "goodput_per_s": 3,
        "requests_per_s": 83 / 20,
        "tokens_per_s": 200,
    }
    assert {name: found[name] for name in expected} == expected


def test_every_statistic_but_a_ramps_is_measured() -> None:
    assert figures(Counts(), 1).keys() == STATISTICS.keys() - {"held_rate_per_s"}


def test_a_stretch_counts_what_came_since() -> None:
    before = Counts(ttft=Counter({5.0: 2}), start=Counter({0.0: 3}), requests=2, tokens=10)
    after = Counts(ttft=Counter({5.0: 2, 7.0: 1}), start=Counter({0.0: 6}), requests=4, tokens=25, dropped=1)
    during = after.since(before)
    assert (during.ttft, during.requests, during.tokens) == (Counter({7.0: 1}), 2, 15)
    assert after.in_flight == 3


@given(st.lists(st.floats(0, 1e5), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_the_least_time_that_so_many_do_not_exceed(times: list[float], share: float) -> None:
    found = percentile(Counter(times), share)
    assert found is not None
    assert sum(time <= found for time in times) >= share * len(times) - 1e-9
    assert sum(time < found for time in times) < share * len(times)


@given(st.lists(st.none() | st.floats(0, 1e6), max_size=20), st.sampled_from(["p99", "a < b & c", ""]))
@example([5e-324], "the least there is")
def test_a_plot_is_well_formed_whatever_was_measured(values: list[float | None], name: str) -> None:
    drawn = ET.fromstring(plot("TTFT < 1 s & more", {name: list(enumerate(values))}))  # noqa: S314  our own text
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    points = [point for line in lines for point in line.attrib["points"].split()]
    assert len(points) == sum(value is not None for value in values)
