"""Begins requests a few in each turn of the event loop, so that none waits for a crowd of others, and whose they are in turn.

A request's first step, from its headers to its slice, keeps the loop for half a millisecond. Two hundred that come at once would
keep it for a hundred, and a key's one request waits behind another's two hundred.
"""

import asyncio
from collections import deque
from collections.abc import Callable

# In a turn. The door takes more connections than that: the rest waits here, by key, and not in the kernel's queue.
_MOST = 4
# While many wait, fewer: who is not of the crowd comes through shorter turns. Turns cost an answer a tenth more where 32 clients ask flat out.
_CROWD = 64
_MOST_OF_CROWD = 2


class Starts:
    """Those of one event loop."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._begun = 0  # in this turn
        self._is_due = False  # whether the next turn is waited for
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # by owner; whose turn it is stands first
        self._waiting_count = 0

    def put(self, begin: Callable[[], None], owner: Callable[[], str]) -> None:
        """Call `begin` in this turn of the loop or a later one; `owner`, which a free loop does not ask, says whose it is."""
        if self._begun < self._most and not self._waiting:
            self._begun += 1
            begin()
        else:
            self._waiting.setdefault(owner(), deque()).append(begin)
            self._waiting_count += 1
        if not self._is_due:
            self._await_turn()

    def _await_turn(self) -> None:
        self._is_due = True
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        if not self._begun:
            self._is_due = False
            return
        self._begun = 0
        self._await_turn()  # also where one of them fails
        most = self._most if self._waiting_count <= _CROWD else min(self._most, _MOST_OF_CROWD)
        while self._waiting and self._begun < most:
            owner, queue = next(iter(self._waiting.items()))
            del self._waiting[owner]
            begin = queue.popleft()
            self._waiting_count -= 1
            if queue:
                self._waiting[owner] = queue  # behind the others
            self._begun += 1
            begin()
