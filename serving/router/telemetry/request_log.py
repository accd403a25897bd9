"""One JSON line per request, in a file under Ray's session logs. Never a prompt or an answer, unless the YAML asks.

Requests that were refused before anybody knew whose they are have a small file of their own: who has no key can't rotate
away what others did. No field of a line is longer than what a client may send there.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.errors import MethodError, UnauthorizedError, UnknownPathError
from serving.metrics.table import NO_KEY
from serving.router.telemetry.lines import Lines
from serving.router.telemetry.record import RequestRecord
from serving.router.telemetry.rotating_file import Rotation

_MOST_LINES = 20_000
_MOST_STRANGERS = 200  # a beat
_STRANGERS = Rotation(most_bytes=8 << 20, files=2, most_files=2, keep_s=0)
_STRANGE = frozenset(error.code for error in (UnauthorizedError, UnknownPathError, MethodError))
_MOST_CONTENT = 64 << 10
_LONGEST_PATH = 200  # the longest that is served has 33


class RequestLog:
    """Two files: of requests, and of those whose client is not known."""

    def __init__(self, path: Path, *, most_lines: int = _MOST_LINES, rotation: Rotation = Rotation()) -> None:  # noqa: B008  frozen
        self.path = path
        self._lines = Lines(path, rotation, most_lines)
        self.strangers = path.with_name(f"{path.stem}.strangers{path.suffix}")
        self._strangers = Lines(self.strangers, _STRANGERS, _MOST_STRANGERS)

    def __call__(self, record: RequestRecord) -> None:
        """Take a record's line."""
        strange = record.key == NO_KEY and record.code in _STRANGE
        (self._strangers if strange else self._lines).put(line(record))

    def flush(self) -> None:
        """Write the lines that wait; those that the disk does not take stay."""
        self._lines.flush()
        self._strangers.flush()

    def close(self) -> None:
        self.flush()


def line(record: RequestRecord) -> Mapping[str, Any]:
    """The fields of a line. Times are seconds since the request's arrival; what did not happen is left out."""
    fields: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.arrived_at, UTC).isoformat(timespec="milliseconds"),
        "request_id": record.request_id,
        "path": record.path[:_LONGEST_PATH],
        "model": record.model,
        "key": record.key,
        "outcome": record.outcome,
        "status": record.status,
        "stream": record.streamed,
    }
    if record.code:
        fields["code"] = record.code
    if record.leases:
        fields["slice"] = record.slice
        fields["pool"] = record.pool
        if len(record.leases) > 1:
            fields["slices"] = [lease.slice for lease in record.leases]
    if record.prompt_tokens is not None:
        fields["prompt_tokens"] = record.prompt_tokens
    if record.output_tokens is not None:
        fields["output_tokens"] = record.output_tokens
    times = (
        ("queued_s", record.queued_s or None),
        ("router_s", record.router_s),
        ("ttft_s", record.first_s - record.arrived_s if record.first_s else None),
        ("slice_ttft_s", record.slice_ttft_s if record.first_s else None),
        ("inter_token_s", record.inter_token_s),
        ("longest_gap_s", record.longest_gap_s or None),
        ("total_s", record.ended_s - record.arrived_s),
        ("paused_s", record.paused_s or None),
    )
    # As round(seconds, 6), in a third of the time.
    fields |= {name: round(seconds * 1e6) / 1e6 for name, seconds in times if seconds is not None}
    rare = (
        ("retries", record.retries),
        ("continuations", record.continuations),
        ("preemptions", record.preemptions),
        ("trace_id", record.trace_id),
    )
    fields |= {name: value for name, value in rare if value}
    if record.answer is not None:
        fields["question"] = _text(record.question)
        fields["answer"] = _text(b"".join(record.answer))
    return fields


def _text(raw: bytes) -> str:
    return raw[:_MOST_CONTENT].decode(errors="replace")
