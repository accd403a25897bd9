"""The statements on the tables of usage.

A router numbers its flushes. The number of the last one that is in stands in the same transaction as what it added: a flush
that is told again, after a crash or a lost answer, adds nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, case, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from serving.database.database import Database
from serving.database.tables import USAGE, USAGE_ROUTERS

# The columns of one increment, in the order in which routers send them.
NAMES = ("key", "day", "model", "pool")
AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "slice_seconds", "dollars")
# A router that has been silent for so long is gone: what its requests may use counts no more.
_SILENT_S = 10.0
# Numbers of routers that are gone for so long are forgotten.
_FORGOTTEN_S = 90 * 86400.0


@dataclass(frozen=True)
class Flush:
    """What a router tells: increments under a number, and the keys with a budget that it asks about.

    `under_way` has what requests under way may yet use, by every key with a budget that asks the router: tokens, and dollars under
    `$`. `day` is the router's, and says which day and month of those keys are meant.
    """

    router: str
    sequence: int
    day: str
    rows: Sequence[Sequence[Any]] = ()
    under_way: Mapping[str, Any] | None = None
    asked: Collection[str] = ()


@dataclass(frozen=True)
class Total:
    """What a key used this day and this month in all routers.

    `others` are the other routers that it asks of late, whose requests may yet use so many tokens and dollars.
    """

    tokens_today: int = 0
    dollars_this_month: float = 0.0
    others: int = 0
    others_under_way: float = 0.0
    others_dollars_under_way: float = 0.0


class Ledger:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def flush(self, flush: Flush, now_s: float) -> dict[str, Total]:
        """Add a flush, once; the totals of the keys that it asks about."""
        async with self._database.write() as connection:
            if await self._is_new(connection, flush, now_s) and flush.rows:
                statement = self._database.insert(USAGE)
                more = {name: USAGE.c[name] + statement.excluded[name] for name in AMOUNTS}
                # In one order everywhere: two routers' rows would else lock each other out.
                rows = [
                    dict(zip((*NAMES, *AMOUNTS), row, strict=True)) for row in sorted(map(tuple, flush.rows))
                ]
                await connection.execute(
                    statement.on_conflict_do_update(index_elements=NAMES, set_=more), rows
                )
            if not flush.asked:
                return {}
            others = await self._others(connection, flush.router, now_s)
            return await self._totals(connection, flush, others)

    async def of_key(self, key: str, first_day: str, last_day: str) -> list[Row[Any]]:
        """A key's rows, by day."""
        query = select(USAGE).where(USAGE.c.key == key, USAGE.c.day >= first_day, USAGE.c.day <= last_day)
        async with self._database.read() as connection:
            return list(
                (await connection.execute(query.order_by(USAGE.c.day, USAGE.c.model, USAGE.c.pool))).all()
            )

    async def by(self, columns: Sequence[str], first_day: str, last_day: str) -> list[Row[Any]]:
        """Sums of all keys' rows by these columns."""
        groups = [USAGE.c[name] for name in columns]
        sums = [func.sum(USAGE.c[name]).label(name) for name in AMOUNTS]
        query = select(*groups, *sums).where(USAGE.c.day >= first_day, USAGE.c.day <= last_day)
        async with self._database.read() as connection:
            return list((await connection.execute(query.group_by(*groups).order_by(*groups))).all())

    async def sweep(self, now_s: float) -> None:
        """Forget the numbers of routers that are long gone."""
        async with self._database.write() as connection:
            await connection.execute(
                delete(USAGE_ROUTERS).where(USAGE_ROUTERS.c.heard_s <= now_s - _FORGOTTEN_S)
            )

    async def _is_new(self, connection: AsyncConnection, flush: Flush, now_s: float) -> bool:
        """Whether the flush's number is higher than the last; it is the last then."""
        values = {"heard_s": now_s, "under_way": dict(flush.under_way or {})}
        first = self._database.insert(USAGE_ROUTERS).values(router=flush.router, sequence=0, **values)
        await connection.execute(first.on_conflict_do_nothing())
        ours = USAGE_ROUTERS.c.router == flush.router
        newer = update(USAGE_ROUTERS).where(ours, USAGE_ROUTERS.c.sequence < flush.sequence)
        if (await connection.execute(newer.values(sequence=flush.sequence, **values))).rowcount:
            return True
        await connection.execute(
            update(USAGE_ROUTERS).where(ours, USAGE_ROUTERS.c.sequence == flush.sequence).values(**values)
        )
        return False

    async def _others(
        self, connection: AsyncConnection, router: str, now_s: float
    ) -> list[Mapping[str, Any]]:
        query = select(USAGE_ROUTERS.c.under_way).where(
            USAGE_ROUTERS.c.router != router, USAGE_ROUTERS.c.heard_s > now_s - _SILENT_S
        )
        return [dict(under_way) for under_way in await connection.scalars(query)]

    async def _totals(
        self, connection: AsyncConnection, flush: Flush, others: Sequence[Mapping[str, Any]]
    ) -> dict[str, Total]:
        tokens = USAGE.c.prompt_tokens + USAGE.c.output_tokens
        query = (
            select(
                USAGE.c.key,
                func.sum(case((USAGE.c.day == flush.day, tokens), else_=0)),
                func.sum(USAGE.c.dollars),
            )
            .where(
                USAGE.c.key.in_(flush.asked),
                USAGE.c.day >= f"{flush.day[:7]}-01",
                USAGE.c.day <= f"{flush.day[:7]}-31",
            )
            .group_by(USAGE.c.key)
        )
        used = {row[0]: (int(row[1]), float(row[2])) for row in await connection.execute(query)}
        totals = {}
        for key in flush.asked:
            under_way = [other[key] for other in others if key in other]
            dollars = sum(other.get("$", {}).get(key, 0.0) for other in others)
            totals[key] = Total(*used.get(key, (0, 0.0)), len(under_way), sum(under_way), dollars)
        return totals
