"""What one key may use: requests and tokens a minute, and requests at once. Pure: time is given.

A limit per minute is a bucket of that size which refills all the time: a minute's worth may come at once, and nothing
resets on the stroke of the minute. All routers share one bucket. Each knows the level from what the others say they took. Until it
hears of them again it takes no more than its share (`serving.router.admission.shares`).
"""

import math
import random
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from serving.errors import RateLimitError, Refusal
from serving.router.admission.budget import Budget
from serving.router.admission.shares import KeyUse, Lease, Share, share
from serving.router.http.auth import Key
from serving.timings import TIMINGS

_MINUTE_S = 60.0
_DEAL_S = 2.0  # between two dealings of what is left
_TOLD_BEATS = 3  # within which all know what a router says of itself
_ASKED_S = 10.0  # over which requests asked for are averaged
_REFUSED_S = 5.0  # for so long a refused request counts as wanting a place
_MOST_REFUSED = 1000  # that are remembered
# A key that nobody uses is told of for so long yet. With 10,000 users of an issuer, routers would do nothing but talk of them.
_RESTS_S = 10.0
# Refusals are averaged over this time; so many a second are answered at once, and each one more delays all by this.
_REFUSALS_S = 2.0
_FREE_REFUSALS_PER_S = 50.0
_DELAY_S = 0.005
_LONGEST_DELAY_S = 2.0  # on average


class Bucket:
    """An amount per minute. Use that is only known afterwards may overdraw the bucket: it then fills from below zero."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self._limit = self._level = per_minute
        self._per_s = per_minute / _MINUTE_S
        self._at_s = now_s
        self._share = Share()
        self._own = self._level
        self._dealt_s = -math.inf
        self._lump_s = -math.inf
        self._of_late: deque[tuple[float, float]] = deque()
        self.used = 0.0

    @property
    def level(self) -> float:
        return self._level

    def is_full(self, now_s: float) -> bool:
        self._fill(now_s)
        return self._level >= self._limit

    def set(self, per_minute: float, now_s: float) -> None:
        """Change the limit; what was used stays used."""
        self._fill(now_s)
        used = self._limit - self._level
        self._limit, self._per_s = per_minute, per_minute / _MINUTE_S
        self._level = per_minute - used
        self._deal(now_s)

    def lower(self, left: float, now_s: float) -> None:
        """Take over a lower level."""
        self._level = min(self._level, left)
        self._deal(now_s)

    def deal(self, share: Share, others_took: float, now_s: float) -> None:
        """Take over what the other routers took since the last call, and this router's share of what is left."""
        self._fill(now_s)
        self._level = min(self._limit, self._level - others_took)
        fewer = share.part < 0.5 * self._share.part  # routers have joined
        self._share = share
        if fewer or now_s - self._dealt_s >= _DEAL_S:
            self._deal(now_s)

    def lost(self, now_s: float) -> None:
        """Others may have taken what was this router's share: it has none until the next dealing, which comes with the next beat."""
        self._fill(now_s)
        if self._share.part < 1:
            self._own, self._dealt_s = min(self._own, 0.0), -math.inf

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount; a negative one gives back."""
        self._fill(now_s)
        if amount > self._own:
            self._lump_s = now_s
        self._level = min(self._limit, self._level - amount)
        self._own -= amount
        self.used += amount
        if self._share.part < 1:
            self._of_late.append((now_s, amount))
            self._unheard(now_s)

    def wait_s(self, amount: float, now_s: float, *, calm: bool = True) -> float:
        """The time until the amount is there. A full bucket lets through more than it holds.

        `calm`: all routers together are asked for less than the limit.
        """
        self._fill(now_s)
        need = min(amount, self._limit)
        missing_s = max(0.0, (need - self._level) / self._per_s)
        if self._share.part >= 1 or missing_s > 0:
            return missing_s
        if self._own >= need:
            return 0.0
        # More than this router's share ever holds: in its turn, or one a dealing while nobody else could want it.
        lump = need > self._share.part * self._limit
        if lump and (self._share.turn or (calm and now_s - self._lump_s >= _DEAL_S)):
            return 0.0
        return min(_DEAL_S, (need - self._own) / (self._share.part * self._per_s))

    def headers(self, what: str, now_s: float) -> list[tuple[bytes, bytes]]:
        """OpenAI's three, of the whole service."""
        self._fill(now_s)
        full_s = (self._limit - self._level) / self._per_s
        return [
            (f"x-ratelimit-limit-{what}".encode(), b"%d" % self._limit),
            (f"x-ratelimit-remaining-{what}".encode(), b"%d" % max(0, math.floor(self._level))),
            (f"x-ratelimit-reset-{what}".encode(), duration(full_s).encode()),
        ]

    def _deal(self, now_s: float) -> None:
        """The others are thought to have taken of late what this router took, each by its share: nobody has heard of it yet."""
        part = self._share.part
        others = self._unheard(now_s) * (1 - part) / part
        self._own = part * max(0.0, self._level - max(0.0, others))
        self._dealt_s = now_s

    def _unheard(self, now_s: float) -> float:
        """What this router took of late."""
        while self._of_late and now_s - self._of_late[0][0] >= TIMINGS.heard_s:
            self._of_late.popleft()
        return sum(amount for _, amount in self._of_late)

    def _fill(self, now_s: float) -> None:
        elapsed_s = max(0.0, now_s - self._at_s)
        self._level = min(self._limit, self._level + elapsed_s * self._per_s)
        self._own = min(
            self._share.part * self._limit, self._own + elapsed_s * self._share.part * self._per_s
        )
        self._at_s = max(self._at_s, now_s)


