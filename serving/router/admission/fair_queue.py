"""Who goes next: start-time fair queueing over the keys, strict by priority. Pure; not even time is needed.

Within a priority, a key with twice the weight gets twice the tokens through while both wait. A request's stamp is the
virtual time at which it would start if every key had its share for itself; the smallest stamp goes first. Virtual time is
the stamp of the last request to go, so that an idle key starts level with the others and saves nothing up.
"""

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Place(Generic[T]):
    item: T
    flow: str
    priority: int
    weight: float
    gone: bool = False


@dataclass
class _Class:
    """One priority: its virtual time, and where each key's next request would start."""

    now: float = 0.0
    next_start: dict[str, float] = field(default_factory=dict)


class FairQueue(Generic[T]):
    """Requests of many keys, in the order in which they go."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, _Place[T]]] = []
        self._places: dict[T, _Place[T]] = {}
        self._flows: dict[str, dict[T, None]] = {}
        self._classes: dict[int, _Class] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def push(self, item: T, flow: str, *, cost: float, weight: float = 1.0, priority: int = 0) -> None:
        klass = self._classes.setdefault(priority, _Class())
        start = max(klass.now, klass.next_start.get(flow, 0.0))
        klass.next_start[flow] = start + cost / weight
        place = _Place(item, flow, priority, weight)
        self._count += 1
        heapq.heappush(self._heap, (-priority, start, self._count, place))
        self._places[item] = place
        self._flows.setdefault(flow, {})[item] = None

    def pop(self) -> T:
        """The next request; raises IndexError where none waits."""
        while True:
            rank, start, _, place = heapq.heappop(self._heap)
            if place.gone:
                continue
            self._classes[-rank].now = start
            self._forget(place)
            return place.item

    def remove(self, item: T) -> None:
        """Take a request out; its key's later requests keep their places."""
        self._forget(self._places[item])
        # Requests that left must not pile up behind requests that wait.
        if len(self._heap) > 2 * len(self._places) + 16:
            self._heap = [entry for entry in self._heap if not entry[3].gone]
            heapq.heapify(self._heap)

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
        place.gone = True
        del self._places[place.item]
        items = self._flows[place.flow]
        del items[place.item]
        if not items:
            del self._flows[place.flow]
        if not self._places:  # nobody waits, so no key is owed anything
            self._heap.clear()
            self._classes.clear()
