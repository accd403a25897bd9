"""The database's door: SQLite in a file, and the same schema in a real PostgreSQL."""

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    JSON,
    BigInteger,
    Connection,
    Double,
    MetaData,
    String,
    Text,
    delete,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError
from support.postgres import postgres

from serving.database import database as door
from serving.database.database import Database, version
from serving.database.tables import FILES, METADATA
from serving.errors import ConfigError, StorageError, StorageFullError, StorageRefusedError

SQLITE = pytest.mark.unit
POSTGRES = (pytest.mark.http, pytest.mark.slow)


@pytest.fixture(
    params=[pytest.param("sqlite", marks=SQLITE), pytest.param("postgresql", marks=POSTGRES)], scope="module"
)
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path_factory.mktemp("database") / "store.sqlite")
    else:
        with postgres() as url:
            yield url


def row(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "key": "0" * 64,
        "filename": "in.jsonl",
        "purpose": "batch",
        "bytes": 1,
        "state": "stored",
        "created_s": 1.5,
    }


async def count(database: Database) -> int:
    async with database.read() as connection:
        return int(await connection.scalar(select(func.count()).select_from(FILES)) or 0)


def differences(connection: Connection) -> list[Any]:
    return list(compare_metadata(MigrationContext.configure(connection), METADATA))


async def test_migrations_and_tables_say_the_same(where: str) -> None:
    database = await Database.open(where)
    async with database.read() as connection:
        assert await connection.run_sync(differences) == []
        assert await connection.scalar(text("SELECT version_num FROM alembic_version")) == version()
    await database.close()


async def test_several_open_a_new_database_at_once_and_none_of_their_writes_is_lost(where: str) -> None:
    opened = await asyncio.gather(*(Database.open(where) for _ in range(4)))
    before = await count(opened[0])

    async def write(at: int) -> None:
        async with opened[at % 4].write() as connection:
            await connection.execute(insert(FILES).values(row(f"several-{at}")))

    await asyncio.gather(*(write(at) for at in range(40)))
    assert await count(opened[0]) == before + 40
    await asyncio.gather(*(database.close() for database in opened))


async def test_a_transaction_that_fails_leaves_nothing(where: str) -> None:
    database = await Database.open(where)
    before = await count(database)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  what is written before it fails
        async with database.write() as connection:
            await connection.execute(insert(FILES).values(row("failed")))
            _ = 1 / 0
    assert await count(database) == before
    await database.close()


async def test_what_is_there_twice_is_ignored_where_that_is_asked_for(where: str) -> None:
    database = await Database.open(where)
    for _ in range(2):
        async with database.write() as connection:
            await connection.execute(database.insert(FILES).values(row("twice")).on_conflict_do_nothing())
    with pytest.raises(StorageError, match="can't be written"):
        async with database.write() as connection:
            await connection.execute(insert(FILES).values(row("twice")))
    await database.close()


async def test_a_database_of_a_newer_version_is_not_touched(where: str) -> None:
    database = await Database.open(where)
    async with database.write() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigError, match="newer version"):
        await Database.open(where)
    async with database.write() as connection:
        await connection.execute(
            text("UPDATE alembic_version SET version_num = :newest"), {"newest": version()}
        )
    await database.close()


REVISIONS = [script.revision for script in ScriptDirectory.from_config(door._alembic()).walk_revisions()]


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_database_of_any_earlier_version_keeps_its_rows(where: str, revision: str) -> None:
    database = await Database.open(where)
    async with database.write() as connection:
        await connection.run_sync(downgrade, revision)
        of_then = await connection.run_sync(add_rows)
    await database.close()
    database = await Database.open(where)
    async with database.read() as connection:
        assert await connection.run_sync(differences) == []
        for name, columns in of_then.items():
            query = select(*(METADATA.tables[name].c[column] for column in columns))
            rows = [dict(row._mapping) for row in await connection.execute(query)]
            assert columns in rows, name
    await database.close()


async def test_who_only_looks_leaves_a_database_of_an_older_version_to_that_version(where: str) -> None:
    """A newer `serving usage` would else keep the running service from its own store at its next start."""
    database = await Database.open(where)
    async with database.write() as connection:
        await connection.run_sync(downgrade, "0003")
    with pytest.raises(ConfigError, match="older version"):
        await Database.open(where, migrates=False)
    async with database.read() as connection:
        assert await connection.scalar(text("SELECT version_num FROM alembic_version")) == "0003"
    await (await Database.open(where)).close()
    await (await Database.open(where, migrates=False)).close()
    await database.close()


def downgrade(connection: Connection, revision: str) -> None:
    config = door._alembic()
    config.attributes["connection"] = connection
    command.downgrade(config, revision)


def add_rows(connection: Connection) -> dict[str, dict[str, Any]]:
    """A row in each table that there is at this version; what is in it, by table."""
    there = MetaData()
    there.reflect(connection)
    added = {}
    for name, table in there.tables.items():
        if name != "alembic_version":
            newest = METADATA.tables[name].c
            added[name] = {column.name: VALUES[type(newest[column.name].type)] for column in table.columns}
            connection.execute(delete(table))
            connection.execute(insert(table).values(added[name]))
    return added


VALUES: dict[type, Any] = {String: "1", Text: "text", BigInteger: 7, Double: 1.5, JSON: {"some": ["json"]}}

