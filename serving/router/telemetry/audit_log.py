"""What an operator is asked afterwards: whose keys came and went, who was refused how often, what a router did to slices.

JSON lines beside the request log, kept for a week at least. A key is named by its first digits, as everywhere. Refusals are added
up by key and reason, a line a minute each: nobody can fill the log by being refused.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.errors import ServingError
from serving.router.telemetry.lines import Lines
from serving.router.telemetry.record import RequestRecord, outcome_of
from serving.router.telemetry.rotating_file import Rotation

_ROTATION = Rotation(most_bytes=8 << 20, files=4, most_files=32, keep_s=7 * 24 * 3600)
_MOST_LINES = 10_000
_REFUSALS_S = 60.0


class AuditLog:
    """The file of one router process. Safe to use from several threads."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._lines = Lines(path, _ROTATION, _MOST_LINES)
        self._clock = clock
        self._refused: Counter[tuple[str, str]] = Counter()
        self._counting = threading.Lock()
        self._since_s = clock()

    def __call__(self, record: RequestRecord) -> None:
        """Take a request's record: what was refused is counted."""
        self._count(record.key, record.code, record.outcome)

    def refused(self, key: str, error: ServingError) -> None:
        """Count a request without a record that ended with this error."""
        self._count(key, error.code, outcome_of(error))

    def tell(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write an act."""
        at = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        self._lines.put({"time": at, "event": event, **fields})

    def flush(self) -> None:
        """Write the lines that wait, and once a minute the refusals."""
        if self._clock() - self._since_s >= _REFUSALS_S:
            self._tell_refusals()
        self._lines.flush()

    def close(self) -> None:
        self._tell_refusals()
        self._lines.flush()

    def _count(self, key: str, code: str, outcome: str) -> None:
        if outcome == "refused":
            with self._counting:
                self._refused[key, code] += 1

    def _tell_refusals(self) -> None:
        with self._counting:
            refused, self._refused = self._refused, Counter()
        self._since_s = self._clock()
        for (key, code), count in refused.items():
            self.tell("refused", {"key": key, "code": code, "requests": count})
