"""A store or a router that is killed at any step of a flush: nothing is counted twice, and what is lost is the router's last second.

Real SQLite. The bomb goes off before a transaction, in it, and after it, when its answer is lost.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import AsyncConnection
from support.servers import PATIENCE_S

from serving.database.database import Database
from serving.metering.service import Metering
from serving.router.admission.meter import Meter, Rate, Tokens
from serving.router.http.auth import Key, KeyFile
from serving.router.http.kept_files import KeptFiles
from serving.router.usage_loop import UsageLoop
from serving.secret import KEY_HEADER

pytestmark = pytest.mark.http
NOW_S = 1_795_348_800.0
KEY = Key(name="a", sha256="a" * 64, tokens_per_day=10**6)
REQUESTS = 6
STEPS = 3 * REQUESTS  # of a life without a bomb


class Killed(BaseException):
    """The process is no more."""


class Mortal(Database):
    at = 0
    steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.at:
            raise Killed

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        self.step()
        async with super().write() as connection:
            yield connection
            self.step()
        self.step()


class Store:
    """The store's process, started anew after it was killed."""

    def __init__(self, path: Path, at: int) -> None:
        self._path = path
        self._at = at
        self.deaths = 0
        self.steps = 0

    async def call(self, method: str, path: str, **options: Any) -> Any:
        """One question of one process; None where the process was killed before its answer was out."""
        database = await Mortal.open(str(self._path))
        database.at, database.steps = self._at, self.steps
        app = FastAPI()
        app.include_router(Metering(database, lambda: NOW_S).routes())
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
                return (await http.request(method, path, **options)).json()
        except Killed:
            self.deaths += 1
            return None
        finally:
            self.steps = database.steps
            await database.close()

    async def used(self) -> int:
        answer = await self.call(
            "GET", "/v1/usage?start=2026-11-22&end=2026-11-22", headers={KEY_HEADER: KEY.id}
        )
        return sum(row["prompt_tokens"] for row in answer["data"])


def router(name: str) -> Meter:
    meter = Meter(name, {("llama", "spot"): Rate(8, 10.0)})
    meter.budget(KEY)
    return meter


async def flush(meter: Meter, store: Store) -> None:
    if told := meter.flush(NOW_S):
        answer = await store.call("POST", "/usage/flush", json=told)
        if answer is not None:
            meter.answered(answer, NOW_S)


def request(meter: Meter) -> None:
    meter.add(KEY.id, "llama", [("spot", 0.0)], 1, Tokens(1, 0, 0), 1.0, NOW_S)


async def test_a_life_without_a_bomb_has_as_many_steps_as_are_tried(tmp_path: Path) -> None:
    store, meter = Store(tmp_path / "store.sqlite", 0), router("one")
    for _ in range(REQUESTS):
        request(meter)
        await flush(meter, store)
    assert (await store.used(), store.steps) == (REQUESTS, STEPS)


@pytest.mark.parametrize("at", range(1, STEPS + 1))
async def test_a_store_that_is_killed_at_any_step_has_each_use_once(tmp_path: Path, at: int) -> None:
    store, meter = Store(tmp_path / "store.sqlite", at), router("one")
    budget = meter.budget(KEY)
    assert budget
    for made in range(1, REQUESTS + 1):
        request(meter)
        await flush(meter, store)
        assert budget.state(NOW_S)["tokens_per_day"]["used"] == made
    assert store.deaths == 1
    for _ in range(2):
        await flush(meter, store)
    assert await store.used() == REQUESTS
    assert budget.state(NOW_S)["tokens_per_day"]["used"] == REQUESTS


@pytest.mark.parametrize("at", range(1, STEPS + 1))
async def test_a_router_that_is_killed_with_the_store_loses_its_last_flush_at_most(
    tmp_path: Path, at: int
) -> None:
    """And the next router of its name, which numbers anew, loses nothing."""
    store, meter = Store(tmp_path / "store.sqlite", at), router("one")
    made = 0
    while not store.deaths:
        made += 1
        request(meter)
        await flush(meter, store)
    assert made - await store.used() in (0, 1)
    before = await store.used()
    successor = router("two")
    for _ in range(3):
        request(successor)
        await flush(successor, store)
    assert await store.used() == before + 3


async def test_a_router_ends_within_seconds_where_nobody_finds_the_store() -> None:
    async def find() -> tuple[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    meter = router("one")
    request(meter)
    loop = UsageLoop(meter, KeptFiles(find), KeyFile(None), lambda: NOW_S)
    async with asyncio.timeout(PATIENCE_S):
        await loop.close(last_s=0.05)
    assert meter.flush(NOW_S)  # it would be told again
