"""A process that is killed at any step of a batch: the next one goes on from the database and the folder alone.

Real SQLite, real files. The bomb goes off before a transaction, in it, and after it; and before and after each call on files.
"""

import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection
from support.batches import KEY, folder, line
from support.simulated_engine import MODEL

from serving.batches.files import Folder, Writing
from serving.batches.lifecycle import OVER, State
from serving.batches.service import Batches
from serving.config import BatchSpec, StoreSpec
from serving.database.database import Database
from serving.database.tables import BATCHES, FILES, LINES
from serving.secret import KEY_HEADER

pytestmark = [
    pytest.mark.http,
    # The killed leave coroutines and files open, as they do.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine"),
]

LINES_OF_INPUT = [
    line("a"),
    line("b"),
    "malformed",
    line("c"),
    line("a"),  # twice
    line("d"),
]


class Killed(BaseException):
    """The process is no more: nothing after this runs but what unwinds."""


class Bomb:
    """Goes off at its step; `at` 0 never."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._at and self._steps >= self._at:
            raise Killed

    @property
    def went_off(self) -> bool:
        return bool(self._at) and self._steps >= self._at


class Mortal(Database):
    bomb: Bomb

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        self.bomb.step()
        async with super().write() as connection:
            yield connection
            self.bomb.step()
        self.bomb.step()


class MortalWriting(Writing):
    bomb: Bomb

    def write(self, data: bytes) -> None:
        self.bomb.step()
        super().write(data)

    def close(self) -> None:
        self.bomb.step()
        super().close()
        self.bomb.step()

    def discard(self) -> None:
        """A killed process tidies nothing."""


class MortalFolder(Folder):
    bomb: Bomb

    def write(self, name: str) -> Writing:
        self.bomb.step()
        made = super().write(name)
        made.__class__ = MortalWriting
        made.bomb = self.bomb  # type: ignore[attr-defined]
        return made

    def delete(self, name: str) -> None:
        self.bomb.step()
        super().delete(name)
        self.bomb.step()


class World:
    """What outlives the process: the disk, the time, a client with its ids, and a router with what it has."""

    def __init__(self, path: Path, *, router_dies: bool) -> None:
        self.store = folder(path)
        self.now_s = 1_000_000.0
        self.router_dies = router_dies
        self.file = ""
        self.batch = ""
        self.asked: Counter[int] = Counter()
        self.results: list[dict[str, Any]] = []
        self.routers = 0

    def clock(self) -> float:
        return self.now_s


async def life(world: World, bomb: Bomb) -> dict[str, Any]:
    """One process, until the batch is over and swept, or the bomb goes off."""
    database = await Mortal.open(world.store.database_at)
    database.bomb = bomb
    batches = Batches(database, world.store, BatchSpec(), [MODEL], 1 << 20, calendar=world.clock)
    made_folder = MortalFolder(world.store.files_at)
    made_folder.bomb = bomb
    batches._folder = batches.desk._folder = batches.desk.content._folder = made_folder
    batches.desk._clock = world.clock
    batches.desk._began_s = world.clock()
    app = FastAPI()
    app.include_router(batches.routes())
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://x", headers={KEY_HEADER: KEY}
        ) as http:
            return await story(world, batches, http)
    finally:
        await batches.desk._turns.close()  # what they have open locks the file
        await batches.desk._sweeping.close()
        await database.close()


async def story(world: World, batches: Batches, http: httpx.AsyncClient) -> dict[str, Any]:
    if not world.file:
        text = "\n".join(LINES_OF_INPUT).encode()
        answer = await http.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"})
        world.file = answer.json()["id"]
    if not world.batch:
        fields = {
            "input_file_id": world.file,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        world.batch = (await http.post("/v1/batches", json=fields)).json()["id"]
    router = f"router-{world.routers}"
    for _ in range(50):
        await batches.desk.tick()
        await batches.desk.idle()
        world.now_s += 3
        if world.results:
            await http.post("/lines/commit", json={"results": world.results})
            world.results = []
        wants = [{"names": [MODEL], "most": 2}]
        taken = await http.post("/lines/take", json={"router": router, "wants": wants, "holding": []})
        for row in taken.json()["lines"]:
            world.asked[row["line"]] += 1
            world.results.append(
                {
                    "batch": row["batch"],
                    "line": row["line"],
                    "status": 200,
                    "request_id": "r",
                    "body": json.dumps({"answer": world.asked[row["line"]]}),
                    "again": False,
                }
            )
        batch = (await http.get(f"/v1/batches/{world.batch}")).json()
        if State(batch["status"]) in OVER:
            await batches.desk.content.sweep()
            return dict(batch)
    raise AssertionError(batch)


async def lived(world: World, bomb: Bomb) -> dict[str, Any]:
    """Lives one after the other until the story is over."""
    while True:
        try:
            return await life(world, bomb)
        except Killed:
            bomb._at = 0
            world.now_s += 20
            if world.router_dies:
                world.results = []
                world.routers += 1


@pytest.mark.parametrize("router_dies", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_batch_ends_right_wherever_its_process_was_killed(
    tmp_path: Path, *, router_dies: bool
) -> None:
    kills = 0
    for at in itertools.count(1):
        world = World(tmp_path / str(at), router_dies=router_dies)
        bomb = Bomb(at)
        batch = await lived(world, bomb)
        killed = bomb._at == 0
        kills += killed
        await check(world, batch)
        if not killed:
            break
    print(f"killed at each of {kills} steps")
    assert kills > 60


async def check(world: World, batch: dict[str, Any]) -> None:
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {"total": 6, "completed": 4, "failed": 2}
    # What was half written or is too old goes in time, and nothing else.
    database = await Database.open(world.store.database_at)
    batches = Batches(database, world.store, BatchSpec(), [MODEL], 1 << 20, calendar=world.clock)
    world.now_s += 2 * 3600
    await batches.desk.content.sweep()
    async with database.read() as connection:
        stored = set(await connection.scalars(select(FILES.c.id)))
        of_client = list(await connection.scalars(select(BATCHES.c.id)))
        assert not await connection.scalar(select(func.count()).select_from(LINES))
    assert contents(world.store) == stored
    assert {batch["output_file_id"], batch["error_file_id"], world.file} <= stored
    assert batch["id"] in of_client
    rows = read(world.store, batch["output_file_id"])
    assert [row["custom_id"] for row in rows] == ["a", "b", "c", "d"]
    assert all(row["response"]["status_code"] == 200 for row in rows)
    errors = read(world.store, batch["error_file_id"])
    assert [row["error"]["line"] for row in errors] == [3, 5]
    await database.close()


def contents(store: StoreSpec) -> set[str]:
    return {path.name for path in Path(store.files_at).iterdir()}


def read(store: StoreSpec, name: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (Path(store.files_at) / name).read_text().splitlines()]
