"""The last minutes as one reader of the store saw them: rates out of counters, times to first token, times of starts.

Pure: records and the time are arguments. Every router reads the same store, so any router can answer.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from serving.state.records import Demand, SliceRecord, SliceState

STEP_S = 2.0
POINTS = 150  # five minutes
_RATE_S = 3.0  # engines count tokens at the end of a step: over less time a rate jumps between zero and twice itself


@dataclass(frozen=True)
class Point:
    """One model over one step; times to first token are those of the slowest router, None where nothing was answered."""

    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None


@dataclass
class _Replica:
    """One slice replica: its counters over the last seconds, and the time its phase began."""

    phase: str
    phase_since_s: float
    counts: deque[tuple[float, int, int]] = field(default_factory=deque)


class Rates:
    """What is remembered between two reads of the store."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._starts: dict[tuple[str, str, str], float] = {}
        self._points: dict[tuple[str, str], deque[Point]] = {}
        self._next_point_s: float | None = None
        self._now_s = 0.0

    def observe(self, entries: Sequence[SliceRecord], demands: Sequence[Demand], now_s: float) -> None:
        """Take in the records of one read of the store."""
        self._now_s = now_s
        replicas = {}
        for entry in entries:
            replica = self._replicas.get(entry.replica) or _Replica(entry.phase, now_s)
            if replica.phase != entry.phase:
                replica.phase, replica.phase_since_s = entry.phase, now_s
            replica.counts.append((now_s, entry.output_tokens, entry.prompt_tokens))
            while len(replica.counts) > 2 and replica.counts[1][0] <= now_s - _RATE_S:
                replica.counts.popleft()
            replicas[entry.replica] = replica
            if entry.serves:
                self._starts[_pool_of(entry)] = sum(seconds for _, seconds in entry.phases)
        self._replicas = replicas
        self._add_point(entries, demands, now_s)

    def rates(self, replica: str) -> tuple[float, float]:
        """Output and prompt tokens a second of a slice, over the last seconds."""
        known = self._replicas.get(replica)
        if known is None or len(known.counts) < 2:
            return 0.0, 0.0
        (then_s, *before), (now_s, *after) = known.counts[0], known.counts[-1]
        output, prompt = (max(0, b - a) / (now_s - then_s) for a, b in zip(before, after, strict=True))
        return output, prompt

    def start(self, entry: SliceRecord) -> tuple[float, float | None]:
        """How long a starting slice has taken, and how long the last start of its pool took, if one was seen."""
        known = self._replicas.get(entry.replica)
        here_s = self._now_s - known.phase_since_s if known else 0.0
        elapsed_s = sum(seconds for _, seconds in entry.phases) + here_s
        return elapsed_s, self._starts.get(_pool_of(entry))

    def points(self, application: str, model: str) -> list[Point]:
        """The steps of an application's model, the oldest first."""
        return list(self._points.get((application, model), ()))

    def _add_point(self, entries: Sequence[SliceRecord], demands: Sequence[Demand], now_s: float) -> None:
        if self._next_point_s is None:
            self._next_point_s = now_s + STEP_S
            return
        if now_s < self._next_point_s:
            return
        # After a pause (the store could not be read) the series goes on at the present time, with no points made up.
        due_s = self._next_point_s + STEP_S
        self._next_point_s = due_s if due_s > now_s else now_s + STEP_S
        models = {(entry.application, entry.model) for entry in entries}
        models |= {(demand.application, demand.model) for demand in demands}
        for owner in models | self._points.keys():
            of_model = [demand for demand in demands if (demand.application, demand.model) == owner]
            rates = [
                self.rates(entry.replica)
                for entry in entries
                if (entry.application, entry.model) == owner and entry.state is not SliceState.LOST
            ]
            point = Point(
                output_tokens_per_s=round(sum(output for output, _ in rates), 1),
                prompt_tokens_per_s=round(sum(prompt for _, prompt in rates), 1),
                ttft_p50_s=slowest(demand.ttft_p50_s for demand in of_model),
                ttft_p90_s=slowest(demand.ttft_p90_s for demand in of_model),
            )
            self._points.setdefault(owner, deque(maxlen=POINTS)).append(point)


def _pool_of(entry: SliceRecord) -> tuple[str, str, str]:
    return entry.application, entry.model, entry.pool


def slowest(times_s: Iterable[float]) -> float | None:
    """Percentiles of several routers can't be merged: the worst of them, None where none answered."""
    return max((time_s for time_s in times_s if time_s > 0), default=None)
