"""Tells the store what keys have used, once a second, and hears what they have used in all routers and which keys there are."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from serving.errors import StoreAwayError
from serving.router.admission.budget import Budget
from serving.router.admission.meter import Meter
from serving.router.http.auth import KeyFile
from serving.router.http.kept_files import KeptFiles

logger = logging.getLogger("ray.serve")

FLUSH_S = 1.0
_TIMEOUT_S = 10.0  # after which an answer is taken for lost
_LAST_S = 3.0  # for the last flush of a router that ends
_HEARD_S = 2.0  # for a request to wait until the store has said what its key has used


class UsageLoop:
    """Follows one router's meter, until closed."""

    def __init__(
        self, meter: Meter, kept: KeptFiles, keys: KeyFile, calendar: Callable[[], float] = time.time
    ) -> None:
        self._meter = meter
        self._keys = keys
        self._kept = kept
        self.calendar = calendar
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._over: asyncio.Future[None] | None = None  # the next flush
        self._is_away = False

    async def start(self, flush_s: float = FLUSH_S) -> None:
        """Hear once what of budgets is used and which keys there are, if the store is there; then flush for ever."""
        if self._meter.has_budgets or self._keys.version is not None:
            await self._flush()
        self._task = asyncio.create_task(self._run(flush_s))

    async def close(self, last_s: float = _LAST_S) -> None:
        """Tell the rest."""
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
        # With its application the store goes too, and nobody finds it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(last_s):
                for _ in range(2):  # what was on its way, and what came since
                    await self._flush()

    async def hear(self, budget: Budget) -> None:
        """Have the store say at once what of a budget is used. Not while it is away: a router then goes by what it knows."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEARD_S):
                for _ in range(2):  # one may be under way that does not ask for it
                    if budget.known or self._is_away or self._task is None:
                        return
                    budget.active = True
                    self._wanted.set()
                    self._over = self._over or asyncio.get_running_loop().create_future()
                    await asyncio.shield(self._over)

    async def flush(self) -> None:
        """Tell the store, and take over its answer. Raises StoreAwayError and TimeoutError; the same is told again then."""
        if used := self._meter.flush(self.calendar()):
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await self._kept.call("/usage/flush", {**used, "keys": self._keys.version})
            if "keys" in answer:
                self._keys.take(**answer["keys"])
            self._meter.answered(answer, self.calendar())

    async def _run(self, flush_s: float) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(flush_s):
                    await self._wanted.wait()
            self._wanted.clear()
            await self._flush()
            if self._over:
                self._over.set_result(None)
                self._over = None

    async def _flush(self) -> None:
        try:
            await self.flush()
            self._is_away = False
        except StoreAwayError:  # it is logged once, and usage stays here until the store is back
            self._is_away = True
        except TimeoutError:
            self._is_away = True
            logger.warning("the store does not answer what keys have used; it is told again")
        except Exception:
            logger.exception("usage is not told; the next flush tries again")
