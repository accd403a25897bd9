"""What lines of batches cost requests inside engines: simulated slices in simulated time, the same on any machine.

    python -m benchmarks.filled_steps               # some minutes

Llama 3.3 70B on v6e 2x4 with 32 seats a slice. Requests come at random times; lines take every other seat but `batch.spare`, one
after the other at the router's pace, and the line that runs for the shortest time is given up for a request that finds no seat. The
router's own table says which slice takes what. The engine is vLLM's schedule in the calibrated time of steps, without HTTP:
`python -m benchmarks.batches` has that, in real time.
"""

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.preemption import planned
from serving.config import BatchSpec
from serving.planning import Plan
from serving.router.core import reading
from serving.router.http.protocol import InferenceRequest
from serving.router.prompt_pace import PromptPace
from serving.router.scheduling.prefix_index import TOKEN_BYTES
from serving.router.scheduling.slice_table import SliceTable
from serving.simulation.engine.physics import Physics
from serving.simulation.engine.scheduler import Limits, Request, Scheduler
from serving.simulation.engine.server import factors_for
from serving.state.records import SliceRecord, SliceState
from serving.timings import TIMINGS

_MODEL = "llama"


@dataclass(frozen=True)
class Load:
    """Requests a second of each slice, and their tokens; the tokens of lines, none where there is no batch, and the share they leave free.

    `passes`: whether requests go past slices that read a prompt, and lines are read on half of them at most. `target_s`: `batch.ttft_p99_s`.
    """

    slices: int = 1
    seats: int = 32
    per_s: float = 4.0
    seconds: float = 900.0
    prompt_tokens: int = 260
    tokens: int = 100
    line_prompt_tokens: int = 0
    line_tokens: int = 300
    spare: float = BatchSpec().spare
    passes: bool = True
    target_s: float | None = None


LOADS = (
    Load(),
    *(Load(line_prompt_tokens=tokens) for tokens in (16, 128, 650, 2000)),
    *(Load(line_prompt_tokens=650, spare=spare) for spare in (0.5, 0.7)),
    *(Load(line_prompt_tokens=tokens, target_s=0.083) for tokens in (650, 2000)),
    *(Load(slices=slices, line_prompt_tokens=tokens) for slices in (2, 4) for tokens in (0, 16, 650, 2000)),
    *(
        Load(slices=slices, line_prompt_tokens=tokens, target_s=target_s)
        for slices, target_s in ((2, 0.074), (4, 0.058))
        for tokens in (650, 2000)
    ),
)


@dataclass
class Played:
    """What came of one load: the requests, and how many lines were answered and given up."""

    load: Load
    requests: list[Request] = field(default_factory=list)
    lines: int = 0
    given_up: int = 0

    def first_ms(self, percent: int) -> float:
        first_s = [
            request.first_token_s - request.arrived_s for request in self.requests if request.first_token_s
        ]
        return 1e3 * statistics.quantiles(first_s, n=100, method="inclusive")[percent - 1]

    def token_ms(self) -> float:
        return 1e3 * statistics.median(
            (request.last_token_s - request.first_token_s) / (self.load.tokens - 1)
            for request in self.requests
            if request.first_token_s and request.last_token_s
        )


