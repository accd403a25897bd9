"""A router's beat: reads the store, hands its records to the router, and writes the router's records back.

It ends a replica that neither beats nor answers a probe, so that Serve starts another one.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from serving.router.core import Forgotten, RouterCore, abandoned
from serving.slices.quarantine import EARLY_S, failed
from serving.slices.tpu_hosts import TpuHost
from serving.state.board import Board
from serving.state.gcs import Store
from serving.state.records import Demand, SliceFailures, SliceRecord, SliceState, Suspicion, Wanted
from serving.timings import TIMINGS, Timings

logger = logging.getLogger("ray.serve")

_ASKED_AT_ONCE = 64  # slices: where the store is slow, the records of all of them stand still


class StoreClaims:
    """Slices on which this router, and no other, tries a suspect, and the suspects that it tries."""

    def __init__(self, store: Store, application: str, router: str) -> None:
        self._store = store
        self._application = application
        self._router = router

    async def take(self, replica: str, name: str, for_s: float) -> bool:
        return await asyncio.to_thread(self._take, replica, name, for_s)

    async def give_back(self, replica: str, name: str) -> None:
        for what in (replica, name):
            await asyncio.to_thread(self._store.unclaim, self._application, what, self._router)

    def _take(self, replica: str, name: str, for_s: float) -> bool:
        store, application, router, now = self._store, self._application, self._router, self._store.now()
        if not store.claim(application, name, router, now, now + for_s):
            return False
        if store.claim(application, replica, router, now, now + for_s):
            return True
        store.unclaim(application, name, router)
        return False


async def in_steps(work: Iterable[None]) -> Any:
    """Let the event loop go on between the steps of a generator; returns what the generator returns."""
    steps = iter(work)
    while True:
        try:
            next(steps)
        except StopIteration as over:
            return over.value
        await asyncio.sleep(0)


class StoreLoop:
    """Follows the store for one router, until closed."""

    def __init__(
        self,
        core: RouterCore,
        store: Store,
        end_replica: Callable[[str, str], None],
        timings: Timings = TIMINGS,
        *,
        hosts: Callable[[], Sequence[TpuHost]] = tuple,
    ) -> None:
        """`end_replica` ends the replica of a deployment and tag that has fallen silent, `hosts` lists the TPU hosts; both may block."""
        self._core = core
        self._store = store
        self._end_replica = end_replica
        self._hosts = hosts
        self._beat_s = timings.beat_s
        self._look_s = timings.waiting_look_s
        self._explaining: asyncio.Task[None] | None = None
        core.keep_time(store.now)
        core.dispatcher.trials.claims = StoreClaims(store, core.application, core.name)
        self._board = Board()
        self._told: Mapping[str, Suspicion] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking = asyncio.Semaphore(_ASKED_AT_ONCE)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the store once, then on every beat."""
        await self._beat()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, and delete this router's records. What routers share of a model goes with the last router that has it."""
        if self._task:
            self._task.cancel()
        core, store = self._core, self._store
        await asyncio.to_thread(store.put_suspicions, core.application, core.name, {})
        for demand in core.demands():
            await asyncio.to_thread(store.delete_demand, demand)
        left = await asyncio.to_thread(store.look, self._board, core.application)
        for entry in abandoned(left.others):
            await asyncio.to_thread(store.delete_wanted, core.application, entry.model)

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
        view = await asyncio.to_thread(self._store.look, self._board, core.application)
        now_s = time.monotonic()
        await in_steps(self._board.take(view.beats, view.fixed))
        snapshot = dataclasses.replace(view.others, slices=self._board.slices)
        forgotten = await in_steps(core.take(snapshot, now_s))
        demands = core.demands()
        wanted = core.wanted(now_s)
        if any(entry.missing for entry in wanted) and (not self._explaining or self._explaining.done()):
            self._explaining = self._background(self._explain())
        for entry in core.liveness.silent:
            self._background(self._ask(entry))
        for entry in forgotten.slices:
            self._background(self._end_if_silent(entry))
        await asyncio.to_thread(self._write, wanted, demands, forgotten)
        for entry, reason in core.wrong_slices():
            await asyncio.to_thread(self._store.put_verdict, entry.replica, reason)
        # Every time while there are any: other routers delete those of one that stood still.
        if (suspicions := dict(core.suspicions)) or self._told:
            await asyncio.to_thread(self._store.put_suspicions, core.application, core.name, suspicions)
            self._told = suspicions
        await asyncio.to_thread(core.publish, demands, now_s)

    def _background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _explain(self) -> None:
        """See why slices are missing, and rest before another look."""
        try:
            self._core.explain(await asyncio.to_thread(self._hosts))
        except Exception:
            logger.exception("Ray's hosts can't be listed; why slices are missing stays as it was")
        await asyncio.sleep(self._look_s)

    async def _ask(self, entry: SliceRecord) -> None:
        """Ask a slice whose record stands still whether it is well."""
        liveness, well = self._core.liveness, False
        try:
            async with self._asking:
                well = await self._core.dispatcher.is_well(entry)
        finally:
            if well:
                liveness.answered(entry.replica, time.monotonic())
            else:
                liveness.unanswered(entry.replica)

    async def _end_if_silent(self, entry: SliceRecord) -> None:
        """A silent replica that still answers only can't write to the store, as after a head restart: it keeps its engine."""
        if entry.address and not await self._core.dispatcher.reaches(entry):
            logger.warning(
                "slice %s of %s neither beats nor answers: its replica ends", entry.slice, entry.model
            )
            if self._core.audit:
                self._core.audit.tell(
                    "slice_ended", {"slice": entry.slice, "model": entry.model, "reason": "silent"}
                )
            await asyncio.to_thread(self._end_replica, entry.deployment, entry.tag)

    def _failure(self, record: SliceRecord) -> SliceFailures | None:
        """Of a replica whose process ended while it started or soon after, as by lack of memory: it could not tell itself."""
        early, now = record.serves, self._store.now()
        if not record.slice or not (record.state is SliceState.STARTING or early):
            return None
        if early and now - record.since > EARLY_S:
            return None
        reason = f"the replica ended without a word {'soon after it began to serve' if early else 'while it started'}"
        seen = self._core.seen
        return failed(record, reason, now, seen.slice_failures, seen.slices, early=early)

    def _write_failures(self, forgotten: Forgotten) -> None:
        for failures in (*forgotten.failures, *(left for left in forgotten.explained if not left.failures)):
            self._store.delete_slice_failures(failures)
        for failures in forgotten.explained:
            if failures.failures:
                self._store.put_slice_failures(failures)

    def _write(self, wanted: list[Wanted], demands: list[Demand], forgotten: Forgotten) -> None:
        """Write this router's records, and delete those of slices and routers that fell silent.

        Not of those that beat again: this router may have been paused since it looked, or its store slow.
        """
        for demand in demands:
            self._store.put_demand(demand)
        for entry in wanted:
            self._store.put_wanted(entry)
        self._write_failures(forgotten)
        for record in forgotten.slices:
            if self._store.has_moved(record):
                continue
            if (failure := self._failure(record)) and self._store.ended_alone(record):
                self._store.put_slice_failures(failure)
            self._store.delete_slice(record)
        for demand in forgotten.demands:
            if self._store.has_moved(demand):
                continue
            self._store.delete_demand(demand)
            self._store.put_suspicions(demand.application, demand.router, {})
        for entry in forgotten.wanted:
            self._store.delete_wanted(self._core.application, entry.model)
