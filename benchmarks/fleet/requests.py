"""Requests one by one, on a few slices for an hour or two: what the fluid is held to.

Each is sent by the router's own choice (serving.router.scheduling.slice_table) over entries that are half a second old, waits in its
slice until a sequence is free, and then goes on at the step time of all that share the slice. Lengths are drawn.
"""

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.fleet.fluid import Outcome, World, poisson
from benchmarks.fleet.rivals import Policy, View
from benchmarks.fleet.supply import Supply
from benchmarks.fleet.traces import Trace
from serving.router.scheduling.slice_table import SliceTable
from serving.scaling.capacity import capacity, itl_s
from serving.scaling.policy import Report
from serving.state.records import Demand, SliceRecord, SliceState
from serving.timings import TIMINGS

_MODEL = "model"
_STEP_S = 0.1


@dataclass(slots=True, order=True)
class _Request:
    ends_at: float  # tokens of its slice's clock
    arrived_s: float = field(compare=False)
    prompt: float = field(compare=False)
    answer: float = field(compare=False)
    first_s: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class _Slice:
    """Tokens that every running request has had since the slice began, and who is running and waiting."""

    name: str
    clock: float = 0.0
    running: list[_Request] = field(default_factory=list)
    waiting: deque[_Request] = field(default_factory=deque)
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0


def run(world: World, trace: Trace, policy: Policy, opening: Sequence[int], *, every_s: int = 10) -> Outcome:
    """As fluid.run, request by request; one pool."""
    return _Run(world, trace, policy, opening, every_s).outcome


class _Run:
    def __init__(
        self, world: World, trace: Trace, policy: Policy, opening: Sequence[int], every_s: int
    ) -> None:
        self._world, self._pool = world, world.pools[0]
        self._most = int(capacity(self._pool, world.lengths).sequences)
        self._draw = random.Random(world.seed)
        self._supply = Supply(world.pools, world.markets, random.Random(world.seed + 1))
        self._supply.open(opening)
        self._slices: dict[str, _Slice] = {}
        self._held: deque[_Request] = deque()
        self._table = SliceTable({_MODEL: 1}, {_MODEL: "slice"})
        self.outcome = Outcome(policy.name, trace.name)
        wanted = opening
        for step in range(int(trace.seconds / _STEP_S)):
            now_s = step * _STEP_S
            self._supply.advance(now_s, _STEP_S)
            if step % round(TIMINGS.beat_s / _STEP_S) == 0:
                self._beat(now_s)
            for _ in range(poisson(self._draw, trace.rate(now_s) * _STEP_S)):
                self.outcome.arrived += 1
                prompt = self._draw.uniform(0.5, 1.5) * world.lengths.prompt
                answer = self._draw.uniform(0.5, 1.5) * world.lengths.answer
                self._held.append(_Request(0.0, now_s, prompt, answer))
            self._send(now_s)
            for each in self._slices.values():
                self._advance(each, now_s)
            if step % round(every_s / _STEP_S) == 0:
                wanted = policy.wanted(self._view(now_s))
            self._supply.want(wanted, now_s)
        self.outcome.slice_hours, self.outcome.dollars = self._supply.slice_s / 3600, self._supply.dollars
        self.outcome.preempted = self._supply.preempted

    def _beat(self, now_s: float) -> None:
        """Slices that came and went; what a lost one had begins again."""
        ready = {unit.name for unit in self._supply.units[0] if unit.ready_s <= now_s}
        for name in ready - self._slices.keys():
            self._slices[name] = _Slice(name)
        for name in self._slices.keys() - ready:
            gone = self._slices.pop(name)
            for request in [*gone.running, *gone.waiting]:
                self._table.end(name)
                self._held.appendleft(request)
        self._table.update(self._entries(now_s), now_s)

    def _send(self, now_s: float) -> None:
        while self._held and now_s - self._held[0].arrived_s > self._world.deadline_s:
            self._held.popleft()
            self.outcome.refused += 1
        free = sum(self._most - len(each.running) - len(each.waiting) for each in self._slices.values())
        while self._held and free > 0:
            chosen = self._table.choose(_MODEL).replica
            self._table.begin(chosen)
            self._slices[chosen].waiting.append(self._held.popleft())
            free -= 1

    def _advance(self, each: _Slice, now_s: float) -> None:
        lengths, world = self._world.lengths, self._world
        if each.running:
            token_s = itl_s(self._pool, lengths, float(len(each.running)))
            each.clock += _STEP_S / token_s
            each.output_tokens += len(each.running) * _STEP_S / token_s
            while each.running and each.running[0].ends_at <= each.clock:
                done = heapq.heappop(each.running)
                self._table.end(each.name)
                mean_itl_s = (now_s + _STEP_S - done.first_s) / done.answer
                in_time = done.first_s - done.arrived_s <= world.ttft_s
                self.outcome.good += in_time and mean_itl_s <= world.itl_s
        while each.waiting and len(each.running) < self._most:
            request = each.waiting.popleft()
            request.ends_at = each.clock + request.answer
            request.first_s = (
                now_s + request.prompt / self._pool.prefill_tokens_per_s + self._pool.steps[0][1]
            )
            each.prompt_tokens += request.prompt
            heapq.heappush(each.running, request)

    def _entries(self, now_s: float) -> list[SliceRecord]:
        entries = []
        for unit in self._supply.units[0]:
            each = self._slices.get(unit.name)
            if each is None or unit.ready_s > now_s:
                entries.append(
                    SliceRecord(unit.name, _MODEL, SliceState.STARTING, "", "", pool=self._pool.key)
                )
                continue
            entries.append(
                SliceRecord(
                    unit.name,
                    _MODEL,
                    SliceState.SERVING,
                    "",
                    "",
                    running=len(each.running),
                    waiting=len(each.waiting),
                    kv_usage=min(1.0, len(each.running) / self._most),
                    prompt_tokens=round(each.prompt_tokens),
                    output_tokens=round(each.output_tokens),
                    pool=self._pool.key,
                    beat=round(now_s / TIMINGS.beat_s),
                )
            )
        return entries

    def _view(self, now_s: float) -> View:
        sent = sum(len(each.running) + len(each.waiting) for each in self._slices.values())
        waiting = sum(len(each.waiting) for each in self._slices.values()) + len(self._held)
        demand = Demand(
            "router",
            _MODEL,
            held=len(self._held),
            in_flight=sent,
            arrived=round(self.outcome.arrived),
            refused=round(self.outcome.refused),
        )
        report = Report(self._entries(now_s), [demand])
        return View(now_s, report, len(self._slices), sent + len(self._held), waiting)
