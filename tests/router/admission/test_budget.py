"""Budgets of a day and a month in routers that hear the store's sums late."""

import heapq
import random
from collections.abc import Callable
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import BudgetError, RateLimitError
from serving.router.admission.budget import Budget, Calendar
from serving.router.http.auth import Key

pytestmark = pytest.mark.unit
# 2026-11-22T12:00:00Z, a Sunday
NOON_S = 1_795_348_800.0
DAY_S = 86_400.0
DAY = "2026-11-22"


def key(**limits: float) -> Key:
    return Key.model_validate({"name": "batch", "sha256": "a" * 64, **limits})


def test_days_are_those_of_utc() -> None:
    calendar = Calendar()
    midnight_s = NOON_S + DAY_S / 2
    days = [calendar.day(at_s) for at_s in (NOON_S, midnight_s - 1, midnight_s, NOON_S - DAY_S)]
    assert days == [DAY, DAY, "2026-11-23", "2026-11-21"]


def test_a_budget_that_is_used_up_says_what_was_used_and_when_it_is_new() -> None:
    budget = Budget(key(tokens_per_day=100))
    budget.use(99, 0.0, NOON_S)
    assert budget.refusal(NOON_S) is None
    budget.use(3, 0.0, NOON_S)
    refusal = budget.refusal(NOON_S)
    assert refusal
    assert isinstance(refusal.error, BudgetError)
    assert refusal.error.message == (
        "Key 'batch' has used 102 of its 100 tokens a day (tokens_per_day); the budget is new at 2026-11-23T00:00:00Z."
    )
    assert refusal.retry_after_s == DAY_S / 2
    assert budget.refusal(NOON_S + DAY_S / 2 - 1)
    assert budget.refusal(NOON_S + DAY_S / 2) is None


def test_dollars_under_way_here_and_elsewhere_may_use_the_rest_of_a_month() -> None:
    budget = Budget(key(dollars_per_month=1.0))
    budget.begin(0.0, 0.6)
    assert budget.refusal(NOON_S) is None
    budget.begin(0.0, 0.4)
    refusal = budget.refusal(NOON_S)
    assert refusal
    assert type(refusal.error) is RateLimitError
    budget.end(0.0, 0.6)
    budget.end(0.0, 0.4)
    assert budget.under_way == (0.0, 0.0)
    budget.told(DAY, 0, 0.2, 1, (0.0, 0.8), NOON_S)
    assert budget.refusal(NOON_S)
    budget.told(DAY, 0, 0.2, 1, (0.0, 0.5), NOON_S)
    assert budget.refusal(NOON_S) is None


@pytest.mark.parametrize(
    ("day", "end"), [("2026-11-22", "2026-12-01"), ("2026-12-31", "2027-01-01"), ("2028-02-29", "2028-03-01")]
)
def test_dollars_are_new_with_the_month(day: str, end: str) -> None:
    now_s, end_s = (datetime.fromisoformat(f"{at}T00:00:00+00:00").timestamp() for at in (day, end))
    budget = Budget(key(dollars_per_month=2.5))
    budget.use(10**9, 2.5, now_s)
    refusal = budget.refusal(now_s + 60)
    assert refusal
    assert "$2.5000 of its $2.50 a month" in refusal.error.message
    assert f"{end}T00:00:00Z" in refusal.error.message
    assert refusal.retry_after_s == end_s - now_s - 60
    assert budget.refusal(end_s) is None


def test_what_is_under_way_may_use_the_rest_and_to_wait_for_it_takes_a_second() -> None:
    budget = Budget(key(tokens_per_day=100))
    budget.use(50, 0.0, NOON_S)
    budget.begin(50, 0.0)
    refusal = budget.refusal(NOON_S)
    assert refusal
    assert type(refusal.error) is RateLimitError
    assert refusal.retry_after_s == 1
    budget.end(50, 0.0)
    budget.use(10, 0.0, NOON_S)
    assert budget.refusal(NOON_S) is None


