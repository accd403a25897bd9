import json
import resource
import signal
import time
from pathlib import Path

import pytest

from serving.config import SloSpec
from serving.errors import (
    BadRequestError,
    NoSliceError,
    OverloadedError,
    RateLimitError,
    ServingError,
    SliceLostError,
)
from serving.metrics import table
from serving.metrics.recorder import Recorder
from serving.router.telemetry.journal import Journal, request_id
from serving.router.telemetry.record import RequestRecord
from serving.router.telemetry.request_log import RequestLog
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":12,"total_tokens":15,"completion_tokens":3}}\n\n'


def entry(slice_: str = "slice-0", pool: str = "") -> SliceRecord:
    return SliceRecord(slice_, "llama", SliceState.SERVING, "serving", "v6e 2x4", slice=slice_, pool=pool)


def streamed(*chunks: bytes, path: str = CHAT) -> RequestRecord:
    record = RequestRecord(path, model="llama")
    record.sent(entry())
    record.answered(200, streamed=True)
    for chunk in chunks:
        record.passed_on(chunk, chunk.count(b"\n\n"))
    record.end()
    return record


def test_usage_is_read_off_the_end_of_a_stream() -> None:
    record = streamed(b"data: {}\n\n", b"data: {}\n\n", USAGE, b"data: [DONE]\n\n")
    assert (record.prompt_tokens, record.output_tokens) == (12, 3)