class Slice:
    """An engine, and the requests and lines that it has."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.name = name
        self.open: list[Request] = []
        self.lines: list[Request] = []
        self.steps = False
        self._physics = Physics(plan, factors_for(plan))
        self._scheduler = Scheduler(Limits.of(plan))

    @property
    def taken(self) -> int:
        return len(self.open) + len(self.lines)

    def add(self, request: Request, *, fills: bool) -> None:
        (self.lines if fills else self.open).append(request)
        self._scheduler.add(request)

    def give_up(self, line: Request) -> None:
        self.lines.remove(line)
        self._scheduler.cancel(line)

    def step(self, now_s: float) -> float | None:
        """When the next step ends; None where there is nothing to do."""
        step = self._scheduler.schedule(now_s)
        if step is None:
            return None
        ends_s = now_s + self._physics.seconds(step.batch)
        self._scheduler.complete(step, ends_s)
        return ends_s

    def done(self) -> tuple[list[Request], list[Request]]:
        """The requests and the lines that have ended since the last call."""
        ended = [[each for each in these if each.done] for these in (self.open, self.lines)]
        self.open = [request for request in self.open if not request.done]
        self.lines = [line for line in self.lines if not line.done]
        return ended[0], ended[1]


class Fleet:
    """Slices whose seats are filled, and the router's choice among them. The time is that of their steps."""

    def __init__(self, load: Load) -> None:
        plan = planned(load.seats)
        self._load = load
        self._slices = {name: Slice(name, plan) for name in map(str, range(load.slices))}
        seats = load.slices * load.seats
        self._fillable = seats - math.ceil(load.spare * seats) if load.line_prompt_tokens else 0
        self._now_s = 0.0
        self._table = SliceTable(
            {_MODEL: load.slices},
            {_MODEL: "v6e"},
            seats={(_MODEL, ""): load.seats},
            reads={(_MODEL, ""): reading(plan, routers=1).tokens_per_s} if load.passes else {},
            clock=lambda: self._now_s,
        )
        self._pace = PromptPace({_MODEL: reading(plan, routers=1)}, load.target_s)
        self._names = itertools.count()
        self._events: list[tuple[float, int, Slice | None]] = []
        self._held: deque[Request] = deque()
        self._beat_s = 0.0
        self.played = Played(load)

    def run(self, coming: deque[float]) -> None:
        """Until the last of these times."""
        while coming:
            at_s = min(coming[0], self._events[0][0] if self._events else math.inf, self._beat_s)
            self._now_s = at_s
            while coming and coming[0] <= at_s:
                request = self._made(self._load.prompt_tokens, self._load.tokens, coming.popleft())
                self.played.requests.append(request)
                self._held.append(request)
            while self._events and self._events[0][0] <= at_s:
                if slice_ := heapq.heappop(self._events)[2]:
                    self._end_step(slice_)
            if self._beat_s <= at_s:
                self._beat()
            self._send()
            for slice_ in self._slices.values():
                if not slice_.steps and (ends_s := slice_.step(at_s)) is not None:
                    slice_.steps = True
                    self._later(ends_s, slice_)

    def _beat(self) -> None:
        """What slices report."""
        beat = round(self._beat_s / TIMINGS.beat_s)
        self._table.update(
            (
                SliceRecord(
                    name, _MODEL, SliceState.SERVING, "", "v6e", beat=beat, running=float(slice_.taken)
                )
                for name, slice_ in self._slices.items()
            ),
            self._now_s,
        )
        asked = self._load.passes and self._table.is_asked(_MODEL)
        self._pace.serve(_MODEL, self._load.slices, unread=1.0, asked=asked)
        self._beat_s += TIMINGS.beat_s

    def _end_step(self, slice_: Slice) -> None:
        slice_.steps = False
        requests, lines = slice_.done()
        self.played.lines += len(lines)
        for _ in (*requests, *lines):
            self._table.end(slice_.name)
        for request in requests:
            assert request.first_token_s is not None  # noqa: S101  it has ended
            first_s = request.first_token_s - request.arrived_s
            self._pace.answered(_MODEL, request.arrived_s, first_s, self._now_s)

    def _send(self) -> None:
        """Hand requests and lines to engines."""
        taken = sum(slice_.taken for slice_ in self._slices.values())
        running = sum(len(slice_.open) for slice_ in self._slices.values())
        seats = self._load.slices * self._load.seats
        while self._held and running < seats:
            if taken == seats:
                self._give_up()
                taken -= 1
            self._start(self._held.popleft(), fills=False)
            running, taken = running + 1, taken + 1
        while not self._held and taken < self._fillable:
            if wait_s := self._pace.wait_s(_MODEL, self._now_s):
                self._later(self._now_s + wait_s, None)
                break
            self._pace.started(_MODEL, self._load.line_prompt_tokens, self._now_s)
            line = self._made(self._load.line_prompt_tokens, self._load.line_tokens, self._now_s)
            self._start(line, fills=True)
            taken += 1

    def _start(self, request: Request, *, fills: bool) -> None:
        text = f"{next(self._names):08}".ljust(TOKEN_BYTES * len(request.prompt), "x")
        asked = InferenceRequest(_MODEL, "/v1/completions", b"", {"prompt": text}, fills=fills)
        chosen = self._table.choose(_MODEL, (), asked).replica
        self._table.begin(chosen)
        self._slices[chosen].add(request, fills=fills)

    def _give_up(self) -> None:
        """The line that runs for the shortest time."""
        line, slice_ = max(
            ((line, slice_) for slice_ in self._slices.values() for line in slice_.lines),
            key=lambda pair: pair[0].arrived_s,
        )
        slice_.give_up(line)
        self._table.end(slice_.name)
        self.played.given_up += 1

    def _later(self, at_s: float, slice_: Slice | None) -> None:
        heapq.heappush(self._events, (at_s, next(self._names), slice_))

    def _made(self, prompt_tokens: int, tokens: int, at_s: float) -> Request:
        """No two prompts have anything in common."""
        name = next(self._names) << 20
        return Request(range(name, name + prompt_tokens), (1,) * tokens, at_s)


def arrivals(load: Load) -> Iterator[float]:
    """The same for every load of as many requests."""
    draw, at_s = random.Random(7), 0.0
    while (at_s := at_s + draw.expovariate(load.slices * load.per_s)) < load.seconds:
        yield at_s


def play(load: Load) -> Played:
    fleet = Fleet(load)
    fleet.run(deque(arrivals(load)))
    return fleet.played


def table(played: Sequence[Played]) -> str:
    """The first of each number of slices is the one without a batch."""
    rows = [
        "| slices | tokens of a line's prompt | `batch.spare` | `batch.ttft_p99_s` | TTFT p50, ms | p99, ms | p99 over that without | ms a token, p50 | lines/s | given up |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in played:
        without = next(each for each in played if each.load.slices == one.load.slices)
        cells = (
            str(one.load.slices),
            str(one.load.line_prompt_tokens or "no batch"),
            f"{one.load.spare:g}" if one.load.line_prompt_tokens else "",
            f"{one.load.target_s:g}" if one.load.target_s else "",
            f"{one.first_ms(50):.0f}",
            f"{one.first_ms(99):.0f}",
            f"{one.first_ms(99) / without.first_ms(99):.2f}",
            f"{one.token_ms():.1f}",
            f"{one.lines / one.load.seconds:.1f}",
            str(one.given_up),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=Load.seconds, help="simulated, of each row")
    options = parser.parse_args(arguments)
    print(table([play(replace(load, seconds=options.seconds)) for load in LOADS]))


if __name__ == "__main__":
    main()
