"""How requests of the last minute went, as one router saw them. A writer of the journal; the store's Demand carries the figures."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from serving.router.telemetry.record import RequestRecord

WINDOW_S = 60.0
_MOST = 1000  # per model; in a busier minute the last thousand requests say as much


class RecentLatency:
    """Times of streamed answers by model: to the first token, and between tokens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[str, deque[tuple[float, float, float | None]]] = {}

    def __call__(self, record: RequestRecord) -> None:
        """Take a request at its end. An error's times would hide how long answers take."""
        if record.streamed and record.outcome == "ok" and record.first_s:
            times = self._times.setdefault(record.model, deque(maxlen=_MOST))
            times.append((self._clock(), record.first_s - record.arrived_s, record.inter_token_s))

    def percentiles(self, model: str) -> dict[str, Any]:
        """The fields of Demand: 0 where nothing was answered of late."""
        times = self._times.get(model, deque())
        while times and times[0][0] < self._clock() - WINDOW_S:
            times.popleft()
        ttft = sorted(first for _, first, _ in times)
        itl = sorted(between for _, _, between in times if between is not None)
        return {
            "ttft_p50_s": _percentile(ttft, 0.5),
            "ttft_p90_s": _percentile(ttft, 0.9),
            "itl_p50_s": _percentile(itl, 0.5),
            "itl_p90_s": _percentile(itl, 0.9),
        }


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value with this share at or below it."""
    return round(ordered[math.ceil(share * len(ordered)) - 1], 6) if ordered else 0.0
