"""One JSON line per request, in a file under Ray's session logs. Never a prompt or an answer, unless the YAML asks.

Another thread writes the lines once a beat: a slow disk costs no request anything.
"""

import errno
import logging
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from serving.router.telemetry.record import RequestRecord

logger = logging.getLogger("ray.serve")

_MOST_BYTES = 64 << 20
_FILES = 4
_MOST_LINES = 20_000  # kept while the disk takes none; further lines are only counted
_MOST_CONTENT = 64 << 10


class RequestLog:
    """The file and the lines that wait for it."""

    def __init__(self, path: Path, *, most_lines: int = _MOST_LINES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.dropped = 0
        self._most_lines = most_lines
        self._files = RotatingFileHandler(path, backupCount=_FILES, delay=True)
        self._lines: list[bytes] = []
        self._refused = False
        self._taking = threading.Lock()  # never held while the disk is busy
        self._writing = threading.Lock()

    def __call__(self, record: RequestRecord) -> None:
        """Take a record's line."""
        encoded = to_json(line(record))
        with self._taking:
            if len(self._lines) < self._most_lines:
                self._lines.append(encoded)
            else:
                self.dropped += 1

    def flush(self) -> None:
        """Write the lines that wait; those that the disk does not take stay."""
        with self._writing:
            with self._taking:
                lines, self._lines = self._lines, []
                dropped, self.dropped = self.dropped, 0
            if not lines:
                return
            notice = [b'{"dropped":%d}' % dropped] if dropped else []
            try:
                self._write(b"".join(text + b"\n" for text in lines + notice))
            except OSError as error:
                if not self._refused:  # once, not every beat
                    logger.warning("request log %s: %s; its lines wait", self.path, error.strerror)
                self._refused = True
                with self._taking:
                    waiting = lines + self._lines
                    self._lines = waiting[: self._most_lines]
                    self.dropped += dropped + len(waiting) - len(self._lines)
            else:
                self._refused = False

    def close(self) -> None:
        self.flush()

    def _write(self, text: bytes) -> None:
        """Write all of the text, or nothing and raise OSError."""
        if self.path.exists() and 0 < self.path.stat().st_size > _MOST_BYTES - len(text):
            self._files.doRollover()
        # Logging's own handler swallows errors, and a buffered file would write its buffer again.
        with self.path.open("ab", buffering=0) as file:
            begun = file.tell()
            if file.write(text) < len(text):
                file.truncate(begun)  # half of a line would spoil the next one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def line(record: RequestRecord) -> Mapping[str, Any]:
    """The fields of a line. Times are seconds since the request's arrival; what did not happen is left out."""
    fields: dict[str, Any] = {
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
        fields["code"] = record.code
    if record.leases:
        fields["slice"] = record.slice
        fields["pool"] = record.leases[-1].pool
        fields["slices"] = [lease.slice for lease in record.leases] if len(record.leases) > 1 else None
    fields |= {
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
        fields["question"] = _text(record.question)
        fields["answer"] = _text(b"".join(record.answer))
    return {
        key: round(value, 6) if isinstance(value, float) else value
        for key, value in fields.items()
        if value is not None
    }


def _text(raw: bytes) -> str:
    return raw[:_MOST_CONTENT].decode(errors="replace")
