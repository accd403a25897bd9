"""Files and batches in the database: every statement, each change of state in one transaction.

Whatever dies between two transactions, the rows say what is to be done next. A line gets one result: the first that comes, from
whoever owns the batch, while the batch is in progress.
"""

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from serving.batches.lifecycle import ASSEMBLING, OPEN, OVER, Event, State, after
from serving.batches.lines import refused
from serving.database.database import Database
from serving.database.tables import BATCHES, FILES, LINES
from serving.errors import BadRequestError, StorageError

# Of a file: it has a row before it has content, and the row goes last, so that no content is left without a row.
UPLOADING, STORED, DELETING = "uploading", "stored", "deleting"
ANSWERED, REFUSED = "answered", "refused"
_PAGE, _PAGE_CHARS = 16, 4 << 20  # results a query, and how long all of them are; one alone may be longer
_SWEPT = 200  # lines a transaction that forgets them
_OF_WORK = [column for column in BATCHES.c if column.name not in ("metadata", "errors", "usage")]


@dataclass(frozen=True)
class NewLine:
    """A line of input for the table. `result`: of a line that is refused as it stands."""

    line: int
    start: int
    bytes: int
    custom_id: str | None = None
    model: str | None = None
    result: str | None = None


@dataclass(frozen=True)
class ToDo:
    """A line without a result."""

    batch: str
    line: int
    start: int
    bytes: int
    model: str


@dataclass(frozen=True)
class Result:
    """What became of a line: a line of the output file, or of the error file."""

    batch: str
    line: int
    text: str
    is_error: bool
    usage: Mapping[str, int] = field(default_factory=dict)


