import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.router.admission.rate_limit import Account, Bucket, Refusals, duration
from serving.router.http.auth import Key

pytestmark = pytest.mark.unit


def account(**limits: float) -> Account:
    key = Key.model_validate({"name": "batch", "sha256": "0" * 64, **limits})
    made = Account(key)
    made.set(key, 0.0)
    return made


@given(
    per_minute=st.floats(1, 1e6),
    steps=st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 1e5)), max_size=60),
)
def test_a_bucket_lets_no_more_through_than_its_size_and_what_flowed_in(
    per_minute: float, steps: list[tuple[float, float]]
) -> None:
    bucket, now_s, through = Bucket(per_minute, 0.0), 0.0, 0.0
    for wait_s, amount in steps:
        now_s += wait_s
        if amount <= per_minute and bucket.wait_s(amount, now_s) == 0:
            bucket.take(amount, now_s)
            through += amount
        assert through <= per_minute * (1 + now_s / 60) * (1 + 1e-9)


@given(per_minute=st.floats(1, 1e6), used=st.floats(0, 1e6), amount=st.floats(0.1, 1e6))
def test_who_waits_as_long_as_told_is_let_through(per_minute: float, used: float, amount: float) -> None:
    bucket = Bucket(per_minute, 0.0)
    bucket.take(used, 0.0)
    wait_s = bucket.wait_s(amount, 0.0)
    assert bucket.wait_s(amount, wait_s) == pytest.approx(0, abs=1e-6)


def test_requests_a_minute_are_counted_and_come_back_one_by_one() -> None:
    one = account(requests_per_minute=2)
    for _ in range(2):
        assert one.arrive(0.0) is None
    refusal = one.arrive(0.0)
    assert refusal is not None
    assert (
        refusal.error.message == "Key 'batch' has used its 2 requests a minute; there is room again in 30s."
    )
    assert refusal.retry_after_s == 30
    assert one.arrive(30.0) is None


def test_tokens_are_held_when_a_request_comes_and_put_right_when_it_has_gone() -> None:
    one = account(tokens_per_minute=600)
    assert one.reserve(500, 0.0) is None
    refusal = one.reserve(200, 0.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(10)
    one.settle(500, 50, 0.0)
    assert one.reserve(200, 0.0) is None
    one.settle(200, 2000, 0.0)  # it wrote more than anybody knew: paid back before the next
    refusal = one.reserve(1, 0.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(145.1)


def test_a_request_that_no_minute_has_room_for_is_not_told_to_come_back() -> None:
    refusal = account(tokens_per_minute=600).reserve(601, 0.0)
    assert refusal is not None
    assert refusal.retry_after_s is None
    assert "asks for 601 tokens" in refusal.error.message


def test_requests_at_once_are_counted_until_they_end() -> None:
    one = account(concurrency=2)
    assert [one.arrive(0.0), one.arrive(0.0)] == [None, None]
    refusal = one.arrive(0.0)
    assert refusal is not None
    assert "may have 2 at once" in refusal.error.message
    one.leave(8.0)
    assert one.arrive(8.0) is None
    refusal = one.arrive(8.0)
    assert refusal is not None
    assert refusal.retry_after_s == 4  # two at once that take 8 s each: one ends every 4


def test_what_was_used_stays_used_when_the_limit_changes() -> None:
    one = account(requests_per_minute=10)
    for _ in range(10):
        one.arrive(0.0)
    one.set(one.key.model_copy(update={"requests_per_minute": 12.0}), 0.0)
    assert dict(one.headers(0.0))[b"x-ratelimit-remaining-requests"] == b"2"
    one.set(one.key.model_copy(update={"requests_per_minute": None}), 0.0)
    assert one.arrive(0.0) is None


def test_the_headers_are_those_of_openai() -> None:
    one = account(requests_per_minute=60, tokens_per_minute=6000)
    one.arrive(0.0)
    one.reserve(3000, 0.0)
    assert one.headers(0.0) == [
        (b"x-ratelimit-limit-requests", b"60"),
        (b"x-ratelimit-remaining-requests", b"59"),
        (b"x-ratelimit-reset-requests", b"1s"),
        (b"x-ratelimit-limit-tokens", b"6000"),
        (b"x-ratelimit-remaining-tokens", b"3000"),
        (b"x-ratelimit-reset-tokens", b"30s"),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (59.2, "1m0s"), (360, "6m0s"), (3661, "1h1m1s")],
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_refusals_are_kept_back_the_longer_the_more_there_are() -> None:
    """A client that backs off hears at once; two hundred connections that do not get some hundred answers a second."""
    now_and_then, flood = Refusals(), Refusals()
    assert [now_and_then.delay_s(second) for second in range(60)] == [0.0] * 60
    due, answers = [0.0] * 200, 0
    for _ in range(4000):
        now_s = min(due)
        answers += now_s > 5
        due[due.index(now_s)] = now_s + 0.001 + flood.delay_s(now_s)
    assert answers / (min(due) - 5) < 300
    assert flood.delay_s(min(due) + 60) == 0.0


def test_who_is_refused_at_once_is_not_answered_at_once() -> None:
    flood = Refusals()
    delays = [flood.delay_s(0.0) for _ in range(2000)][-200:]  # each as long as they get
    assert max(delays) - min(delays) > 1
