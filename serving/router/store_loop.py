"""A router's beat: reads the store, hands it to the router, and writes back what the router says.

A replica that has neither beaten nor answers a probe is ended, so that Serve starts another one.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping

from serving.router.core import Forgotten, RouterCore
from serving.state.gcs import Store
from serving.state.records import Demand, SliceRecord, Suspicion, Wanted
from serving.timings import TIMINGS, Timings

logger = logging.getLogger("ray.serve")


class StoreLoop:
    """Follows the store for one router, until closed."""

    def __init__(
        self,
        core: RouterCore,
        store: Store,
        end_replica: Callable[[str, str], None],
        timings: Timings = TIMINGS,
    ) -> None:
        """`end_replica` ends the replica of a deployment and tag that has fallen silent; it may block."""
        self._core = core
        self._store = store
        self._end_replica = end_replica
        self._beat_s = timings.beat_s
        self._told: Mapping[str, Suspicion] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the store once, then on every beat."""
        await self._beat()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, and take what this router wrote out of the store. What routers share stays while another one beats."""
        if self._task:
            self._task.cancel()
        core, store = self._core, self._store
        await asyncio.to_thread(store.put_suspicions, core.application, core.name, {})
        for demand in core.demands():
            await asyncio.to_thread(store.delete_demand, demand)
            if core.alone:
                await asyncio.to_thread(store.delete_wanted, core.application, demand.model)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self._beat()
            except Exception:
                # The table stays as it was: slices go on answering while the head restarts.
                logger.exception("the store can't be read; routing by the last view of it")

    async def _beat(self) -> None:
        core = self._core
        snapshot = await asyncio.to_thread(self._store.read, core.application)
        now_s = time.monotonic()
        forgotten = core.take(snapshot, now_s)
        demands = core.demands()
        wanted = [dataclasses.replace(one, application=core.application) for one in core.wanted(now_s)]
        for entry in forgotten.slices:
            ending = asyncio.create_task(self._end_if_silent(entry))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
        await asyncio.to_thread(self._write, wanted, demands, forgotten)
        if (suspicions := dict(core.suspicions)) != self._told:
            await asyncio.to_thread(self._store.put_suspicions, core.application, core.name, suspicions)
            self._told = suspicions
        await asyncio.to_thread(core.publish, demands, now_s)

    async def _end_if_silent(self, entry: SliceRecord) -> None:
        """A replica that answers only can't write to the store, as after a restart of the head: its engine is worth more."""
        if entry.address and not await self._core.dispatcher.reaches(entry):
            logger.warning(
                "slice %s of %s neither beats nor answers: its replica ends", entry.slice, entry.model
            )
            await asyncio.to_thread(self._end_replica, entry.deployment, entry.tag)

    def _write(self, wanted: list[Wanted], demands: list[Demand], forgotten: Forgotten) -> None:
        """What this router says, less what those left behind that ended without a word."""
        for one in wanted:
            self._store.put_wanted(one)
        for demand in demands:
            self._store.put_demand(demand)
        for entry in forgotten.slices:
            self._store.delete_slice(entry)
        for demand in forgotten.demands:
            self._store.delete_demand(demand)
            self._store.put_suspicions(demand.application, demand.router, {})