class Refusals:
    """How often somebody is refused, and how long each further refusal is kept back for it.

    A refusal costs the event loop half a millisecond. With 200 connections that ask again at once there are 230 a second.
    """

    def __init__(self) -> None:
        self._rate = 0.0
        self._at_s = 0.0

    def delay_s(self, now_s: float) -> float:
        """Count one; the time to wait before its answer. Nothing for who is refused now and then."""
        self._rate = self._rate * math.exp(-max(0.0, now_s - self._at_s) / _REFUSALS_S) + 1 / _REFUSALS_S
        self._at_s = now_s
        delay_s = min(_LONGEST_DELAY_S, max(0.0, self._rate - _FREE_REFUSALS_PER_S) * _DELAY_S)
        return delay_s * random.uniform(0.5, 1.5)  # who came at once does not come back at once


@dataclass
class Account:
    """One key's use, in one router. `revoked`: the key is no longer in force."""

    key: Key
    revoked: bool = False
    open: int = 0
    refusals: Refusals = field(default_factory=Refusals, repr=False)
    budget: Budget | None = None
    _requests: Bucket | None = field(default=None, repr=False)
    _tokens: Bucket | None = field(default=None, repr=False)
    _took_s: float = 0.0
    _lease: Lease = field(default_factory=Lease, repr=False)
    _asked: float = 0.0
    _asked_s: float = 0.0
    _others_asked: float = 0.0
    _joined: bool = False
    _told: deque[float] = field(default_factory=lambda: deque(maxlen=_TOLD_BEATS), repr=False)
    _refused: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_REFUSED), repr=False)
    _seen: dict[str, KeyUse] = field(default_factory=dict, repr=False)
    _used_s: float = -math.inf

    def set(self, key: Key, now_s: float) -> None:
        """Take over the key as the file has it now."""
        self._requests = _bucket(self._requests, key.requests_per_minute, now_s)
        self._tokens = _bucket(self._tokens, key.tokens_per_minute, now_s)
        self.key = key

    def wake(self, now_s: float) -> None:
        """Somebody uses the key, here or elsewhere: routers tell each other of it."""
        self._used_s = now_s

    def is_news(self, others: Mapping[str, KeyUse]) -> bool:
        """Whether the key is used in another router, or known in one that has not told of it before."""
        return any(
            use.open or use.refused or use.asked or router not in self._seen for router, use in others.items()
        )

    def rests(self, now_s: float) -> bool:
        """Whether nobody has used the key for a while, and none of its limits is touched."""
        buckets = (self._requests, self._tokens)
        if self.open or any(bucket and not bucket.is_full(now_s) for bucket in buckets):
            self._used_s = now_s
        return now_s - self._used_s > _RESTS_S

    def share(
        self, own: str, uses: Mapping[str, KeyUse], routers: Collection[str], now_s: float, at_s: float
    ) -> None:
        """Take over what the other routers say of the key; `at_s`: seconds since 1970. Once a beat while the key is used.

        Of `routers`, all others, one that tells nothing has what it had, and does not use it. A router that joins has as much
        left as the others say.
        """
        resting = {router: use.at_rest for router, use in self._seen.items() if router in routers}
        others = {**resting, **uses}
        if not self._joined and others:
            for bucket, left in (
                (self._requests, min(use.requests_left for use in others.values())),
                (self._tokens, min(use.tokens_left for use in others.values())),
            ):
                if bucket:
                    bucket.lower(left, now_s)
        self._joined = True
        while self._refused and now_s - self._refused[0] >= _REFUSED_S:
            self._refused.popleft()
        if self.key.concurrency is not None:
            wanting = min(len(self._refused), self.key.concurrency)
            books = {router: use.book for router, use in others.items()}
            self._lease.beat(self.key.concurrency, own, self.open, wanting, books)
        # Its own rate as the others know it: with a fresher one, each router of a burst would think itself the only one asked.
        known = self._told[0] if self._told else 0.0
        asked = {own: known, **{router: use.asked for router, use in others.items()}}
        self._others_asked = sum(asked.values()) - asked[own]
        part = share(own, asked, self.key.name, at_s)
        took = [(use, self._seen.get(router, use)) for router, use in others.items()]
        if self._requests:
            self._requests.deal(
                part, sum(use.requests_used - seen.requests_used for use, seen in took), now_s
            )
        if self._tokens:
            self._tokens.deal(part, sum(use.tokens_used - seen.tokens_used for use, seen in took), now_s)
        self._seen = dict(others)

    def lost(self, now_s: float) -> None:
        """Other routers may have taken this one for gone, and its part of the limits."""
        self._lease.lost()
        for bucket in (self._requests, self._tokens):
            if bucket:
                bucket.lost(now_s)

    def regained(self) -> None:
        """Nobody has been heard of since."""
        self._lease.regained()

    def use(self, now_s: float) -> KeyUse:
        """What this router says of the key to the others, once a beat."""
        self._told.append(self._rate(now_s))
        return KeyUse(
            self.open,
            len(self._refused),
            self._lease.most or 0,
            round(self._rate(now_s), 4),
            self._requests.used if self._requests else 0.0,
            self._requests.level if self._requests else 0.0,
            self._tokens.used if self._tokens else 0.0,
            self._tokens.level if self._tokens else 0.0,
        )

    @property
    def limited(self) -> bool:
        return bool(self._requests or self._tokens)

    @property
    def shared(self) -> bool:
        """Whether other routers have to know of this key."""
        return self.limited or self.key.concurrency is not None

    def arrive(self, now_s: float) -> Refusal | None:
        """Count a request of which only the headers are there; or say why it may not come now."""
        self._asked = self._rate(now_s) + 1 / _ASKED_S
        key = self.key
        most = self._most_open()
        if most is not None and self.open >= most:
            self._refused.append(now_s)
            return Refusal(
                RateLimitError(
                    f"Key {key.name!r} has {self.open} requests under way, and may have {most} at once here "
                    f"({key.concurrency} in all); wait for one to end."
                ),
                max(1.0, self._took_s / max(1, most)),  # the average time until one of them ends
            )
        if refusal := self._over(self._requests, 1.0, key.requests_per_minute, "requests", now_s):
            return refusal
        self.open += 1
        if self._requests:
            self._requests.take(1.0, now_s)
        return None

    def reserve(self, tokens: float, now_s: float) -> Refusal | None:
        """Take the tokens that a request may use; or say why it may not have them now."""
        key = self.key
        if self._tokens and key.tokens_per_minute and tokens > key.tokens_per_minute:
            return Refusal(
                RateLimitError(
                    f"The request asks for {tokens:.0f} tokens, prompt and max_tokens together; key {key.name!r} has "
                    f"{key.tokens_per_minute:g} a minute. Ask for less."
                ),
                None,
            )
        if refusal := self._over(self._tokens, tokens, key.tokens_per_minute, "tokens", now_s):
            return refusal
        if self._tokens:
            self._tokens.take(tokens, now_s)
        return None

    def settle(self, reserved: float, used: float, now_s: float) -> None:
        """Correct the tokens that a request was thought to use by those that it used."""
        if self._tokens:
            self._tokens.take(used - reserved, now_s)

    def leave(self, took_s: float) -> None:
        """A request that arrived is over."""
        self.open -= 1
        self._took_s = took_s if not self._took_s else 0.9 * self._took_s + 0.1 * took_s

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        headers = []
        if self._requests:
            headers += self._requests.headers("requests", now_s)
        if self._tokens:
            headers += self._tokens.headers("tokens", now_s)
        return headers

    def _over(
        self, bucket: Bucket | None, amount: float, limit: float | None, what: str, now_s: float
    ) -> Refusal | None:
        if not bucket or not limit:
            return None
        requests = self.key.requests_per_minute
        calm = (
            requests is None or self._rate(now_s) + self._others_asked <= requests / _MINUTE_S + 1 / _ASKED_S
        )
        if (wait_s := bucket.wait_s(amount, now_s, calm=calm)) <= 0:
            return None
        return Refusal(
            RateLimitError(
                f"Key {self.key.name!r} has used its {limit:g} {what} a minute; there is room again in {duration(wait_s)}."
            ),
            wait_s,
        )

    def _rate(self, now_s: float) -> float:
        """Requests asked for per second of late, refused ones among them."""
        elapsed_s = max(0.0, now_s - self._asked_s)
        if elapsed_s:
            self._asked *= math.exp(-elapsed_s / _ASKED_S)
            self._asked_s = now_s
        return self._asked if self._asked > 1e-3 else 0.0

    def _most_open(self) -> int | None:
        """One more than the lease while the key has less under way, and asks for less, than it may."""
        if self.key.concurrency is None:
            return None
        if not self._seen:
            return self.key.concurrency
        asking = self.open + len(self._refused) + sum(use.open + use.refused for use in self._seen.values())
        return max(self._lease.most or 0, 1 if asking < self.key.concurrency else 0)


def duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1s, 6m0s. Rounded up, so that the wait is long enough."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, seconds = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _bucket(bucket: Bucket | None, per_minute: float | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now_s)
    bucket.set(per_minute, now_s)
    return bucket
