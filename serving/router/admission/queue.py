"""Which request goes to a slice now, which waits in the router, and which is refused. Pure: time and load are given.

A model has as many seats as its slices run sequences at once. With a free seat a request is admitted at once. Without one it
waits here, where keys get their fair share, and not in an engine, whose queue knows no keys. A request also waits for a
slice that is coming. The queue has an end and a deadline, and a refusal says when to come back.

A request under way may have to make room for one of higher priority (serving.router.admission.preemption). It is paused: it
gives its seats back, and waits first of its priority, with neither the queue's end nor its deadline.

No request has a timer: `update` refuses those that waited too long, and takes over what the store says.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from serving.config import PreemptionSpec, QueueSpec
from serving.errors import NoSliceError, OverloadedError, Refusal, UnauthorizedError
from serving.router.admission.budget import Budget
from serving.router.admission.fair_queue import FairQueue
from serving.router.admission.preemption import Running, victims
from serving.router.admission.rate_limit import Account
from serving.router.forwarding.seat import Preemptible
from serving.state.records import SliceRecord

# Requests that wait in an engine for one beat may have just arrived; a queue stands for a second and more.
_BACKLOG_BEATS = 3
# All bodies together that wait for one model in one router.
_MOST_HELD_BYTES = 256 << 20
_LONGEST_RETRY_S = 600.0
# Weight of a beat in the measured rate: half of it comes from the last four beats, two seconds.
_BEAT_WEIGHT = 0.16
_FILLS = -101  # the priority of requests that fill: below any key's
_LIFTED = 101  # the priority of requests that were paused for as long as they may be: above any key's
_REVOKED = Refusal(
    UnauthorizedError("The API key that this was asked with is no longer one of this service's."), None
)


class Where(Enum):
    """What admission has decided on a request."""

    HELD = auto()
    ADMITTED = auto()
    REFUSED = auto()


@dataclass(eq=False, slots=True)
class Ticket:
    """One request in admission. `seats`: sequences it takes on a slice; `tokens`: what it may use of its key's limit.

    `used_tokens`: what it has used, known once it has ended. `budget` counts what it may use at most while it is here, `most_tokens` and `dollars`. A request that
    `fills` takes a free seat or none, and leaves a share `spare` of all seats free: it never waits, and is no demand. One that has
    `begun` and is held again is paused.
    `makes_room`: it is to give its seats back, `hands_on` to the next in this router; `times`: how often it has been told to; `paused_s`: of pauses that are over;
    `lifted`: the next free seat is for it.
    """

    model: str
    account: Account
    tokens: float
    seats: int
    size_bytes: int
    since_s: float
    where: Where = Where.HELD
    refusal: Refusal | None = None
    used_tokens: float = 0.0
    fills: bool = False
    spare: float = 0.0
    budget: Budget | None = None
    most_tokens: float = 0.0
    dollars: float = 0.0
    begun: bool = False
    makes_room: bool = False
    hands_on: bool = True
    times: int = 0
    paused_s: float = 0.0
    paused_at_s: float = 0.0
    lifted: bool = False

    @property
    def priority(self) -> int:
        return _FILLS if self.fills else self.account.key.priority

    @property
    def paused(self) -> bool:
        return self.begun and self.where is Where.HELD

    def paused_for_s(self, now_s: float) -> float:
        """All pauses together."""
        return self.paused_s + (now_s - self.paused_at_s if self.paused else 0.0)


@dataclass(frozen=True)
class Outlook:
    """What a beat says of a model: this router's seats, whether a slice serves at all and, where none does, whether one is coming.

    A router of several may have no seat while slices serve: it gets one within some beats of asking.
    """

    seats: int
    coming: bool
    why_none: str
    serves: bool = False

    @property
    def hopeful(self) -> bool:
        return bool(self.seats) or self.serves or self.coming


@dataclass
class _Model:
    name: str
    spec: QueueSpec
    queue: FairQueue[Ticket] = field(default_factory=FairQueue)
    outlook: Outlook = field(default_factory=lambda: Outlook(0, coming=False, why_none="no slice is known"))
    open: int = 0
    requests: int = 0
    filling: int = 0
    filled_seats: int = 0
    running: dict[Ticket, tuple[int, Preemptible]] = field(default_factory=dict)
    priorities: Counter[int] = field(default_factory=Counter)  # of those
    paused: int = 0
    held_bytes: int = 0
    held_seats: int = 0
    arrived: int = 0
    refused: int = 0
    abandoned: int = 0
    prompt_bytes: int = 0
    ended: int = 0
    rate_per_s: float = 0.0
    beat_s: float | None = None

    @property
    def has_queue(self) -> bool:
        return bool(self.spec.requests and self.spec.wait_s and self.outlook.hopeful)

    def takes(self, ticket: Ticket) -> bool:
        return (
            self.has_queue
            and len(self.queue) - self.paused < self.spec.requests
            and self.held_bytes + ticket.size_bytes <= _MOST_HELD_BYTES
        )

    def room(self, spare: float) -> int:
        """Seats for requests that fill, where a share stays free; one seat alone may be filled."""
        return 0 if self.queue else max(0, self.fillable(spare) - self.open)

    def fillable(self, spare: float) -> int:
        """Seats that may be filled while nothing else has one."""
        kept = max(0, min(math.ceil(spare * self.outlook.seats), self.outlook.seats - 1))
        return self.outlook.seats - kept

    def measure(self, now_s: float) -> None:
        """Average the requests ended per second, over beats in which there was something to do."""
        if self.beat_s is not None and (self.requests or self.ended):
            rate = self.ended / max(1e-3, now_s - self.beat_s)
            self.rate_per_s += (_BEAT_WEIGHT if self.rate_per_s else 1.0) * (rate - self.rate_per_s)
        self.ended, self.beat_s = 0, now_s

    def refusal(self, waited_s: float) -> Refusal:
        waited = f" This request waited {waited_s:.0f} s." if waited_s >= 1 else ""
        if not (self.outlook.seats or self.outlook.serves):
            return Refusal(NoSliceError(self.outlook.why_none + waited), self._retry_after_s())
        return Refusal(
            OverloadedError(
                f"Every slice of {self.name!r} is busy: {self.requests} requests are under way and {len(self.queue)} wait "
                f"in this router.{waited}"
            ),
            self._retry_after_s(),
        )

    def _retry_after_s(self) -> float:
        """The time until the queue has emptied, at the rate at which requests end; its deadline where none end."""
        if self.outlook.seats and self.rate_per_s > 0:
            return min(_LONGEST_RETRY_S, max(1.0, (len(self.queue) + 1) / self.rate_per_s))
        return max(5.0, self.spec.wait_s)


class AdmissionQueue:
    """The queues of one router. A call returns the other requests that it admits or refuses: their `where` has changed."""

    def __init__(
        self,
        specs: Mapping[str, QueueSpec],
        preemption: PreemptionSpec = PreemptionSpec(),  # noqa: B008  frozen
    ) -> None:
        self._models = {name: _Model(name, spec) for name, spec in specs.items()}
        self._preemption = preemption

    def enter(self, ticket: Ticket, now_s: float) -> list[Ticket]:
        """Admit, hold or refuse a new request: `where` of its ticket says which.

        What its key's own limit refuses is no demand: no slice more would change it.
        """
        model = self._models[ticket.model]
        key = ticket.account.key
        if refusal := ticket.account.reserve(ticket.tokens, now_s):
            ticket.where, ticket.refusal = Where.REFUSED, refusal
            return []
        if ticket.account.revoked:
            self._refuse(model, ticket, 0.0, now_s)
            return []
        if ticket.fills:
            room = model.room(ticket.spare)
            # A line that would use more alone than may be filled gets its turn when all of that is free.
            if room and room >= min(ticket.seats, model.fillable(ticket.spare)):
                ticket.seats = min(ticket.seats, model.outlook.seats)
                self._admit(model, ticket, now_s)
            else:
                ticket.where, ticket.refusal = Where.REFUSED, model.refusal(0.0)
                ticket.account.settle(ticket.tokens, 0.0, now_s)
            return []
        model.arrived += 1
        model.prompt_bytes += ticket.size_bytes
        seats = model.outlook.seats
        if seats and (not ticket.seats or (not model.queue and model.open < seats)):
            self._admit(model, ticket, now_s)
            return []
        dropped: list[Ticket] = []
        if not model.takes(ticket):
            victim = model.queue.heaviest(key.name, weight=key.weight, priority=key.priority)
            if victim is None or not model.has_queue:
                self._refuse(model, ticket, 0.0, now_s)
                return []
            self._refuse_held(model, victim, now_s)
            dropped.append(victim)
        cost = max(1.0, ticket.tokens)
        model.queue.push(ticket, key.name, cost=cost, weight=key.weight, priority=key.priority)
        model.held_bytes += ticket.size_bytes
        model.held_seats += ticket.seats
        return dropped

    def leave(self, ticket: Ticket, now_s: float) -> list[Ticket]:
        """End a request, however it went."""
        model = self._models[ticket.model]
        self.stops(ticket)
        match ticket.where:
            case Where.REFUSED if not ticket.begun:
                return []
            case Where.HELD:  # the client has gone
                self._unqueue(model, ticket)
                model.abandoned += not ticket.begun
            case Where.ADMITTED:
                self._give_back(model, ticket)
                model.ended += not ticket.fills
        ticket.account.settle(ticket.tokens, ticket.used_tokens if ticket.begun else 0.0, now_s)
        if ticket.begun and not ticket.fills:
            key = ticket.account.key
            # No request is for nothing, or a key whose requests fail would always be next.
            more = max(1.0, ticket.used_tokens) - max(1.0, ticket.tokens)
            model.queue.charge(key.name, more, weight=key.weight, priority=key.priority)
        return self._next(model, now_s, hands_on=ticket.makes_room and ticket.hands_on)

    def runs(self, ticket: Ticket, stream: Preemptible) -> None:
        """An admitted request could be told to make room from now on."""
        self.stops(ticket)
        model = self._models[ticket.model]
        model.running[ticket] = ticket.priority, stream
        model.priorities[ticket.priority] += 1

    def stops(self, ticket: Ticket) -> None:
        """It could no more."""
        model = self._models[ticket.model]
        if entry := model.running.pop(ticket, None):
            model.priorities[entry[0]] -= 1

    def preempt_for_others(self, name: str, waiting: Iterable[Sequence[int]], over: int) -> list[Preemptible]:
        """Those that make room for requests that wait in other routers, whose leases lack the `over` seats that are taken here.

        `waiting`: pairs of a priority and how many have it, the highest first.
        """
        model = self._models[name]
        over -= sum(ticket.seats for ticket in model.running if ticket.makes_room and not ticket.hands_on)
        priorities = [priority for priority, count in waiting for _ in range(min(count, max(0, over)))]
        return self._tell(model, priorities[: max(0, over)], hands_on=False)

    def waiting(self, name: str) -> list[tuple[int, int]]:
        """How many requests wait of each priority, the highest first."""
        return [
            (priority, count)
            for priority, count in self._models[name].queue.by_priority()
            if priority != _LIFTED
        ]

    def preempt(self, name: str) -> list[Preemptible]:
        """Those that make room for requests that wait now. Each is to be told, and then paused or ended."""
        model = self._models[name]
        if not (model.queue and model.running and model.outlook.seats):
            return []
        lowest = min(priority for priority, count in model.priorities.items() if count)
        coming = sum(ticket.seats for ticket in model.running if ticket.makes_room and ticket.hands_on)
        waiting: list[int] = []
        for priority, count in model.queue.by_priority():
            if priority <= lowest:
                break
            lacking = max(0, count - coming)
            coming -= count - lacking
            if priority != _LIFTED:  # these wait for a seat, and make nobody wait
                waiting += [priority] * lacking
        return self._tell(model, waiting, hands_on=True)

    def _tell(self, model: _Model, waiting: Sequence[int], *, hands_on: bool) -> list[Preemptible]:
        """The requests that make room for others of these priorities, the highest first."""
        able = (
            Running((ticket, stream), priority, stream.work, stream.movable, ticket.times, ticket.paused_s)
            for ticket, (priority, stream) in model.running.items()
            if waiting and priority < waiting[0] and not ticket.makes_room
        )
        chosen = []
        for ticket, stream in victims(waiting, able, self._preemption):
            ticket.makes_room, ticket.hands_on = True, hands_on
            ticket.times += 1
            chosen.append(stream)
        return chosen

    def pause(self, ticket: Ticket, now_s: float) -> list[Ticket]:
        """Take the seats of a request that makes room; it waits for others, first of its priority."""
        model = self._models[ticket.model]
        self.stops(ticket)
        self._give_back(model, ticket)
        hands_on, ticket.hands_on = ticket.hands_on, True
        ticket.where, ticket.makes_room, ticket.paused_at_s = Where.HELD, False, now_s
        model.queue.put_back(ticket, ticket.account.key.name, priority=ticket.priority)
        model.paused += 1
        model.held_seats += ticket.seats
        return self._next(model, now_s, hands_on=hands_on)

    def update(self, name: str, outlook: Outlook, now_s: float) -> list[Ticket]:
        """Take over what the store says of a model, and refuse requests that waited too long, or whose key was revoked."""
        model = self._models[name]
        model.measure(now_s)
        model.outlook = outlook
        changed = self._next(model, now_s)
        for ticket in model.queue.items():
            if self._is_hopeless(model, ticket, now_s) or (ticket.account.revoked and not ticket.begun):
                self._refuse_held(model, ticket, now_s)
                changed.append(ticket)
            elif ticket.paused and not ticket.lifted and self._paused_enough(ticket, now_s):
                ticket.lifted = True
                model.queue.remove(ticket)
                model.queue.put_back(ticket, ticket.account.key.name, priority=_LIFTED)
        return changed

    def counts(self, name: str) -> dict[str, int]:
        """The fields of Demand that the queue knows."""
        model = self._models[name]
        return {
            "held": len(model.queue),
            "in_flight": model.requests,
            "arrived": model.arrived,
            "refused": model.refused,
            "abandoned": model.abandoned,
            "prompt_bytes": model.prompt_bytes,
        }

    def room(self, name: str, spare: float) -> int:
        """Seats for requests that fill; `spare`: the share of all seats that stays free of them."""
        return self._models[name].room(spare)

    def filling(self, name: str) -> int:
        """Requests under way that fill."""
        return self._models[name].filling

    def free_seats(self, name: str) -> int:
        return self._models[name].outlook.seats - self._models[name].open

    def seats_taken(self, name: str) -> int:
        return self._models[name].open

    def seats_needed(self, name: str) -> int:
        """Those of them that no request has which only fills."""
        return self._models[name].open - self._models[name].filled_seats

    def seats_wanted(self, name: str) -> int:
        """Seats of the requests that wait."""
        return self._models[name].held_seats

    def _next(self, model: _Model, now_s: float, *, hands_on: bool = False) -> list[Ticket]:
        """Admit while a seat is free. A request for several seats needs one: else smaller ones would always go first.

        `hands_on`: seats were given back for the next, who gets them even if too many are taken.
        """
        admitted: list[Ticket] = []
        seats = model.outlook.seats
        while model.queue and (model.open < seats or (hands_on and seats and not admitted)):
            ticket = model.queue.pop()
            self._left_queue(model, ticket)
            self._admit(model, ticket, now_s)
            admitted.append(ticket)
        return admitted

    def _admit(self, model: _Model, ticket: Ticket, now_s: float) -> None:
        ticket.paused_s = ticket.paused_for_s(now_s)
        ticket.where, ticket.begun = Where.ADMITTED, True
        model.open += ticket.seats
        if ticket.fills:
            model.filling += 1
            model.filled_seats += ticket.seats
        else:
            model.requests += 1

    def _give_back(self, model: _Model, ticket: Ticket) -> None:
        model.open -= ticket.seats
        if ticket.fills:
            model.filling -= 1
            model.filled_seats -= ticket.seats
        else:
            model.requests -= 1

    def _unqueue(self, model: _Model, ticket: Ticket) -> None:
        model.queue.remove(ticket)
        self._left_queue(model, ticket)

    def _left_queue(self, model: _Model, ticket: Ticket) -> None:
        model.held_seats -= ticket.seats
        if ticket.begun:
            model.paused -= 1
        else:
            model.held_bytes -= ticket.size_bytes

    def _is_hopeless(self, model: _Model, ticket: Ticket, now_s: float) -> bool:
        """Whether a request has waited for long enough; one that is paused waits on while a slice serves."""
        outlook = model.outlook
        if ticket.begun and (outlook.seats or outlook.serves):
            return False
        since_s = ticket.paused_at_s if ticket.begun else ticket.since_s
        return not outlook.hopeful or now_s - since_s >= model.spec.wait_s

    def _paused_enough(self, ticket: Ticket, now_s: float) -> bool:
        return ticket.paused_for_s(now_s) >= self._preemption.longest_s

    def _refuse_held(self, model: _Model, ticket: Ticket, now_s: float) -> None:
        self._unqueue(model, ticket)
        self._refuse(model, ticket, now_s - (ticket.paused_at_s if ticket.begun else ticket.since_s), now_s)

    def _refuse(self, model: _Model, ticket: Ticket, waited_s: float, now_s: float) -> None:
        ticket.paused_s = ticket.paused_for_s(now_s)
        ticket.where = Where.REFUSED
        ticket.refusal = _REVOKED if ticket.account.revoked else model.refusal(waited_s)
        model.refused += 1
        if not ticket.begun:
            ticket.account.settle(ticket.tokens, 0.0, now_s)


class _Queued(NamedTuple):
    """A slice's queue: the last beat that told of it, so many in a row, and looks since then."""

    beat: int = -1
    beats: int = 0
    looks: int = 0

    @property
    def stands(self) -> bool:
        return self.beats >= _BACKLOG_BEATS and self.looks < _BACKLOG_BEATS

    def after(self, beat: int) -> "_Queued":
        if beat == self.beat:
            return self._replace(looks=self.looks + 1)
        return _Queued(beat, self.beats + 1)


