"""Which request goes to a slice now, which waits in the router, and which is sent away. Pure: time and load are given.

A model has as many seats as its slices run sequences at once. While one is free a request goes straight through; else it
waits here, where keys get their fair share, and not in an engine, whose queue knows no keys. It waits as long for a
slice that is on its way. The queue has an end and a deadline, and whoever is sent away is told when to come back.

Nobody has a timer of its own: `update` sends those away whose time is up, and takes over what the board says.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from serving.config import QueueSpec
from serving.errors import NoSliceError, OverloadedError, Refusal
from serving.router.admission.fair_queue import FairQueue
from serving.router.admission.rate_limit import Account
from serving.state.records import SliceRecord

# One beat may show what has only just arrived in the engine; a queue is what stands there for a second and more.
_BACKLOG_BEATS = 3
# Of all bodies that wait for one model, in one router.
_MOST_HELD_BYTES = 256 << 20
_LONGEST_RETRY_S = 600.0
# Weight of a beat in the measured rate: half of it comes from the last four beats, two seconds.
_BEAT_WEIGHT = 0.16


class Where(Enum):
    """Where a request is."""

    HELD = auto()
    ADMITTED = auto()
    REFUSED = auto()


@dataclass(eq=False, slots=True)
class Ticket:
    """One request on its way through. `seats`: the sequences it is on a slice; `tokens`: what it may use of its key's."""

    model: str
    account: Account
    tokens: float
    seats: int
    size_bytes: int
    since_s: float
    where: Where = Where.HELD
    refusal: Refusal | None = None
    used_tokens: float = 0.0


@dataclass(frozen=True)
class Outlook:
    """What a beat says of a model: seats for this router; where there are none, whether any are on their way."""

    seats: int
    coming: bool
    why_none: str


@dataclass
class _Model:
    name: str
    spec: QueueSpec
    queue: FairQueue[Ticket] = field(default_factory=FairQueue)
    outlook: Outlook = field(default_factory=lambda: Outlook(0, coming=False, why_none="no slice is known"))
    open: int = 0
    requests: int = 0
    held_bytes: int = 0
    arrived: int = 0
    refused: int = 0
    prompt_bytes: int = 0
    ended: int = 0
    rate_per_s: float = 0.0
    beat_s: float | None = None

    @property
    def has_queue(self) -> bool:
        return bool(self.spec.requests and self.spec.wait_s and (self.outlook.seats or self.outlook.coming))

    def takes(self, ticket: Ticket) -> bool:
        return (
            self.has_queue
            and len(self.queue) < self.spec.requests
            and self.held_bytes + ticket.size_bytes <= _MOST_HELD_BYTES
        )

    def measure(self, now_s: float) -> None:
        """Requests ended a second, as a moving average over beats in which there was something to do."""
        if self.beat_s is not None and (self.requests or self.ended):
            rate = self.ended / max(1e-3, now_s - self.beat_s)
            self.rate_per_s += (_BEAT_WEIGHT if self.rate_per_s else 1.0) * (rate - self.rate_per_s)
        self.ended, self.beat_s = 0, now_s

    def refusal(self, waited_s: float) -> Refusal:
        waited = f" This request waited {waited_s:.0f} s." if waited_s >= 1 else ""
        if not self.outlook.seats:
            return Refusal(NoSliceError(self.outlook.why_none + waited), self._retry_after_s())
        return Refusal(
            OverloadedError(
                f"Every slice of {self.name!r} is busy: {self.requests} requests are under way and {len(self.queue)} wait "
                f"in this router.{waited}"
            ),
            self._retry_after_s(),
        )

    def _retry_after_s(self) -> float:
        """Until those who wait now have gone, at the rate at which requests end; the queue's deadline where none do."""
        if self.outlook.seats and self.rate_per_s > 0:
            return min(_LONGEST_RETRY_S, max(1.0, (len(self.queue) + 1) / self.rate_per_s))
        return max(5.0, self.spec.wait_s)