def test_what_was_told_before_midnight_and_answered_after_it_is_of_no_new_day() -> None:
    budget = Budget(key(tokens_per_day=100, dollars_per_month=1))
    budget.use(100, 0.5, NOON_S)
    budget.tell()
    assert budget.refusal(NOON_S + DAY_S) is None
    budget.told(DAY, 100, 0.5, 0, (0.0, 0.0), NOON_S)
    assert budget.state(NOON_S + DAY_S) == {
        "tokens_per_day": {"budget": 100, "used": 0, "resets_at": "2026-11-24T00:00:00Z"},
        "dollars_per_month": {"budget": 1, "used": 0.5, "resets_at": "2026-12-01T00:00:00Z"},
    }


def test_a_router_that_starts_goes_by_what_the_store_has() -> None:
    budget = Budget(key(tokens_per_day=100, dollars_per_month=1))
    budget.told(DAY, 100, 0.0, 0, (0.0, 0.0), NOON_S)
    assert budget.refusal(NOON_S)
    budget = Budget(key(tokens_per_day=100, dollars_per_month=1))
    budget.told("2026-11-21", 100, 0.0, 0, (0.0, 0.0), NOON_S)
    assert budget.refusal(NOON_S) is None
    budget.told("2026-11-21", 100, 1.0, 0, (0.0, 0.0), NOON_S)
    assert budget.refusal(NOON_S)


def test_a_budget_that_is_raised_is_open_at_once_and_what_was_used_stays() -> None:
    budget = Budget(key(tokens_per_day=100))
    budget.use(150, 0.0, NOON_S)
    assert budget.refusal(NOON_S)
    budget.set(key(tokens_per_day=200))
    assert budget.refusal(NOON_S) is None
    assert budget.state(NOON_S)["tokens_per_day"]["used"] == 150


class Store:
    """Adds up what budgets tell, and answers when it is told to."""

    def __init__(self, routers: int, most: float) -> None:
        self.budgets = [Budget(key(tokens_per_day=most)) for _ in range(routers)]
        self.untold = [0.0] * routers
        self.sum = 0.0

    def ask(self, at: int, tokens: float) -> bool:
        if self.budgets[at].refusal(NOON_S):
            return False
        self.budgets[at].use(tokens, 0.0, NOON_S)
        self.untold[at] += tokens
        return True

    def flush(self, at: int) -> Callable[[], None]:
        """Told at once; the answer comes when what is returned is called."""
        self.budgets[at].tell()
        self.sum, self.untold[at] = self.sum + self.untold[at], 0.0
        told = self.sum
        return lambda: self.budgets[at].told(DAY, told, 0.0, len(self.budgets) - 1, (0.0, 0.0), NOON_S)

    @property
    def used(self) -> float:
        return self.sum + sum(self.untold)


@given(
    routers=st.integers(1, 5),
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "ask", "ask", "flush"]), st.integers(0, 4)), max_size=300
    ),
)
def test_routers_that_flush_in_turn_stay_within_the_budget_but_for_one_request_each(
    routers: int, steps: list[tuple[str, int]]
) -> None:
    store = Store(routers, 1000)
    for at in range(routers):
        store.flush(at)()
    for what, at in steps:
        if what == "ask":
            store.ask(at % routers, 10)
        else:
            for router in [*range(routers)] * 2:  # all have told before the last of them is answered
                store.flush(router)()
    assert store.used <= 1000 + 10 * routers


def test_without_an_answer_each_router_uses_its_part() -> None:
    store = Store(4, 1000)
    for at in range(4):
        store.flush(at)()
    for _ in range(100):
        for at in range(4):
            store.ask(at, 10)
    assert store.used == 1000


def test_a_budget_is_used_up_to_its_end_whoever_is_asked() -> None:
    store = Store(4, 1000)
    for at in range(4):
        store.flush(at)()
    for _ in range(100):
        while store.ask(2, 10):
            pass
        for at in range(4):
            store.flush(at)()
    assert 1000 <= store.used <= 1010