WRITER = """
import asyncio, sys
from sqlalchemy import insert
from serving.database.database import Database
from serving.database.tables import FILES

async def main():
    database = await Database.open(sys.argv[1])
    for at in range(10**6):
        async with database.write() as connection:
            values = dict(key="0" * 64, filename="f", purpose="batch", bytes=1, state="stored", created_s=1.5)
            await connection.execute(insert(FILES).values([dict(values, id=f"a{at}"), dict(values, id=f"b{at}")]))
        print(at, flush=True)

asyncio.run(main())
"""


@pytest.mark.http
def test_what_a_killed_writer_committed_is_there_and_nothing_by_half(tmp_path: Path) -> None:
    where = str(tmp_path / "store.sqlite")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, where], stdout=subprocess.PIPE, text=True)
    assert writer.stdout
    told = [int(writer.stdout.readline()) for _ in range(50)]
    os.kill(writer.pid, signal.SIGKILL)
    told += [int(line) for line in writer.stdout if line.endswith("\n")]
    writer.wait()
    found = asyncio.run(counted(where))
    assert found % 2 == 0
    assert found // 2 - len(told) in (0, 1)  # the last commit may not have been told


async def counted(where: str) -> int:
    database = await Database.open(where)
    found = await count(database)
    await database.close()
    return found


@pytest.mark.unit
async def test_the_file_is_its_owner_s_alone(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "new" / "store.sqlite"))
    assert stat.S_IMODE((tmp_path / "new" / "store.sqlite").stat().st_mode) == 0o600
    await database.close()


@pytest.mark.unit
async def test_a_full_disk_refuses_what_is_new_and_keeps_what_there_is(tmp_path: Path) -> None:
    """SQLite's own limit on pages fails as a full disk does."""
    database = await Database.open(str(tmp_path / "store.sqlite"))
    async with database.write() as connection:
        await connection.execute(insert(FILES).values(row("first")))
    with pytest.raises(StorageFullError, match="full"):  # noqa: PT012
        async with database.write() as connection:
            pages = (await connection.exec_driver_sql("PRAGMA page_count")).scalar()
            await connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            await connection.execute(insert(FILES).values({**row("second"), "filename": "x" * 100_000}))
    assert await count(database) == 1
    await database.close()


@pytest.mark.unit
async def test_a_file_that_may_not_be_written_is_no_server_that_is_away(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "store.sqlite"))
    with pytest.raises(StorageRefusedError, match="readonly"):  # noqa: PT012
        async with database.write() as connection:
            await connection.exec_driver_sql("PRAGMA query_only = 1")
            await connection.execute(insert(FILES).values(row("first")))
    await database.close()


@pytest.mark.unit
def test_postgresql_without_room_is_full_and_one_that_is_shutting_down_is_away() -> None:
    full, away = asyncpg.DiskFullError("no space left"), asyncpg.AdminShutdownError("shutting down")
    causes = [DBAPIError("INSERT", None, cause) for cause in (full, away)]
    assert [StorageError.of("It can't be written.", cause).status for cause in causes] == [507, 503]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("postgresql://serving:secret@127.0.0.1/x", "has a password in it"),
        ("postgresql://serving@127.0.0.1:1/x", "PGPASSWORD is set"),
        ("postgresql://serving@host:port/x", "this is no URL"),
        ("/dev/null/store.sqlite", "on a disk of the head's own"),
    ],
)
async def test_a_place_that_is_none_is_refused_with_what_to_change(place: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        await Database.open(place)
    assert "secret@" not in refused.value.message


@pytest.mark.unit
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_clients_are_not_told_where_the_server_is_that_nobody_reaches(host: str) -> None:
    database = Database(*door._engine(f"postgresql://serving@{host}:1/x"))
    with pytest.raises(StorageError) as failed:
        await count(database)
    assert failed.value.message.startswith("The database can't be read (")
    assert not any(words in failed.value.message for words in ("127.0.0.1", "::1", "1)"))
    await database.close()


@pytest.mark.unit
async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"something else\n" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        await Database.open(str(path))
    assert path.read_bytes().startswith(b"something else")


@pytest.mark.unit
async def test_the_file_can_be_read_by_sqlite_s_own_tools(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    database = await Database.open(str(path))
    async with database.write() as connection:
        await connection.execute(insert(FILES).values(row("first")))
    with sqlite3.connect(path) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert other.execute("SELECT id FROM files").fetchall() == [("first",)]
    await database.close()


@pytest.mark.http
@pytest.mark.slow
async def test_a_server_that_says_nothing_any_more_is_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As beyond a network that was cut: nothing is refused, and nothing comes."""
    goes_on = asyncio.Event()
    goes_on.set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            await goes_on.wait()
            writer.write(piece)
            await writer.drain()

    with postgres() as url:
        port = int(url.rpartition(":")[2].partition("/")[0])

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, here = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pass_on(reader, here), pass_on(there, writer), return_exceptions=True)

        await (
            await Database.open(url)
        ).close()  # makes the tables, which takes longer than an answer may below
        monkeypatch.setattr(door, "_ANSWER_S", 5.0)
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        database = await Database.open(url.replace(f":{port}/", f":{server.sockets[0].getsockname()[1]}/"))
        goes_on.clear()
        with pytest.raises(StorageError, match="can't be reached"):
            await asyncio.wait_for(count(database), 60)
        goes_on.set()
        assert await asyncio.wait_for(count(database), 60) == 0
        await database.close()
        server.close()