def test_usage_is_read_off_an_answer_in_one_piece() -> None:
    body = json.dumps({"choices": ["x" * 9000], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
    record = RequestRecord(CHAT)
    record.sent(entry())
    record.answered(200, streamed=False)
    record.passed_on(body.encode())
    record.end()
    assert (record.prompt_tokens, record.output_tokens) == (7, 2)


CACHED = b'"usage":{"prompt_tokens":12,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}'


def test_tokens_that_a_cache_had_are_read_where_the_answer_says_them() -> None:
    record = RequestRecord(CHAT)
    record.answered(200, streamed=False)
    record.passed_on(b"{" + CACHED + b"}")
    record.end()
    assert (record.prompt_tokens, record.cached_tokens) == (12, 8)
    told = RequestRecord(CHAT)
    told.answered(200, streamed=True)
    told.passed_on(b'data: {"choices":[],' + CACHED + b"}\n\n", 1)
    told.passed_on(b"data: [DONE]\n\n", 1)
    told.used(11, 2)
    told.end()
    assert (told.prompt_tokens, told.output_tokens, told.cached_tokens) == (11, 2, 8)
    assert (streamed(USAGE).cached_tokens, streamed(b"data: x\n\n").cached_tokens) == (0, None)


@pytest.mark.parametrize("spaces", [(",", ":"), (", ", ": ")])
def test_usage_is_found_before_a_prompts_ids_and_logprobs(spaces: tuple[str, str]) -> None:
    """vLLM's order of a chat's fields; a token may read like the field itself."""
    body = {
        "choices": [{"message": {"content": '"usage":{"prompt_tokens":1,"completion_tokens":1}'}}],
        "usage": {"prompt_tokens": 9000, "total_tokens": 9002, "completion_tokens": 2},
        "prompt_logprobs": [{"7": {"decoded_token": "usage", "rank": 1}}] * 2000,
        "prompt_token_ids": [12345] * 9000,
    }
    record = RequestRecord(CHAT)
    record.sent(entry())
    record.answered(200, streamed=False)
    record.passed_on(json.dumps(body, separators=spaces).encode())
    record.end()
    assert (record.prompt_tokens, record.output_tokens) == (9000, 2)


@pytest.mark.parametrize(
    "body", [b"", b'{"usage": null}', b'{"usage": {"seconds": 3}}', b'["usage", "usage"]']
)
def test_an_answer_without_usage_has_none(body: bytes) -> None:
    record = RequestRecord(CHAT)
    record.answered(200, streamed=False)
    record.passed_on(body)
    record.end()
    assert (record.prompt_tokens, record.output_tokens) == (None, None)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/render", "/v1/chat/completions/derender", "/tokenize"]
)
def test_what_an_answer_of_a_tokenizer_says_of_usage_is_its_client_s(path: str) -> None:
    """A render repeats a schema, and a derender the count that it was sent."""
    record = RequestRecord(path)
    record.answered(200, streamed=False)
    record.passed_on(b'{"structured_outputs":{"json":{"usage":{"prompt_tokens":1,"completion_tokens":1}}}}')
    record.end()
    assert (record.prompt_tokens, record.output_tokens) == (None, None)


def test_usage_of_anthropics_route_is_read_too() -> None:
    last = b'event: message_delta\ndata: {"usage":{"input_tokens":5,"output_tokens":4}}\n\n'
    record = streamed(last, b"event: message_stop\ndata: {}\n\n", path="/v1/messages")
    assert (record.prompt_tokens, record.output_tokens) == (5, 4)


def test_tokens_that_anthropics_route_found_in_a_cache_are_of_the_prompt_too() -> None:
    """A conversation that a cache had cost nothing there."""
    record = RequestRecord("/v1/messages")
    record.answered(200, streamed=False)
    cached = b'"cache_creation_input_tokens":1,"cache_read_input_tokens":9000'
    record.passed_on(b'{"usage":{"input_tokens":5,"output_tokens":4,' + cached + b"}}")
    record.end()
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (9006, 9000, 4)


@pytest.mark.parametrize(("path", "tokens"), [(CHAT, 2), ("/v1/completions", 3)])
def test_a_stream_without_usage_counts_events(path: str, tokens: int) -> None:
    record = streamed(b"data: a\n\n", b"data: b\n\ndata: c\n\n", b"data: [DONE]\n\n", path=path)
    assert record.prompt_tokens is None
    assert record.output_tokens == tokens


def test_what_a_part_knows_of_the_usage_goes_before_what_the_bytes_say() -> None:
    record = RequestRecord(CHAT)
    record.used(100, 50)
    record.passed_on(USAGE, 1)
    record.end()
    assert (record.prompt_tokens, record.output_tokens) == (100, 50)


def test_another_slice_is_a_retry_before_the_first_token_and_a_continuation_after_it() -> None:
    record = RequestRecord(CHAT)
    record.sent(entry("slice-0"))
    record.sent(entry("slice-1"))
    record.passed_on(b"data: a\n\n", 1)
    record.sent(entry("slice-2", pool="second"))
    assert (record.retries, record.continuations) == (1, 1)
    assert (record.slice, record.pool) == ("slice-2", "second")


def test_times_are_split_into_queue_router_and_slice() -> None:
    record = RequestRecord(CHAT, arrived_s=time.monotonic() - 1.0)
    record.waited(0.7)
    record.admitted()
    record.sent(entry())
    record.passed_on(b"data: a\n\n", 1)
    assert record.router_s >= 0.299
    assert record.slice_ttft_s >= 0
    assert record.queued_s == 0.7
    assert record.first_s - record.arrived_s == pytest.approx(
        record.queued_s + record.router_s + record.slice_ttft_s
    )


@pytest.mark.parametrize(
    ("streamed", "tokens", "sequences", "between_s"),
    [
        (True, 3, 1, 0.5),
        (True, 1, 1, None),
        (True, 0, 1, None),
        (True, None, 1, None),
        (False, 3, 1, None),
        (True, 12, 4, 0.5),
        (True, 4, 4, None),
    ],
)
def test_the_time_between_tokens_is_by_tokens_of_one_answer_and_not_by_events(
    streamed: bool, tokens: int | None, sequences: int, between_s: float | None
) -> None:
    """Role, usage and end are events too, and answers beside each other have a token each in the same time."""
    record = RequestRecord(CHAT, streamed=streamed, first_s=10.0, last_s=11.0, events=6, output_tokens=tokens)
    record.sequences = sequences
    assert record.inter_token_s == between_s


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (BadRequestError("x"), "client_error"),
        (NoSliceError("x"), "no_slice"),
        (SliceLostError("x"), "slice_lost"),
        (OverloadedError("x"), "overloaded"),
        (RateLimitError("x"), "refused"),
    ],
)
def test_an_error_is_an_outcome(error: ServingError, outcome: str) -> None:
    record = RequestRecord(CHAT)
    record.failed(error)
    record.end()
    assert (record.outcome, record.status, record.code) == (outcome, error.status, error.code)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "ok"), (400, "client_error"), (429, "refused"), (500, "error"), (0, "error")],
)
def test_a_slices_status_is_an_outcome(status: int, outcome: str) -> None:
    record = RequestRecord(CHAT)
    record.answered(status, streamed=False)
    record.end()
    assert record.outcome == outcome


