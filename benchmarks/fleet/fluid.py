"""Requests as a fluid, for days of a thousand slices in seconds: what arrives in a second shares one fate.

Modelled: arrivals drawn by the second, one queue in front of all slices, sequences spread evenly over them (what the
router's choice comes to, see requests.py), the plan's step time at that load, tokens of prompts in between, and requests
refused that would wait beyond a deadline. Not modelled: the differences between requests' lengths, and between slices.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.fleet.rivals import Policy, View
from benchmarks.fleet.supply import Market, Supply
from benchmarks.fleet.traces import Trace
from serving.scaling.capacity import Lengths, Pool, capacity, itl_s
from serving.scaling.policy import Report
from serving.state.records import Demand, SliceRecord, SliceState

_MODEL = "model"


@dataclass(frozen=True)
class World:
    """What all policies meet: pools, how their slices come, requests' lengths, targets, the longest wait."""

    pools: tuple[Pool, ...]
    markets: tuple[Market, ...]
    lengths: Lengths
    ttft_s: float
    itl_s: float
    deadline_s: float = 30.0
    seed: int = 7


@dataclass(frozen=True)
class Moment:
    """One point of the timeline."""

    at_s: float
    wanted: int
    ordered: int
    serving: int
    queued: float
    arriving: float


@dataclass
class Outcome:
    """What a policy made of a trace. Requests are counted, those within both targets as good."""

    policy: str
    trace: str
    arrived: float = 0.0
    good: float = 0.0
    refused: float = 0.0
    slice_hours: float = 0.0
    dollars: float = 0.0
    preempted: int = 0
    timeline: list[Moment] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """The share of all requests that were answered within the targets."""
        return self.good / self.arrived if self.arrived else 1.0


def poisson(draw: random.Random, mean: float) -> int:
    """A Poisson number; from 30 on, the normal one it nears."""
    if mean >= 30:
        return max(0, round(draw.gauss(mean, math.sqrt(mean))))
    limit, product, count = math.exp(-mean), draw.random(), 0
    while product > limit:
        product *= draw.random()
        count += 1
    return count


def run(world: World, trace: Trace, policy: Policy, opening: Sequence[int], *, every_s: int = 10) -> Outcome:
    """A trace from its start to its end, in steps of a second; the policy is asked every `every_s`."""
    arrivals, supply = (
        random.Random(world.seed),
        Supply(world.pools, world.markets, random.Random(world.seed + 1)),
    )
    supply.open(opening)
    outcome = Outcome(policy.name, trace.name)
    flow = _Flow(world)
    wanted: Sequence[int] = opening
    for second in range(int(trace.seconds)):
        now_s = float(second)
        lost = supply.advance(now_s, 1.0)
        serving = supply.serving
        arrived = poisson(arrivals, trace.rate(now_s))
        flow.second(arrived, serving, lost)
        if second % every_s == 0:
            wanted = policy.wanted(flow.view(now_s, supply, serving))
        supply.want(wanted, now_s)
        if second % 60 == 0:
            ordered = sum(map(len, supply.orders)) + sum(map(len, supply.units)) - sum(serving)
            moment = Moment(now_s, sum(wanted), ordered, sum(serving), flow.queued, trace.rate(now_s))
            outcome.timeline.append(moment)
    outcome.arrived, outcome.good, outcome.refused = flow.arrived, flow.good, flow.refused
    outcome.slice_hours, outcome.dollars = supply.slice_s / 3600, supply.dollars
    outcome.preempted = supply.preempted
    return outcome


class _Flow:
    """The requests of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._full = [capacity(pool, world.lengths) for pool in world.pools]
        # Slices of other pools as so many of the first.
        rates = [capacity(pool, world.lengths, world.itl_s).requests_per_s for pool in world.pools]
        self._weights = [rate / rates[0] for rate in rates]
        self._first_s = (
            world.lengths.prompt / world.pools[0].prefill_tokens_per_s + world.pools[0].steps[0][1]
        )
        self.arrived = self.good = self.refused = self.finished = 0.0
        self.queued = self.running = 0.0
        self._answered_each = 0.0
        self._recent: list[float] = []

    def second(self, arrived: int, serving: Sequence[int], lost: int) -> None:
        world, pool, lengths = self._world, self._world.pools[0], self._world.lengths
        slices = sum(count * weight for count, weight in zip(serving, self._weights, strict=True))
        self.arrived += arrived
        self._recent = [*self._recent[-int(world.deadline_s) + 1 :], float(arrived)]
        if lost:  # what a lost slice had begins again elsewhere
            back = self.running * lost / (lost + sum(serving))
            self.running -= back
            self.queued += back
        if not slices:
            self.queued += arrived + self.running
            self.running = 0.0
            self._refuse(sum(self._recent))
            return
        most = slices * self._full[0].sequences
        each = min(max(1.0, self.running / slices), self._full[0].sequences)
        token_s = itl_s(pool, lengths, each)
        done = min(self.running, self.running / (lengths.answer * token_s))
        self.running -= done
        self.finished += done
        self._answered_each += done / sum(serving) if sum(serving) else 0.0
        ahead = max(0.0, self.queued - (most - self.running))
        rate = most / (lengths.answer * itl_s(pool, lengths, self._full[0].sequences))
        wait_s = ahead / rate
        self.queued += arrived
        admitted = min(self.queued, most - self.running)
        self.queued -= admitted
        self.running += admitted
        # The batch that these tokens will share: what runs now.
        token_s = itl_s(pool, lengths, min(max(1.0, self.running / slices), self._full[0].sequences))
        if wait_s + self._first_s + token_s <= world.ttft_s and token_s <= world.itl_s:
            self.good += arrived
        self._refuse(rate * world.deadline_s)

    def _refuse(self, most: float) -> None:
        over = max(0.0, self.queued - most)
        self.queued -= over
        self.refused += over

    def view(self, now_s: float, supply: Supply, serving: Sequence[int]) -> View:
        """What the board says: every slice an entry with its share of the load."""
        count = sum(serving)
        running = self.running / count if count else 0.0
        waiting = self.queued / count if count else 0.0
        lengths = self._world.lengths
        kv = min(1.0, running / self._full[0].sequences)
        entries = []
        for units in supply.units:
            for unit in units:
                if unit.ready_s > now_s:
                    entries.append(
                        SliceRecord(
                            unit.name,
                            _MODEL,
                            SliceState.STARTING,
                            "",
                            "",
                            pool=self._world.pools[unit.pool].key,
                        )
                    )
                    continue
                if unit.before is None:
                    unit.before = self._answered_each
                answered = self._answered_each - unit.before
                entries.append(
                    SliceRecord(
                        unit.name,
                        _MODEL,
                        SliceState.SERVING,
                        "",
                        "",
                        running=running,  # type: ignore[arg-type]  # a fluid has halves
                        waiting=waiting,  # type: ignore[arg-type]
                        kv_usage=kv,
                        prompt_tokens=round(answered * lengths.prompt),
                        output_tokens=round(answered * lengths.answer),
                        pool=self._world.pools[unit.pool].key,
                    )
                )
        demand = Demand(
            "router",
            _MODEL,
            held=0 if count else round(self.queued),
            in_flight=round(self.running + self.queued) if count else 0,
            arrived=round(self.arrived),
            refused=round(self.refused),
        )
        return View(now_s, Report(entries, [demand]), count, self.running + self.queued, self.queued)
