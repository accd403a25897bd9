"""Several simulated engines behind routers in simulated time: seconds of traffic in a fraction of a second, no socket.

Engines schedule and take time as the simulated engine does; routers are the router's own tables of slices, which read
reports every beat as they do on a cluster.
"""

import heapq
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from serving.planning import Plan
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.simulation.engine.calibration import factors_for
from serving.simulation.engine.physics import Physics
from serving.simulation.engine.scheduler import Limits, Request, Scheduler, Step
from serving.state.records import SliceRecord, SliceState
from serving.timings import TIMINGS
from support.simulated_engine import small_plan

MODEL = "llama"
_VOCABULARY = range(1, 30_000)


@dataclass(frozen=True)
class Talk:
    """A conversation: what is before its first turn, what each turn adds and gets, and how long a client thinks."""

    begins_s: float
    shared: tuple[int, ...]
    turns: tuple[tuple[int, int], ...]  # tokens asked and answered
    think_s: float


@dataclass
class Outcome:
    """What came of all requests."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    per_slice: Counter[str] = field(default_factory=Counter)

    def note(self, request: Request, replica: str, end_s: float) -> None:
        first_s = request.first_token_s or end_s
        self.ttft_s.append(first_s - request.arrived_s)
        self.tpot_s.append((end_s - first_s) / max(1, len(request.answer) - 1))
        self.prompt_tokens += len(request.prompt)
        self.cached_tokens += request.cached
        self.per_slice[replica] += 1

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def ttft_at(self, share: float) -> float:
        return statistics.quantiles(self.ttft_s, n=100)[round(share * 100) - 1]


def talks(
    seconds: float,
    per_s: float,
    *,
    turns: Sequence[int],
    asked: Sequence[int],
    answered: Sequence[int],
    shared: Sequence[int] = (0,),
    think_s: float = 2.0,
    seed: int = 0,
) -> list[Talk]:
    """Conversations that begin at random times, each length drawn evenly between two bounds.

    `shared`: tokens of each system prompt that conversations begin with.
    """
    draw = random.Random(seed)
    systems = [tuple(draw.choices(_VOCABULARY, k=length)) for length in shared]
    found, now_s = [], 0.0
    while (now_s := now_s + draw.expovariate(per_s)) < seconds:
        lengths = [(draw.randint(*asked), draw.randint(*answered)) for _ in range(draw.randint(*turns))]
        found.append(Talk(now_s, draw.choice(systems), tuple(lengths), draw.expovariate(1 / think_s)))
    return found


def play(
    traffic: Sequence[Talk],
    routers: Sequence[SliceTable],
    *,
    slices: int = 4,
    slowness: Sequence[float] = (),
    plan: Plan | None = None,
) -> Outcome:
    """All of the traffic, each request through a router drawn at random."""
    return _Fleet(routers, slices, slowness, plan or small_plan()).play(traffic)


@dataclass
class _Slice:
    replica: str
    scheduler: Scheduler
    slowness: float
    step: Step | None = None
    beat: int = 0

    def report(self) -> SliceRecord:
        self.beat += 1
        scheduler = self.scheduler
        return SliceRecord(
            self.replica,
            MODEL,
            SliceState.SERVING,
            "serving",
            "v6e 2x4",
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=scheduler.pool.usage,
            prompt_tokens=scheduler.totals.prompt_tokens,
            cached_tokens=scheduler.totals.cached_tokens,
            output_tokens=scheduler.totals.written_tokens,
            beat=self.beat,
        )


class _Fleet:
    def __init__(
        self, routers: Sequence[SliceTable], slices: int, slowness: Sequence[float], plan: Plan
    ) -> None:
        self._routers = routers
        self._physics = Physics(plan, factors_for(plan))
        names = [f"s{number}" for number in range(slices)]
        self._slices = {
            name: _Slice(name, Scheduler(Limits.of(plan)), slow)
            for name, slow in zip(names, slowness or [1.0] * slices, strict=True)
        }
        self._draw = random.Random(1)
        self._outcome = Outcome()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._under_way: dict[Request, Callable[[float], None]] = {}

    def play(self, traffic: Sequence[Talk]) -> Outcome:
        for talk in traffic:
            turns = iter(talk.turns)
            self._at(talk.begins_s, partial(self._ask, list(talk.shared), turns, talk.think_s))
        self._report(0.0)
        while self._events:
            now_s, _, do = heapq.heappop(self._events)
            do(now_s)
        return self._outcome

    def _at(self, when_s: float, do: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), do))

    def _report(self, now_s: float) -> None:
        reports = [each.report() for each in self._slices.values()]
        for table in self._routers:
            table.update(reports, now_s)
        if self._events:
            self._at(now_s + TIMINGS.beat_s, self._report)

    def _ask(self, said: list[int], turns: Iterator[tuple[int, int]], think_s: float, now_s: float) -> None:
        if (lengths := next(turns, None)) is None:
            return
        asked, answered = (self._draw.choices(_VOCABULARY, k=length) for length in lengths)
        request = Request([*said, *asked], answered, now_s)
        table = self._draw.choice(self._routers)
        ask = InferenceRequest(MODEL, "/v1/completions", b"", {"prompt": request.prompt})
        chosen = self._slices[table.choose(MODEL, (), ask).replica]
        table.begin(chosen.replica)

        def answered_all(end_s: float) -> None:
            table.end(chosen.replica)
            self._outcome.note(request, chosen.replica, end_s)
            self._at(end_s + think_s, partial(self._ask, request.tokens, turns, think_s))

        self._under_way[request] = answered_all
        chosen.scheduler.add(request)
        self._step(chosen, now_s)

    def _step(self, on: _Slice, now_s: float) -> None:
        if on.step is None and (step := on.scheduler.schedule(now_s)):
            on.step = step
            self._at(now_s + self._physics.seconds(step.batch) * on.slowness, partial(self._complete, on))

    def _complete(self, on: _Slice, now_s: float) -> None:
        assert on.step
        step, on.step = on.step, None
        for request in on.scheduler.complete(step, now_s):
            if request.done:
                self._under_way.pop(request)(now_s)
        self._step(on, now_s)
