"""The last minutes as one reader of the board saw them: rates out of counters, times to first token, how long starts take.

Decisions only: what the board says and the time are given. Every router sees the same board, so any of them can answer.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from serving.state.records import Demand, SliceRecord, SliceState

STEP_S = 2.0
POINTS = 150  # five minutes
_RATE_S = 3.0  # engines count a token when its step ends: shorter, and a rate jumps between nothing and twice itself


@dataclass(frozen=True)
class Point:
    """One model over one step; times to first token are those of the slowest router, None where nothing was answered."""

    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None


@dataclass
class _Seen:
    """One slice replica: its counters over the last seconds, and since when it is in its phase."""

    phase: str
    phase_since_s: float
    counts: deque[tuple[float, int, int]] = field(default_factory=deque)


class Rates:
    """What is remembered between two looks at the board."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._starts: dict[tuple[str, str], float] = {}
        self._points: dict[str, deque[Point]] = {}
        self._next_point_s: float | None = None
        self._now_s = 0.0

    def observe(self, entries: Sequence[SliceRecord], demands: Sequence[Demand], now_s: float) -> None:
        """Take a look at the board, as a reader of it left it."""
        self._now_s = now_s
        seen = {}
        for entry in entries:
            one = self._seen.get(entry.replica) or _Seen(entry.phase, now_s)
            if one.phase != entry.phase:
                one.phase, one.phase_since_s = entry.phase, now_s
            one.counts.append((now_s, entry.output_tokens, entry.prompt_tokens))
            while len(one.counts) > 2 and one.counts[1][0] <= now_s - _RATE_S:
                one.counts.popleft()
            seen[entry.replica] = one
            if entry.serves:
                self._starts[entry.model, entry.pool] = sum(seconds for _, seconds in entry.phases)
        self._seen = seen
        self._draw(entries, demands, now_s)

    def rates(self, replica: str) -> tuple[float, float]:
        """Output and prompt tokens a second of a slice, over the last seconds."""
        one = self._seen.get(replica)
        if one is None or len(one.counts) < 2:
            return 0.0, 0.0
        (then_s, *before), (now_s, *after) = one.counts[0], one.counts[-1]
        output, prompt = (max(0, b - a) / (now_s - then_s) for a, b in zip(before, after, strict=True))
        return output, prompt

    def start(self, entry: SliceRecord) -> tuple[float, float | None]:
        """How long a starting slice has taken, and how long the last start of its pool took, if one was seen."""
        one = self._seen.get(entry.replica)
        here_s = self._now_s - one.phase_since_s if one else 0.0
        elapsed_s = sum(seconds for _, seconds in entry.phases) + here_s
        return elapsed_s, self._starts.get((entry.model, entry.pool))

    def points(self, model: str) -> list[Point]:
        """A model's steps, the oldest first."""
        return list(self._points.get(model, ()))

    def _draw(self, entries: Sequence[SliceRecord], demands: Sequence[Demand], now_s: float) -> None:
        if self._next_point_s is None:
            self._next_point_s = now_s + STEP_S
            return
        if now_s < self._next_point_s:
            return
        # After a pause (the board could not be read) the line goes on where time is, with no points made up.
        due_s = self._next_point_s + STEP_S
        self._next_point_s = due_s if due_s > now_s else now_s + STEP_S
        models = {entry.model for entry in entries} | {demand.model for demand in demands}
        for model in models | self._points.keys():
            rates = [
                self.rates(entry.replica)
                for entry in entries
                if entry.model == model and entry.state is not SliceState.LOST
            ]
            point = Point(
                output_tokens_per_s=round(sum(output for output, _ in rates), 1),
                prompt_tokens_per_s=round(sum(prompt for _, prompt in rates), 1),
                ttft_p50_s=slowest(demand.ttft_p50_s for demand in demands if demand.model == model),
                ttft_p90_s=slowest(demand.ttft_p90_s for demand in demands if demand.model == model),
            )
            self._points.setdefault(model, deque(maxlen=POINTS)).append(point)


def slowest(times_s: Iterable[float]) -> float | None:
    """Percentiles of several routers can't be merged: the worst of them, None where none answered."""
    return max((time_s for time_s in times_s if time_s > 0), default=None)
