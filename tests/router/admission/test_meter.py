"""What a router adds up, and what of it it tells the store: each use once, whatever becomes of answers."""

from typing import Any

import pytest

from serving.router.admission.meter import Meter, Rate, Tokens
from serving.router.http.auth import Key

pytestmark = pytest.mark.unit
NOON_S = 1_795_348_800.0
DAY = "2026-11-22"
MIDNIGHT_S = NOON_S + 43_200
RATES = {("llama", "spot"): Rate(8, 18.0), ("llama", "reserved"): Rate(4, 36.0)}
KEY = Key(name="a", sha256="a" * 64, tokens_per_day=1000)


def meter() -> Meter:
    return Meter("router", RATES)


def answer(*keys: str, tokens: int = 0) -> dict[str, Any]:
    total = {"tokens_today": tokens, "dollars_this_month": 0.0, "others": 0, "others_under_way": 0.0}
    return {"totals": dict.fromkeys(keys, total)}


def add(to: Meter, key: str = "k", now_s: float = NOON_S, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "handed": [("spot", 10.0)],
        "seats": 1,
        "tokens": Tokens(30, 16, 12),
        "ended_s": 20.0,
    }
    to.add(key, "llama", **(fields | changes), now_s=now_s)


def rows(told: dict[str, Any] | None) -> list[list[Any]]:
    assert told
    return [list(row) for row in told["rows"]]


def test_requests_of_a_row_are_added_up() -> None:
    counting = meter()
    add(counting)
    add(counting, tokens=Tokens(1, 0, 2))
    add(counting, key="other")
    slice_s, dollars = 2 * 10 / 8, 2 * 10 / 8 * 18 / 3600
    assert rows(counting.flush(NOON_S)) == [
        ["k", DAY, "llama", "spot", 2, 31, 16, 14, slice_s, pytest.approx(dollars)],
        ["other", DAY, "llama", "spot", 1, 30, 16, 12, slice_s / 2, pytest.approx(dollars / 2)],
    ]


def test_a_share_is_that_of_the_sequences_and_at_most_the_whole_slice() -> None:
    counting = meter()
    add(counting, seats=2)
    add(counting, key="large", seats=100)
    add(counting, key="none", seats=0)
    assert [row[8] for row in rows(counting.flush(NOON_S))] == [2.5, 10.0, 0.0]


def test_each_slice_that_had_a_request_is_paid_for_its_time_and_the_last_has_the_tokens() -> None:
    counting = meter()
    add(counting, handed=[("spot", 0.0), ("reserved", 8.0), ("spot", 12.0)])
    found = {row[3]: row[4:] for row in rows(counting.flush(NOON_S))}
    assert found["spot"] == [1, 30, 16, 12, 2.0, pytest.approx(2.0 * 18 / 3600)]
    assert found["reserved"] == [0, 0, 0, 0, 1.0, pytest.approx(36 / 3600)]


def test_a_pause_costs_nothing_and_what_it_parts_is_one_request() -> None:
    counting = meter()
    add(counting, handed=[("spot", 0.0), (None, 4.0), ("spot", 12.0)])
    add(counting, key="paused to its end", handed=[("spot", 0.0), (None, 4.0)])
    found = {row[0]: row[4:9] for row in rows(counting.flush(NOON_S))}
    assert found == {"k": [1, 30, 16, 12, 1.5], "paused to its end": [1, 30, 16, 12, 0.5]}


def test_a_pool_without_a_price_has_its_tokens() -> None:
    counting = meter()
    add(counting, handed=[("unknown", 10.0)])
    assert rows(counting.flush(NOON_S)) == [["k", DAY, "llama", "unknown", 1, 30, 16, 12, 0, 0]]


def test_a_request_counts_for_the_day_on_which_it_ends() -> None:
    counting = meter()
    add(counting, now_s=MIDNIGHT_S - 0.1)
    add(counting, now_s=MIDNIGHT_S)
    assert [row[1] for row in rows(counting.flush(MIDNIGHT_S))] == [DAY, "2026-11-23"]


