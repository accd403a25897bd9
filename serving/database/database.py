"""The one door to SQLAlchemy and Alembic: opens the database, brings its schema up to date, hands out transactions.

SQLite in a file by default, PostgreSQL by URL. SQLite runs in WAL mode with a sync at every commit: what was committed is there
after a power cut. A SQLite file is for processes of one host, on a disk of that host.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.schema import Table

from serving.errors import ConfigError, StorageError

logger = logging.getLogger("ray.serve")

_BUSY_S = 10.0  # another process of the host writes
_CONNECT_S, _ANSWER_S = 10.0, 15.0  # after which a PostgreSQL that says nothing is one that is gone
_MIGRATIONS = Path(__file__).with_name("migrations")
_MIGRATING = 7_411_046_332_818_243_761  # PostgreSQL's advisory lock; any number that is ours alone
_POSTGRES = ("postgresql", "postgres")


class Database:
    """An open database whose schema is the newest."""

    def __init__(self, engine: AsyncEngine, where: str) -> None:
        self._engine = engine
        # SQLite has one writer and no queue: who finds it busy tries again now and then, and may find it busy for ever.
        self._turn = asyncio.Lock() if self.is_sqlite else contextlib.nullcontext()
        self.where = where  # without a password

    @classmethod
    async def open(cls, where: str, *, migrates: bool = True) -> "Database":
        """`where`: the path of an SQLite file, or postgresql://USER@HOST/NAME. Raises ConfigError.

        PostgreSQL's password comes from PGPASSWORD or PGPASSFILE. `migrates`: whether the schema of an older version is
        brought up to date, after which that version can't open it any more.
        """
        engine, name = _engine(where)
        try:
            async with engine.connect() as connection, _writing(connection):
                await connection.run_sync(_migrate, older=migrates)
        except ConfigError as error:
            await engine.dispose()
            raise ConfigError(f"store: {name} {error.message}") from None
        except (OSError, SQLAlchemyError) as error:
            await engine.dispose()
            raise ConfigError(f"store: {name} can't be opened ({_reason(error)}); {_mend(where)}") from None
        except CommandError:
            await engine.dispose()
            raise ConfigError(
                f"store: {name} was written by a newer version of this service; install that version, or name another database"
            ) from None
        return cls(engine, name)

    @property
    def is_sqlite(self) -> bool:
        return self._engine.dialect.name == "sqlite"

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that is committed at its end, or not at all. Raises StorageError: a full disk, a lost server."""
        try:
            async with self._turn, self._engine.connect() as connection, _writing(connection):
                yield connection
        except (OSError, SQLAlchemyError) as error:
            raise _failed("The database can't be written", error) from error

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection for looking; several statements may see several states. Raises StorageError."""
        try:
            async with self._engine.connect() as connection:
                yield connection
        except (OSError, SQLAlchemyError) as error:
            raise _failed("The database can't be read", error) from error

    def insert(self, table: Table) -> Any:
        """An INSERT that has `on_conflict_do_nothing` and `on_conflict_do_update`, which both databases spell alike."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    async def close(self) -> None:
        await self._engine.dispose()


def version() -> str:
    """The newest schema's."""
    return str(ScriptDirectory.from_config(_alembic()).get_current_head())


def is_postgres(where: str) -> bool:
    return where.partition("://")[0] in _POSTGRES


def _engine(where: str) -> tuple[AsyncEngine, str]:
    if is_postgres(where):
        try:
            url = make_url(where).set(drivername="postgresql+asyncpg")
        except (ValueError, SQLAlchemyError):
            raise ConfigError("store.database: this is no URL; write postgresql://USER@HOST/NAME") from None
        if url.password is not None:
            raise ConfigError(
                "store.database has a password in it; leave it out, and set PGPASSWORD or PGPASSFILE"
            )
        answers = {"timeout": _CONNECT_S, "command_timeout": _ANSWER_S}
        return create_async_engine(
            url, pool_pre_ping=True, pool_size=8, connect_args=answers
        ), url.render_as_string()
    path = Path(where)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)  # before SQLite makes it, readable by anyone
    except OSError as error:
        raise ConfigError(f"store: {path} can't be made ({error.strerror}); {_mend(where)}") from None
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args={"timeout": _BUSY_S})
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    return engine, str(path)


def _prepare_sqlite(connection: Any, _: Any) -> None:
    # Python's own idea of when a transaction begins is not ours: `_writing` says it.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


@asynccontextmanager
async def _writing(connection: AsyncConnection) -> AsyncIterator[None]:
    async with connection.begin():
        if connection.dialect.name == "sqlite":
            # At once: a reader that turned writer would fail where another wrote in between.
            await connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield


def _migrate(connection: Connection, *, older: bool) -> None:
    """Raises ConfigError for a schema of an older version where those are to stay."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _MIGRATING})
    config = _alembic()
    config.attributes["connection"] = connection
    current = MigrationContext.configure(connection).get_current_revision()
    if not older and current and current < version():
        raise ConfigError(
            "is of an older version of this service, which may be running: use that version's `serving`, or start this version first"
        )
    command.upgrade(config, "head")


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    return config


def _mend(where: str) -> str:
    if is_postgres(where):
        return "see that the server is up, that the user may make tables there, and that PGPASSWORD is set"
    return "name a folder on a disk of the head's own that the service may write to"


def _failed(what: str, error: Exception) -> StorageError:
    message = f"{what} ({_reason(error)})."
    # Of a server: one that starts anew has no socket yet.
    return StorageError(message) if isinstance(error, OSError) else StorageError.of(message, error)


def _reason(error: Exception) -> str:
    """The driver's words in one line, without the statement and its values. Clients read them: a server's address stays out."""
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno else "its server can't be reached"
    words = str(getattr(error, "orig", None) or error) or type(error).__name__
    return " ".join(words.split())[:300]
