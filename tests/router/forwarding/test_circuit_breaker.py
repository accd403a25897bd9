import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.router.forwarding.circuit_breaker import FAILURES, CircuitBreaker
from serving.timings import TIMINGS

OPEN_S, LONGEST_S = TIMINGS.circuit_open_s, TIMINGS.circuit_longest_s

pytestmark = pytest.mark.unit


@pytest.fixture
def breaker() -> CircuitBreaker:
    return CircuitBreaker()


def test_a_slice_nobody_complained_of_is_not_left_out(breaker: CircuitBreaker) -> None:
    breaker.began("a", 0)
    breaker.ended("a")
    assert breaker.left_out(0) == set()


def test_a_broken_connection_leaves_a_slice_out_at_once(breaker: CircuitBreaker) -> None:
    breaker.failed("a", 5, broken=True)
    assert breaker.left_out(5) == breaker.left_out(5 + OPEN_S - 0.01) == {"a"}
    assert breaker.left_out(5 + OPEN_S) == set()


def test_errors_leave_it_out_only_in_a_row(breaker: CircuitBreaker) -> None:
    for _ in range(3):
        for _ in range(FAILURES - 1):
            breaker.failed("a", 0, broken=False)
        assert breaker.left_out(0) == set()
        breaker.answered("a")
    for _ in range(FAILURES):
        breaker.failed("a", 0, broken=False)
    assert breaker.left_out(0) == {"a"}


def test_one_request_tries_it_again_and_lets_the_others_in(breaker: CircuitBreaker) -> None:
    breaker.failed("a", 0, broken=True)
    breaker.began("a", OPEN_S)
    assert breaker.left_out(OPEN_S) == {"a"}
    breaker.answered("a")
    assert breaker.left_out(OPEN_S) == set()


def test_a_try_that_nobody_waited_for_is_given_to_the_next(breaker: CircuitBreaker) -> None:
    breaker.failed("a", 0, broken=True)
    breaker.began("a", OPEN_S)
    breaker.ended("a")
    assert breaker.left_out(OPEN_S) == set()


def test_a_long_answer_that_tries_a_slice_does_not_keep_it_out_while_the_slice_gives_tokens(
    breaker: CircuitBreaker,
) -> None:
    """An answer in one piece comes with its last token, minutes after the first."""
    breaker.failed("a", 0, broken=True)
    breaker.began("a", OPEN_S)
    assert breaker.on_trial == ["a"]
    breaker.worked("a", OPEN_S - 0.1)  # before it was tried
    assert breaker.left_out(OPEN_S + 1) == {"a"}
    breaker.worked("a", OPEN_S + 0.5)
    assert breaker.left_out(OPEN_S + 1) == set()
    assert breaker.on_trial == []


def test_tokens_do_not_bring_a_slice_back_that_nobody_tries(breaker: CircuitBreaker) -> None:
    breaker.failed("a", 0, broken=True)
    breaker.worked("a", 0.5)
    assert breaker.left_out(0.9) == {"a"}


def test_all_the_requests_that_broke_with_it_count_as_one(breaker: CircuitBreaker) -> None:
    for _ in range(16):
        breaker.failed("a", 0, broken=True)
    assert breaker.left_out(OPEN_S) == set()


def test_each_failed_try_doubles_the_wait_up_to_a_limit(breaker: CircuitBreaker) -> None:
    now_s, waits = 0.0, []
    breaker.failed("a", now_s, broken=True)
    for _ in range(7):
        wait_s = next(step / 2 for step in range(1000) if not breaker.left_out(now_s + step / 2))
        waits.append(wait_s)
        now_s += wait_s
        breaker.began("a", now_s)
        breaker.failed("a", now_s, broken=False)
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    breaker.keep(set())
    assert breaker.left_out(now_s) == set()


@given(
    st.lists(st.tuples(st.sampled_from(["began", "answered", "ended", "failed", "broken"]), st.floats(0, 5)))
)
def test_whatever_happens_a_slice_is_tried_again_within_the_longest_wait(
    happened: list[tuple[str, float]],
) -> None:
    breaker, now_s = CircuitBreaker(), 0.0
    for what, passed_s in happened:
        now_s += passed_s
        match what:
            case "began":
                breaker.began("a", now_s)
            case "answered":
                breaker.answered("a")
            case "ended":
                breaker.ended("a")
            case _:
                breaker.failed("a", now_s, broken=what == "broken")
    breaker.ended("a")
    assert breaker.left_out(now_s + LONGEST_S) == set()
