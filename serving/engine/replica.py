"""One Serve replica is one TPU slice: it holds the slice's placement group and runs the engine on it.

Serve owns its life. It answers requests over HTTP on its own port, says so on the board, watches hosts, workers and
engine itself, and gives the slice up as a whole as soon as any of them is gone: vLLM's own health check stays silent
when a host dies under it, and its EngineCore hangs.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from typing import Any

import ray
from ray import serve

from serving.engine.server import EngineServer, EngineSite
from serving.engine.slice_metrics import ChipsOf, SliceMetrics
from serving.environment import is_simulated
from serving.errors import ServingError, SliceLostError
from serving.planning import Plan
from serving.slices.held_slice import held_slice
from serving.slices.host_watch import HostWatch, first, watched_in_a_thread
from serving.slices.placement import is_waiting
from serving.slices.rollout import Yielding
from serving.state.gcs import Store
from serving.state.publisher import Publisher
from serving.state.records import SliceRecord, SliceState, deployment
from serving.timings import TIMINGS

logger = logging.getLogger("ray.serve")

MakeEngine = Callable[[Plan, EngineSite], EngineServer]


class SliceReplica:
    """The callable of a slice deployment; `app.build` binds it to its plan."""

    async def __init__(self, plan: Plan, engine: MakeEngine, chips_of: ChipsOf | None = None) -> None:  # type: ignore[misc]  # Serve awaits it
        """`engine` makes the engine of the host that this replica stands on; `chips_of` works out a simulated slice's chip use."""
        context = ray.get_runtime_context()
        ours = serve.get_replica_context()
        self._plan = plan
        self._spec = plan.model
        self._failure: SliceLostError | None = None
        self._watch: asyncio.Task[None] | None = None
        self._started = time.monotonic()
        self._phase = ("placing", self._started)
        self._phases: list[tuple[str, float]] = []
        self._store = Store(context.gcs_address)
        self._record = Publisher(
            self._store,
            SliceRecord(
                replica=context.get_actor_id(),
                model=plan.model.name,
                state=SliceState.STARTING,
                phase="placing",
                shape=str(plan.slice),
                application=ours.app_name,
                pool=plan.pool,
                deployment=deployment(ours.app_name, ours.deployment),
                tag=ours.replica_id.unique_id,
                since=time.time(),
                version=plan.version,
                simulated=is_simulated(),
                **_planned(plan),
            ),
            beaten=SliceMetrics(plan, chips_of).publish,
        )
        try:
            group = ray.util.get_current_placement_group()
            held = held_slice(group)
            self._record.update(slice=held.name, hosts=tuple(host.ip for host in held.hosts))
            self._hosts = HostWatch(held, group, context.get_node_id())
            self._engine = engine(plan, EngineSite(held, group, context.gcs_address, context.get_actor_id()))
            self._enter("starting the engine")
            self._record.load = self._starting
            with _serves_log_kept(), watched_in_a_thread(self._lost_while_starting, self._end_start):
                await self._engine.start()
        except ServingError as error:
            self._record.update(state=SliceState.LOST, reason=error.message)
            raise
        self._record.load = self._load
        self._enter("serving")
        self._record.update(
            state=SliceState.SERVING,
            address=f"http://{held.hosts[0].ip}:{self._engine.port}",
            max_model_len=self._engine.max_model_len,
        )
        self._watch = asyncio.create_task(self._give_up_when_lost())
        self._notice = asyncio.create_task(self._leave_on_notice())
        self._yielding = asyncio.create_task(self._make_room())
        logger.info(
            "%s serves on slice %s (%s) after %.0f s%s",
            plan.model.name,
            held.name,
            plan.slice,
            time.monotonic() - self._started,
            ", simulated" if is_simulated() else "",
        )

    def reconfigure(self, settings: dict[str, Any]) -> None:
        """What the YAML may change while the engine runs; Serve calls it, also after the start."""
        self._spec = self._plan.model.model_copy(update=settings["model"])

    def check_health(self) -> None:
        """Serve's health check; raises SliceLostError once the slice is lost."""
        if self._failure:
            raise self._failure

    async def __del__(self) -> None:
        """Serve's end of a replica: out of the routers' tables, then finish what is running, within drain_s."""
        if self._record.record.state is SliceState.LOST:
            return  # what failed stays on the board for its readers to see
        if self._watch:
            self._notice.cancel()
            self._yielding.cancel()
            await self._drain()
        self._record.close()

    async def _drain(self) -> None:
        self._record.update(state=SliceState.DRAINING, phase="draining")
        await asyncio.sleep(2 * TIMINGS.beat_s)  # routers read the board every beat
        if self._watch:
            self._watch.cancel()
        await self._engine.drain(self._spec.drain_s)
        self._hosts.close()

    async def _make_room(self) -> None:
        """End, once a changed engine of this deployment waits for a slice and this one is the first to go."""
        own = self._record.record
        deployment = own.deployment
        seen = Yielding()
        while not seen.due(time.monotonic(), self._spec.surge_s):
            await asyncio.sleep(TIMINGS.rollout_look_s)
            try:
                release = await asyncio.to_thread(self._store.release, deployment)
                changed = release is not None and release.version != self._record.record.version
                entries = await asyncio.to_thread(self._store.slices, own.application) if changed else []
                waiting = changed and await asyncio.to_thread(is_waiting, deployment)
            except Exception:  # the head restarts; an update goes on after it
                logger.exception("no word of whether a changed engine waits; asking again")
                continue
            seen = seen.next(self._record.record, entries, release, time.monotonic(), waiting=waiting)
        logger.info("%s: making room for a changed engine", self._plan.model.name)
        await self._drain()
        self._record.close()
        os._exit(0)

    def _starting(self) -> dict[str, object]:
        """Called from the board's thread: the event loop waits for the engine."""
        phase = self._store.phase(self._record.record.replica)
        if phase and phase != self._phase[0]:
            self._note(phase)
        return {"phase": self._phase[0], "phases": tuple(self._phases)}

    def _load(self) -> dict[str, float]:
        load = dataclasses.asdict(self._engine.load)
        del load["last_output_s"]  # by this host's clock
        return load

    def _enter(self, phase: str) -> None:
        self._note(phase)
        self._record.update(phase=phase, phases=tuple(self._phases))

    def _note(self, phase: str) -> None:
        before, since = self._phase
        now = time.monotonic()
        self._phases.append((before, round(now - since, 1)))
        self._phase = (phase, now)

    async def _lost_while_starting(self) -> str:
        return await first(self._hosts.lost, self._engine.worker_died)

    async def _give_up_when_lost(self) -> None:
        reason = await first(self._hosts.lost, self._engine.died, self._engine_is_silent)
        self._lose(reason)
        for _ in range(10):
            await asyncio.sleep(TIMINGS.last_words_s / 10)
            if not self._engine.requests_open:
                break
        # Serve would ask three more times, then try to stop this replica in peace. There is nothing left to stop.
        os._exit(1)

    async def _leave_on_notice(self) -> None:
        """A host that is to go takes its slice with it: finish what fits in the time, then cut the rest off.

        Serve itself moves a replica only when the host of its actor is to go, and only once another slice is free.
        """
        reason, left_s = await self._hosts.draining()
        logger.warning("%s: %s; no more requests", self._plan.model.name, reason)
        self._record.update(state=SliceState.DRAINING, phase="draining", reason=reason)
        drain_s = self._spec.drain_s
        until_s = time.monotonic() + max(
            0.0, min(drain_s, (left_s or drain_s) - TIMINGS.last_words_s - TIMINGS.engine_probe_s)
        )
        await asyncio.sleep(2 * TIMINGS.beat_s)
        while self._engine.requests_open and time.monotonic() < until_s:  # noqa: ASYNC110  the server has no event for it
            await asyncio.sleep(TIMINGS.open_requests_s)
        self._failure = SliceLostError(f"slice given back: {reason}")
        self._engine.kill()
        await asyncio.sleep(TIMINGS.last_words_s)
        self._record.close()
        os._exit(1)

    def _end_start(self, reason: str) -> None:
        """Called from another thread: the event loop waits for an engine that won't come."""
        self._lose(reason)
        os._exit(1)

    def _lose(self, reason: str) -> None:
        self._failure = SliceLostError(f"slice lost: {reason}")
        logger.error("%s: %s; giving the slice up", self._plan.model.name, reason)
        self._engine.kill()
        # In a thread: while the head is away the board takes nothing, and what is left here is not to wait for it.
        news = {"state": SliceState.LOST, "phase": "lost", "reason": reason}
        telling = threading.Thread(target=self._record.update, kwargs=news, daemon=True)
        telling.start()
        telling.join(TIMINGS.last_words_s)

    async def _engine_is_silent(self) -> str:
        """Wait until EngineCore or a worker neither answers a probe nor gives a token for stall_s."""
        while True:
            await asyncio.sleep(TIMINGS.engine_probe_s)
            stall_s = self._spec.stall_s
            probe = asyncio.create_task(self._engine.probe())
            asked_s = time.monotonic()
            while not probe.done():
                silent_s = time.monotonic() - max(asked_s, self._engine.load.last_output_s)
                if silent_s >= stall_s:
                    probe.cancel()
                    return f"the engine or one of its workers has not answered for {silent_s:.0f} s"
                await asyncio.wait([probe], timeout=stall_s - silent_s)
            if error := probe.exception():
                return f"the engine failed its probe: {error}"


def _planned(plan: Plan) -> dict[str, Any]:
    """What the board says of a chip; the plan counts devices."""
    devices = plan.slice.hardware.devices_per_chip
    return {
        "chips_per_host": plan.slice.chips_per_host,
        "hbm_bytes": devices * plan.fit.usable_bytes,
        "weight_bytes": devices * plan.fit.weight_bytes,
        "cache_bytes": devices * plan.fit.cache_bytes,
    }


@contextlib.contextmanager
def _serves_log_kept() -> Iterator[None]:
    """vLLM sets logging up anew, which closes every handler there is; a Serve controller that comes back asks
    its replicas for the file of theirs, and gives up those that can't say.
    """
    handlers = logging.getLogger("ray.serve").handlers
    buffers = [(one, one.target) for one in handlers if isinstance(one, MemoryHandler)]
    try:
        yield
    finally:
        for buffer, target in buffers:
            buffer.setTarget(target)
