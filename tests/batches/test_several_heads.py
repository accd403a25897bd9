"""Two heads on one PostgreSQL and one folder: each batch is worked on by one of them, and by the other once that one is silent."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.batches import KEY, line
from support.postgres import postgres
from support.simulated_engine import MODEL

from serving.batches.desk import Desk, Held
from serving.batches.files import Folder
from serving.batches.ledger import Ledger
from serving.batches.lifecycle import State
from serving.config import BatchSpec
from serving.database.database import Database

pytestmark = [pytest.mark.http, pytest.mark.slow]
WANTS = [{"names": [MODEL], "most": 3}]


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Head:
    def __init__(self, name: str, database: Database, folder: Folder, clock: Time) -> None:
        self.ledger = Ledger(database, name)
        self.desk = Desk(self.ledger, folder, BatchSpec(), [MODEL], 1 << 20, clock=clock, calendar=clock)

    async def settle(self) -> None:
        for _ in range(3):
            await self.desk.tick()
            await self.desk.idle()

    async def take(self) -> list[Held]:
        taken = await self.desk.take("router", WANTS, [])
        return [(row["batch"], row["line"]) for row in taken["lines"]]

    async def bring(self, lines: list[Held]) -> None:
        result = {"status": 200, "request_id": "r", "body": "{}", "again": False}
        await self.desk.commit([{"batch": batch, "line": number, **result} for batch, number in lines])


@pytest.fixture
async def heads(tmp_path: Path) -> AsyncIterator[tuple[Head, Head, Folder, Time]]:
    with postgres() as url:
        databases = [await Database.open(url) for _ in range(2)]
        folder, clock = Folder(str(tmp_path / "files")), Time()
        first, second = (
            Head(name, database, folder, clock) for name, database in zip("ab", databases, strict=True)
        )
        yield first, second, folder, clock
        await asyncio.gather(*(database.close() for database in databases))


async def test_a_batch_of_a_head_that_dies_is_ended_by_the_other(
    heads: tuple[Head, Head, Folder, Time],
) -> None:
    first, second, folder, clock = heads
    writing = folder.write("file-in")
    writing.write("\n".join(line(f"r{at}") for at in range(6)).encode())
    writing.close()
    file = {"id": "file-in", "key": KEY, "filename": "in", "purpose": "batch", "bytes": writing.bytes}
    await first.ledger.add_file({**file, "created_s": 0.0, "expires_s": 10.0**6})
    await first.ledger.store_file("file-in", writing.bytes)
    fields = {"key": KEY, "endpoint": "/v1/chat/completions", "input_file_id": "file-in"}
    await first.ledger.add_batch(
        {**fields, "id": "batch", "completion_window": "1h", "created_s": 0.0, "expires_s": 3600.0}, 100
    )
    await first.settle()
    await second.settle()
    clock.now_s += 3
    held = await first.take()
    assert held == [("batch", at) for at in (1, 2, 3)]
    assert await second.take() == []
    await first.bring(held[:1])
    clock.now_s += 20  # the first says nothing any more
    await second.settle()
    clock.now_s += 3
    assert await second.take() == [("batch", at) for at in (2, 3, 4)]
    await first.bring(held)  # too late: the batch is the second's
    await asyncio.gather(second.bring([("batch", at) for at in (2, 3, 4)]), second.bring(held))
    await second.bring([("batch", at) for at in (5, 6)])
    await second.settle()
    batch = await second.ledger.batch(KEY, "batch")
    assert batch
    assert (batch.state, batch.completed, batch.failed) == (State.COMPLETED, 6, 0)
    rows = folder.read(batch.output_file_id).readlines()
    assert [json.loads(row)["custom_id"] for row in rows] == [f"r{at}" for at in range(6)]
