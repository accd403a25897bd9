"""Routers as a group in one process and faked time: real admission, and real liveness of what they tell each other."""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from serving.config import ModelSpec, RouterSpec
from serving.planning import plan
from serving.router.admission.controller import AdmissionController
from serving.router.admission.visit import Visit
from serving.router.http.auth import KeyFile, new
from serving.router.scheduling.slice_table import SliceTable
from serving.state.liveness import Liveness
from serving.state.records import Demand, SliceRecord, SliceState
from serving.timings import TIMINGS

MODEL = "llama"
PLAN = plan(
    ModelSpec.model_validate(
        {
            "name": MODEL,
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
            "engine": {"max_num_seqs": 256, "max_model_len": 2048},
        }
    )
)
_ON_ITS_WAY_S = 0.1  # what a router writes


@dataclass
class RouterGroup:
    """Routers that beat in turn and read what the others wrote last. They join, leave, end and stand still."""

    path: Path
    key: str
    capacity: int = 256
    now_s: float = 0.0
    routers: dict[str, AdmissionController] = field(default_factory=dict)
    store: dict[str, Demand] = field(default_factory=dict)
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    admitted_s: list[float] = field(default_factory=list)
    order: "itertools.count[int]" = field(default_factory=itertools.count)
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    stands_until_s: dict[str, float] = field(default_factory=dict)
    open: dict[str, list[Visit]] = field(default_factory=dict)
    liveness: dict[str, Liveness] = field(default_factory=dict)
    away: bool = False  # the store
    joined: int = 0
    beats: int = 0

    def join(self, number: int) -> None:
        for _ in range(number):
            name = f"r{self.joined}"
            self.joined += 1
            table = SliceTable({MODEL: 1}, {MODEL: "v6e 2x4"})
            slices = [
                SliceRecord(f"s{one}", MODEL, SliceState.SERVING, "serving", "v6e 2x4", pool=PLAN.pool)
                for one in range(self.capacity // 256)
            ]
            table.update(slices, 0.0)
            self.routers[name] = AdmissionController(
                RouterSpec(),
                [PLAN],
                table,
                KeyFile(self.path),
                clock=lambda: self.now_s,
                calendar=lambda: 1e9 + self.now_s,
            )
            self.liveness[name], self.open[name] = Liveness(), []
            self.at(
                self.now_s + self.draw.random() * TIMINGS.beat_s if number > 1 else self.now_s,
                lambda n=name: self.beat(n),
            )

    def end(self, name: str, *, tells: bool) -> None:
        """A router ends, and the requests that it carries; one that leaves by plan `tells`, and takes its record away."""
        del self.routers[name]
        self.running -= len(self.open.pop(name))
        if tells:
            self.store.pop(name, None)

    def stand(self, name: str, seconds: float) -> None:
        """A router's process stands still. What it carries is forgotten: nobody can know of that any more."""
        self.stands_until_s[name] = self.now_s + seconds
        self.running -= len(self.open[name])
        self.open[name] = []

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when_s, next(self.order), do))

    def waits(self, name: str, do: Callable[[], None]) -> bool:
        """Whether a router stands still; then it does this as soon as it goes on."""
        until_s = self.stands_until_s.get(name, 0.0)
        if self.now_s < until_s:
            self.at(until_s, do)
        return self.now_s < until_s

    def beat(self, name: str) -> None:
        """As the store's loop: read, decide, then write; the next beat after that."""
        # A request that came meanwhile is there before a timer is looked at.
        if name not in self.routers or self.waits(name, lambda: self.at(self.now_s, lambda: self.beat(name))):
            return
        router = self.routers[name]
        self.at(self.now_s + TIMINGS.beat_s, lambda: self.beat(name))
        if self.away:
            router.refresh()
            return
        alive, forgotten = self.liveness[name].routers(self.store.values(), self.now_s)
        for demand in forgotten:
            self.store.pop(demand.router, None)
        list(router.others(alive, name))
        router.refresh()
        self.beats += 1
        record = Demand(name, MODEL, **router.counts(MODEL), keys=router.key_uses(), beat=self.beats)
        self.at(self.now_s + _ON_ITS_WAY_S, lambda: self.write(record))

    def write(self, record: Demand) -> None:
        if record.router in self.routers:
            self.store[record.router] = record

    def run(self, until_s: float) -> None:
        while self.events and self.events[0][0] <= until_s:
            self.now_s, _, do = heapq.heappop(self.events)
            do()
        self.now_s = until_s

    def arrive(self, router: str) -> Visit:
        visit = self.routers[router].arrive([(b"authorization", b"Bearer " + self.key.encode())])
        if not visit.refusal:
            self.admitted_s.append(self.now_s)
            self.open[router].append(visit)
            self.running += 1
            self.most = max(self.most, self.running)
        return visit

    def ask(self, router: str, lasts_s: float) -> None:
        """A request at a router, which may be gone or stand still; over after so long."""
        if router in self.routers and not self.waits(router, lambda: self.ask(router, lasts_s)):
            visit = self.arrive(router)
            if not visit.refusal:
                self.at(self.now_s + lasts_s, lambda: self.over(router, visit))

    def over(self, router: str, visit: Visit) -> None:
        if router in self.routers and not self.waits(router, lambda: self.over(router, visit)):
            self.routers[router].leave(visit)
            if visit in self.open[router]:
                self.open[router].remove(visit)
                self.running -= 1

    def admitted_within(self, from_s: float, to_s: float) -> int:
        return sum(from_s <= when_s < to_s for when_s in self.admitted_s)

    def overdrawn(self, per_minute: float) -> float:
        """By how much what was admitted has overdrawn a bucket of a minute's size that all routers share."""
        level, at_s, least = per_minute, 0.0, 0.0
        for when_s in self.admitted_s:
            level = min(per_minute, level + (when_s - at_s) * per_minute / 60) - 1
            at_s, least = when_s, min(least, level)
        return abs(least)


def router_group(folder: Path, routers: int, capacity: int = 256, **limits: float) -> RouterGroup:
    """So many routers that know of each other, and a key with these limits; `folder` is for the file of keys."""
    key, line = new("batch", **limits)
    path = folder / "keys.yaml"
    path.write_text(line)
    made = RouterGroup(path, key, capacity)
    made.join(routers)
    made.run(3.0)
    return made


def flood(
    some: RouterGroup, per_s: float, until_s: float, *, lasts_s: float = 0.2, routers: int = 99
) -> None:
    """Requests at a steady rate, each at one of the first `routers` that there are then, drawn at random."""
    when_s = some.now_s

    def ask() -> None:
        some.ask(some.draw.choice(list(some.routers)[:routers]), lasts_s)

    while (when_s := when_s + some.draw.expovariate(per_s)) < until_s:
        some.at(when_s, ask)
    some.run(until_s)
