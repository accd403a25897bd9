"""Parses and checks large bodies beside the event loop: one at a time, and those of one key with pauses between them.

Python parses with its global lock held, a large body for 10 ms and more. Threads side by side would hold the event loop up for the
sum of their bodies. A key with nothing but large bodies would leave the loop no time, and one with nothing but large bodies that
are refused costs it time without a request to show for it.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serving.bounded_json import SMALL_BYTES
from serving.router.http.auth import ANYONE

T = TypeVar("T")

# After a body its key's next one waits for so many times as long as that took: a key gets a fifth of the lock at most.
_PAUSES = 4
# After one that was refused: a 200th. Where there are no keys a stranger's mistake would hold up everybody's bodies.
_PAUSES_AFTER_REFUSAL = 200


class Parsing:
    """One router's large bodies. Lives in its event loop."""

    def __init__(self, pauses: float = _PAUSES, after_refusal: float = _PAUSES_AFTER_REFUSAL) -> None:
        self._pauses = pauses
        self._after_refusal = after_refusal
        self._thread = ThreadPoolExecutor(1, "parsing")
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: dict[str, int] = {}

    async def run(self, work: Callable[[], T], size_bytes: int, owner: str) -> T:
        """What `work` on a body of so many bytes of the key `owner` returns or raises. That of a small one is done at once."""
        if size_bytes < SMALL_BYTES:
            return work()
        turn = self._turns.setdefault(owner, asyncio.Lock())
        self._waiting[owner] = self._waiting.get(owner, 0) + 1
        try:
            await turn.acquire()
        except asyncio.CancelledError:
            self._left(owner)
            raise
        parsing = asyncio.get_running_loop().run_in_executor(self._thread, _timed, work)
        # Also where the client goes meanwhile: the thread works on.
        parsing.add_done_callback(lambda done: self._rest(owner, turn, *done.result()))
        outcome, _ = await asyncio.shield(parsing)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _rest(self, owner: str, turn: asyncio.Lock, outcome: object, took_s: float) -> None:
        is_refused = isinstance(outcome, Exception) and owner != ANYONE.name
        pauses = self._after_refusal if is_refused else self._pauses

        def over() -> None:
            turn.release()
            self._left(owner)

        asyncio.get_running_loop().call_later(pauses * took_s, over)

    def _left(self, owner: str) -> None:
        self._waiting[owner] -= 1
        if not self._waiting[owner]:
            del self._waiting[owner], self._turns[owner]


def _timed(work: Callable[[], T]) -> tuple[T | Exception, float]:
    began_s = time.thread_time()
    try:
        outcome: T | Exception = work()
    except Exception as error:  # noqa: BLE001  raised where it is awaited
        outcome = error
    return outcome, time.thread_time() - began_s