class AdmissionQueue:
    """The queues of one router. What other requests a call sends on or away, it returns: their `where` has changed."""

    def __init__(self, specs: Mapping[str, QueueSpec]) -> None:
        self._models = {name: _Model(name, spec) for name, spec in specs.items()}

    def enter(self, ticket: Ticket, now_s: float) -> list[Ticket]:
        """Admit, hold or refuse a new request: `where` of its ticket says which."""
        model = self._models[ticket.model]
        model.arrived += 1
        model.prompt_bytes += ticket.size_bytes
        key = ticket.account.key
        if refusal := ticket.account.refusal(ticket.tokens, now_s):
            self._refuse(model, ticket, refusal)
            return []
        ticket.account.begin(ticket.tokens, now_s)
        seats = model.outlook.seats
        if seats and (not ticket.seats or (not model.queue and model.open < seats)):
            self._admit(model, ticket)
            return []
        dropped: list[Ticket] = []
        if not model.takes(ticket):
            victim = model.queue.heaviest(key.name, weight=key.weight, priority=key.priority)
            if victim is None or not model.has_queue:
                self._refuse(model, ticket, model.refusal(0.0), now_s)
                return []
            self._send_away(model, victim, now_s)
            dropped.append(victim)
        cost = max(1.0, ticket.tokens)
        model.queue.push(ticket, key.name, cost=cost, weight=key.weight, priority=key.priority)
        model.held_bytes += ticket.size_bytes
        return dropped

    def leave(self, ticket: Ticket, now_s: float) -> list[Ticket]:
        """A request is over, whichever way."""
        model = self._models[ticket.model]
        match ticket.where:
            case Where.REFUSED:
                return []
            case Where.HELD:  # its client has gone
                self._unqueue(model, ticket)
                ticket.account.end(ticket.tokens, 0.0, now_s - ticket.since_s, now_s)
            case Where.ADMITTED:
                model.open -= ticket.seats
                model.requests -= 1
                model.ended += 1
                ticket.account.end(ticket.tokens, ticket.used_tokens, now_s - ticket.since_s, now_s)
        return self._next(model)

    def update(self, name: str, outlook: Outlook, now_s: float) -> list[Ticket]:
        """Take over what the board says of a model, and send away those whose time is up."""
        model = self._models[name]
        model.measure(now_s)
        model.outlook = outlook
        changed = self._next(model)
        hopeless = not outlook.seats and not outlook.coming
        for ticket in model.queue.items():
            if hopeless or now_s - ticket.since_s >= model.spec.wait_s:
                self._send_away(model, ticket, now_s)
                changed.append(ticket)
        return changed

    def counts(self, name: str) -> dict[str, int]:
        """The fields of board.Demand that are known here."""
        model = self._models[name]
        return {
            "held": len(model.queue),
            "in_flight": model.requests,
            "arrived": model.arrived,
            "refused": model.refused,
            "prompt_bytes": model.prompt_bytes,
        }

    def free_seats(self, name: str) -> int:
        return self._models[name].outlook.seats - self._models[name].open

    def seats_taken(self, name: str) -> int:
        return self._models[name].open

    def _next(self, model: _Model) -> list[Ticket]:
        """One that needs several seats goes when one is free: else those that need one would always go before it."""
        going = []
        while model.queue and model.open < model.outlook.seats:
            ticket = model.queue.pop()
            model.held_bytes -= ticket.size_bytes
            self._admit(model, ticket)
            going.append(ticket)
        return going

    def _admit(self, model: _Model, ticket: Ticket) -> None:
        ticket.where = Where.ADMITTED
        model.open += ticket.seats
        model.requests += 1

    def _unqueue(self, model: _Model, ticket: Ticket) -> None:
        model.queue.remove(ticket)
        model.held_bytes -= ticket.size_bytes

    def _send_away(self, model: _Model, ticket: Ticket, now_s: float) -> None:
        self._unqueue(model, ticket)
        self._refuse(model, ticket, model.refusal(now_s - ticket.since_s), now_s)

    def _refuse(
        self, model: _Model, ticket: Ticket, refusal: Refusal, counted_until_s: float | None = None
    ) -> None:
        """`counted_until_s`: now, where its key has begun to count it."""
        ticket.where, ticket.refusal = Where.REFUSED, refusal
        model.refused += 1
        if counted_until_s is not None:
            ticket.account.end(ticket.tokens, 0.0, counted_until_s - ticket.since_s, counted_until_s)


class Backlog:
    """Which slices have had requests waiting in their engine for several beats running."""

    def __init__(self) -> None:
        self._beats: Counter[str] = Counter()

    def observe(self, entries: Iterable[SliceRecord]) -> frozenset[str]:
        """The replicas that have a queue."""
        self._beats = Counter({one.replica: self._beats[one.replica] + 1 for one in entries if one.waiting})
        return frozenset(replica for replica, beats in self._beats.items() if beats >= _BACKLOG_BEATS)


def seats(
    entries: Iterable[SliceRecord],
    most_sequences: Mapping[str, int],
    backlog: frozenset[str],
    *,
    taken: int,
    elsewhere: int = 0,
    routers: int = 1,
) -> int:
    """How many sequences one of several routers may have on a model's slices.

    All that the others leave, and its even share at least: they learn of each other by the beat, so two may take the same
    seat once, and the engine's own queue holds what does not sit. Where every slice has had a queue for a while, its
    cache is full before its seats are: then fewer than now, until the queues have gone.
    """
    serving = [entry for entry in entries if entry.serves]
    capacity = sum(most_sequences.get(entry.pool, 1) for entry in serving)
    mine = max(math.ceil(capacity / routers), capacity - elsewhere)
    if serving and all(entry.replica in backlog for entry in serving):
        running = sum(entry.running for entry in serving)
        waiting = sum(entry.waiting for entry in serving)
        mine = min(mine, max(1, math.ceil(taken * (1 - 0.5 * waiting / (running + waiting)))))
    return mine
