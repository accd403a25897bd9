"""A batch in progress, as far as it is handed out; and its lines on their way from the input."""

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row

from serving.batches import lines
from serving.batches.files import Folder, Reading
from serving.batches.ledger import Result, ToDo


@dataclass
class Bodies:
    """Number, model and body of lines, and results of those that can't be read, for an older version may have let them in."""

    of_lines: list[tuple[int, str, str]] = field(default_factory=list)
    unread: list[Result] = field(default_factory=list)


@dataclass
class Coming:
    """Lines that are being read; `numbers` are those that nobody has brought meanwhile. `is_late`: a router was kept for them in vain."""

    names: frozenset[str]
    numbers: set[int]
    task: asyncio.Task[Bodies]
    is_late: bool = False


@dataclass
class Work:
    """`behind`: by models asked for, the last line that was looked up.

    `returns`: how often lines came back; `waits_until_s`: after its lines could not be read; `why`: what it waits for.
    """

    batch: Row[Any]
    ahead: dict[frozenset[str], deque[ToDo]] = field(default_factory=dict)
    behind: dict[frozenset[str], int] = field(default_factory=dict)
    nothing: set[frozenset[str]] = field(default_factory=set)
    file: Reading | None = None
    coming: Coming | None = None
    returns: int = 0
    waits_until_s: float = -math.inf
    why: str = ""
    is_over: bool = False

    def returned(self) -> None:
        """Lines came back: look from the start again."""
        self.returns += 1
        self.ahead.clear()
        self.behind.clear()
        self.nothing.clear()

    def may_have(self, names: frozenset[str]) -> bool:
        """Whether it may have lines of these models that are nowhere; one of another model has none, without a look."""
        of_another = self.batch.model is not None and self.batch.model not in names
        return not of_another and (
            self.coming is not None or names not in self.nothing or bool(self.ahead.get(names))
        )

    def read(self, folder: Folder, chosen: list[ToDo]) -> Bodies:
        """Blocks. The file is this call's until it ends: closing it elsewhere would wait for a read that hangs."""
        file, self.file = self.file, None
        file = file or folder.read(self.batch.input_file_id)
        bodies = Bodies()
        try:
            for line in chosen:
                file.seek(line.start)
                try:
                    bodies.of_lines.append((line.line, line.model, lines.body(file.read(line.bytes))))
                except lines.LineError as error:
                    text = lines.refused(self.batch.id, line.line, None, error.code, error.message)
                    bodies.unread.append(Result(self.batch.id, line.line, text, is_error=True))
        except BaseException:
            file.close()
            raise
        self.file = file
        if self.is_over:
            self.close_file()
        return bodies

    def close(self) -> None:
        self.is_over = True
        if self.coming:
            self.coming.task.cancel()
            self.coming = None
        self.close_file()

    def close_file(self) -> None:
        file, self.file = self.file, None
        if file:
            file.close()