_NO_QUEUE = _Queued()


class Backlog:
    """Which slices have had requests waiting in their engine for several beats in a row."""

    def __init__(self) -> None:
        self._known: dict[str, _Queued] = {}

    def observe(self, entries: Iterable[SliceRecord]) -> frozenset[str]:
        """The replicas that have a queue. A record that stands still, as while the head restarts, says so of then and not of now."""
        self._known = {
            entry.replica: self._known.get(entry.replica, _NO_QUEUE).after(entry.beat)
            for entry in entries
            if entry.waiting
        }
        return frozenset(replica for replica, queued in self._known.items() if queued.stands)


def capacity(entries: Iterable[SliceRecord], most_sequences: Mapping[str, int]) -> int:
    """How many sequences a model's slices run at once; `most_sequences` of one slice, by pool, where a slice does not say."""
    usual = max(most_sequences.values(), default=1)
    return sum(entry.sequences or most_sequences.get(entry.pool, usual) for entry in entries if entry.serves)


def seats(entries: Iterable[SliceRecord], leased: int, backlog: frozenset[str], *, taken: int) -> int:
    """How many sequences this router may have on a model's slices: those it leased from what all routers share.

    Where every slice has had a queue for a while, caches are full before seats are: then the router takes fewer than now,
    until the queues have gone.
    """
    serving = [entry for entry in entries if entry.serves]
    if serving and all(entry.replica in backlog for entry in serving):
        running = sum(entry.running for entry in serving)
        waiting = sum(entry.waiting for entry in serving)
        return min(leased, max(1, math.ceil(taken * (1 - 0.5 * waiting / (running + waiting)))))
    return leased
