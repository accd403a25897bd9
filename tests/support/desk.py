"""A desk at a time that the test moves, with real SQLite and real files; and what routers bring to it."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from serving.batches.desk import Desk
from serving.batches.files import Folder
from serving.batches.ledger import Ledger
from serving.config import BatchSpec
from serving.database.database import Database
from support.batches import KEY, folder, line
from support.simulated_engine import MODEL


class Table:
    """A desk, its ledger and its folder, at a time that the test moves."""

    def __init__(self, desk: Desk, ledger: Ledger, folder: Folder) -> None:
        self.desk = desk
        self.ledger = ledger
        self.folder = folder
        self.now_s = 0.0

    async def add(self, name: str, lines: Sequence[str], key: str = KEY, window_s: float = 3600) -> None:
        writing = self.folder.write(f"file-{name}")
        writing.write("\n".join(lines).encode())
        writing.close()
        file = {
            "id": f"file-{name}",
            "key": key,
            "filename": "in",
            "purpose": "batch",
            "bytes": writing.bytes,
        }
        await self.ledger.add_file({**file, "created_s": self.now_s, "expires_s": self.now_s + 10**6})
        await self.ledger.store_file(f"file-{name}", writing.bytes)
        await self.ledger.add_batch(
            {
                "id": name,
                "key": key,
                "endpoint": "/v1/chat/completions",
                "input_file_id": f"file-{name}",
                "completion_window": "1h",
                "created_s": self.now_s,
                "expires_s": self.now_s + window_s,
            },
            100,
        )
        await self.settle()

    async def settle(self) -> None:
        """Two beats, and what they began."""
        for _ in range(2):
            await self.desk.tick()
            await self.desk.idle()
        await self.desk.tick()
        self.now_s += 3

    async def take(
        self, router: str, holding: Sequence[tuple[str, int]] = (), most: int = 4
    ) -> list[tuple[str, int]]:
        taken = await self.desk.take(router, [{"names": [MODEL], "most": most}], holding)
        return [(row["batch"], row["line"]) for row in taken["lines"]]

    async def bring(
        self,
        lines: Sequence[tuple[str, int]],
        status: int = 200,
        *,
        again: bool = False,
        wait_s: float | None = None,
    ) -> None:
        await self.desk.commit([brought(held, status, again=again, wait_s=wait_s) for held in lines])

    async def batch(self, name: str, key: str = KEY) -> Any:
        return await self.ledger.batch(key, name)

    def results(self, file: str | None) -> list[Any]:
        return [json.loads(text) for text in self.folder.read(file).read().splitlines()] if file else []


def brought(
    held: tuple[str, int], status: int, *, again: bool = False, wait_s: float | None = None
) -> dict[str, Any]:
    fields = {"status": status, "request_id": "r", "body": "{}", "again": again, "wait_s": wait_s}
    return {"batch": held[0], "line": held[1], **fields}


@asynccontextmanager
async def table(
    path: Path,
    make_ledger: Callable[[Database, str], Ledger] = Ledger,
    models: Sequence[str] = (MODEL,),
    **limits: Any,
) -> AsyncIterator[Table]:
    store = folder(path)
    database = await Database.open(store.database_at)
    ledger, kept = make_ledger(database, "here"), Folder(store.files_at)
    made: list[Table] = []
    desk = Desk(
        ledger,
        kept,
        BatchSpec(**limits),
        models,
        1 << 20,
        clock=lambda: made[0].now_s if made else 0.0,
        calendar=lambda: made[0].now_s if made else 0.0,
    )
    made.append(Table(desk, ledger, kept))
    yield made[0]
    await desk.close()
    await database.close()


def lines(count: int) -> list[str]:
    return [line(f"r{at}") for at in range(count)]
