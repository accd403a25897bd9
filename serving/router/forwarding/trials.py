"""Begins and ends the trials of suspects, one at a time on a slice, as agreed with the other routers.

serving.router.forwarding.suspects decides who is a suspect and what a trial shows.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from serving.router.forwarding.suspects import Suspects

logger = logging.getLogger("ray.serve")

_LATE_S = 5.0  # between the end of a trial and the store's knowing of it


class Claims(Protocol):
    """Which router tries which suspect on which slice: one suspect at a time on a slice, and on one slice at a time."""

    async def take(self, replica: str, name: str, for_s: float) -> bool:
        """Whether this router may try the suspect on the slice: for so long, or until it gives both back."""

    async def give_back(self, replica: str, name: str) -> None: ...


class NoClaims:
    """Of a router that is the only one."""

    async def take(self, replica: str, name: str, for_s: float) -> bool:  # noqa: ARG002  as Claims has it
        return True

    async def give_back(self, replica: str, name: str) -> None:  # noqa: ARG002
        return


class Trials:
    """Of one router."""

    def __init__(self, suspects: Suspects) -> None:
        self.claims: Claims = NoClaims()
        self.now: Callable[[], float] = time.time
        self._suspects = suspects
        self._givings: dict[asyncio.Task[None], tuple[str, str]] = {}  # replica and suspect

    def closed(self) -> set[str]:
        """Replicas on which no other suspect of this router may be tried."""
        return self._suspects.closed() | {replica for replica, _ in self._givings.values()}

    def open_to(self, name: str) -> bool:
        """Whether no trial of this suspect is under way here, nor just over, and one of its kind may be tried."""
        under_way = self._suspects.on_trial(name) or any(other == name for _, other in self._givings.values())
        return not under_way and not self._suspects.held_s(name, self.now())

    async def begin(self, name: str, replica: str) -> bool:
        """Whether a suspect may be tried on a replica; from now on, so that no other is meanwhile."""
        self._suspects.tried(name, replica, self.now())
        taken = False
        try:
            taken = await self.claims.take(replica, name, self._suspects.trial_s(name) + _LATE_S)
        except asyncio.CancelledError:
            self.end(name, self._suspects.left(name, replica))  # the store may have noted it all the same
            raise
        except Exception:
            logger.exception("no suspect is tried on a slice while the store can't be asked")
        if not taken:
            self._suspects.left(name, replica)
        elif replica in self._suspects.closed():
            self._suspects.tried(name, replica, self.now())  # the store may have been slow
        else:
            self.end(name, replica)  # it was cleared meanwhile
        return taken

    def end(self, name: str, replica: str | None, after_s: float = 0.0) -> None:
        """A trial is over, where `replica` has one: any router may try suspects there, and this suspect elsewhere."""
        if replica is not None:
            giving = asyncio.create_task(self._give_back(name, replica, after_s))
            self._givings[giving] = replica, name
            giving.add_done_callback(self._givings.pop)

    async def _give_back(self, name: str, replica: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        try:
            await self.claims.give_back(replica, name)
        except Exception:
            logger.exception("a slice is given back to other routers' suspects when its time is over")
