"""One Serve replica is one TPU slice: it holds the slice's placement group and runs the engine on it.

Serve starts and stops the replica, which answers requests over HTTP on its own port and keeps its record in the store. It
watches hosts and every process of the engine itself, and gives up the whole slice as soon as one is gone: vLLM's own health
check stays silent when a host dies under it, and its EngineCore hangs. The table of serving.engine.lifecycle says what the
replica does on an event; only `_on` takes a step.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from logging.handlers import MemoryHandler
from typing import Any

import ray
from ray import serve

from serving.engine.compilation_watch import heard_s
from serving.engine.lifecycle import TABLE, Action, Event, Life
from serving.engine.server import EngineServer, EngineSite
from serving.engine.slice_metrics import ChipsOf, SliceMetrics
from serving.engine.worker_facts import WorkerFacts
from serving.engine.wrong_tokens import WrongTokens
from serving.environment import is_simulated
from serving.errors import (
    PlacementError,
    QuarantinedError,
    ServingError,
    SliceLostError,
    UnfitHostError,
    WrongTokensError,
)
from serving.planning import Plan
from serving.slices import quarantine, stacks
from serving.slices.held_slice import held_slice
from serving.slices.host_watch import HostWatch, first, watched_in_a_thread
from serving.slices.placement import session_logs, slices_left_out
from serving.state.gcs import Store
from serving.state.publisher import Publisher
from serving.state.records import SliceRecord, SliceState, deployment
from serving.timings import TIMINGS

logger = logging.getLogger("ray.serve")

MakeEngine = Callable[[Plan, EngineSite], EngineServer]


class SliceReplica:
    """The callable of a slice deployment; `app.build` binds it to its plan."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        plan: Plan,
        engine: MakeEngine,
        chips_of: ChipsOf | None = None,
        *,
        compares: bool = False,
        tls: bool = False,
    ) -> None:
        """`engine` makes the engine of the host that this replica stands on; `chips_of` works out a simulated slice's chip use.

        `compares`: whether the slice's first answer is compared with those of the slices that serve. `tls`: whether its port
        speaks TLS from the start.
        """
        stacks.register()
        context = ray.get_runtime_context()
        ours = serve.get_replica_context()
        self._plan = plan
        self._spec = plan.model
        self._life = Life.STARTING
        self._acting = threading.RLock()
        self._over = asyncio.Event()
        self._failure: SliceLostError | None = None
        self._error: Exception | None = None  # of a start that failed
        self._judged, self._wrong = compares, False
        self._reason = ""
        # When a leaving slice ends at the latest, and when its host goes.
        self._until_s = self._notice_s = math.inf
        self._watching: list[asyncio.Task[None]] = []
        self._ending: list[asyncio.Task[None]] = []
        self._started = time.monotonic()
        self._served_s = math.inf  # since when, by the monotonic clock
        self._phase = ("placing", self._started)
        self._phases: list[tuple[str, float]] = []
        self._engine: EngineServer | None = None
        self._store = Store(context.gcs_address)
        self._record = Publisher(
            self._store,
            SliceRecord(
                replica=context.get_actor_id(),
                model=plan.model.name,
                state=SliceState.STARTING,
                phase="placing",
                shape=str(plan.slice),
                pod_type=plan.slice.pod_type,
                application=ours.app_name,
                pool=plan.pool,
                deployment=deployment(ours.app_name, ours.deployment),
                tag=ours.replica_id.unique_id,
                since=self._store.now(),
                version=plan.version,
                simulated=is_simulated(),
                **_planned(plan),
            ),
            beaten=SliceMetrics(plan, ours.app_name, chips_of).publish,
        )
        self._wrong_tokens = WrongTokens(self._store, self._record)
        try:
            group = ray.util.get_current_placement_group()
            held = held_slice(group)
            self._record.update(
                slice=held.name, hosts=tuple(host.ip for host in held.hosts), bought_for=held.bought_for
            )
            await asyncio.to_thread(self._refuse_quarantined)
            self._hosts = HostWatch(held, group, context.get_node_id(), self._store.now)
            server = engine(plan, EngineSite(held, group, context.gcs_address, context.get_actor_id(), tls))
            self._engine = server
            await self._look_over_hosts(server)
            self._enter("starting the engine")
            self._record.load = self._starting
            await self._bring_up(server, compares=compares)
        except Exception as error:
            self._error = error
            self._on(Event.FAILED, error.message if isinstance(error, ServingError) else repr(error))
            raise
        self._on(Event.STARTED)
        watching = (self._watch(), self._notice(), self._verdict(), self._outlive(), self._facts.follow())
        self._watching = [asyncio.create_task(work) for work in watching]

    async def _look_over_hosts(self, server: EngineServer) -> None:
        """Raises UnfitHostError where one lacks what the engine needs."""
        self._enter("looking over the hosts")
        if unfit := await first(partial(self._hosts.unfit, server.needs()), self._leave_at_notice):
            raise UnfitHostError(unfit)

    async def _bring_up(self, server: EngineServer, *, compares: bool) -> None:
        """Start the engine and look at it, which hangs where a host dies under it: the watch goes on till then."""
        late = partial(self._is_late, asyncio.get_running_loop())
        watch = partial(first, self._hosts.lost, server.worker_died, late, self._leave_at_notice)
        with watched_in_a_thread(watch, partial(self._on, Event.LOST)):
            with _serves_log_kept():
                await server.start()
            self._server = server
            await self._look_at_start(compares=compares)

    async def reconfigure(self, settings: dict[str, Any]) -> None:
        """Take over what the YAML may change while the engine runs; Serve calls this also after the start."""
        self._spec = self._plan.model.model_copy(update=settings["model"])
        self._judged = settings["judged"]
        await self._speak(tls=settings["tls"])

    async def _speak(self, *, tls: bool) -> None:
        """Go over to TLS, or away from it; the former port takes connections until routers have long read of the new one."""
        http = self._server.http
        if close_former := await http.speak(tls=tls):
            logger.info(
                "%s on slice %s speaks %s with routers from now on",
                *(self._plan.model.name, self._record.record.slice, "TLS" if tls else "plain HTTP"),
            )
            await asyncio.to_thread(partial(self._record.update, **http.peer._asdict()))
            asyncio.get_running_loop().call_later(TIMINGS.former_port_s, close_former)

    def check_health(self) -> None:
        """Serve's health check; raises SliceLostError once the slice is lost."""
        if self._failure:
            raise self._failure

    async def __del__(self) -> None:
        """Serve ends the replica: leave the routers' tables, then finish open requests, within drain_s."""
        self._on(Event.STOP)
        if self._life is Life.STOPPING:
            await self._over.wait()

    def _on(self, event: Event, reason: str = "") -> None:
        """Take the table's step. From any thread: the event loop is blocked while the engine starts."""
        with self._acting:
            step = TABLE[self._life, event]
            self._life = step.life
            if reason and step.actions:
                self._reason = reason
            for action in step.actions:
                self._do(action)
            if step.life is Life.OVER and step.actions:
                self._end_tasks()

    def _do(self, action: Action) -> None:
        match action:
            case Action.FINISH:
                self._until_s = min(time.monotonic() + self._spec.drain_s, self._notice_s)
                self._ending.append(asyncio.create_task(self._finish()))
            case Action.LAST_WORDS:
                self._ending.append(asyncio.create_task(self._last_words()))
            case Action.FORGET:
                _within_last_words(self._record.close)
            case Action.NOTE_FAILURE:
                _within_last_words(self._note_failure)
            case Action.EXIT:
                os._exit(1)
            case Action.HURRY:
                self._until_s = min(self._until_s, self._notice_s)
            case Action.KILL:
                self._kill()
            case _:
                self._say(action)

    def _kill(self) -> None:
        self._failure = SliceLostError(f"slice given up: {self._reason or 'Serve stops it'}")
        if self._engine:
            self._engine.kill()

    def _say(self, action: Action) -> None:
        """Write the replica's new state to its record."""
        name, reason = self._plan.model.name, self._reason
        match action:
            case Action.SAY_SERVING:
                self._say_serving()
            case Action.SAY_LEAVING:
                logger.info("%s leaves its slice: %s", name, reason or "Serve stops it")
                changes = {"state": SliceState.DRAINING, "phase": "draining", "reason": reason}
                _within_last_words(partial(self._record.update, **changes))
            case Action.SAY_LOST:
                logger.error("%s: %s; giving the slice up", name, reason)
                changes = {"state": SliceState.LOST, "phase": "lost", "reason": reason}
                _within_last_words(partial(self._record.update, **changes))

    def _say_serving(self) -> None:
        self._served_s = time.monotonic()
        _within_last_words(partial(self._forget_slice_failures, early=False))
        self._record.load = self._load
        self._enter("serving")
        self._record.update(
            state=SliceState.SERVING,
            **self._server.http.peer._asdict(),
            max_model_len=self._server.max_model_len,
            reason="",
        )
        logger.info(
            "%s serves on slice %s (%s) after %.0f s%s",
            self._plan.model.name,
            self._record.record.slice,
            self._plan.slice,
            time.monotonic() - self._started,
            ", simulated" if is_simulated() else "",
        )

    def _refuse_quarantined(self) -> None:
        """Raises QuarantinedError where the slice has come into quarantine since Serve asked for one."""
        own, snapshot = self._record.record, self._store.read()
        if own.slice in slices_left_out(snapshot, own.pod_type, own.version, self._store.now(), own.pool):
            raise QuarantinedError(f"slice {own.slice} is in quarantine; Serve is to take another")

    def _note_failure(self) -> None:
        """Remember that the slice failed; one that fails again and again is left out for a while."""
        own = self._record.record
        if not own.slice or isinstance(self._error, PlacementError | QuarantinedError):
            return
        wrong = self._wrong or isinstance(self._error, WrongTokensError)
        served_s = max(0.0, time.monotonic() - self._served_s)
        if served_s >= quarantine.EARLY_S and not wrong:
            return
        snapshot = self._store.read()
        failed = quarantine.failed(
            own,
            self._reason,
            self._store.now(),
            snapshot.slice_failures,
            snapshot.slices,
            host_at_fault=wrong or isinstance(self._error, UnfitHostError),
            counts=quarantine.WRONG_TOKENS if wrong else 1,
            early=served_s > 0 and not wrong,
        )
        self._store.put_slice_failures(failed)
        if (left_out_s := quarantine.until(failed) - failed.at) > 0:
            logger.error(
                "slice %s is in quarantine for %.0f s: engines failed on %s, the last one for: %s",
                failed.slice,
                left_out_s,
                failed.host,
                failed.reason,
            )

    def _forget_slice_failures(self, *, early: bool) -> None:
        for failed in self._store.read().slice_failures:
            if quarantine.over(failed, self._record.record, early=early):
                self._store.delete_slice_failures(failed)

    async def _outlive(self) -> None:
        """Once the engine has served for long, what engines before it died of early is forgotten."""
        await asyncio.sleep(quarantine.EARLY_S)
        while True:
            try:
                return await asyncio.to_thread(partial(self._forget_slice_failures, early=True))
            except Exception:
                logger.exception("failures on the slice can't be forgotten; trying again")
                await asyncio.sleep(TIMINGS.engine_probe_s)

    def _end_tasks(self) -> None:
        """Cancel the tasks that watch; a task that ends the process goes on."""
        self._over.set()
        for task in self._watching:
            task.cancel()

    async def _finish(self) -> None:
        """Wait until no request is open or the deadline is over; routers read the store every beat."""
        await asyncio.sleep(2 * TIMINGS.beat_s)
        while self._server.requests_open and time.monotonic() < self._until_s:  # noqa: ASYNC110  the server has no event for it
            await asyncio.sleep(TIMINGS.open_requests_s)
        self._hosts.close()
        self._on(Event.DONE)

    async def _last_words(self) -> None:
        """End this process once clients have their errors. Serve would check health three more times, then stop it gently."""
        until_s = time.monotonic() + TIMINGS.last_words_s
        while self._server.requests_open and time.monotonic() < until_s:  # noqa: ASYNC110  as above
            await asyncio.sleep(TIMINGS.last_words_s / 10)
        os._exit(1)

    async def _watch(self) -> None:
        """Wait until a host, a process of the engine, the engine or its HTTP server is gone, or the engine is silent."""
        reason = ""
        while not reason:
            try:
                processes = await asyncio.to_thread(self._server.processes)
                ended = partial(self._hosts.process_ended, processes)
                reason = await first(self._hosts.lost, ended, self._server.died, self._engine_is_silent)
            except Exception:
                logger.exception(
                    "%s: the watch over the engine failed, and begins anew", self._plan.model.name
                )
                await asyncio.sleep(TIMINGS.engine_probe_s)
        self._on(Event.LOST, reason)

    async def _leave_at_notice(self) -> str:
        """Give a start up when a host is to go: that is no failure of the slice, as the host's end would be."""
        reason, _ = await self._hosts.draining()
        logger.warning("%s gives its start up: %s", self._plan.model.name, reason)
        self._on(Event.NOTICE, reason)
        await asyncio.Event().wait()
        raise AssertionError

    async def _notice(self) -> None:
        """Leave when a host is to go: finish what fits in the time.

        Serve itself moves a replica only when the host of its actor is to go, and only once another slice is free.
        """
        reason, left_s = await self._hosts.draining()
        if left_s is not None:
            spare_s = TIMINGS.last_words_s + TIMINGS.engine_probe_s
            self._notice_s = time.monotonic() + max(0.0, left_s - spare_s)
        self._on(Event.NOTICE, reason)

    async def _verdict(self) -> None:
        """Wait until a router or another slice finds that this one gives wrong tokens, where anybody looks for that."""
        reason = ""
        while not reason:
            await asyncio.sleep(TIMINGS.verdict_look_s)
            if not self._judged:
                continue
            with contextlib.suppress(Exception):  # the head restarts
                reason = await asyncio.to_thread(self._wrong_tokens.verdict)
        self._wrong = True
        # Routers take off what they can, and suspect no request of ending the slice.
        changes = {"state": SliceState.DRAINING, "phase": "draining", "reason": reason}
        with contextlib.suppress(Exception):
            await asyncio.to_thread(partial(self._record.update, **changes))
        await asyncio.sleep(2 * TIMINGS.beat_s)
        self._on(Event.WRONG, reason)

    async def _look_at_start(self, *, compares: bool) -> None:
        """What is to be known of the engine before it serves; raises WrongTokensError."""
        self._record.load = self._load  # the engine's own phases are over
        self._enter("checking the devices")
        self._facts = WorkerFacts(self._plan.model.name, self._server, self._store, self._record)
        await self._facts.tell_start()
        if compares:
            await self._wrong_tokens.compare_first_answer(self._server.http.peer)

    def _starting(self) -> dict[str, object]:
        """The record's fields during the start. The record's thread calls this: the event loop is blocked."""
        phase = self._store.phase(self._record.record.replica)
        if phase and phase != self._phase[0]:
            self._note(phase)
        return {"phase": self._phase[0], "phases": tuple(self._phases)}

    def _load(self) -> dict[str, float]:
        load = dataclasses.asdict(self._server.load)
        del load["last_output_s"], load["finished"]  # by this host's clock; for this replica alone
        return load | {"compiling_s": self._compiling_s()}

    def _compiling_s(self) -> float:
        """Seconds for which the engine has been compiling instead of giving tokens; the store is asked once it is silent."""
        load, now_s = self._server.load, time.monotonic()
        if not load.running + load.waiting or now_s - load.last_output_s < TIMINGS.beat_s:
            return 0.0
        seconds = self._server.compiling_s()
        return seconds or 0.0 if heard_s(now_s, load.last_output_s, seconds) == now_s else 0.0

    def _enter(self, phase: str) -> None:
        self._note(phase)
        self._record.update(phase=phase, phases=tuple(self._phases))

    def _note(self, phase: str) -> None:
        before, since = self._phase
        now = time.monotonic()
        self._phases.append((before, round(now - since, 1)))
        self._phase = (phase, now)

    async def _engine_is_silent(self) -> str:
        """Wait until EngineCore or a worker neither answers a probe, gives a token nor compiles for stall_s."""
        while True:
            await asyncio.sleep(TIMINGS.engine_probe_s)
            stall_s = self._spec.stall_s
            probe = asyncio.create_task(self._server.probe())
            alive_s = time.monotonic()
            await asyncio.wait([probe], timeout=min(stall_s, TIMINGS.engine_probe_s))
            while not probe.done():
                compiling_s = None
                with contextlib.suppress(Exception):  # the head restarts
                    compiling_s = await asyncio.to_thread(self._server.compiling_s)
                now_s = time.monotonic()
                alive_s = max(alive_s, heard_s(now_s, self._server.load.last_output_s, compiling_s))
                silent_s = now_s - alive_s
                if silent_s >= stall_s:
                    silent = f"the engine or one of its workers has not answered for {silent_s:.0f} s"
                    if compiling_s:
                        silent += f", and has compiled one program for {compiling_s:.0f} s, more than {TIMINGS.compile_s:.0f}"
                    report = await self._report(silent, asyncio.get_running_loop())
                    probe.cancel()
                    return f"{silent}; {report}"
                await asyncio.wait([probe], timeout=min(stall_s - silent_s, TIMINGS.engine_probe_s))
            if error := probe.exception():
                return f"the engine failed its probe: {error}"

    async def _is_late(self, loop: asyncio.AbstractEventLoop) -> str:
        """Once a start is late, tell why in a report, and wait for ever: a start has no limit."""
        await asyncio.sleep(self._spec.start_s)
        late = f"the start has taken more than {self._spec.start_s:.0f} s"
        reason = f"{late}; {await self._report(late, loop)}"
        logger.warning("%s on slice %s: %s", self._plan.model.name, self._record.record.slice, reason)
        await asyncio.to_thread(self._record.update, reason=reason)
        await asyncio.Event().wait()
        raise AssertionError

    async def _report(self, reason: str, loop: asyncio.AbstractEventLoop) -> str:
        """Write the stacks and last log lines of all the engine's processes to a file beside Ray's logs; says where it is."""
        try:
            awaited = stacks.tasks(loop)
            assert self._engine is not None  # noqa: S101  its start has begun
            processes = await asyncio.to_thread(self._engine.processes)
            own = self._record.record
            text = "\n\n".join(
                [f"{own.model} on slice {own.slice}: {reason}", awaited, await self._hosts.stacks(processes)]
            )
            path = await asyncio.to_thread(stacks.write_report, session_logs(), own.slice, text, time.time())
        except Exception:  # the slice is given up all the same
            logger.exception("the stacks of a silent engine could not be written")
            return "its stacks could not be written, the log says why"
        return f"stacks and last log lines in {path} on {own.hosts[0]}"


def _within_last_words(tell: Callable[[], None]) -> None:
    """Write in a thread: without the head the store blocks, and a replica's end must not wait for it."""
    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    telling.join(TIMINGS.last_words_s)


def _planned(plan: Plan) -> dict[str, Any]:
    """What the plan says of the slice. The record's figures are of one chip, the plan's per device."""
    devices = plan.slice.hardware.devices_per_chip
    return {
        "chips_per_host": plan.slice.chips_per_host,
        "hbm_bytes": devices * plan.fit.usable_bytes,
        "weight_bytes": devices * plan.fit.weight_bytes,
        "cache_bytes": devices * plan.fit.cache_bytes,
        "sequences": plan.most_sequences,
        "adapters": plan.adapters,
    }


@contextlib.contextmanager
def _serves_log_kept() -> Iterator[None]:
    """vLLM's logging setup closes every handler. A Serve controller that comes back asks replicas for their
    log file, and gives up those that can't name it.
    """
    handlers = logging.getLogger("ray.serve").handlers
    buffers = [(handler, handler.target) for handler in handlers if isinstance(handler, MemoryHandler)]
    try:
        yield
    finally:
        for buffer, target in buffers:
            buffer.setTarget(target)
