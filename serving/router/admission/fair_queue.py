"""Who goes next: start-time fair queueing over the keys, strict by priority. Pure; not even time is needed.

Within a priority, a key with twice the weight gets twice the tokens through while both wait. A key's stamp is the virtual time
at which its next request would start if every key had its share for itself; the smallest stamp goes first. Virtual time is the
stamp of the last request to go, so that an idle key starts level with the others and saves nothing up. What a request turns
out to have used is charged to its key's stamp afterwards. What is put back has been charged: it goes first of its priority.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Place(Generic[T]):
    item: T
    flow: str
    priority: int
    weight: float
    cost: float
    number: int


@dataclass
class _Class(Generic[T]):
    """One priority: its virtual time, each key's stamp, and each key's requests in their order. `back` go first."""

    now: float = 0.0
    stamps: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, dict[T, _Place[T]]] = field(default_factory=dict)
    back: dict[T, _Place[T]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.back) + sum(map(len, self.waiting.values()))


class FairQueue(Generic[T]):
    """Requests of many keys, in the order in which they go."""

    def __init__(self) -> None:
        self._places: dict[T, _Place[T]] = {}
        self._flows: dict[str, dict[T, None]] = {}
        self._classes: dict[int, _Class[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def push(self, item: T, flow: str, *, cost: float, weight: float = 1.0, priority: int = 0) -> None:
        klass = self._classes.setdefault(priority, _Class())
        self._count += 1
        place = _Place(item, flow, priority, weight, cost, self._count)
        if flow not in klass.waiting:
            klass.stamps[flow] = max(klass.now, klass.stamps.get(flow, 0.0))
        klass.waiting.setdefault(flow, {})[item] = place
        self._places[item] = place
        self._flows.setdefault(flow, {})[item] = None

    def put_back(self, item: T, flow: str, *, priority: int) -> None:
        """Have a request that went once go first of its priority, behind those put back before. `heaviest` never names it."""
        self._count += 1
        place = _Place(item, flow, priority, 1.0, 0.0, self._count)
        self._classes.setdefault(priority, _Class()).back[item] = place
        self._places[item] = place

    def by_priority(self) -> list[tuple[int, int]]:
        """How many wait of each priority, the highest first."""
        counts = ((priority, klass.size) for priority, klass in self._classes.items())
        return sorted((pair for pair in counts if pair[1]), reverse=True)

    def pop(self) -> T:
        """The next request; raises IndexError where none waits."""
        if not self._places:
            raise IndexError("nobody waits")
        klass = self._classes[
            max(priority for priority, klass in self._classes.items() if klass.waiting or klass.back)
        ]
        if klass.back:
            place = next(iter(klass.back.values()))
            self._forget(place)
            return place.item
        heads = [(klass.stamps[flow], next(iter(items.values()))) for flow, items in klass.waiting.items()]
        klass.now, place = min(heads, key=lambda head: (head[0], head[1].number))
        klass.stamps[place.flow] = klass.now + place.cost / place.weight
        self._forget(place)
        return place.item

    def charge(self, flow: str, amount: float, *, weight: float = 1.0, priority: int = 0) -> None:
        """Correct what a request that went was thought to cost; a negative amount gives back."""
        if klass := self._classes.get(priority):
            stamp = max(klass.now, klass.stamps.get(flow, 0.0))
            klass.stamps[flow] = max(klass.now, stamp + amount / weight)

    def remove(self, item: T) -> None:
        """Take a request out; its key's later requests keep their order."""
        self._forget(self._places[item])

    def heaviest(self, flow: str, *, weight: float = 1.0, priority: int = 0) -> T | None:
        """The request whose place `flow` may take in a full queue: the newest of the key with most waiting for its weight.

        None where that key is `flow` itself, counting its new request, or one of higher priority.
        """
        newcomer = (-priority, (len(self._flows.get(flow, ())) + 1) / weight)
        worst, victim = newcomer, None
        for items in self._flows.values():
            last = next(reversed(items))
            place = self._places[last]
            held = (-place.priority, len(items) / place.weight)
            if held > worst and place.flow != flow:
                worst, victim = held, last
        return victim

    def items(self) -> list[T]:
        return list(self._places)

    def _forget(self, place: _Place[T]) -> None:
        del self._places[place.item]
        klass = self._classes[place.priority]
        if klass.back.pop(place.item, None) is None:
            for flows in (self._flows, klass.waiting):
                items = flows[place.flow]
                del items[place.item]
                if not items:
                    del flows[place.flow]
        if not self._places:  # nobody waits, so no key is owed anything
            self._classes.clear()
