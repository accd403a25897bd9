"""Responses that clients may come back to, in an SQLite file on the router's host: `router: {responses_store: PATH}`.

Routers of one host share the file. A response is its key's alone. What is too old goes when the next one comes, and of too many
the oldest of the key that has the most: no key takes another's place. One thread of a router's own does all of it, off the event
loop.
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import to_json

from serving.config import ResponsesStoreSpec
from serving.errors import ConfigError, StorageError
from serving.router.http.responses import Keeping, Kept

T = TypeVar("T")

_BUSY_S = 5.0  # another router writes
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    key TEXT NOT NULL, id TEXT NOT NULL, created_s REAL NOT NULL, bytes INTEGER NOT NULL, response TEXT NOT NULL, items TEXT NOT NULL,
    PRIMARY KEY (key, id)
);
CREATE INDEX IF NOT EXISTS by_age ON responses (created_s);
CREATE TABLE IF NOT EXISTS totals (responses INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals SELECT 0, 0 WHERE NOT EXISTS (SELECT * FROM totals);
CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON responses
    BEGIN UPDATE totals SET responses = responses + 1, bytes = bytes + new.bytes; END;
CREATE TRIGGER IF NOT EXISTS went AFTER DELETE ON responses
    BEGIN UPDATE totals SET responses = responses - 1, bytes = bytes - old.bytes; END;
BEGIN IMMEDIATE;
CREATE INDEX IF NOT EXISTS by_key_and_age ON responses (key, created_s);
CREATE TABLE IF NOT EXISTS of_keys (key TEXT PRIMARY KEY, responses INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO of_keys SELECT key, COUNT(*), SUM(bytes) FROM responses WHERE NOT EXISTS (SELECT * FROM of_keys) GROUP BY key;
CREATE TRIGGER IF NOT EXISTS came_of_key AFTER INSERT ON responses BEGIN
    INSERT OR IGNORE INTO of_keys VALUES (new.key, 0, 0);
    UPDATE of_keys SET responses = responses + 1, bytes = bytes + new.bytes WHERE key = new.key;
END;
CREATE TRIGGER IF NOT EXISTS went_of_key AFTER DELETE ON responses BEGIN
    UPDATE of_keys SET responses = responses - 1, bytes = bytes - old.bytes WHERE key = old.key;
    DELETE FROM of_keys WHERE key = old.key AND responses = 0;
END;
CREATE TABLE IF NOT EXISTS output_items (key TEXT NOT NULL, item TEXT NOT NULL, id TEXT NOT NULL, PRIMARY KEY (key, item, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS output_items_by_id ON output_items (key, id);
CREATE TRIGGER IF NOT EXISTS came_with_items AFTER INSERT ON responses BEGIN
    INSERT OR IGNORE INTO output_items SELECT new.key, json_extract(value, '$.id'), new.id
        FROM json_each(new.response, '$.output') WHERE type = 'object' AND json_type(value, '$.id') = 'text';
END;
CREATE TRIGGER IF NOT EXISTS went_with_items AFTER DELETE ON responses
    BEGIN DELETE FROM output_items WHERE key = old.key AND id = old.id; END;
COMMIT;
"""
# Of the key that has the largest part of either bound.
_OLDEST = """
DELETE FROM responses WHERE rowid = (
    SELECT rowid FROM responses
    WHERE key = (SELECT key FROM of_keys ORDER BY MAX(1.0 * responses / ?, 1.0 * bytes / ?) DESC, key LIMIT 1)
    ORDER BY created_s, rowid LIMIT 1
)
"""
_HOLDERS = "SELECT id FROM output_items WHERE key = ? AND item IN (SELECT value FROM json_each(?))"


