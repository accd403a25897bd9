"""Parses large bodies beside the event loop: one at a time, and those of one key with pauses between them.

Python parses with its global lock held, a large body for 10 ms and more. Threads side by side held the event loop up for the sum
of their bodies, and a key with nothing but large bodies left it no time.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serving.bounded_json import SMALL_BYTES
from serving.router.http.validation import parse

# After a body its key's next one waits for so many times as long as that took: a key gets a fifth of the lock at most.
_PAUSES = 4


class Parsing:
    """One router's large bodies. Lives in its event loop."""

    def __init__(self, parse: Callable[[bytes], dict[str, Any]] = parse, pauses: float = _PAUSES) -> None:
        self._parse = parse
        self._pauses = pauses
        self._thread = ThreadPoolExecutor(1, "parsing")
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: dict[str, int] = {}

    async def fields(self, body: bytes, owner: str) -> dict[str, Any]:
        """The fields of a body of the key `owner`; raises what parsing raises."""
        if len(body) < SMALL_BYTES:
            return self._parse(body)
        turn = self._turns.setdefault(owner, asyncio.Lock())
        self._waiting[owner] = self._waiting.get(owner, 0) + 1
        try:
            await turn.acquire()
        except asyncio.CancelledError:
            self._left(owner)
            raise
        parsing = asyncio.get_running_loop().run_in_executor(self._thread, self._timed, body)
        # Also where the client goes meanwhile: the thread parses on.
        parsing.add_done_callback(lambda done: self._rest(owner, turn, done.result()[1]))
        found, _ = await asyncio.shield(parsing)
        if isinstance(found, Exception):
            raise found
        return found

    def _timed(self, body: bytes) -> tuple[dict[str, Any] | Exception, float]:
        began_s = time.thread_time()
        try:
            found: dict[str, Any] | Exception = self._parse(body)
        except Exception as error:  # noqa: BLE001  raised where it is awaited
            found = error
        return found, time.thread_time() - began_s

    def _rest(self, owner: str, turn: asyncio.Lock, took_s: float) -> None:
        def over() -> None:
            turn.release()
            self._left(owner)

        asyncio.get_running_loop().call_later(self._pauses * took_s, over)

    def _left(self, owner: str) -> None:
        self._waiting[owner] -= 1
        if not self._waiting[owner]:
            del self._waiting[owner], self._turns[owner]
