"""Calls of the files' storage: each on a thread of its own, and for a limited time.

A bucket that hangs gives no answer and no error, and a thread that waits for it can't be ended. So its caller goes on without it.
Few of a file's or batch's calls may hang, so that there are places for those of the others.
"""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from serving.errors import StorageError

T = TypeVar("T")

_ANSWER_S = 60.0  # of one call: a few MiB are read or written
_MOST, _MOST_HANGING = 64, 4  # calls at once, and those of one name that nobody waits for any more


class StorageCalls:
    """The calls that are under way."""

    def __init__(self, answer_s: float = _ANSWER_S) -> None:
        self._answer_s = answer_s
        self._places = asyncio.Semaphore(_MOST)
        self._hanging: Counter[str] = Counter()

    async def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """`name`: the file or batch that it is for. Raises StorageError where no answer comes in time, and what `function` raises."""
        if self._hanging[name] >= _MOST_HANGING:
            raise StorageError(
                f"The storage of files hangs: {_MOST_HANGING} earlier calls have no answer yet."
            )
        try:
            async with asyncio.timeout(self._answer_s):
                await self._places.acquire()
        except TimeoutError:
            raise StorageError(f"The storage of files hangs: {_MOST} calls have no answer.") from None
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def end(settle: Callable[[Any], None], outcome: Any) -> None:
            self._places.release()
            if answer.cancelled():
                self._hanging[name] -= 1
                self._hanging = +self._hanging  # without names of which nothing hangs any more
            else:
                settle(outcome)

        def run() -> None:
            try:
                outcome: Any = function(*arguments)
                settle: Callable[[Any], None] = answer.set_result
            except BaseException as error:  # noqa: BLE001  it is the caller's
                outcome, settle = error, answer.set_exception
            with contextlib.suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(end, settle, outcome)

        try:
            threading.Thread(target=run, daemon=True, name="storage").start()  # its hang is not the process's
        except RuntimeError as error:  # the system's threads are used up
            self._places.release()
            raise StorageError(f"The storage of files can't be asked now ({error}).") from error
        try:
            await asyncio.wait({answer}, timeout=self._answer_s)
        finally:
            if not answer.done():
                answer.cancel()
                self._hanging[name] += 1
        if answer.cancelled():
            raise StorageError(f"The storage of files has given no answer for {self._answer_s:g} s.")
        return answer.result()