class ResponseStore:
    """The file of one router. `clock` is a calendar's: the file outlives the process.

    What is asked of it raises StorageError where the file is damaged, full or held by another.
    """

    def __init__(self, spec: ResponsesStoreSpec, clock: Callable[[], float] = time.time) -> None:
        """Opens the file, and makes it where there is none; raises ConfigError."""
        self._spec = spec
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "responses")
        try:
            self._file = self._thread.submit(self._open).result()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"router.responses_store: {spec.path} can't be opened ({error}); name a file in a folder that the router may write to"
            ) from None

    async def put(self, keeping: Keeping, response: dict[str, object]) -> None:
        """Keep a response, unless it alone is larger than the store."""
        await self._run(lambda: self._put(keeping, response))

    async def size_bytes(self, key: str, name: str) -> int | None:
        """What `get` would bring; None where there is none."""
        return await self._run(lambda: self._size_bytes(key, name))

    async def get(self, key: str, name: str) -> Kept | None:
        """A key's own response; None where there is none."""
        return await self._run(lambda: self._get(key, name))

    async def holders_bytes(self, key: str, items: Sequence[str]) -> int:
        """What `holders` would bring."""
        return sum(await self._run(lambda: self._holders("LENGTH(CAST(response AS BLOB))", key, items)))

    async def holders(self, key: str, items: Sequence[str]) -> list[bytes]:
        """The key's responses whose output has one of these items, as JSON."""
        return await self._run(lambda: self._holders("CAST(response AS BLOB)", key, items))

    async def delete(self, key: str, name: str) -> bool:
        """Whether there was one."""
        return await self._run(lambda: self._delete(key, name))

    async def close(self) -> None:
        await self._run(self._file.close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise StorageError.of(
                f"router.responses_store: the file can't be used ({error}).", error
            ) from error

    def _open(self) -> sqlite3.Connection:
        path = Path(self._spec.path)
        path.touch(mode=0o600)  # before SQLite makes it, readable by anyone
        file = sqlite3.connect(path, timeout=_BUSY_S)
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute("PRAGMA secure_delete = ON")
        file.executescript(_TABLES)
        return file

    def _put(self, keeping: Keeping, response: dict[str, object]) -> None:
        texts = to_json(response), keeping.items
        size = sum(map(len, texts))
        if size > self._spec.max_bytes:
            return
        with self._file:
            # The first stays: a client may choose the ids of its responses.
            self._file.execute(
                "INSERT OR IGNORE INTO responses VALUES (?, ?, ?, ?, ?, ?)",
                (keeping.key, response["id"], self._clock(), size, *(text.decode() for text in texts)),
            )
            self._file.execute("DELETE FROM responses WHERE created_s < ?", (self._oldest_s(),))
            while self._too_much():
                self._file.execute(_OLDEST, (self._spec.max_responses, self._spec.max_bytes))

    def _too_much(self) -> bool:
        rows, size = self._file.execute("SELECT responses, bytes FROM totals").fetchone()
        return bool(rows > self._spec.max_responses or size > self._spec.max_bytes)

    def _size_bytes(self, key: str, name: str) -> int | None:
        row = self._of("bytes", key, name)
        return int(row[0]) if row else None

    def _get(self, key: str, name: str) -> Kept | None:
        row = self._of("CAST(response AS BLOB), CAST(items AS BLOB)", key, name)
        return Kept(*row) if row else None

    def _holders(self, column: str, key: str, items: Sequence[str]) -> list[Any]:
        query = f"SELECT {column} FROM responses WHERE key = ? AND created_s >= ? AND id IN ({_HOLDERS})"  # noqa: S608  no client names one
        return [row[0] for row in self._file.execute(query, (key, self._oldest_s(), key, json.dumps(items)))]

    def _of(self, columns: str, key: str, name: str) -> tuple[Any, ...] | None:
        query = f"SELECT {columns} FROM responses WHERE key = ? AND id = ? AND created_s >= ?"  # noqa: S608  no client names one
        row: tuple[Any, ...] | None = self._file.execute(query, (key, name, self._oldest_s())).fetchone()
        return row

    def _delete(self, key: str, name: str) -> bool:
        with self._file:
            return (
                self._file.execute("DELETE FROM responses WHERE key = ? AND id = ?", (key, name)).rowcount > 0
            )

    def _oldest_s(self) -> float:
        return self._clock() - self._spec.max_age_s
