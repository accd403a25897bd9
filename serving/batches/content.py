"""Contents of batches' files: an input becomes rows, results become files, and what nobody may read any more goes.

A try that was cut short is made again: reading goes on behind the rows that there are, and files are written anew.
"""

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from sqlalchemy import Row

from serving.batches import lines
from serving.batches.files import Folder, Writing
from serving.batches.ledger import ANSWERED, Ledger, NewLine
from serving.batches.lifecycle import Event, State
from serving.batches.storage_calls import StorageCalls
from serving.config import BatchSpec
from serving.errors import StorageError

logger = logging.getLogger("ray.serve")

_UPLOAD_S = 3600.0  # of one file, at most
_READ_LINES, _READ_BYTES = 500, 4 << 20  # of one transaction
_OUTPUT, _ERRORS = "output_file_id", "error_file_id"
# What is said of lines without a result when the files are assembled.
_UNDONE = {
    State.FINALIZING: ("internal_error", "This line has no result."),
    State.CANCELLING: ("batch_cancelled", "The batch was cancelled before this line was asked."),
    State.EXPIRING: (
        "batch_expired",
        "The batch's completion window was over before this line was answered.",
    ),
}


class Content:
    """What is between the ledger and the folder."""

    def __init__(
        self,
        ledger: Ledger,
        folder: Folder,
        calls: StorageCalls,
        spec: BatchSpec,
        models: Collection[str],
        most_line_bytes: int,
        calendar: Callable[[], float],
    ) -> None:
        """`models` are the names that a line may ask for."""
        self._ledger = ledger
        self._folder = folder
        self._calls = calls
        self._spec = spec
        self._models = models
        self._most_line_bytes = most_line_bytes
        self._calendar = calendar

    async def read(self, batch: Row[Any]) -> None:
        """Give every line of a batch's input a row, from where an earlier try has ended."""
        try:
            await self._read(batch)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            await self._break(batch, "invalid_file", "The content of the input file is no longer there.")
        except Exception:  # of the file itself: another try would end as this one
            logger.exception("batch %s can't be read", batch.id)
            await self._break(batch, "invalid_file", "The file can't be read as lines of JSON.")

    async def assemble(self, batch: Row[Any]) -> None:
        """Write the files of results, and end the batch with them."""
        if batch.state != State.FINALIZING and State.IN_PROGRESS not in batch.times:
            await self.read(batch)  # its end came while it was read, and every line is told of
        now_s = self._calendar()
        expires_s = now_s + (batch.output_expires_after_s or self._spec.max_age_s)
        names = {column: f"file-{uuid.uuid4().hex}" for column in (_OUTPUT, _ERRORS)}
        for column, name in names.items():
            what = "output" if column == _OUTPUT else "error"
            await self._ledger.add_file(
                {
                    "id": name,
                    "key": batch.key,
                    "filename": f"{batch.id}_{what}.jsonl",
                    "purpose": "batch_output",
                    "bytes": 0,
                    "created_s": now_s,
                    "expires_s": expires_s,
                }
            )
        code, why = _UNDONE[State(batch.state)]
        writings: dict[str, Writing] = {}
        try:
            for column, name in names.items():
                writings[column] = await self._calls.call(batch.id, self._folder.write, name)
            counts = Counter[str]()
            async for page in self._ledger.results(batch.id):
                texts: dict[str, list[str]] = {_OUTPUT: [], _ERRORS: []}
                for row in page:
                    text = row.result or lines.refused(batch.id, row.line, row.custom_id, code, why)
                    texts[_OUTPUT if row.outcome == ANSWERED else _ERRORS].append(text + "\n")
                for column, of_column in texts.items():
                    counts[column] += len(of_column)
                    await self._calls.call(batch.id, writings[column].write, "".join(of_column).encode())
            for writing in writings.values():
                await self._calls.call(batch.id, writing.close)
        except BaseException:
            for writing in writings.values():
                await self.discard(batch.id, writing)
            await self.clear(names.values())
            raise
        sizes = {column: (name, writings[column].bytes) for column, name in names.items()}
        await self._ledger.assembled(batch.id, sizes, (counts[_OUTPUT], counts[_ERRORS]), self._calendar())

    async def discard(self, name: str, writing: Writing) -> None:
        """Stop writing for `name`: a bucket's file is given up by a call over the network."""
        try:
            await self._calls.call(name, writing.discard)
        except StorageError as error:
            logger.warning("a file that was not written is swept later: %s", error.message)

    async def clear(self, names: Iterable[str]) -> None:
        """Leave nothing of files that were not written: the next try may come every second, for hours."""
        try:
            for name in names:
                await self._calls.call(name, self._folder.delete, name)
                await self._ledger.drop_file(name)
        except StorageError as error:
            logger.warning("a file that was not written is swept later: %s", error.message)

    async def sweep(self) -> None:
        """Delete what nobody may read any more."""
        now_s, kept = self._calendar(), []
        await self._ledger.sweep_lines()
        await self._ledger.sweep_batches(now_s - self._spec.max_age_s)
        for name in await self._ledger.condemn(now_s, _UPLOAD_S):
            try:
                await self._calls.call(name, self._folder.delete, name)
            except StorageError as error:  # of this file, maybe alone
                kept.append(error.message)
            else:
                await self._ledger.forget_file(name)
        if kept:
            logger.warning("%d files are to go and are swept later: %s", len(kept), kept[0])

    async def _read(self, batch: Row[Any]) -> None:
        reading, total = self._pieces(batch), batch.total
        while True:
            piece = await self._calls.call(batch.id, next, reading, None)
            if piece is None:
                break
            rows, read_bytes = piece
            total += len(rows)
            if total > self._spec.max_lines:
                problem = f"The file has more than {self._spec.max_lines} lines, the most of a batch; send several (batch.max_lines)."
                await self._break(batch, "too_many_lines", problem)
                return
            if not await self._ledger.add_lines(batch.id, rows, read_bytes):
                return
        after = await self._ledger.batch(batch.key, batch.id)
        if after and not after.total:
            await self._break(batch, "empty_file", "The file has no line.")
        else:
            await self._ledger.read(batch.id, self._calendar())

    async def _break(self, batch: Row[Any], code: str, message: str) -> None:
        error = {"code": code, "message": message, "line": None, "param": None}
        await self._ledger.happen(
            batch.id, Event.BREAK, self._calendar(), errors={"object": "list", "data": [error]}
        )

    def _pieces(self, batch: Row[Any]) -> Iterator[tuple[list[NewLine], int]]:
        """The lines of an input without rows, some at a time, and how far the file is read with them."""
        with self._folder.read(batch.input_file_id) as file:
            number = at = 0
            rows: list[NewLine] = []
            began = batch.read_bytes
            while text := file.readline(self._most_line_bytes + 1):
                start, number = at, number + 1
                at += len(text)
                whole = text.endswith(b"\n") or len(text) <= self._most_line_bytes
                if not whole:
                    at += _skip(file)
                if at <= batch.read_bytes or not text.strip():
                    continue
                rows.append(self._row(batch, number, start, text, whole=whole))
                if len(rows) >= _READ_LINES or at - began >= _READ_BYTES:
                    yield rows, at
                    rows, began = [], at
            if rows:
                yield rows, at

    def _row(self, batch: Row[Any], number: int, start: int, text: bytes, *, whole: bool) -> NewLine:
        try:
            if not whole:
                raise lines.LineError("line_too_long", f"A line has at most {self._most_line_bytes} bytes.")  # noqa: TRY301
            asked = lines.asked(text, (batch.endpoint,), self._models)
        except lines.LineError as error:
            result = lines.refused(batch.id, number, error.custom_id, error.code, error.message)
            return NewLine(number, start, len(text), result=result)
        return NewLine(number, start, len(text), asked.custom_id, asked.model)


def _skip(file: Any) -> int:
    """Read the rest of a line that is too long; its bytes."""
    skipped = 0
    while piece := file.readline(1 << 20):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
