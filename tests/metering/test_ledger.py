"""The tables of usage: what flushes add, once, in SQLite and in a real PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from sqlalchemy import delete
from support.postgres import postgres

from serving.database.database import Database
from serving.database.tables import USAGE, USAGE_ROUTERS
from serving.metering.ledger import AMOUNTS, Flush, Ledger, Total

DAY = "2026-11-22"
NOW_S = 1_795_348_800.0


@pytest.fixture(
    params=[
        pytest.param("sqlite", marks=pytest.mark.unit),
        pytest.param("postgresql", marks=(pytest.mark.http, pytest.mark.slow)),
    ],
    scope="module",
)
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path_factory.mktemp("database") / "store.sqlite")
    else:
        with postgres() as url:
            yield url


@pytest.fixture
async def heads(where: str) -> AsyncIterator[list[Ledger]]:
    """Two processes that own the database."""
    databases = [await Database.open(where) for _ in range(2)]
    async with databases[0].write() as connection:
        for table in (USAGE, USAGE_ROUTERS):
            await connection.execute(delete(table))
    yield [Ledger(database) for database in databases]
    await asyncio.gather(*(database.close() for database in databases))


def row(key: str = "a", day: str = DAY, model: str = "llama", tokens: int = 10) -> list[Any]:
    return [key, day, model, "spot", 1, tokens, 1, tokens, 0.5, 0.25]


def flush(sequence: int, *rows: list[Any], router: str = "r", **fields: Any) -> Flush:
    return Flush(router, sequence, DAY, rows, **fields)


async def tokens_of(ledger: Ledger, key: str = "a") -> int:
    return sum(found.prompt_tokens + found.output_tokens for found in await ledger.of_key(key, DAY, DAY))


async def test_flushes_add_up_by_key_day_model_and_pool(heads: list[Ledger]) -> None:
    first, second = heads
    await first.flush(flush(1, row(), row(key="b"), row(model="qwen")), NOW_S)
    await second.flush(flush(2, row(), row(day="2026-11-21")), NOW_S)
    found = await first.of_key("a", "2026-11-01", DAY)
    assert [(one.day, one.model, one.requests) for one in found] == [
        ("2026-11-21", "llama", 1),
        (DAY, "llama", 2),
        (DAY, "qwen", 1),
    ]
    assert [getattr(found[1], name) for name in AMOUNTS] == [2, 20, 2, 20, 1.0, 0.5]


async def test_a_flush_that_is_told_again_adds_nothing_to_whichever_head(heads: list[Ledger]) -> None:
    told = flush(1, row())
    await asyncio.gather(*(heads[at % 2].flush(told, NOW_S) for at in range(6)))
    assert await tokens_of(heads[0]) == 20
    await heads[1].flush(flush(2, row()), NOW_S)
    await heads[0].flush(told, NOW_S)
    assert await tokens_of(heads[0]) == 40


async def test_routers_number_their_flushes_for_themselves(heads: list[Ledger]) -> None:
    work = [
        heads[number % 2].flush(flush(number, row(), row(key="b"), router=f"r{router}"), NOW_S)
        for number in (1,)
        for router in range(8)
    ]
    await asyncio.gather(*work)
    assert (await tokens_of(heads[0]), await tokens_of(heads[0], "b")) == (160, 160)


async def test_rows_in_any_order_lock_nobody_out(heads: list[Ledger]) -> None:
    rows = [row(key=f"k{at}") for at in range(30)]
    for number in range(1, 6):
        both = [
            flush(number, *rows, router="r0"),
            flush(number, *reversed(rows), router="r1"),
        ]
        await asyncio.gather(*(head.flush(one, NOW_S) for head, one in zip(heads, both, strict=True)))
    assert await tokens_of(heads[0], "k7") == 2 * 5 * 20


async def test_totals_are_of_the_routers_day_and_its_month(heads: list[Ledger]) -> None:
    ledger, _ = heads
    days = ("2026-10-31", "2026-11-01", "2026-11-21", DAY)
    await ledger.flush(flush(1, *(row(day=day) for day in days), row(day=DAY, model="qwen")), NOW_S)
    totals = await ledger.flush(flush(1, asked=["a", "b"]), NOW_S)
    assert totals == {"a": Total(40, 1.0), "b": Total()}


async def test_an_answer_has_the_flush_that_it_answers_and_what_others_have_under_way(
    heads: list[Ledger],
) -> None:
    first, second = heads
    await first.flush(flush(1, row(), router="x", under_way={"a": 7.0, "b": 1.0, "$": {"a": 0.25}}), NOW_S)
    asks = flush(1, row(), asked=["a", "b"], under_way={"a": 100.0})
    totals = await second.flush(asks, NOW_S)
    assert totals == {"a": Total(40, 0.5, 1, 7.0, 0.25), "b": Total(0, 0.0, 1, 1.0)}
    await first.flush(flush(1, router="x", under_way={"a": 0.0}), NOW_S)  # they are over
    assert await second.flush(asks, NOW_S) == {"a": Total(40, 0.5, 1, 0.0), "b": Total()}


async def test_a_router_that_is_silent_counts_no_more_and_its_number_stays(heads: list[Ledger]) -> None:
    ledger, _ = heads
    await ledger.flush(flush(3, row(), router="x", under_way={"a": 7.0}), NOW_S)
    totals = await ledger.flush(flush(1, asked=["a"]), NOW_S + 11)
    assert totals == {"a": Total(20, 0.25)}
    await ledger.sweep(NOW_S + 80 * 86400)
    await ledger.flush(flush(3, row(), router="x"), NOW_S + 80 * 86400)
    assert await tokens_of(ledger) == 20
    await ledger.sweep(NOW_S + 171 * 86400)
    await ledger.flush(flush(4, row(), router="x"), NOW_S + 171 * 86400)
    assert await tokens_of(ledger) == 40


async def test_sums_by_columns(heads: list[Ledger]) -> None:
    ledger, _ = heads
    await ledger.flush(flush(1, row(), row(model="qwen"), row(key="b"), row(day="2026-11-01")), NOW_S)
    found = await ledger.by(["key", "model"], "2026-11-02", DAY)
    assert [(one.key, one.model, int(one.requests)) for one in found] == [
        ("a", "llama", 1),
        ("a", "qwen", 1),
        ("b", "llama", 1),
    ]
    assert [int(one.requests) for one in await ledger.by([], "2026-01-01", DAY)] == [4]
