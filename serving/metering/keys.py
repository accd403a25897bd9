"""The statements on the table of API keys. It has hashes, never a key."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, delete, insert, select, update

from serving.database.database import Database
from serving.database.tables import KEYS
from serving.errors import ConfigError


@dataclass(frozen=True)
class InForce:
    """The keys that let in now, as routers take them; the version changes with them."""

    version: str
    entries: list[dict[str, Any]]


class KeyTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, name: str, sha256: str, limits: Mapping[str, Any], now_s: float) -> None:
        """Raises ConfigError where there is a key of this name."""
        async with self._database.write() as connection:
            if await connection.scalar(select(KEYS.c.id).where(KEYS.c.name == name)):
                raise ConfigError(f"there is a key named {name!r}; `serving keys roll` gives it a new secret")
            values = {
                "id": sha256,
                "name": name,
                "sha256": sha256,
                "limits": dict(limits),
                "created_s": now_s,
            }
            await connection.execute(insert(KEYS).values(values))

    async def roll(self, name: str, sha256: str, now_s: float, grace_s: float) -> None:
        """Give a key another secret; the one before it lets in for so long. Raises ConfigError."""
        async with self._database.write() as connection:
            values = {
                "previous_sha256": KEYS.c.sha256,
                "previous_until_s": now_s + grace_s,
                "sha256": sha256,
            }
            if not (
                await connection.execute(update(KEYS).where(KEYS.c.name == name).values(values))
            ).rowcount:
                raise ConfigError(_unknown(name))

    async def revoke(self, name: str) -> None:
        """Raises ConfigError."""
        async with self._database.write() as connection:
            if not (await connection.execute(delete(KEYS).where(KEYS.c.name == name))).rowcount:
                raise ConfigError(_unknown(name))

    async def all(self) -> list[Row[Any]]:
        async with self._database.read() as connection:
            return list((await connection.execute(select(KEYS).order_by(KEYS.c.name))).all())

    async def in_force(self, now_s: float) -> InForce:
        entries = []
        for row in await self.all():
            hashes = [row.sha256]
            if row.previous_sha256 and row.previous_until_s > now_s:
                hashes.append(row.previous_sha256)
            entries.append({**row.limits, "name": row.name, "sha256": row.id, "hashes": hashes})
        version = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
        return InForce(version, entries)


def _unknown(name: str) -> str:
    return f"there is no key named {name!r}; `serving keys list` has them"
