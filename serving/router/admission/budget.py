"""What one key may use in a day and in a month, in one router. Pure: time is given, in seconds since 1970.

The store adds up what all routers tell it, and answers with the sum. Between two answers a router lets a key use its even part
of what was left, among the routers that the key asks; as soon as a key asks a router anew, that are thought to be all there are, until
each of them could tell. Days and months are UTC's.
"""

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from serving.errors import BudgetError, RateLimitError, Refusal
from serving.router.http.auth import Key

# Where only this router's part is used up, or what is under way may use the rest: the time until the store has answered again.
_SOON_S = 1.0
_LATE_S = 10.0  # answers further apart say nothing of how fast the others are
_RESTED_S = 10.0  # after which a key that asks again asks anew; the store forgets as soon who asks where
_ANSWERS = 2  # to what was told since: by the second, all routers that the key asks have told too


class Calendar:
    """The day of UTC, as "2026-11-22", by a clock; a date is made once a day."""

    def __init__(self) -> None:
        self._day = ""
        self._until_s = -math.inf
        self._since_s = math.inf

    def day(self, now_s: float) -> str:
        if not self._since_s <= now_s < self._until_s:
            midnight = datetime.fromtimestamp(now_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            self._day = midnight.date().isoformat()
            self._since_s = midnight.timestamp()
            self._until_s = (midnight + timedelta(days=1)).timestamp()
        return self._day


@dataclass
class Limit:
    """One budget. `told` is the store's sum, `telling` what is on its way there, `own` what this router has used since.

    `others_under_way` is what requests in other routers may yet use, `others_per_s` how fast the others were between two answers.
    """

    name: str
    most: float
    period: str = ""
    told: float = 0.0
    told_s: float = -math.inf
    others_under_way: float = 0.0
    others_per_s: float = 0.0
    telling: float = 0.0
    own: float = 0.0

    @property
    def used(self) -> float:
        """As far as this router knows."""
        return self.told + self.telling + self.own

    def begin(self, period: str) -> None:
        """Count for this day or month; nothing was used of a new one."""
        if period != self.period:
            self.period, self.told_s = period, -math.inf
            self.told = self.others_under_way = self.others_per_s = self.telling = self.own = 0.0

    def answered(self, period: str, stored: float, others_under_way: float, now_s: float) -> None:
        if period < self.period:  # it is over
            return
        self.begin(period)
        elapsed_s = now_s - self.told_s
        others = stored - self.told - self.telling
        self.others_per_s = max(0.0, others) / elapsed_s if 0 < elapsed_s < _LATE_S else 0.0
        self.told, self.told_s = stored, now_s
        self.others_under_way, self.telling = others_under_way, 0.0

    def is_open(self, under_way: float, routers: int, now_s: float) -> bool:
        """Whether this router's part of what is left has room. The others are thought to go on as they did."""
        others = self.others_per_s * min(max(0.0, now_s - self.told_s), _LATE_S)
        left = self.most - self.told - self.others_under_way - others
        return self.telling + self.own + under_way < left / routers


class Budget:
    """A key's budgets. `under_way`: tokens and dollars that its requests here may yet use."""

    def __init__(self, key: Key) -> None:
        self._calendar = Calendar()
        self._tokens = Limit("tokens_per_day", math.inf)
        self._dollars = Limit("dollars_per_month", math.inf)
        self.under_way = (0.0, 0.0)
        self._open = 0
        self.active = False  # asked for, or used, since the last flush
        self.known = False  # the store has said what was used
        self.all_routers = 1
        self._routers = 1
        self._asked_s = -math.inf
        self._answers = 0  # of the store since the key has asked anew
        self._tells = False  # that it does
        self.set(key)

    def set(self, key: Key) -> None:
        """Take over the key's budgets; what was used stays used."""
        self._name = key.name
        self._tokens.most = math.inf if key.tokens_per_day is None else key.tokens_per_day
        self._dollars.most = math.inf if key.dollars_per_month is None else key.dollars_per_month

    def begin(self, tokens: float, dollars: float) -> None:
        """A request that may use so much is let in."""
        self.under_way = (self.under_way[0] + tokens, self.under_way[1] + dollars)
        self._open += 1

    def end(self, tokens: float, dollars: float) -> None:
        self._open -= 1
        # Sums of fractions leave a rest.
        left = self.under_way[0] - tokens, self.under_way[1] - dollars
        self.under_way = (max(0.0, left[0]), max(0.0, left[1])) if self._open > 0 else (0.0, 0.0)

    def use(self, tokens: float, dollars: float, now_s: float) -> None:
        self.active = True
        self._begin(now_s)
        self._tokens.own += tokens
        self._dollars.own += dollars

    def tell(self) -> None:
        """What was used since is on its way to the store."""
        self._tells, self.active = self.active, False
        for limit in (self._tokens, self._dollars):
            limit.telling += limit.own
            limit.own = 0.0

    def told(
        self,
        day: str,
        tokens: float,
        dollars: float,
        others: int,
        others_under_way: tuple[float, float],
        now_s: float,
    ) -> None:
        """The store's sums of a day and its month, with what was on its way in them; `others`: routers that the key asks too."""
        self.known = True
        self._routers = 1 + others
        self._answers += self._tells
        self._tokens.answered(day, tokens, others_under_way[0], now_s)
        self._dollars.answered(day[:7], dollars, others_under_way[1], now_s)

    def refusal(self, now_s: float) -> Refusal | None:
        """Why the key may not ask now."""
        self.active = True
        if not 0 <= now_s - self._asked_s < _RESTED_S:
            self._answers, self._tells = 0, False
        self._asked_s = now_s
        routers = self._routers if self._answers >= _ANSWERS else max(self._routers, self.all_routers)
        day = self._begin(now_s)
        for limit, under_way in zip((self._tokens, self._dollars), self.under_way, strict=True):
            if not limit.is_open(under_way, routers, now_s):
                return self._refusal(limit, _end(day, limit), now_s)
        return None

    def state(self, now_s: float) -> dict[str, dict[str, float | str]]:
        """Each budget there is, for the key's owner."""
        day = self._begin(now_s)
        return {
            limit.name: {
                "budget": limit.most,
                "used": limit.used,
                "resets_at": _end(day, limit).isoformat().replace("+00:00", "Z"),
            }
            for limit in (self._tokens, self._dollars)
            if limit.most < math.inf
        }

    def _begin(self, now_s: float) -> str:
        day = self._calendar.day(now_s)
        self._tokens.begin(day)
        self._dollars.begin(day[:7])
        return day

    def _refusal(self, limit: Limit, end: datetime, now_s: float) -> Refusal:
        of = (
            f"{limit.used:.0f} of its {limit.most:.0f} tokens a day"
            if limit is self._tokens
            else f"${limit.used:.4f} of its ${limit.most:.2f} a month"
        )
        reason = f"Key {self._name!r} has used {of} ({limit.name})"
        if limit.used < limit.most:
            return Refusal(
                RateLimitError(
                    f"{reason}, and its requests under way may use the rest; ask again in a second. Requests that set max_tokens "
                    "set less aside."
                ),
                _SOON_S,
            )
        return Refusal(
            BudgetError(f"{reason}; the budget is new at {end:%Y-%m-%dT%H:%M:%SZ}."),
            max(_SOON_S, end.timestamp() - now_s),
        )


def _end(day: str, limit: Limit) -> datetime:
    """When the day or the month of a limit is over."""
    begins = datetime.fromisoformat(day).replace(tzinfo=UTC)
    if limit.name == "tokens_per_day":
        return begins + timedelta(days=1)
    return (begins.replace(day=1) + timedelta(days=31)).replace(day=1)
