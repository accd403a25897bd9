"""A router that does not know what a key has used asks the store before it lets the key in."""

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from support.servers import PATIENCE_S, asgi_server
from support.simulated_engine import small_plan

from serving.errors import BudgetError, StoreAwayError
from serving.router.admission.budget import Budget
from serving.router.admission.meter import Meter
from serving.router.core import RouterCore, Served
from serving.router.http.auth import Key, KeyFile
from serving.router.usage_loop import UsageLoop

pytestmark = pytest.mark.unit
NOON_S = 1_795_348_800.0
DAY = "2026-11-22"
KEY = Key(name="team", sha256="a" * 64, tokens_per_day=100)


class Store:
    """Knows of 100 tokens of every key that is asked for."""

    def __init__(self) -> None:
        self.away = False
        self.calls = 0

    async def call(self, path: str, fields: Any) -> dict[str, Any]:
        assert path == "/usage/flush"
        self.calls += 1
        await asyncio.sleep(0)
        if self.away:
            raise StoreAwayError("away")
        total = {"tokens_today": 100, "dollars_this_month": 0.0, "others": 0, "others_under_way": 0.0}
        return {"totals": dict.fromkeys(fields["asked"], total)}


def loop_of(store: Any) -> tuple[UsageLoop, Meter]:
    meter = Meter("r", {})
    return UsageLoop(meter, store, KeyFile(None), lambda: NOON_S), meter


def budget_of(meter: Meter, key: Key = KEY) -> Budget:
    budget = meter.budget(key)
    assert budget
    return budget


async def test_a_router_whose_host_s_clock_is_days_off_asks_for_the_day_that_its_budgets_count() -> None:
    """What the store said was of another day: the key used its whole budget on every router, each day."""
    asked: list[str] = []

    async def answer(request: Request) -> JSONResponse:
        flush = await request.json()
        asked.append(flush["day"])
        used = 100 if flush["day"] == DAY else 0
        total = {"tokens_today": used, "dollars_this_month": 0.0, "others": 0, "others_under_way": 0.0}
        return JSONResponse({"totals": dict.fromkeys(flush["asked"], total)})

    app = Starlette(routes=[Route("/usage/flush", answer, methods=["POST"])])
    with asgi_server(app) as address:

        async def find() -> tuple[str, str]:
            return address, "token"

        core = RouterCore(Served([small_plan()]), KeyFile(None), dict, store=find)  # type: ignore[arg-type]
        core.keep_time(lambda: NOON_S)
        assert core.usage
        budget = budget_of(core.usage._meter)
        assert budget.refusal(core.admission.calendar()) is None
        await core.usage.flush()
        assert budget.refusal(core.admission.calendar())
        assert asked == [DAY]
        await core.close()


async def test_requests_of_a_key_that_nobody_knows_of_wait_for_one_word_of_the_store() -> None:
    store = Store()
    loop, meter = loop_of(store)
    await loop.start(flush_s=1000)
    budget = budget_of(meter)
    assert budget.refusal(NOON_S) is None
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(loop.hear(budget) for _ in range(10)))
    refusal = budget.refusal(NOON_S)
    assert refusal
    assert isinstance(refusal.error, BudgetError)
    assert store.calls == 1
    await loop.hear(budget)
    assert store.calls == 1
    await loop.close()


async def test_a_key_that_comes_while_another_s_use_is_told_is_asked_for_next() -> None:
    store = Store()
    loop, meter = loop_of(store)
    await loop.start(flush_s=1000)
    first, second = budget_of(meter), budget_of(meter, KEY.model_copy(update={"sha256": "b" * 64}))
    async with asyncio.timeout(PATIENCE_S):
        hearing = asyncio.create_task(loop.hear(first))
        while not store.calls:  # noqa: ASYNC110  the store sets no event
            await asyncio.sleep(0)
        second.active = False
        await loop.hear(second)
        await hearing
    assert first.known
    assert second.known
    await loop.close()


async def test_while_the_store_is_away_no_request_waits_for_it_twice() -> None:
    store = Store()
    loop, meter = loop_of(store)
    store.away = True
    await loop.start(flush_s=1000)
    budget = budget_of(meter)
    async with asyncio.timeout(PATIENCE_S):
        await loop.hear(budget)
        calls = store.calls
        await loop.hear(budget)
    assert not budget.known
    assert store.calls == calls == 1
    await loop.close()
