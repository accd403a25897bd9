import pytest

from serving.errors import SliceLostError
from serving.router.telemetry.latency import WINDOW_S, RecentLatency
from serving.router.telemetry.record import RequestRecord

pytestmark = pytest.mark.unit
LLAMA = "llama"
NOTHING = {"ttft_p50_s": 0.0, "ttft_p90_s": 0.0, "itl_p50_s": 0.0, "itl_p90_s": 0.0}


def answered(
    ttft_s: float, *, tokens: int = 11, between_s: float = 0.02, streamed: bool = True
) -> RequestRecord:
    first_s = 100.0 + ttft_s
    return RequestRecord(
        "/v1/completions",
        model=LLAMA,
        streamed=streamed,
        outcome="ok",
        arrived_s=100.0,
        first_s=first_s,
        last_s=first_s + between_s * (tokens - 1),
        output_tokens=tokens,
    )


def test_percentiles_are_those_of_streamed_answers() -> None:
    recent = RecentLatency(lambda: 0.0)
    for hundredths in range(1, 101):
        recent(answered(hundredths / 100))
    recent(answered(99.0, streamed=False))
    assert recent.percentiles(LLAMA) == pytest.approx(
        {"ttft_p50_s": 0.5, "ttft_p90_s": 0.9, "itl_p50_s": 0.02, "itl_p90_s": 0.02}
    )
    assert recent.percentiles("other") == NOTHING


def test_what_failed_says_nothing_of_how_long_answers_take() -> None:
    recent, record = RecentLatency(lambda: 0.0), answered(5.0)
    record.failed(SliceLostError("gone"))
    recent(record)
    assert recent.percentiles(LLAMA) == NOTHING


def test_a_minute_later_it_is_forgotten() -> None:
    now_s = [0.0]
    recent = RecentLatency(lambda: now_s[0])
    recent(answered(1.0))
    now_s[0] = WINDOW_S
    recent(answered(3.0))
    assert recent.percentiles(LLAMA)["ttft_p50_s"] == 1.0
    now_s[0] = WINDOW_S + 1
    assert recent.percentiles(LLAMA)["ttft_p50_s"] == 3.0
