from collections import Counter
from pathlib import Path

import pytest

import thresholds
from arrivals import Ramp
from bad_input import BadInputError
from figures import STATISTICS, Counts, Slo, figures
from ramping import Ramping

pytestmark = pytest.mark.unit

SHIPPED = Path(__file__).parents[2] / "loadtest" / "thresholds.yaml"


def write(directory: Path, text: str) -> Path:
    path = directory / "thresholds.yaml"
    path.write_text(text)
    return path


def test_the_shipped_file_is_in_order() -> None:
    loaded = thresholds.load(SHIPPED)
    assert {"ttft_p99_ms", "itl_p99_ms", "goodput", "failures", "refusals"} <= loaded.limits.keys()


def test_a_statistic_that_does_not_exist_is_told_with_all_that_do(tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as refused:
        thresholds.load(write(tmp_path, "thresholds: {ttft_p98_ms: 500}"))
    assert "ttft_p98_ms" in str(refused.value)
    assert all(name in str(refused.value) for name in STATISTICS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("thresholds: {goodput: high}", "goodput is 'high', not a number"),
        ("thresholds: {failures: -1}", "failures is -1"),
        ("thresholds: [goodput]", "not a mapping"),
        ("slo: {tpot_ms: 3}", "tpot_ms, which nothing measures; known are ttft_ms, itl_ms"),
        ("limits: {}", "the keys slo and thresholds"),
        ("", "the keys slo and thresholds"),
        ("a: [", "thresholds.yaml"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        thresholds.load(write(tmp_path, text))


def test_times_have_a_most_and_rates_a_least() -> None:
    limits = thresholds.Thresholds({"ttft_p99_ms": 500, "tokens_per_s": 100}, Slo())
    assert [one.broken for one in limits.judge({"ttft_p99_ms": 500, "tokens_per_s": 100})] == [False, False]
    assert [one.broken for one in limits.judge({"ttft_p99_ms": 501, "tokens_per_s": 99})] == [True, True]
    assert str(limits.judge({"ttft_p99_ms": 501.0})[0]) == "ttft_p99_ms 501, at most 500"


def test_what_was_not_measured_did_not_hold() -> None:
    (judged,) = thresholds.Thresholds({"itl_p50_ms": 50}, Slo()).judge(figures(Counts(), 10))
    assert judged.broken
    assert "not measured" in str(judged)


def at(answers: int, ttft_ms: float, dropped: int = 0) -> Counts:
    return Counts(ttft=Counter({ttft_ms: answers}), requests=answers + dropped, dropped=dropped, good=answers)


def test_a_ramp_ends_at_the_first_step_that_breaks_and_says_at_which_rate() -> None:
    ramp = Ramping(Ramp(10, 5, step_s=10), thresholds.Thresholds({"ttft_p99_ms": 100}, Slo()))
    first = at(100, 50)
    second = Counts(ttft=first.ttft + Counter({80.0: 150}), requests=250)
    third = Counts(ttft=second.ttft + Counter({300.0: 200}), requests=450)
    assert not ramp.ended(9, first)
    assert not ramp.ended(10, first)
    assert not ramp.ended(20, second)
    assert ramp.ended(30, third)
    assert str(ramp) == (
        "ramp: broke at 20 requests/s (ttft_p99_ms 300, at most 100); the step before held, at 15 requests/s"
    )
    assert not any(one.broken for one in ramp.judge())


def test_a_ramp_that_breaks_at_its_first_step_fails() -> None:
    ramp = Ramping(Ramp(10, 5, step_s=10), thresholds.Thresholds({"ttft_p99_ms": 100}, Slo()))
    assert ramp.ended(10, Counts())
    assert ramp.judge()[0].broken


def test_a_ramp_passes_by_the_rate_it_held() -> None:
    limits = {"ttft_p99_ms": 100, "held_rate_per_s": 15, "tokens_per_s": 1e9}
    ramp = Ramping(Ramp(10, 5, step_s=10), thresholds.Thresholds(limits, Slo()))
    assert not ramp.ended(10, at(100, 50))
    assert ramp.judge()[0].broken
    assert not ramp.ended(20, at(200, 50))
    assert not ramp.judge()[0].broken
    assert "was not broken" in str(ramp)


def test_a_step_with_requests_that_were_never_sent_is_broken() -> None:
    ramp = Ramping(Ramp(10, 5, step_s=10), thresholds.Thresholds({"ttft_p99_ms": 100}, Slo()))
    assert ramp.ended(10, at(100, 50, dropped=1))
    assert "dropped" in str(ramp)
