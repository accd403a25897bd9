"""What a request is charged that ends before its tokens are counted."""

from typing import Any

import pytest

from serving.router.admission.usage import _MOST_KEYS, Usage, used_tokens
from serving.router.http.validation import Checked, Estimate
from serving.router.http.work import Work
from serving.router.telemetry.record import Lease, RequestRecord

pytestmark = pytest.mark.unit

CONTEXT = 2048
UNBOUND = Work(1, 1, None)
USAGE = {"prompt_tokens": 5, "status": 200, "first_s": 10.1, "last_s": 10.1}


def record(**fields: Any) -> RequestRecord:
    return RequestRecord("/v1/chat/completions", model="llama", leases=[Lease("a", "v6e", 10.0)], **fields)


def short_answers() -> Usage:
    """Of a key all of whose answers were of one token."""
    usage = Usage()
    for _ in range(60):
        usage.learn("evil", record(output_tokens=1, **USAGE), UNBOUND)
    return usage


def charged(work: Work, usage: Usage, **fields: Any) -> tuple[float, float]:
    booked = (
        usage.output_tokens("evil", "llama", CONTEXT) if work.output_tokens is None else work.output_tokens
    )
    estimate = Estimate.of(Checked(work, 5, 20), booked, CONTEXT)
    gone = record(outcome="cancelled", **fields)
    return used_tokens(gone, estimate, usage, CONTEXT, now_s=20.0)


def test_who_hangs_up_pays_what_was_written_however_short_his_answers_were_before() -> None:
    usage = short_answers()
    assert charged(UNBOUND, usage) == (5, 300)  # 10 s of 30 tokens
    assert charged(Work(1, 4, None), usage) == (5, 1200)
    assert charged(Work(1, 4, 100), usage) == (5, 400)
    assert charged(Work(3, generates=False), usage) == (5, 0)


def test_no_answer_is_longer_than_the_context() -> None:
    usage = short_answers()
    usage.learn("a", record(output_tokens=1000, **USAGE), Work(1, 1, 1000))
    assert charged(Work(1, 2, None), usage) == (5, 2 * CONTEXT)


def test_who_takes_the_beginning_of_a_whole_answer_pays_until_then() -> None:
    assert charged(UNBOUND, short_answers(), first_s=15.0, status=200) == (5, 150)
    assert charged(UNBOUND, short_answers(), first_s=15.0, status=200, output_tokens=7) == (5, 7)


@pytest.mark.parametrize(
    ("work", "held_up", "written"),
    [(UNBOUND, True, 270), (UNBOUND, False, 7), (Work(1, 2, 100), True, 200), (Work(1, 1, 5), True, 7)],
)
def test_who_does_not_read_a_stream_and_leaves_pays_what_was_written_meanwhile(
    work: Work, held_up: bool, written: int
) -> None:
    stream = {"first_s": 11.0, "status": 200, "streamed": True, "output_tokens": 7, "prompt_tokens": 5}
    assert charged(work, short_answers(), held_up=held_up, **stream) == (5, written)


def test_who_reads_a_stream_late_but_to_its_end_pays_what_was_counted() -> None:
    read = record(first_s=11.0, status=200, streamed=True, held_up=True, output_tokens=7, prompt_tokens=5)
    assert used_tokens(
        read, Estimate.of(Checked(UNBOUND, 5, 20), 256, CONTEXT), short_answers(), CONTEXT, now_s=20.0
    ) == (5, 7)


@pytest.mark.parametrize(("work", "written"), [(UNBOUND, 270), (Work(1, 1, 100), 100), (Work(1, 1, 5), 7)])
def test_who_reads_a_stream_late_that_nobody_counts_pays_what_was_written_meanwhile(
    work: Work, written: int
) -> None:
    """As with `echo`: vLLM puts all that it wrote since into the next event."""
    read = record(first_s=11.0, status=200, streamed=True, held_up=True, events=9, _tail=b"data: [DONE]\n\n")
    assert used_tokens(
        read, Estimate.of(Checked(work, 5, 20), 256, CONTEXT), short_answers(), CONTEXT, now_s=20.0
    ) == (
        5,
        written,
    )


@pytest.mark.parametrize(("work", "written"), [(UNBOUND, 100), (Work(1, generates=False), 0)])
def test_an_answer_that_nobody_counts_is_not_free(work: Work, written: int) -> None:
    """That of speech has its seconds for usage."""
    spoken = record(first_s=11.0, status=200, outcome="ok", sent_bytes=400)
    assert used_tokens(
        spoken, Estimate.of(Checked(work, 5, 20), 10, CONTEXT), short_answers(), CONTEXT, now_s=20.0
    ) == (
        5,
        written,
    )


def test_answers_of_a_token_neither_make_the_next_one_free_nor_the_model_slow() -> None:
    usage = short_answers()
    assert usage.output_tokens("evil", "llama", CONTEXT) == 64
    assert usage.output_tokens("evil", "llama", 32) == 32
    usage.learn(
        "evil", record(output_tokens=2, prompt_tokens=9, status=200, first_s=10.1, last_s=19.0), UNBOUND
    )
    assert usage.written_tokens("llama", 1.0) == 30


def test_of_any_number_of_keys_the_latest_are_remembered() -> None:
    """An issuer's tokens name new ones every day."""
    usage = short_answers()
    for key in range(3 * _MOST_KEYS):
        usage.learn(str(key), record(output_tokens=500, **USAGE), UNBOUND)
        if key % (_MOST_KEYS // 2) == 0:
            usage.learn("evil", record(output_tokens=1, **USAGE), UNBOUND)
    assert len(usage._of_key) == _MOST_KEYS
    assert usage.output_tokens("evil", "llama", CONTEXT) < usage.output_tokens(str(key), "llama", CONTEXT)
