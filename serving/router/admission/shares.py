"""How routers share seats and limits, from what each of them publishes every beat. Pure.

Whole things, seats on slices and a key's requests at once, are leased: all leases together are at most all there is. A router
first gives up what it need not have and says so; only then does another take it. Amounts a minute are one bucket for all:
each router knows its level from what all have taken, and may take its share of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Self

# Records are up to two beats old: a lease that has grown does not grow again before all have seen it.
_GROWS_AFTER_BEATS = 3
# What a router that nobody asks may still take of a limit, so that the first request there is not refused.
_IDLE_SHARE = 0.1
# A router's turn to take more than its share. In its first part the takings of the turn before are still being published.
TURN_S = 4.0
_TURN_BEGINS_S = 1.5


class Book(NamedTuple):
    """What one router has of something: `taken`, asked for and not had (`wanting`), and `leased`."""

    taken: int = 0
    wanting: int = 0
    leased: int = 0


class KeyUse(NamedTuple):
    """What one key has in one router, as the router publishes it.

    `open`, `refused` (of late, for too many at once) and `leased` count requests at once. `asked` is requests a second.
    `*_used` count since the router's start, `*_left` is the level of the bucket that all routers share.
    """

    open: int = 0
    refused: int = 0
    leased: int = 0
    asked: float = 0.0
    requests_used: float = 0.0
    requests_left: float = 0.0
    tokens_used: float = 0.0
    tokens_left: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The record as the store keeps it."""
        open_, refused, leased, *rest = values
        return cls(int(open_), int(refused), int(leased), *rest)

    @property
    def book(self) -> Book:
        return Book(self.open, self.refused, self.leased)

    @property
    def at_rest(self) -> Self:
        """The same of a router that no longer tells of the key, for nobody uses it there."""
        full = math.inf
        return self._replace(open=0, refused=0, asked=0.0, requests_left=full, tokens_left=full)


class Lease:
    """What one router may have of something whole, from beat to beat."""

    def __init__(self) -> None:
        self.most: int | None = None  # before a beat has told
        self._had: int | None = None
        self._beats = _GROWS_AFTER_BEATS

    def beat(self, total: int, own: str, taken: int, wanting: int, others: Mapping[str, Book]) -> int:
        """The lease after a beat in which the other routers said this."""
        self._beats += 1
        if not others:
            self.most = total
            return total
        before = self.most or 0
        now = lease(total, own, {**others, own: Book(taken, wanting, before)})
        if now > before and self._beats < _GROWS_AFTER_BEATS:
            now = before
        if now > before:
            self._beats = 0
        self.most = now
        return now

    def lost(self) -> None:
        """Others may have taken this router for gone, and have leased what it had."""
        self._had, self.most = self.most, None

    def regained(self) -> None:
        """Nobody has been heard of since: whoever can't be read has not taken anything either."""
        if self.most is None:
            self.most = self._had


@dataclass(frozen=True)
class Share:
    """What a router may take of a limit that all share: a part of what is left, and in its turn one thing larger than its part."""

    part: float = 1.0
    turn: bool = True


def lease(total: int, own: str, books: Mapping[str, Book]) -> int:
    """How many of `total` the router `own` may have now; `books` has every router's, its own among them."""
    fair = _deal(
        total,
        {name: book.taken + book.wanting for name, book in books.items()},
        {name: book.leased for name, book in books.items()},
    )
    mine = books[own]
    if fair[own] <= mine.leased:
        return fair[own]
    held = {name: max(book.leased, book.taken) for name, book in books.items()}
    free = max(0, total - sum(held.values()))
    gaps = {name: max(0, fair[name] - held[name]) for name in books}
    granted = gaps if sum(gaps.values()) <= free else _deal(free, gaps)
    return min(fair[own], max(mine.leased, min(mine.taken, fair[own])) + granted[own])


def share(own: str, asked: Mapping[str, float], name: str, at_s: float) -> Share:
    """A router's share of a key's limits by how often the key asks each router; `at_s`: seconds since 1970."""
    if len(asked) <= 1:
        return Share()
    total = sum(asked.values())
    even = 1 / len(asked)
    part = even if total <= 0 else _IDLE_SHARE * even + (1 - _IDLE_SHARE) * asked[own] / total
    turn, phase_s = divmod(at_s, TURN_S)
    holder = _holder({router: rate for router, rate in asked.items() if rate > 0} or asked, name, int(turn))
    return Share(part, turn=holder == own and phase_s >= _TURN_BEGINS_S)


def _deal(total: int, wants: Mapping[str, int], held: Mapping[str, int] | None = None) -> dict[str, int]:
    """As fair as can be: nobody gets more than he wants while another lacks; what nobody wants is spread evenly.

    What can't be divided goes to those who hold most, so that it stays where it is while wants change a little.
    """
    rest, lacking = total, sorted(wants, key=lambda name: (wants[name], name))
    dealt = {}
    while lacking and wants[lacking[0]] <= rest // len(lacking):
        dealt[lacking[0]] = wants[lacking[0]]
        rest -= wants[lacking.pop(0)]
    more = lacking or sorted(wants)
    even, rest = divmod(rest, len(more))
    first = sorted(more, key=lambda name: (dealt.get(name, 0), -(held or {}).get(name, 0), name))[:rest]
    return dealt | {name: dealt.get(name, 0) + even + (name in first) for name in more}


def _holder(weights: Mapping[str, float], name: str, turn: int) -> str:
    """The router whose turn it is: all agree without talking, and turns are as frequent as a router is asked."""
    return max(weights, key=lambda router: (_draw(f"{name}\0{router}\0{turn}", weights[router]), router))


def _draw(of: str, weight: float) -> float:
    number = int.from_bytes(blake2b(of.encode(), digest_size=8).digest(), "little")
    return float(((number + 1) / (2**64 + 1)) ** (1 / max(weight, 1e-9)))
