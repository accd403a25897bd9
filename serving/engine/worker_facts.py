"""What the engine's workers found at its start, and what they compile while it serves: told to the store, the record and the log.

An engine starts and serves though its workers tell nothing.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
from functools import partial

from serving.engine.late_programs import Late, lines
from serving.engine.server import EngineServer
from serving.state.gcs import Store
from serving.state.publisher import Publisher
from serving.state.records import FIRST_REQUESTS, StartRecord
from serving.timings import TIMINGS

logger = logging.getLogger("ray.serve")


class WorkerFacts:
    """Of one engine; `model` is the name that clients ask for."""

    def __init__(self, model: str, server: EngineServer, store: Store, record: Publisher) -> None:
        self._model = model
        self._server = server
        self._store = store
        self._record = record
        self._start: StartRecord | None = None

    async def tell_start(self) -> None:
        """Have the workers tell what they found: devices, mesh, cache, programs."""
        try:
            if starts := await self._server.worker_starts():
                self._start = StartRecord(starts)
                await asyncio.to_thread(self._store.put_start, self._record.record.replica, self._start)
            await self._server.late_programs()  # from here on programs are late
        except Exception:
            logger.exception("%s: the workers could not tell what they found", self._model)

    async def follow(self) -> None:
        """Count and name what the engine compiles while it serves, and tell what its first requests had compiled."""
        try:
            late, output_s = Late(), -math.inf
            while True:
                load = self._server.load
                if load.last_output_s != output_s:  # or it has taken no step, and is left alone
                    output_s = load.last_output_s
                    late = await self._tell_late(late, await self._server.late_programs())
                    await self._tell_first_requests(load.finished, late)
                await asyncio.sleep(TIMINGS.late_programs_look_s)
        except Exception:
            logger.exception("%s: the workers could not tell what they compiled", self._model)

    async def _tell_late(self, before: Late, now: Late) -> Late:
        """An engine that compiles as requests come was started so, and tells nothing of it."""
        workers = self._start.workers if self._start else ()
        if now.programs > before.programs and all(worker.precompiles for worker in workers):
            figures = {"late_programs": now.programs, "late_compile_s": round(now.seconds, 3)}
            await asyncio.to_thread(partial(self._record.update, **figures))
            # First requests bring some twenty programs of one operation each, which take a second together.
            level = logging.WARNING if now.seconds - before.seconds >= 1 else logging.INFO
            for line in lines(now.after(before.programs)):
                slice_ = self._record.record.slice
                logger.log(level, "%s on slice %s compiled while it served: %s", self._model, slice_, line)
        return now

    async def _tell_first_requests(self, ended: int, late: Late) -> None:
        if self._start and self._start.late_programs is None and ended >= FIRST_REQUESTS:
            seconds = round(late.seconds, 3)
            start = dataclasses.replace(
                self._start, requests=ended, late_programs=late.programs, late_compile_s=seconds
            )
            with contextlib.suppress(Exception):  # the head restarts; the next look tells
                await asyncio.to_thread(self._store.put_start, self._record.record.replica, start)
                self._start = start
