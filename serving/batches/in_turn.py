"""Work on batches in the background: few at a time, and keys in turn.

A batch that is read or written has files open, and thousands may be to read at once. A key has a part of the places alone, so that
its hundred large batches, which take minutes, keep nobody's small one.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Container, Coroutine
from typing import Any

from serving.errors import StorageError

logger = logging.getLogger("ray.serve")

_MOST, _MOST_OF_KEY = 16, 4  # under way at once

Work = Callable[[], Coroutine[Any, Any, None]]


class InTurn:
    """What is under way, and what waits for its turn, by name."""

    def __init__(self, most: int = _MOST, most_of_key: int = _MOST_OF_KEY) -> None:
        self._most = most
        self._most_of_key = most_of_key
        self._waiting: dict[str, deque[tuple[str, Work]]] = {}  # by key
        self._names: set[str] = set()  # of all that wait or run
        self._running: dict[str, asyncio.Task[None]] = {}
        self._of_key: Counter[str] = Counter()  # of those that run
        self.why: dict[str, str] = {}  # what the storage said to those whose last try failed

    def begin(self, name: str, key: str, work: Work) -> None:
        """Have it done in its turn, unless something of this name waits or runs."""
        if name not in self._names:
            self._names.add(name)
            self._waiting.setdefault(key, deque()).append((name, work))
            self._next()

    def forget_all_but(self, names: Container[str]) -> None:
        """Why others failed is of no interest any more."""
        self.why = {name: why for name, why in self.why.items() if name in names}

    async def idle(self) -> None:
        """Wait until nothing is left."""
        while self._running:
            await asyncio.gather(*self._running.values())

    async def close(self) -> None:
        self._waiting.clear()
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _next(self) -> None:
        while self._waiting and len(self._running) < self._most:
            key = min(self._waiting, key=self._of_key.__getitem__)
            if self._of_key[key] >= self._most_of_key:
                return
            name, work = self._waiting[key].popleft()
            if not self._waiting[key]:
                del self._waiting[key]
            self._of_key[key] += 1
            task = self._running[name] = asyncio.create_task(self._tried(name, work))
            task.add_done_callback(lambda _, name=name, key=key: self._ended(name, key))  # type: ignore[misc]

    def _ended(self, name: str, key: str) -> None:
        del self._running[name]
        self._names.discard(name)
        self._of_key[key] -= 1
        if not self._of_key[key]:
            del self._of_key[key]
        self._next()

    async def _tried(self, name: str, work: Work) -> None:
        try:
            await work()
            self.why.pop(name, None)
        except StorageError as error:
            self.why[name] = error.message
            logger.error("%s waits: %s", name, error.message)  # noqa: TRY400  the message says it all
        except Exception:
            logger.exception("%s waits", name)