def test_a_flush_is_the_same_until_it_is_answered_and_what_comes_meanwhile_is_in_the_next() -> None:
    counting = meter()
    add(counting)
    told = counting.flush(NOON_S)
    add(counting)
    assert counting.flush(NOON_S + 60) is told
    counting.answered(answer(), NOON_S)
    later = counting.flush(NOON_S)
    assert told
    assert later
    assert (told["sequence"], later["sequence"]) == (1, 2)
    assert rows(told) == rows(later)


def test_without_news_the_store_is_told_now_and_then_under_the_number_before() -> None:
    counting = meter()
    add(counting)
    counting.flush(NOON_S)
    counting.answered(answer(), NOON_S)
    assert counting.flush(NOON_S + 1) is None
    told = counting.flush(NOON_S + 3)
    assert told
    assert (told["sequence"], told["rows"], told["asked"]) == (1, [], [])


def test_keys_with_a_budget_are_asked_about_at_first_and_while_they_are_used() -> None:
    counting = meter()
    budget = counting.budget(KEY)
    assert budget
    told = counting.flush(NOON_S)
    assert told
    assert told["asked"] == [KEY.id]
    counting.answered(answer(KEY.id, tokens=990), NOON_S)
    assert counting.flush(NOON_S + 1) is None
    assert budget.refusal(NOON_S) is None
    told = counting.flush(NOON_S + 2)
    assert told
    assert told["asked"] == [KEY.id]
    counting.answered(answer(KEY.id, tokens=1000), NOON_S)
    assert budget.refusal(NOON_S)
    assert counting.budget(Key(name="b", sha256="b" * 64)) is None
    quiet = counting.flush(NOON_S + 40)
    assert quiet
    assert quiet["asked"] == [KEY.id]


def test_what_is_on_its_way_to_the_store_counts_once_before_and_after_the_answer() -> None:
    counting = meter()
    budget = counting.budget(KEY)
    assert budget
    used = []
    add(counting, KEY.id, tokens=Tokens(100, 0, 0))
    used.append(budget.state(NOON_S)["tokens_per_day"]["used"])
    counting.flush(NOON_S)
    add(counting, KEY.id, tokens=Tokens(10, 0, 0))
    used.append(budget.state(NOON_S)["tokens_per_day"]["used"])
    counting.answered(answer(KEY.id, tokens=100), NOON_S)
    used.append(budget.state(NOON_S)["tokens_per_day"]["used"])
    assert used == [100, 110, 110]


def test_tokens_under_way_are_told() -> None:
    counting = meter()
    budget = counting.budget(KEY)
    assert budget
    budget.begin(300, 0.25)
    told = counting.flush(NOON_S)
    assert told
    assert told["under_way"] == {KEY.id: 300, "$": {KEY.id: 0.25}}
    counting.answered(answer(KEY.id), NOON_S)
    told = counting.flush(NOON_S + 30)
    assert told
    assert told["under_way"] == {KEY.id: 300, "$": {KEY.id: 0.25}}  # a long one
    budget.end(300, 0.25)
    counting.answered(answer(KEY.id), NOON_S)
    told = counting.flush(NOON_S + 60)
    assert told
    assert told["under_way"] == {}


def test_what_a_request_may_cost_is_its_share_of_the_dearest_pool_that_it_may_get() -> None:
    counting = meter()
    assert counting.dollars("llama", 1, 60.0) == pytest.approx(60 / 4 * 36 / 3600)
    assert counting.dollars("llama", 16, 60.0) == pytest.approx(60 * 36 / 3600)
    assert counting.dollars("qwen", 1, 60.0) == 0.0


def test_a_key_that_loses_its_budget_and_gets_it_back_is_asked_about_anew() -> None:
    counting = meter()
    counting.budget(KEY)
    counting.flush(NOON_S)
    counting.answered(answer(KEY.id), NOON_S)
    counting.budget(KEY.model_copy(update={"tokens_per_day": None}))
    counting.budget(KEY)
    told = counting.flush(NOON_S)
    assert told
    assert told["asked"] == [KEY.id]
