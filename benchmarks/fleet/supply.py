"""Slices between order and end: delivered after a while or not at all, started, preempted, paid for while they are held."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from serving.scaling.capacity import Pool

# A slice that goes finishes its requests first, and is paid for meanwhile.
DRAIN_S = 60.0


@dataclass(frozen=True)
class Market:
    """How a pool's slices come: seconds to deliver (spread by a quarter), to start, preemptions, and hours without any."""

    delivery_s: float = 240.0
    start_s: float = 180.0
    preempted_per_hour: float = 0.0
    away: tuple[tuple[float, float], ...] = ()

    def delivers(self, now_s: float) -> bool:
        return not any(begin <= now_s < end for begin, end in self.away)


@dataclass(slots=True)
class Unit:
    """One slice that has been delivered."""

    name: str
    pool: int
    ready_s: float
    ends_s: float
    before: float | None = None  # requests a slice had answered when this one began to


@dataclass
class Supply:
    """All slices of one model."""

    pools: Sequence[Pool]
    markets: Sequence[Market]
    draw: random.Random
    orders: list[list[float]] = field(init=False)  # when each will be delivered, the oldest first
    units: list[list[Unit]] = field(init=False)
    slice_s: float = 0.0
    dollars: float = 0.0
    preempted: int = 0
    _made: int = 0
    _next_s: float = 0.0  # nothing comes, serves or goes before
    _serving: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.orders = [[] for _ in self.pools]
        self.units = [[] for _ in self.pools]
        self._serving = [0 for _ in self.pools]

    def open(self, counts: Sequence[int]) -> None:
        """Slices that serve from the start."""
        for at, count in enumerate(counts):
            for _ in range(count):
                self._deliver(at, 0.0, 0.0)

    def want(self, counts: Sequence[int], now_s: float) -> None:
        """Serve's part: order what is missing, cancel orders first, then end slices that start, then the newest."""
        for at, count in enumerate(counts):
            missing = count - len(self.units[at])
            orders = self.orders[at]
            if missing == len(orders):
                continue
            self._next_s = now_s
            del orders[max(0, missing) :]
            while len(orders) < missing:
                orders.append(now_s + self.markets[at].delivery_s * self.draw.uniform(0.75, 1.25))
            if missing < 0:
                units = sorted(self.units[at], key=lambda unit: -unit.ready_s)
                for unit in units[:-missing]:
                    self.units[at].remove(unit)
                    self._pay(at, DRAIN_S)

    def advance(self, now_s: float, seconds: float) -> int:
        """Deliver and preempt up to now; returns how many slices that served were lost."""
        lost = 0
        for at, units in enumerate(self.units):
            self._pay(at, seconds * len(units))
        if now_s < self._next_s:
            return 0
        for at, units in enumerate(self.units):
            for unit in [unit for unit in units if unit.ends_s <= now_s]:
                units.remove(unit)
                lost += unit.ready_s <= now_s
                self.preempted += 1
            orders = self.orders[at]
            while orders and orders[0] <= now_s and self.markets[at].delivers(now_s):
                orders.pop(0)
                self._deliver(at, now_s, self.markets[at].start_s)
        events = [now_s + 1.0 if at_s <= now_s else at_s for orders in self.orders for at_s in orders[:1]]
        for at, units in enumerate(self.units):
            self._serving[at] = sum(unit.ready_s <= now_s for unit in units)
            events += [unit.ready_s for unit in units if unit.ready_s > now_s]
            events += [unit.ends_s for unit in units]
        self._next_s = min(events, default=float("inf"))
        return lost

    @property
    def serving(self) -> list[int]:
        """Slices that serve, by pool, as of the last advance."""
        return list(self._serving)

    def _deliver(self, at: int, now_s: float, start_s: float) -> None:
        self._made += 1
        rate = self.markets[at].preempted_per_hour / 3600
        ends_s = now_s + self.draw.expovariate(rate) if rate else float("inf")
        self.units[at].append(Unit(f"slice-{self._made}", at, now_s + start_s, ends_s))

    def _pay(self, at: int, seconds: float) -> None:
        self.slice_s += seconds
        self.dollars += seconds / 3600 * self.pools[at].dollars_per_hour