class Service:
    """Routers with requests that take their time, a store, and answers that take theirs; in faked time."""

    def __init__(self, routers: int, most: float, seed: int) -> None:
        self.random = random.Random(seed)
        self.budgets = [Budget(key(tokens_per_day=most)) for _ in range(routers)]
        self.untold = [0.0] * routers
        self.under_way = [0.0] * routers
        self.sum = self.used = 0.0
        self.now_s = NOON_S
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for at in range(routers):
            self.later(self.random.random(), lambda at=at: self.flush(at))

    def later(self, after_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + after_s, len(self._events) + id(do) % 997, do))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, do = heapq.heappop(self._events)
            do()
        self.now_s = until_s

    def flush(self, at: int) -> None:
        budget = self.budgets[at]
        budget.tell()
        self.sum, self.untold[at] = self.sum + self.untold[at], 0.0
        self.under_way[at] = budget.under_way[0]
        told, others = self.sum, [*self.under_way[:at], *self.under_way[at + 1 :]]
        others = [tokens for tokens in others if tokens]

        def answer() -> None:
            budget.told(DAY, told, 0.0, len(others), (sum(others), 0.0), self.now_s)
            self.later(1.0, lambda: self.flush(at))

        self.later(self.random.uniform(0.01, 0.3), answer)

    def ask(self, at: int) -> bool:
        """A request of 500 tokens about, estimated at 500, that takes some seconds."""
        budget = self.budgets[at]
        if budget.refusal(self.now_s):
            return False
        tokens = self.random.uniform(200, 800)
        budget.begin(500, 0.0)

        def end() -> None:
            budget.end(500, 0.0)
            budget.use(tokens, 0.0, self.now_s)
            self.untold[at] += tokens
            self.used += tokens

        self.later(self.random.uniform(1, 10), end)
        return True


@pytest.mark.parametrize("routers", [1, 2, 8, 20])
@pytest.mark.parametrize("lasts_s", [100, 600])
def test_routers_together_are_within_one_percent_of_a_budget(routers: int, lasts_s: float) -> None:
    """Ten requests a second, unevenly spread; each hears of the others a second later."""
    most = lasts_s * 10 * 500
    service = Service(routers, most, seed=routers)
    weights = [0.5**at for at in range(routers)]
    for step in range(int(lasts_s * 10 * 1.3)):
        service.run(NOON_S + step / 10)
        service.ask(service.random.choices(range(routers), weights)[0])
    service.run(NOON_S + lasts_s * 1.3 + 20)
    assert 0.99 * most <= service.used <= 1.01 * most


def test_routers_that_a_key_begins_to_ask_at_once_let_in_one_budget_together() -> None:
    store = Store(5, 1000)
    for at, budget in enumerate(store.budgets):
        budget.all_routers = 5
        while store.ask(at, 10):
            pass
    assert store.used == 1000


def test_a_router_that_a_key_asks_alone_gives_it_all_once_all_others_could_tell() -> None:
    budget = Budget(key(tokens_per_day=1000))
    budget.all_routers = 4
    used = 0.0

    def use(now_s: float) -> float:
        nonlocal used
        before = used
        while not budget.refusal(now_s):
            budget.use(10, 0.0, now_s)
            used += 10
        budget.tell()
        budget.told(DAY, used, 0.0, 0, (0.0, 0.0), now_s)
        return used - before

    assert [use(NOON_S + at) for at in range(3)] == [250, 190, 560]
    budget.set(key(tokens_per_day=5000))
    budget.told(DAY, used, 0.0, 0, (0.0, 0.0), NOON_S + 3)  # of a flush from before
    assert use(NOON_S + 30) == 1000  # it asks anew


def test_an_answer_to_what_was_told_before_a_key_asked_says_nothing_of_who_else_is_asked() -> None:
    budget = Budget(key(tokens_per_day=1000))
    budget.all_routers = 10
    for _ in range(5):
        budget.tell()
        budget.told(DAY, 0, 0.0, 0, (0.0, 0.0), NOON_S)
    budget.use(100, 0.0, NOON_S)
    assert budget.refusal(NOON_S)
