"""What one key may use: requests and tokens a minute, and requests at once. Pure: time is given.

A limit per minute is a bucket of that size which refills all the time: a minute's worth may come at once, and nothing
resets on the stroke of the minute. Each of N routers gives its bucket 1/N of size and rate. Together they keep the limit, as
far as the balancer in front spreads a key's requests.
"""

import math
from dataclasses import dataclass, field

from serving.errors import RateLimitError, Refusal
from serving.router.http.auth import Key

_MINUTE_S = 60.0


class Bucket:
    """An amount per minute. Use that is only known afterwards may overdraw the bucket: it then fills from below zero."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self._limit = self._size = self._level = per_minute
        self._per_s = per_minute / _MINUTE_S
        self._at_s = now_s

    def set(self, per_minute: float, share: float, now_s: float) -> None:
        """Change limit or share; what was used stays used."""
        self._fill(now_s)
        used = self._size - self._level
        self._limit = per_minute
        self._size = max(1.0, per_minute * share)
        self._per_s = per_minute * share / _MINUTE_S
        self._level = min(self._size, self._size - used)

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount; a negative one gives back."""
        self._fill(now_s)
        self._level = min(self._size, self._level - amount)

    def wait_s(self, amount: float, now_s: float) -> float:
        """The time until the amount is there. A full bucket lets through more than it holds."""
        self._fill(now_s)
        return max(0.0, (min(amount, self._size) - self._level) / self._per_s)

    def headers(self, what: str, now_s: float) -> list[tuple[bytes, bytes]]:
        """OpenAI's three. The rest in this bucket stands for the whole service: the other routers see as much."""
        self._fill(now_s)
        left = max(0, math.floor(self._limit * self._level / self._size))
        full_s = (self._size - self._level) / self._per_s
        return [
            (f"x-ratelimit-limit-{what}".encode(), b"%d" % self._limit),
            (f"x-ratelimit-remaining-{what}".encode(), b"%d" % left),
            (f"x-ratelimit-reset-{what}".encode(), duration(full_s).encode()),
        ]

    def _fill(self, now_s: float) -> None:
        self._level = min(self._size, self._level + max(0.0, now_s - self._at_s) * self._per_s)
        self._at_s = max(self._at_s, now_s)


@dataclass
class Account:
    """One key's use, in one router."""

    key: Key
    share: float = 1.0
    open: int = 0
    _requests: Bucket | None = field(default=None, repr=False)
    _tokens: Bucket | None = field(default=None, repr=False)
    _took_s: float = 0.0

    def set(self, key: Key, share: float, now_s: float) -> None:
        """Take over the key as the file has it now, and this router's share of its limits."""
        self.key, self.share = key, share
        self._requests = _bucket(self._requests, key.requests_per_minute, share, now_s)
        self._tokens = _bucket(self._tokens, key.tokens_per_minute, share, now_s)

    @property
    def limited(self) -> bool:
        return bool(self._requests or self._tokens)

    def refusal(self, tokens: float, now_s: float) -> Refusal | None:
        """Why a request of so many tokens may not come now."""
        key = self.key
        most = self._most_open()
        if most is not None and self.open >= most:
            return Refusal(
                RateLimitError(
                    f"Key {key.name!r} has {self.open} requests under way, and may have {most} at once here "
                    f"({key.concurrency} in all); wait for one to end."
                ),
                max(1.0, self._took_s / most),  # the average time until one of them ends
            )
        if self._tokens and key.tokens_per_minute and tokens > key.tokens_per_minute:
            return Refusal(
                RateLimitError(
                    f"The request asks for {tokens:.0f} tokens, prompt and max_tokens together; key {key.name!r} has "
                    f"{key.tokens_per_minute:g} a minute. Ask for less."
                ),
                None,
            )
        for bucket, amount, limit, what in (
            (self._requests, 1.0, key.requests_per_minute, "requests"),
            (self._tokens, tokens, key.tokens_per_minute, "tokens"),
        ):
            if bucket and limit and (wait_s := bucket.wait_s(amount, now_s)) > 0:
                return Refusal(
                    RateLimitError(
                        f"Key {key.name!r} has used its {limit:g} {what} a minute; there is room again in {duration(wait_s)}."
                    ),
                    wait_s,
                )
        return None

    def begin(self, tokens: float, now_s: float) -> None:
        self.open += 1
        if self._requests:
            self._requests.take(1.0, now_s)
        if self._tokens:
            self._tokens.take(tokens, now_s)

    def end(self, reserved: float, used: float, took_s: float, now_s: float) -> None:
        """Correct the tokens that a request was thought to use by those that it used."""
        self.open -= 1
        self._took_s = took_s if not self._took_s else 0.9 * self._took_s + 0.1 * took_s
        if self._tokens:
            self._tokens.take(used - reserved, now_s)

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        headers = []
        if self._requests:
            headers += self._requests.headers("requests", now_s)
        if self._tokens:
            headers += self._tokens.headers("tokens", now_s)
        return headers

    def _most_open(self) -> int | None:
        return None if self.key.concurrency is None else math.ceil(self.key.concurrency * self.share)


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


def _bucket(bucket: Bucket | None, per_minute: float | None, share: float, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        bucket = Bucket(per_minute, now_s)
    bucket.set(per_minute, share, now_s)
    return bucket
