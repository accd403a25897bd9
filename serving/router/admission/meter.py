"""What keys have used in one router, until the store has it. Pure: time is given, in seconds since 1970.

A request that has ended adds to one row of a dictionary. A flush takes all rows under the next number, and is the same until the
store has answered it: told twice, it counts once.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from serving.router.admission.budget import Budget, Calendar
from serving.router.http.auth import Key

# A router without news tells so, or the store would take it for gone; and asks for budgets of which it has no request.
_HEARD_S = 3.0
_ASKED_AGAIN_S = 30.0
_MOST_ASKED_AGAIN = 1000  # in one flush
DOLLARS = "$"


class Rate(NamedTuple):
    """A slice of a pool: how many sequences it runs at once, and what an hour of it costs."""

    sequences: int
    dollars_per_hour: float


class Tokens(NamedTuple):
    """Of one request; `cached` of its prompt's were found in a cache."""

    prompt: int
    cached: int
    written: int


class Meter:
    """`name` is of this router's process alone; `rates` by model and pool."""

    def __init__(self, name: str, rates: Mapping[tuple[str, str], Rate]) -> None:
        self._name = name
        self._rates = rates
        self._calendar = Calendar()
        self._rows: dict[tuple[str, str, str, str], list[float]] = {}
        self._telling: dict[str, Any] | None = None
        self._sequence = 0
        self._told_s = -math.inf
        self._budgets: dict[str, Budget] = {}
        self._asked_s: dict[str, float] = {}
        self._routers = 1

    @property
    def has_budgets(self) -> bool:
        return bool(self._budgets)

    def budget(self, key: Key) -> Budget | None:
        """A key's budgets, as the key has them now."""
        if not key.has_budget:
            self.forget(key.id)
            return None
        if budget := self._budgets.get(key.id):
            budget.set(key)
            return budget
        budget = self._budgets[key.id] = Budget(key)
        budget.all_routers = self._routers
        return budget

    def share(self, routers: int) -> None:
        """Note how many routers there are."""
        if routers != self._routers:
            self._routers = routers
            for budget in self._budgets.values():
                budget.all_routers = routers

    def forget(self, key: str) -> None:
        """Of a key with budgets; the store tells it again."""
        self._budgets.pop(key, None)
        self._asked_s.pop(key, None)

    def add(
        self,
        key: str,
        model: str,
        handed: Sequence[tuple[str | None, float]],
        seats: int,
        tokens: Tokens,
        ended_s: float,
        now_s: float,
    ) -> None:
        """A request of this key is over. `handed`: the pools of the slices that it was handed to, and when, with None for a
        pool from where it was paused; `ended_s`: of that clock.

        Its share of a slice is that of its sequences in those that the slice runs at once.
        """
        day, dollars = self._calendar.day(now_s), 0.0
        for pool, at_s in reversed(handed):
            row = self._row((key, day, model, pool)) if pool is not None else None
            if row and pool is not None and (rate := self._rates.get((model, pool))):
                slice_s = (ended_s - at_s) * min(seats, rate.sequences) / rate.sequences
                cost = slice_s * rate.dollars_per_hour / 3600
                row[4] += slice_s
                row[5] += cost
                dollars += cost
            ended_s = at_s
        row = self._row((key, day, model, next(pool for pool, _ in reversed(handed) if pool is not None)))
        row[0] += 1
        row[1] += tokens.prompt
        row[2] += tokens.cached
        row[3] += tokens.written
        if budget := self._budgets.get(key):
            budget.use(tokens.prompt + tokens.written, dollars, now_s)

    def dollars(self, model: str, seats: int, seconds: float) -> float:
        """What a request may cost that takes so long, on the model's dearest pool."""
        return max(
            (
                seconds * min(seats, rate.sequences) / rate.sequences * rate.dollars_per_hour / 3600
                for (of, _), rate in self._rates.items()
                if of == model
            ),
            default=0.0,
        )

    def flush(self, now_s: float) -> dict[str, Any] | None:
        """What to tell the store, the same until it has answered; None where there is no news."""
        if self._telling is None:
            asked = self._to_ask(now_s)
            if not self._rows and not asked and now_s - self._told_s < _HEARD_S:
                return None
            self._sequence += bool(self._rows)
            self._telling = {
                "router": self._name,
                "sequence": self._sequence,
                "day": self._calendar.day(now_s),
                "rows": [[*names, *amounts] for names, amounts in self._rows.items()],
                "under_way": self._under_way(),
                "asked": asked,
            }
            self._rows = {}
            for budget in self._budgets.values():
                budget.tell()
        return self._telling

    def answered(self, answer: Mapping[str, Any], now_s: float) -> None:
        """The store has what it was told last."""
        assert self._telling is not None  # noqa: S101  it answers what it is told
        day, self._telling, self._told_s = self._telling["day"], None, now_s
        for key, total in answer["totals"].items():
            if budget := self._budgets.get(key):
                self._asked_s[key] = now_s
                budget.told(
                    day,
                    total["tokens_today"],
                    total["dollars_this_month"],
                    total["others"],
                    (total["others_under_way"], total.get("others_dollars_under_way", 0.0)),
                    now_s,
                )

    def _under_way(self) -> dict[str, Any]:
        """Tokens by key and, under a name that is no key's, dollars: a store of an older version takes that too."""
        under_way = {
            key: budget.under_way
            for key, budget in self._budgets.items()
            if budget.active or any(budget.under_way)
        }
        dollars = {key: dollars for key, (_, dollars) in under_way.items() if dollars}
        return {key: tokens for key, (tokens, _) in under_way.items()} | (
            {DOLLARS: dollars} if dollars else {}
        )

    def _row(self, names: tuple[str, str, str, str]) -> list[float]:
        if (row := self._rows.get(names)) is None:
            row = self._rows[names] = [0, 0, 0, 0, 0.0, 0.0]
        return row

    def _to_ask(self, now_s: float) -> list[str]:
        """Keys with a budget that were asked for here since the last flush, and those not heard of for long."""
        active = {key for key, budget in self._budgets.items() if budget.active}
        old = [
            key
            for key in self._budgets.keys() - active
            if now_s - self._asked_s.get(key, -math.inf) >= _ASKED_AGAIN_S
        ]
        return [*active, *old[:_MOST_ASKED_AGAIN]]
