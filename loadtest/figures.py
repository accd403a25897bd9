"""Statistics of inference: what there is to measure, and how it comes of counts and histograms."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

LATE_MS = 10.0
_SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}

AT_MOST, AT_LEAST = "at most", "at least"
# Every statistic that a threshold may name: which side of it is good, and what it is.
STATISTICS = {
    **{f"ttft_{name}_ms": (AT_MOST, "time to first token") for name in _SHARES},
    **{f"itl_{name}_ms": (AT_MOST, "inter-token latency") for name in _SHARES},
    **{f"latency_{name}_ms": (AT_MOST, "a whole answer, or the wait for it") for name in _SHARES},
    "start_delay_p99_ms": (AT_MOST, "sent after the intended moment; the load generator's own fault"),
    "late_starts": (AT_MOST, f"share of requests sent over {LATE_MS:g} ms after the intended moment"),
    "dropped": (AT_MOST, "share of requests never sent: too many were in flight"),
    "failures": (AT_MOST, "share of requests that failed, refusals aside"),
    "refusals": (AT_MOST, "share of requests answered 429 or 503"),
    "goodput": (AT_LEAST, "share of requests within the SLO"),
    "goodput_per_s": (AT_LEAST, "requests within the SLO a second"),
    "requests_per_s": (AT_LEAST, "requests answered a second"),
    "tokens_per_s": (AT_LEAST, "output tokens a second"),
    "held_rate_per_s": (AT_LEAST, "of a ramp: the highest rate whose step broke no threshold"),
}
Figures = dict[str, float | None]


@dataclass(frozen=True)
class Slo:
    """What makes a request good."""

    ttft_ms: float = 1000.0
    itl_ms: float = 100.0

    def good(self, *, ttft_s: float | None, latency_s: float, tokens: int) -> bool:
        """Both targets met; between tokens it is the answer's mean that counts.

        An answer that came in one piece is good where a streamed one would have been complete.
        """
        later = max(tokens - 1, 1)
        if ttft_s is None:
            return latency_s * 1000 <= self.ttft_ms + later * self.itl_ms
        return ttft_s * 1000 <= self.ttft_ms and (latency_s - ttft_s) * 1000 / later <= self.itl_ms


@dataclass(frozen=True)
class Counts:
    """What has happened so far; times are histograms in ms."""

    ttft: Counter[float] = field(default_factory=Counter)
    itl: Counter[float] = field(default_factory=Counter)
    latency: Counter[float] = field(default_factory=Counter)
    start: Counter[float] = field(default_factory=Counter)
    requests: int = 0
    failures: int = 0
    refused: int = 0
    dropped: int = 0
    good: int = 0
    tokens: int = 0

    @property
    def in_flight(self) -> int:
        return self.start.total() - (self.requests - self.dropped)

    def since(self, earlier: "Counts") -> "Counts":
        return Counts(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)))


def figures(counts: Counts, seconds: float) -> Figures:
    """Every statistic of a stretch of time; None where nothing was measured."""
    found: Figures = {}
    for name, times in (("ttft", counts.ttft), ("itl", counts.itl), ("latency", counts.latency)):
        for quantile, share in _SHARES.items():
            found[f"{name}_{quantile}_ms"] = percentile(times, share)
    found["start_delay_p99_ms"] = percentile(counts.start, 0.99)
    late = sum(times for delay_ms, times in counts.start.items() if delay_ms > LATE_MS)
    found["late_starts"] = _ratio(late, counts.start.total())
    for name in ("dropped", "failures"):
        found[name] = _ratio(getattr(counts, name), counts.requests)
    found["refusals"] = _ratio(counts.refused, counts.requests)
    found["goodput"] = _ratio(counts.good, counts.requests)
    answered = counts.requests - counts.failures - counts.refused - counts.dropped
    found["goodput_per_s"] = _ratio(counts.good, seconds)
    found["requests_per_s"] = _ratio(answered, seconds)
    found["tokens_per_s"] = _ratio(counts.tokens, seconds)
    return found


def percentile(times: Mapping[float, int], share: float) -> float | None:
    """The least time that such a share of a histogram's times does not exceed."""
    left = math.ceil(share * sum(times.values()))
    for time in sorted(times):
        left -= times[time]
        if left <= 0:
            return time
    return None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
