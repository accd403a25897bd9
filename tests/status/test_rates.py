import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.state.records import Demand, SliceRecord, SliceState
from serving.status.rates import POINTS, STEP_S, Rates

pytestmark = pytest.mark.unit
LLAMA = "llama"


def entry(
    output: int = 0, prompt: int = 0, *, state: SliceState = SliceState.SERVING, **changes: object
) -> SliceRecord:
    fields: dict[str, object] = {"replica": "a", "phase": str(state), "shape": "v6e 2x4", **changes}
    return SliceRecord(model=LLAMA, state=state, output_tokens=output, prompt_tokens=prompt, **fields)  # type: ignore[arg-type]


def test_a_rate_is_what_was_counted_over_the_last_seconds() -> None:
    window = Rates()
    for step in range(20):
        window.observe([entry(output=100 * step, prompt=10 * step)], [], step * 0.5)
    assert window.rates("a") == pytest.approx((200, 20))
    assert window.rates("unknown") == (0, 0)


def test_a_slice_that_is_seen_first_brings_no_rate_of_its_whole_life() -> None:
    window = Rates()
    window.observe([entry(output=1_000_000)], [], 0.0)
    assert window.rates("a") == (0, 0)
    window.observe([entry(output=1_000_010)], [], 0.5)
    assert window.rates("a") == pytest.approx((20, 0))


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0.1, 30)), min_size=1, max_size=60))
def test_no_rate_is_ever_negative(steps: list[tuple[int, float]]) -> None:
    window, now_s = Rates(), 0.0
    for count, pause_s in steps:
        now_s += pause_s
        window.observe([entry(output=count, prompt=count)], [], now_s)
        assert min(window.rates("a")) >= 0
    assert all(point.output_tokens_per_s >= 0 for point in window.points("", LLAMA))


def test_a_point_is_kept_every_step_for_five_minutes() -> None:
    window = Rates()
    for beat in range(4 * POINTS * int(STEP_S)):
        window.observe([entry(output=50 * beat)], [], beat * 0.5)
    points = window.points("", LLAMA)
    assert len(points) == POINTS
    assert POINTS * STEP_S == 300
    assert {point.output_tokens_per_s for point in points} == {100}
    assert window.points("", "unknown") == []


def test_time_that_was_not_watched_is_not_made_up() -> None:
    window = Rates()
    for now_s in (0.0, 2.0, 4.0, 3600.0, 3600.5, 3601.0):
        window.observe([entry()], [], now_s)
    assert len(window.points("", LLAMA)) == 3


def test_times_to_first_token_are_the_slowest_routers() -> None:
    window = Rates()
    for beat in range(5):
        quick = Demand("one", LLAMA, ttft_p50_s=0.1, ttft_p90_s=0.2, beat=beat)
        slow = Demand("two", LLAMA, ttft_p50_s=0.3, beat=beat)
        window.observe([entry()], [quick, slow], beat * 1.0)
    assert (window.points("", LLAMA)[-1].ttft_p50_s, window.points("", LLAMA)[-1].ttft_p90_s) == (0.3, 0.2)


def test_a_start_is_measured_against_the_last_start_of_its_pool() -> None:
    window = Rates()
    done = (("placing", 1.0), ("loading weights", 20.0), ("compiling", 39.0))
    window.observe([entry(replica="old", phases=done)], [], 0.0)
    new = entry(replica="new", state=SliceState.STARTING, phase="loading weights", phases=(("placing", 2.0),))
    for now_s in (1.0, 4.0, 9.0):
        window.observe([new], [], now_s)
    assert window.start(new) == (10.0, 60.0)
    other_pool = entry(replica="b", state=SliceState.STARTING, phase="placing", pool="second")
    assert window.start(other_pool) == (0.0, None)
    green = entry(replica="green", application="green", state=SliceState.STARTING, phase="placing")
    assert window.start(green) == (0.0, None)
