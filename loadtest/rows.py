"""What is measured beside locust's requests, as rows of locust's own statistics.

    TTFT      intended start to the first text of the answer
    ITL       between two texts of an answer
    latency   intended start to the end of a whole answer, or to the end of a run that it did not come within
    tokens    answers, with their tokens in place of bytes
    good      requests within the SLO
    refused   429 and 503: the service had no room
    start     how long after its intended moment a request was sent
    dropped   requests never sent: too many were in flight

They are logged past `events.request`: there each token would count as a request in "Aggregated" and in the charts.
Latency is a row beside locust's own, which has failures in it: a service that refuses in 2 ms would look fast.
"""

from collections import Counter
from collections.abc import Iterable

from locust import stats as locust_stats
from locust.stats import RequestStats

from figures import Counts

ROWS = ("TTFT", "ITL", "latency", "tokens", "good", "refused", "start", "dropped")
REQUEST = "POST"
REFUSALS = (429, 503)


def three_digits(ms: float) -> float:
    """Locust's own rounding keeps whole milliseconds, a tenth of a fast engine's inter-token latency."""
    return float(f"{ms:.3g}")


locust_stats.bucket_response_time = three_digits  # the way locust's documentation gives


def names(stats: RequestStats) -> list[str]:
    """What was asked, as the rows call it."""
    return sorted({name for name, kind in stats.entries if kind == REQUEST})


def count(stats: RequestStats, only: Iterable[str] | None = None) -> Counts:
    """Add up locust's rows of some names, or of all."""
    chosen = set(names(stats) if only is None else only)
    times: dict[str, Counter[float]] = {row: Counter() for row in (*ROWS, REQUEST)}
    total: Counter[str] = Counter()
    for (name, row), entry in list(stats.entries.items()):
        if name not in chosen or row not in times:
            continue
        times[row].update(entry.response_times)
        total[row] += entry.num_requests
        if row == "tokens":
            total["output tokens"] += entry.total_content_length
        if row == REQUEST:
            total["failed"] += entry.num_failures
    return Counts(
        times["TTFT"],
        times["ITL"],
        times["latency"],
        times["start"],
        total[REQUEST],
        total["failed"] - total["refused"] - total["dropped"],
        total["refused"],
        total["dropped"],
        total["good"],
        total["output tokens"],
    )


class Recorder:
    """One request's own rows."""

    def __init__(self, stats: RequestStats, name: str) -> None:
        self._stats, self._name = stats, name

    def time(self, row: str, seconds: float) -> None:
        self._stats.get(self._name, row).log(seconds * 1000, 0)

    def count(self, row: str, amount: int = 0) -> None:
        self._stats.get(self._name, row).log(None, amount)