def test_a_stream_that_broke_is_lost_although_its_status_was_good() -> None:
    record = RequestRecord(CHAT)
    record.answered(200, streamed=True)
    record.passed_on(b"data: a\n\n", 1)
    record.failed(SliceLostError("x"))
    record.end()
    assert (record.outcome, record.status) == ("slice_lost", 200)


def test_a_request_is_written_out_once() -> None:
    written = []
    record = RequestRecord(CHAT, on_end=written.append)
    record.cancelled()
    record.end()
    record.end()
    assert [one.outcome for one in written] == ["cancelled"]


def test_the_journal_counts_by_model_key_outcome_and_pool() -> None:
    recorder = Recorder("default")
    journal = Journal(recorder)
    record = journal.begin(CHAT, {})
    record.model = "llama"
    record.key = "k1"
    record.sent(entry(pool="second"))
    record.answered(200, streamed=False)
    record.passed_on(USAGE)
    record.end()
    assert recorder._counted[table.REQUESTS, ("llama", "k1", "ok", "second")] == 1
    assert recorder._counted[table.OUTPUT_TOKENS, ("llama", "k1", "second")] == 3


def test_answers_are_held_to_the_targets_there_are_and_errors_to_none() -> None:
    recorder = Recorder("default")
    journal = Journal(recorder, slos={"llama": SloSpec(ttft_s=1.0), "qwen": SloSpec(itl_s=0.02)})
    for model, ttft_s, itl_s, status in (
        ("llama", 0.9, 5.0, 200),
        ("llama", 1.1, 0.0, 200),
        ("llama", 9.0, 0.0, 400),
        ("qwen", 9.0, 0.01, 200),
        ("none of them", 9.0, 9.0, 200),
    ):
        record = journal.begin(CHAT, {})
        record.model = model
        record.answered(status, streamed=True)
        record.first_s = record.arrived_s + ttft_s
        record.last_s, record.output_tokens = record.first_s + 10 * itl_s, 11
        record.end()
    judged = {labels: count for (row, labels), count in recorder._counted.items() if row is table.SLO}
    assert judged == {("llama", "ttft", "yes"): 1, ("llama", "ttft", "no"): 1, ("qwen", "itl", "yes"): 1}


def test_an_answer_in_one_piece_has_no_time_to_first_token() -> None:
    recorder = Recorder("default")
    journal = Journal(recorder, slos={"llama": SloSpec(ttft_s=1.0)})
    for streamed in (True, False):
        record = journal.begin(CHAT, {})
        record.model = "llama"
        record.sent(entry())
        record.answered(200, streamed=streamed)
        record.passed_on(USAGE, 1)
        record.end()
        observed = {row for row, _ in recorder._series} & {table.TTFT, table.SLICE_TTFT}
        assert observed == ({table.TTFT, table.SLICE_TTFT} if streamed else set())
        judged = [labels for row, labels in recorder._counted if row is table.SLO]
        assert judged == ([("llama", "ttft", "yes")] if streamed else [])
        recorder._series.clear()
        recorder._counted.clear()


def test_keys_beyond_the_bound_share_one_label() -> None:
    recorder = Recorder("default")
    journal = Journal(recorder)
    for number in range(table.MOST_KEYS + 50):
        record = journal.begin(CHAT, {})
        record.key = f"k{number}"
        record.end()
    keys = {labels[1] for row, labels in recorder._counted if row is table.REQUESTS}
    assert len(keys) == table.MOST_KEYS
    assert table.OTHER_KEYS in keys


def test_records_wait_for_one_another_or_until_they_are_settled() -> None:
    recorder = Recorder("default")
    written: list[RequestRecord] = []
    journal = Journal(recorder, written.append, together=3)
    for number in range(4):
        journal.begin(CHAT, {"x-request-id": f"r{number}"}).end()
    assert [record.request_id for record in written] == ["r0", "r1", "r2"]
    journal.settle()
    journal.settle()
    assert [record.request_id for record in written] == ["r0", "r1", "r2", "r3"]
    assert sum(count for (row, _), count in recorder._counted.items() if row is table.REQUESTS) == 4


def test_a_record_keeps_a_body_only_where_its_content_is_kept() -> None:
    for keeps in (True, False):
        record = Journal(Recorder("default"), keep_content=keeps).begin(CHAT, {})
        record.asked(b"{}")
        assert record.question == (b"{}" if keeps else b"")


def test_a_writer_that_fails_costs_no_answer() -> None:
    written = []

    def failing(_: RequestRecord) -> None:
        raise OSError("disk full")

    journal = Journal(Recorder("default"), failing, written.append)
    journal.begin(CHAT, {}).end()
    assert len(written) == 1


