"""One JSON line a request, in a file of its own under Ray's session logs. Never a prompt or an answer, unless the YAML asks.

Lines are kept for a beat and then written by another thread: a slow disk costs no request anything.
"""

import logging
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from serving.router.record import RequestRecord

_MOST_BYTES = 64 << 20
_FILES = 4
_MOST_LINES = 20_000  # while the disk takes none; the rest is counted, not kept
_MOST_CONTENT = 64 << 10


class RequestLog:
    """The file and the lines that wait for it."""

    def __init__(self, path: Path, *, most_lines: int = _MOST_LINES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.dropped = 0
        self._most_lines = most_lines
        self._file = RotatingFileHandler(path, maxBytes=_MOST_BYTES, backupCount=_FILES, delay=True)
        self._lines: list[bytes] = []
        self._writing = threading.Lock()

    def __call__(self, record: RequestRecord) -> None:
        """Take a record's line."""
        if len(self._lines) < self._most_lines:
            self._lines.append(to_json(line(record)))
        else:
            self.dropped += 1

    def flush(self) -> None:
        """Write what waits."""
        with self._writing:
            lines, self._lines = self._lines, []
            if not lines:
                return
            text = b"\n".join(lines).decode()
            self._file.emit(logging.makeLogRecord({"msg": text}))
            if self.dropped:
                dropped, self.dropped = self.dropped, 0
                self._file.emit(logging.makeLogRecord({"msg": f'{{"dropped":{dropped}}}'}))

    def close(self) -> None:
        self.flush()
        self._file.close()


def line(record: RequestRecord) -> Mapping[str, Any]:
    """What the line says. Times are seconds since the request's arrival; what did not happen is left out."""
    said: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.arrived_at, UTC).isoformat(timespec="milliseconds"),
        "request_id": record.request_id,
        "path": record.path,
        "model": record.model,
        "key": record.key,
        "outcome": record.outcome,
        "status": record.status,
        "stream": record.streamed,
    }
    if record.code:
        said["code"] = record.code
    if record.leases:
        said["slice"] = record.slice
        said["pool"] = record.leases[-1].pool
        said["slices"] = [lease.slice for lease in record.leases] if len(record.leases) > 1 else None
        said["why"] = record.leases[-1].why or None
    said |= {
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "queued_s": record.queued_s or None,
        "router_s": record.router_s,
        "ttft_s": record.first_s - record.arrived_s if record.first_s else None,
        "slice_ttft_s": record.slice_ttft_s if record.first_s else None,
        "inter_token_s": record.inter_token_s,
        "longest_gap_s": record.longest_gap_s or None,
        "total_s": record.ended_s - record.arrived_s,
        "retries": record.retries or None,
        "continuations": record.continuations or None,
        "trace_id": record.trace_id or None,
    }
    if record.answer is not None:
        said["question"] = _text(record.question)
        said["answer"] = _text(b"".join(record.answer))
    return {
        key: round(value, 6) if isinstance(value, float) else value
        for key, value in said.items()
        if value is not None
    }


def _text(raw: bytes) -> str:
    return raw[:_MOST_CONTENT].decode(errors="replace")
