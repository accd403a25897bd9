"""What lines of batches cost requests inside an engine: one simulated slice in simulated time, the same on any machine.

    python -m benchmarks.filled_steps               # a minute

Llama 3.3 70B on v6e 2x4 with 32 seats. Requests come at random times; lines take every other seat but `batch.spare`, one after the
other at the router's pace, and the line that runs for the shortest time is given up for a request that finds no seat. The engine is
vLLM's schedule in the calibrated time of steps, without HTTP and router: `python -m benchmarks.batches` has those, in real time.
"""

import argparse
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.preemption import planned
from serving.config import BatchSpec
from serving.router.core import reading
from serving.router.prompt_pace import PromptPace
from serving.simulation.engine.physics import Physics
from serving.simulation.engine.scheduler import Limits, Request, Scheduler
from serving.simulation.engine.server import factors_for

_MODEL = "llama"


@dataclass(frozen=True)
class Load:
    """Requests a second and their tokens; the tokens of lines, none where there is no batch, and the share they leave free."""

    seats: int = 32
    per_s: float = 4.0
    seconds: float = 300.0
    prompt_tokens: int = 260
    tokens: int = 100
    line_prompt_tokens: int = 0
    line_tokens: int = 300
    spare: float = BatchSpec().spare


LOADS = (
    Load(),
    *(Load(line_prompt_tokens=tokens) for tokens in (16, 128, 650, 2000)),
    *(Load(line_prompt_tokens=650, spare=spare) for spare in (0.5, 0.7)),
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
    """An engine whose seats are filled. The time is that of its steps."""

    def __init__(self, load: Load) -> None:
        plan = planned(load.seats)
        self._physics = Physics(plan, factors_for(plan))
        self._scheduler = Scheduler(Limits.of(plan))
        self._load = load
        self._fillable = load.seats - math.ceil(load.spare * load.seats) if load.line_prompt_tokens else 0
        self._open: list[Request] = []
        self._lines: list[Request] = []
        self._pace = PromptPace({_MODEL: reading(plan, routers=1)})
        self._pace.serve(_MODEL, slices=1, unread=1.0)
        self._names = itertools.count()
        self.held: deque[Request] = deque()
        self.played = Played(load)

    def request(self, at_s: float) -> None:
        request = self._made(self._load.prompt_tokens, self._load.tokens, at_s)
        self.played.requests.append(request)
        self.held.append(request)

    def step(self, now_s: float) -> float | None:
        """Hand requests and lines to the engine; when its next step ends, None where it has nothing to do."""
        self._open = [request for request in self._open if not request.done]
        self.played.lines += sum(line.done for line in self._lines)
        self._lines = [line for line in self._lines if not line.done]
        while self.held and len(self._open) < self._load.seats:
            if len(self._open) + len(self._lines) == self._load.seats:
                self._scheduler.cancel(self._lines.pop())
                self.played.given_up += 1
            self._open.append(self.held.popleft())
            self._scheduler.add(self._open[-1])
        while self._has_seat() and not self._pace.wait_s(_MODEL, now_s):
            self._pace.started(_MODEL, self._load.line_prompt_tokens, now_s)
            line = self._made(self._load.line_prompt_tokens, self._load.line_tokens, now_s)
            self._lines.append(line)
            self._scheduler.add(line)
        step = self._scheduler.schedule(now_s)
        if step is None:
            return now_s + self._pace.wait_s(_MODEL, now_s) if self._has_seat() else None
        ends_s = now_s + self._physics.seconds(step.batch)
        self._scheduler.complete(step, ends_s)
        return ends_s

    def _has_seat(self) -> bool:
        return not self.held and len(self._open) + len(self._lines) < self._fillable

    def _made(self, prompt_tokens: int, tokens: int, at_s: float) -> Request:
        """No two prompts have anything in common."""
        name = next(self._names) << 20
        return Request(range(name, name + prompt_tokens), (1,) * tokens, at_s)


def arrivals(load: Load) -> Iterator[float]:
    """The same for every load of as many requests."""
    draw, at_s = random.Random(7), 0.0
    while (at_s := at_s + draw.expovariate(load.per_s)) < load.seconds:
        yield at_s


def play(load: Load) -> Played:
    filled, now_s = Slice(load), 0.0
    coming = deque(arrivals(load))
    while coming:
        while coming and coming[0] <= now_s:
            filled.request(coming.popleft())
        ends_s = filled.step(now_s)
        now_s = ends_s if ends_s is not None else coming[0]
    return filled.played


def table(played: Sequence[Played]) -> str:
    """The first is the one without a batch."""
    rows = [
        "| tokens of a line's prompt | `batch.spare` | TTFT p50, ms | p99, ms | p99 over that without | ms a token, p50 | lines/s | given up |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in played:
        cells = (
            str(one.load.line_prompt_tokens or "no batch"),
            f"{one.load.spare:g}" if one.load.line_prompt_tokens else "",
            f"{one.first_ms(50):.0f}",
            f"{one.first_ms(99):.0f}",
            f"{one.first_ms(99) / played[0].first_ms(99):.2f}",
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