class Ledger:
    """`owner` names this process among those that share the database."""

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self._owner = owner
        # Of other processes, the latest time that a batch of theirs is owned until, and since when it has been the same.
        self._others: dict[str, tuple[float, float]] = {}

    # Files

    async def add_file(self, fields: Mapping[str, Any]) -> None:
        async with self._database.write() as connection:
            await connection.execute(insert(FILES).values(**fields, state=UPLOADING))

    async def add_upload(self, fields: Mapping[str, Any], most_bytes: int, most_files: int) -> bool:
        """The same for a client's file. False where its key's files have so many bytes, or it has uploaded so many, already."""
        of_key = FILES.c.key == fields["key"]
        uploads = func.count().filter(FILES.c.purpose == fields["purpose"])
        query = select(func.coalesce(func.sum(FILES.c.bytes), 0), uploads).where(of_key)
        async with self._database.write() as connection:
            has_bytes, files = (await connection.execute(query)).one()
            if has_bytes >= most_bytes or files >= most_files:
                return False
            await connection.execute(insert(FILES).values(**fields, state=UPLOADING))
            return True

    async def store_file(self, name: str, size_bytes: int) -> None:
        """The content is there. Raises StorageError where the row no longer is."""
        async with self._database.write() as connection:
            change = update(FILES).where(FILES.c.id == name, FILES.c.state == UPLOADING)
            if not (await connection.execute(change.values(state=STORED, bytes=size_bytes))).rowcount:
                raise StorageError("The file was swept before it was whole; send it again.")

    async def file(self, key: str, name: str, now_s: float) -> Row[Any] | None:
        """A key's own, unless it has expired."""
        query = select(FILES).where(
            FILES.c.id == name, FILES.c.key == key, FILES.c.state == STORED, _not_expired(now_s)
        )
        async with self._database.read() as connection:
            return (await connection.execute(query)).first()

    async def files(
        self, key: str, now_s: float, *, purpose: str | None, after_id: str | None, limit: int, newest: bool
    ) -> Sequence[Row[Any]]:
        query = select(FILES).where(FILES.c.key == key, FILES.c.state == STORED, _not_expired(now_s))
        if purpose:
            query = query.where(FILES.c.purpose == purpose)
        return await self._page(FILES, key, query, after_id, limit, newest=newest)

    async def bytes_of(self, key: str) -> int:
        query = select(func.coalesce(func.sum(FILES.c.bytes), 0)).where(FILES.c.key == key)
        async with self._database.read() as connection:
            return int(await connection.scalar(query) or 0)

    async def delete_file(self, name: str) -> bool:
        """The file is gone for its key; its content goes next, and then `forget_file`. False where an open batch reads it."""
        used = select(BATCHES.c.id).where(BATCHES.c.input_file_id == name, BATCHES.c.state.in_(OPEN))
        async with self._database.write() as connection:
            await self._stored(connection, name)
            if await connection.scalar(used.limit(1)):
                return False
            await connection.execute(update(FILES).where(FILES.c.id == name).values(state=DELETING))
            return True

    async def drop_file(self, name: str) -> None:
        """Forget a file that never became whole."""
        async with self._database.write() as connection:
            await connection.execute(delete(FILES).where(FILES.c.id == name, FILES.c.state == UPLOADING))

    async def forget_file(self, name: str) -> None:
        async with self._database.write() as connection:
            await connection.execute(delete(FILES).where(FILES.c.id == name, FILES.c.state == DELETING))

    async def condemn(self, now_s: float, upload_s: float) -> list[str]:
        """Files whose content is to go: deleted, expired, or never whole after `upload_s`. Inputs of open batches stay."""
        used = select(BATCHES.c.input_file_id).where(BATCHES.c.state.in_(OPEN))
        expired = (FILES.c.expires_s <= now_s) & FILES.c.id.not_in(used)
        broken = (FILES.c.state == UPLOADING) & (FILES.c.created_s <= now_s - upload_s)
        async with self._database.write() as connection:
            await connection.execute(update(FILES).where(or_(expired, broken)).values(state=DELETING))
            return list(await connection.scalars(select(FILES.c.id).where(FILES.c.state == DELETING)))

    # Batches

    async def add_batch(self, fields: Mapping[str, Any], most_open: int) -> bool | None:
        """False where the key has too many open batches, None where the input is no longer there."""
        open_ones = select(func.count()).where(BATCHES.c.key == fields["key"], BATCHES.c.state.in_(OPEN))
        async with self._database.write() as connection:
            if not await self._stored(connection, fields["input_file_id"]):
                return None
            if int(await connection.scalar(open_ones) or 0) >= most_open:
                return False
            await connection.execute(
                insert(BATCHES).values(
                    **fields,
                    state=State.VALIDATING,
                    times={},
                    read_bytes=0,
                    total=0,
                    completed=0,
                    failed=0,
                    owned_until_s=0.0,
                    usage={},
                )
            )
            return True

    async def batch(self, key: str, name: str) -> Row[Any] | None:
        async with self._database.read() as connection:
            query = select(BATCHES).where(BATCHES.c.id == name, BATCHES.c.key == key)
            return (await connection.execute(query)).first()

    async def batches(self, key: str, *, after_id: str | None, limit: int) -> Sequence[Row[Any]]:
        query = select(BATCHES).where(BATCHES.c.key == key)
        return await self._page(BATCHES, key, query, after_id, limit, newest=True)

    async def own(self, now_s: float, owned_s: float, clock_s: float) -> list[Row[Any]]:
        """Take the open batches that nobody owns, and keep those of this process; the oldest first, without what only clients read.

        Those that are this process's for two thirds of `owned_s` yet are not written: there may be thousands, every second.
        Another process is silent once its batches have stayed as they were for `owned_s` of this process's own clock, `clock_s`:
        times of day of two hosts can't be compared, and each may be put back.
        """
        until, owner = BATCHES.c.owned_until_s, BATCHES.c.owner
        is_open = BATCHES.c.state.in_(OPEN)
        late = or_(until <= now_s + owned_s * 2 / 3, until > now_s + owned_s)  # or the clock was put back
        others = (
            select(owner, func.max(until).label("last")).where(is_open, owner != self._owner).group_by(owner)
        )
        async with self._database.write() as connection:
            seen = {row.owner: float(row.last) for row in await connection.execute(others)}
            self._others = {
                name: before if (before := self._others.get(name)) and before[0] == last else (last, clock_s)
                for name, last in seen.items()
            }
            silent = [
                (owner == name) & (until <= last)
                for name, (last, since_s) in self._others.items()
                if clock_s - since_s >= owned_s
            ]
            free = or_(owner.is_(None), (owner == self._owner) & late, *silent)
            await connection.execute(
                update(BATCHES).where(is_open, free).values(owner=self._owner, owned_until_s=now_s + owned_s)
            )
            query = select(*_OF_WORK).where(is_open, owner == self._owner)
            return list((await connection.execute(query.order_by(BATCHES.c.created_s, BATCHES.c.id))).all())

    async def disown(self) -> None:
        """Leave this process's batches to others."""
        async with self._database.write() as connection:
            await connection.execute(
                update(BATCHES).where(BATCHES.c.owner == self._owner).values(owner=None, owned_until_s=0.0)
            )

    async def happen(
        self, name: str, event: Event, now_s: float, *, key: str | None = None, errors: Any = None
    ) -> Row[Any] | None:
        """An event of a batch; the batch afterwards, or None where there is none of this name (and `key`)."""
        async with self._database.write() as connection:
            batch = await self._locked(connection, name)
            if batch is None or (key is not None and batch.key != key):
                return None
            await self._move(connection, batch, event, now_s, errors=errors)
            return (await connection.execute(select(BATCHES).where(BATCHES.c.id == name))).one()

    async def read(self, name: str, now_s: float) -> None:
        """Every line of a batch's input has a row."""
        models = select(LINES.c.model).where(LINES.c.batch_id == name, LINES.c.model.is_not(None)).distinct()
        async with self._database.write() as connection:
            batch = await self._locked(connection, name)
            if batch is None:
                return
            asked = list(await connection.scalars(models.limit(2)))
            model = asked[0] if len(asked) == 1 else None
            await connection.execute(update(BATCHES).where(BATCHES.c.id == name).values(model=model))
            await self._move(connection, batch, Event.READ, now_s)

    async def add_lines(self, name: str, lines: Sequence[NewLine], read_bytes: int) -> bool:
        """Lines of input up to `read_bytes`. False where the batch is no longer this process's to read, or they are there."""
        async with self._database.write() as connection:
            batch = await self._locked(connection, name)
            if (
                batch is None
                or batch.owner != self._owner
                or batch.state not in (State.VALIDATING, State.CANCELLING, State.EXPIRING)
                or batch.read_bytes >= read_bytes
            ):
                return False
            taken = set(
                await connection.scalars(
                    select(LINES.c.custom_id).where(
                        LINES.c.batch_id == name,
                        LINES.c.custom_id.in_([line.custom_id for line in lines if line.custom_id]),
                    )
                )
            )
            rows, failed = [], 0
            for line in lines:
                custom_id, result = line.custom_id, line.result
                if custom_id is not None and custom_id in taken:
                    custom_id, result = None, _twice(name, line)
                elif custom_id is not None:
                    taken.add(custom_id)
                failed += result is not None
                rows.append(
                    {
                        "batch_id": name,
                        "line": line.line,
                        "custom_id": custom_id,
                        "model": line.model,
                        "start": line.start,
                        "bytes": line.bytes,
                        "outcome": None if result is None else REFUSED,
                        "result": result,
                    }
                )
            await connection.execute(insert(LINES), rows)
            await connection.execute(
                update(BATCHES)
                .where(BATCHES.c.id == name)
                .values(
                    read_bytes=read_bytes, total=BATCHES.c.total + len(rows), failed=BATCHES.c.failed + failed
                )
            )
            return True

    async def to_do(self, name: str, models: Collection[str], behind: int, most: int) -> list[ToDo]:
        """Lines of these models behind a line that have no result, in their order."""
        query = (
            select(LINES.c.line, LINES.c.start, LINES.c.bytes, LINES.c.model)
            .where(
                LINES.c.batch_id == name,
                LINES.c.outcome.is_(None),
                LINES.c.line > behind,
                LINES.c.model.in_(models),
            )
            .order_by(LINES.c.line)
            .limit(most)
        )
        async with self._database.read() as connection:
            return [ToDo(name, *row) for row in await connection.execute(query)]

    async def next_model(self, name: str) -> str | None:
        """The model of the first line without a result."""
        query = (
            select(LINES.c.model)
            .where(LINES.c.batch_id == name, LINES.c.outcome.is_(None))
            .order_by(LINES.c.line)
            .limit(1)
        )
        async with self._database.read() as connection:
            model: str | None = await connection.scalar(query)
            return model

    async def custom_ids(self, name: str, lines: Collection[int]) -> dict[int, str | None]:
        query = select(LINES.c.line, LINES.c.custom_id).where(
            LINES.c.batch_id == name, LINES.c.line.in_(lines)
        )
        async with self._database.read() as connection:
            return {row.line: row.custom_id for row in await connection.execute(query)}

    async def commit(self, name: str, results: Sequence[Result], now_s: float) -> set[int] | None:
        """Keep results of a batch; the lines that got theirs by this call.

        None where the batch is not in progress or another's: then nothing is kept, and its lines are not to be worked on here.
        """
        async with self._database.write() as connection:
            batch = await self._locked(connection, name)
            # A process that ends leaves all batches to others, also those that the next one of its name has taken by then.
            if batch is None or batch.owner not in (None, self._owner) or batch.state != State.IN_PROGRESS:
                return None
            kept: set[int] = set()
            completed = failed = 0
            usage = Counter[str](batch.usage)
            for result in results:
                done = await connection.execute(
                    update(LINES)
                    .where(LINES.c.batch_id == name, LINES.c.line == result.line, LINES.c.outcome.is_(None))
                    .values(outcome=REFUSED if result.is_error else ANSWERED, result=result.text)
                )
                if done.rowcount:
                    kept.add(result.line)
                    failed += result.is_error
                    completed += not result.is_error
                    usage.update(result.usage)
            await connection.execute(
                update(BATCHES)
                .where(BATCHES.c.id == name)
                .values(
                    completed=BATCHES.c.completed + completed,
                    failed=BATCHES.c.failed + failed,
                    usage=None if batch.usage is None else dict(usage),
                )
            )
            if batch.completed + batch.failed + len(kept) >= batch.total:
                await self._move(connection, batch, Event.DONE, now_s)
            return kept

    async def results(self, name: str) -> AsyncIterator[Sequence[Any]]:
        """Every line with its outcome and result, in pages and in order."""
        columns = LINES.c.line, LINES.c.custom_id, LINES.c.outcome, LINES.c.result
        length = func.coalesce(func.length(LINES.c.result), 0)
        behind = 0
        while True:
            of_batch = (LINES.c.batch_id == name) & (LINES.c.line > behind)
            lengths = select(LINES.c.line, length).where(of_batch).order_by(LINES.c.line).limit(_PAGE)
            async with self._database.read() as connection:
                last = _end_of_page((await connection.execute(lengths)).all())
                if last is None:
                    return
                query = select(*columns).where(of_batch, LINES.c.line <= last).order_by(LINES.c.line)
                page = (await connection.execute(query)).all()
            behind = last
            yield page

    async def assembled(
        self, name: str, sizes: Mapping[str, tuple[str, int]], counts: tuple[int, int], now_s: float
    ) -> bool:
        """The files of results are whole: they and the batch's end come together. False where that is no longer ours to say.

        `sizes`: by column of the batch, the file and its bytes. A file without any goes.
        """
        async with self._database.write() as connection:
            batch = await self._locked(connection, name)
            ours = batch is not None and batch.owner == self._owner and batch.state in ASSEMBLING
            names: dict[str, str] = {}
            for column, (file, size_bytes) in sizes.items():
                kept = ours and size_bytes
                if kept:
                    names[column] = file
                done = await connection.execute(
                    update(FILES)
                    .where(FILES.c.id == file, FILES.c.state == UPLOADING)
                    .values(state=STORED if kept else DELETING, bytes=size_bytes)
                )
                if kept and not done.rowcount:  # a sweep has taken it for one that never became whole
                    raise StorageError("A file of results is gone; it is written anew.")
            if batch is None or not ours:
                return False
            completed, failed = counts
            await connection.execute(
                update(BATCHES)
                .where(BATCHES.c.id == name)
                .values(**names, completed=completed, failed=failed)
            )
            await self._move(connection, batch, Event.ASSEMBLED, now_s)
            return True

    async def sweep_lines(self) -> None:
        """Forget lines of batches that are over: their files have the results."""
        left = select(LINES.c.line).where(LINES.c.batch_id == BATCHES.c.id).exists()
        over = select(BATCHES.c.id).where(BATCHES.c.state.in_(OVER), left).limit(_PAGE)
        while True:
            async with self._database.read() as connection:
                names = list(await connection.scalars(over))
            if not names:
                return
            for name in names:
                await self._sweep_lines_of(name)

    async def _sweep_lines_of(self, name: str) -> None:
        of_batch = LINES.c.batch_id == name
        page = select(LINES.c.line).where(of_batch).order_by(LINES.c.line).limit(_SWEPT)
        left = True
        while left:  # others write in between, and SQLite's log has to hold one page
            async with self._database.write() as connection:
                lines = list(await connection.scalars(page))
                await connection.execute(delete(LINES).where(of_batch, LINES.c.line.in_(lines)))
            left = len(lines) == _SWEPT

    async def sweep_batches(self, ended_before_s: float) -> None:
        """Forget batches that have been over for long."""
        old = select(BATCHES).where(BATCHES.c.state.in_(OVER), BATCHES.c.created_s <= ended_before_s)
        async with self._database.write() as connection:
            for batch in (await connection.execute(old)).all():
                if batch.times.get(batch.state, batch.created_s) <= ended_before_s:
                    await connection.execute(delete(BATCHES).where(BATCHES.c.id == batch.id))

    async def _stored(self, connection: AsyncConnection, file: str) -> bool:
        """Whether a file is there, which stays so until the transaction's end."""
        query = select(FILES.c.id).where(FILES.c.id == file, FILES.c.state == STORED).with_for_update()
        return bool(await connection.scalar(query))

    async def _locked(self, connection: AsyncConnection, name: str) -> Row[Any] | None:
        # SQLite has one writer, and no such clause.
        query = select(BATCHES).where(BATCHES.c.id == name).with_for_update()
        return (await connection.execute(query)).first()

    async def _move(
        self, connection: AsyncConnection, batch: Row[Any], event: Event, now_s: float, *, errors: Any = None
    ) -> None:
        state = after(State(batch.state), event)
        if state is None:
            return
        values = {"state": state, "times": {**batch.times, state.value: now_s}}
        if errors is not None:
            values["errors"] = errors
        await connection.execute(update(BATCHES).where(BATCHES.c.id == batch.id).values(**values))

    async def _page(
        self, table: Any, key: str, query: Any, after_id: str | None, limit: int, *, newest: bool
    ) -> Sequence[Row[Any]]:
        """One more than `limit` where there are more."""
        async with self._database.read() as connection:
            if after_id is not None:
                of_mark = select(table.c.created_s).where(table.c.id == after_id, table.c.key == key)
                mark = (await connection.execute(of_mark)).scalar()
                if mark is None:
                    raise BadRequestError("after: nothing of this id is there any more; list from the start.")
                time, name = table.c.created_s, table.c.id
                further = (time < mark, name < after_id) if newest else (time > mark, name > after_id)
                query = query.where(or_(further[0], (time == mark) & further[1]))
            columns = (table.c.created_s, table.c.id)
            query = query.order_by(*(column.desc() if newest else column for column in columns))
            return (await connection.execute(query.limit(limit + 1))).all()


def _end_of_page(lengths: Sequence[Any]) -> int | None:
    """The last line of a page: of these lines the first and, of those behind it, as many as it has room for."""
    last, chars = None, 0
    for line, length in lengths:
        chars += length
        if last is not None and chars > _PAGE_CHARS:
            break
        last = line
    return last


def _not_expired(now_s: float) -> Any:
    return or_(FILES.c.expires_s.is_(None), FILES.c.expires_s > now_s)


def _twice(name: str, line: NewLine) -> str:
    return refused(
        name, line.line, line.custom_id, "duplicate_custom_id", "An earlier line has this custom_id."
    )