def test_a_line_has_ids_slice_tokens_times_and_outcome_and_no_word_of_the_client(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl")
    record = RequestRecord(CHAT, "id-1", model="llama", on_end=log, question=b"SECRET")
    record.sent(entry())
    record.answered(200, streamed=True)
    record.passed_on(b'data: {"content": "SECRET"}\n\n', 1)
    record.passed_on(USAGE, 1)
    record.end()
    log.close()
    (line,) = log.path.read_text().splitlines()
    said = json.loads(line)
    assert "SECRET" not in line
    assert said["request_id"] == "id-1"
    assert (said["slice"], said["outcome"], said["status"]) == ("slice-0", "ok", 200)
    assert (said["prompt_tokens"], said["output_tokens"]) == (12, 3)
    assert 0 <= said["router_s"] <= said["ttft_s"] <= said["total_s"]


def test_prompts_and_answers_are_in_the_line_once_asked_for(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl")
    record = Journal(Recorder("default"), log, keep_content=True).begin(CHAT, {})
    record.question = b'{"prompt": "100% caf\xc3\xa9"}'
    record.passed_on(b"data: hello\n\n", 1)
    record.end()
    log.close()
    said = json.loads(log.path.read_text())
    assert said["question"] == '{"prompt": "100% café"}'
    assert said["answer"] == "data: hello\n\n"


def test_lines_that_no_disk_takes_are_counted_not_kept(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl", most_lines=3)
    for _ in range(5):
        RequestRecord(CHAT, "id", on_end=log).end()
    log.close()
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert len(lines) == 4
    assert lines[-1] == {"dropped": 2}


def test_a_line_that_is_made_while_others_are_written_is_not_lost(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl")

    class Beaten(RequestRecord):
        @property
        def router_s(self) -> None:
            log.flush()

    Beaten(CHAT, "id", on_end=log).end()
    log.close()
    assert len(log.path.read_text().splitlines()) == 1


def test_lines_wait_while_the_disk_is_full_and_what_is_too_many_is_counted(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl", most_lines=3)
    log.path.symlink_to("/dev/full")
    for number in range(5):
        RequestRecord(CHAT, f"id-{number}", on_end=log).end()
        log.flush()
    log.path.unlink()
    log.close()
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [line.get("request_id") for line in lines] == ["id-0", "id-1", "id-2", None]
    assert lines[-1] == {"dropped": 2}


def test_a_disk_that_fills_within_a_line_leaves_no_half_of_it(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # a write is cut where the file reaches it
        RequestRecord(CHAT, "id", on_end=log).end()
        log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert log.path.read_bytes() == b""
    log.close()
    assert json.loads(log.path.read_text())["request_id"] == "id"


def test_a_file_that_would_grow_too_large_is_put_aside(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl")
    with log.path.open("wb") as file:
        file.truncate(64 << 20)  # takes no room on the disk
    RequestRecord(CHAT, "id", on_end=log).end()
    log.close()
    assert json.loads(log.path.read_text())["request_id"] == "id"
    assert (tmp_path / "requests.jsonl.1").stat().st_size == 64 << 20


@pytest.mark.parametrize("asked", [None, "", "x" * 129, "a\nb", "ü"])
def test_an_id_that_is_none_is_replaced(asked: str | None) -> None:
    assert len(request_id(asked)) == 24


def test_a_clients_own_id_is_kept() -> None:
    assert request_id("req-1") == "req-1"


def test_a_pause_is_neither_a_retry_nor_a_continuation_nor_time_on_a_slice() -> None:
    record = RequestRecord(CHAT, model="llama", streamed=True)
    record.sent(entry("slice-0", "spot"))
    record.passed_on(b"data: {}\n\n", 1)
    record.preempted()
    record.resumed(0.5)
    record.sent(entry("slice-1", "reserved"))
    record.passed_on(b"data: {}\n\n", 1)
    record.sent(entry("slice-2", "spot"))
    assert (record.preemptions, record.retries, record.continuations) == (1, 0, 1)
    assert [pool for pool, _ in record.on_slices] == ["spot", None, "reserved", "spot"]
    assert [at_s for _, at_s in record.on_slices] == sorted(at_s for _, at_s in record.on_slices)
    record.output_tokens, record.first_s, record.last_s = 11, 100.0, 101.5
    assert record.inter_token_s == 0.1
