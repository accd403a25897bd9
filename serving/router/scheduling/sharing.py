"""What routers tell each other: which names of blocks they sent to which slice. Pure; time is given.

Each router keeps the time at which a slice was last sent a name, by whichever router. A name that a slice was not sent for
RENEWED_S is news: it goes out with the next batch, and a batch that comes is merged by the later time. A slice says how old the
content is that its cache still has (`SliceRecord.cache_age_s`); names that were sent before are gone there. So no router has to
know what another forgot. A router that starts asks another for everything.

Batches may be lost, doubled or late: names then count as sent when a batch of them comes, RENEWED_S after the last at the latest.
"""

import json
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

# Names that are sent again within this time are no news, and caches are thought to have them this much longer.
RENEWED_S = 5.0
MOST_NEWS = 1 << 16  # names that wait for the next batch; beyond those the oldest are not told
MOST_TOLD = 1 << 16  # names that a starting router is told
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Sent:
    """Names that a slice was sent at one time, `age_s` ago; `tokens` of the prompt it had not had before."""

    replica: str
    names: tuple[int, ...]
    age_s: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class Batch:
    """What one router tells others."""

    router: str
    sent: tuple[Sent, ...]

    def encoded(self) -> bytes:
        """One line of JSON, then all names, eight bytes each."""
        replicas = {
            replica: at for at, replica in enumerate(dict.fromkeys(entry.replica for entry in self.sent))
        }
        head = {
            "router": self.router,
            "replicas": list(replicas),
            "sent": [
                [replicas[entry.replica], round(entry.age_s, 1), len(entry.names), entry.tokens]
                for entry in self.sent
            ],
        }
        names = array("Q", [name & _MASK for entry in self.sent for name in entry.names])
        if sys.byteorder == "big":
            names.byteswap()
        return json.dumps(head, separators=(",", ":")).encode() + b"\n" + names.tobytes()

    @classmethod
    def decoded(cls, raw: bytes) -> Self:
        """Raises ValueError for what no router sends."""
        head, _, body = raw.partition(b"\n")
        names = array("Q")
        names.frombytes(body)  # ValueError where it is no whole number of names
        if sys.byteorder == "big":
            names.byteswap()
        try:
            fields = json.loads(head)
            replicas, start, sent = fields["replicas"], 0, []
            for at, age_s, count, tokens in fields["sent"]:
                if not 0 <= count <= len(names) - start:
                    raise ValueError(f"{count} names are announced, and {len(names) - start} are there")
                blocks = tuple(names[start : start + count])
                sent.append(Sent(str(replicas[at]), blocks, float(age_s), int(tokens)))
                start += count
            return cls(str(fields["router"]), tuple(sent))
        except (KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
            raise ValueError(f"no batch of a router: {error}") from None


class Sends:
    """When each slice was last sent each name, by any router; slices by number."""

    def __init__(self, most_names: int) -> None:
        """`most_names`: of all slices together; beyond that `excess` has names to forget."""
        self._most = most_names
        self._count = 0
        self._of: dict[int, dict[int, float]] = {}
        self._unsorted: set[int] = set()
        self._last_s: dict[int, float] = {}

    def note(self, number: int, names: Iterable[int], at_s: float) -> list[int]:
        """Take over that a slice was sent names at this time; returns those that it was not sent of late."""
        times = self._of.setdefault(number, {})
        before, renewed_s, news = len(times), at_s - RENEWED_S, []
        for name in names:
            last_s = times.get(name)
            if last_s is None:
                times[name] = at_s
            elif last_s < renewed_s:
                del times[name]  # the dictionary is in the order of time
                times[name] = at_s
            else:
                continue
            news.append(name)
        if news:
            if at_s < self._last_s.get(number, at_s):
                self._unsorted.add(number)
            else:
                self._last_s[number] = at_s
        self._count += len(times) - before
        return news

    def excess(self, most: int) -> tuple[int, list[int]]:
        """Where slices have too many names, forget the oldest of the slice with the most, at most so many; returns both."""
        if self._count <= self._most:
            return 0, []
        number = max(self._of, key=lambda number: len(self._of[number]))
        return number, self.gone(number, math.inf, most)

    def gone(self, number: int, before_s: float, most: int) -> list[int]:
        """Forget what a slice was last sent before this time, at most so many names at once; returns them."""
        times = self._of.get(number)
        if not times:
            return []
        if number in self._unsorted:
            self._unsorted.discard(number)
            times = self._of[number] = dict(sorted(times.items(), key=lambda item: item[1]))
        names = []
        for name, at_s in islice(times.items(), most):
            if at_s >= before_s:
                break
            names.append(name)
        for name in names:
            del times[name]
        self._count -= len(names)
        return names

    def leave(self, number: int) -> None:
        """Forget a slice."""
        self._count -= len(self._of.pop(number, ()))
        self._unsorted.discard(number)
        self._last_s.pop(number, None)

    def latest(self, most: int) -> Iterator[tuple[int, float, tuple[int, ...]]]:
        """The names that slices were sent last, at most so many: slice, time and the names of that time, a slice's oldest first.

        A slice with less than its share leaves the rest to others.
        """
        for at, number in enumerate(sorted(self._of, key=lambda number: len(self._of[number]))):
            share = most // (len(self._of) - at)
            for at_s, names in self._latest_of(number, share):
                yield number, at_s, names
                most -= len(names)

    def _latest_of(self, number: int, most: int) -> list[tuple[float, tuple[int, ...]]]:
        groups: list[tuple[float, list[int]]] = []
        for name, at_s in islice(reversed(self._of[number].items()), most):
            if not groups or groups[-1][0] != at_s:
                groups.append((at_s, []))
            groups[-1][1].append(name)
        return [(at_s, tuple(reversed(names))) for at_s, names in reversed(groups)]


class Outbox:
    """News that wait for the next batch, at most MOST_NEWS names. `on_first` is called once some wait."""

    def __init__(self) -> None:
        self.on_first: Callable[[], None] = lambda: None
        self._sent: list[Sent] = []
        self._names = 0

    def put(self, sent: Sent) -> None:
        self._sent.append(sent)
        self._names += len(sent.names)
        if len(self._sent) == 1:
            self.on_first()
        while self._names > MOST_NEWS:
            self._names -= len(self._sent.pop(0).names)

    def take(self) -> tuple[Sent, ...]:
        """All of them; they wait no longer."""
        sent, self._sent, self._names = tuple(self._sent), [], 0
        return sent


def in_steps(sent: Iterable[Sent], most_names: int) -> Iterator[list[Sent]]:
    """All of it in steps of about so many names, long lists cut; an entry takes as long as a name."""
    step: list[Sent] = []
    size = 0
    for entry in sent:
        for start in range(0, max(1, len(entry.names)), most_names):
            names = entry.names[start : start + most_names]
            step.append(replace(entry, names=names, tokens=0 if start else entry.tokens))
            size += 1 + len(names)
            if size >= most_names:
                yield step
                step, size = [], 0
    if step:
        yield step
