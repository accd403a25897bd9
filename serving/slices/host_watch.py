"""Tells at once when a host of a slice is gone.

Ray's GCS takes 15 s to call a dead node dead. A sentinel actor on each other host dies with its connection, within a second
or two; the sentinel of a host that hangs no longer answers. Only this module uses `ray._private.state`: the public list of
actors needs Ray's dashboard.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import ray
from ray._private import state
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serving.slices import stacks
from serving.slices.held_slice import HeldSlice, SliceHost
from serving.slices.preflight import Facts, Needs, look, problems
from serving.slices.process_watch import descendants, first_dead
from serving.timings import TIMINGS

logger = logging.getLogger("ray.serve")


class _Sentinel:
    """Runs on a host and answers pings."""

    async def ping(self) -> None:
        return None

    async def stay(self) -> None:
        await asyncio.Event().wait()

    async def first_dead(self, processes: Mapping[int, str]) -> str:
        return await first_dead(processes)

    async def look(self, needs: Needs) -> Facts:
        return await asyncio.to_thread(look, needs, TIMINGS.chips_free_s)

    async def stacks(self, processes: Mapping[int, str]) -> str:
        return await asyncio.to_thread(stacks.read, processes, TIMINGS.stacks_s)


class HostWatch:
    """Sentinels on all hosts of a slice but the watcher's own."""

    def __init__(
        self, held: HeldSlice, group: Any, own_node: str, now: Callable[[], float] = time.time
    ) -> None:
        """`now`: the cluster's time, seconds since 1970; this host's clock need not be the head's, which gives notice."""
        # No bound on concurrent calls: a `stay` that no caller waits for any more goes on for ever.
        sentinel = ray.remote(num_cpus=0)(_Sentinel)
        self._hosts: list[tuple[SliceHost, Any]] = [
            (
                host,
                sentinel.options(
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        group, placement_group_bundle_index=host.bundle
                    )
                ).remote(),
            )
            for host in held.hosts
            if host.node_id != own_node
        ]
        self._own_node = own_node
        self._now = now
        self._slice = held.name
        self._all = held.hosts

    async def draining(self) -> tuple[str, float | None]:
        """Wait until Ray has notice that a host of the slice will go; returns which, and the seconds left where Ray knows.

        `ray drain-node` and KubeRay's autoscaler give notice. So does `ray start --block`, which a pod runs, on SIGTERM; a
        `ray start` that does not block, as by hand on a VM, gives none.
        """
        while True:
            try:
                nodes = await asyncio.to_thread(state.state.get_draining_nodes)
            except RayError:  # the head restarts; a slice serves on without the head
                nodes = {}
            for host in self._all:
                if (deadline_ms := nodes.get(host.node_id)) is not None:
                    left_s = deadline_ms / 1000 - self._now() if deadline_ms else None
                    return f"host {host.worker_id} ({host.ip}) of slice {self._slice} is to go", left_s
            await asyncio.sleep(TIMINGS.host_notice_s)

    async def lost(self) -> str:
        """Wait until a host is gone or silent; returns which, and the sign."""
        if not self._hosts:
            await asyncio.Event().wait()
        waits = [partial(watch, host, actor) for host, actor in self._hosts for watch in (_gone, silent)]
        return f"slice {self._slice}: {await first(*waits)}"

    async def process_ended(self, processes: Mapping[str, Mapping[int, str]]) -> str:
        """Wait until one of these processes, given by node, has ended; returns which, and on which host."""
        waits = [
            partial(_process_ended, host, actor, processes[host.node_id])
            for host, actor in self._hosts
            if processes.get(host.node_id)
        ]
        if here := processes.get(self._own_node):
            waits.append(partial(_own_process_ended, here))
        if not waits:
            await asyncio.Event().wait()
        return f"slice {self._slice}: {await first(*waits)}"

    async def unfit(self, needs: Needs) -> str:
        """Have every host look whether it has what an engine needs; returns what is missing where, or nothing."""
        actors = dict(self._hosts)
        lacks = await asyncio.gather(
            *(_unfit(host, actors.get(host), _beside(needs, host, self._all)) for host in self._all)
        )
        missing = "; ".join(filter(None, lacks))
        return f"slice {self._slice}: {missing}" if missing else ""

    async def stacks(self, processes: Mapping[str, Mapping[int, str]]) -> str:
        """The stacks of these processes, given by node, with what the caller's own process started; hosts in order."""
        own = processes.get(self._own_node, {})
        started = {pid: name for pid, name in descendants(os.getpid()).items() if stacks.is_registered(pid)}
        here = {os.getpid(): "replica", **started, **own}
        texts = await asyncio.gather(
            asyncio.to_thread(stacks.read, here, TIMINGS.stacks_s),
            *(_stacks(actor, processes.get(host.node_id, {})) for host, actor in self._hosts),
        )
        hosts = [host for host in self._all if host.node_id == self._own_node]
        hosts += [host for host, _ in self._hosts]
        return "\n\n".join(
            f"=== host {host.worker_id} ({host.ip})\n{text}" for host, text in zip(hosts, texts, strict=True)
        )

    def close(self) -> None:
        for _, actor in self._hosts:
            ray.kill(actor)
        self._hosts = []


async def first(*waits: Callable[[], Coroutine[Any, Any, str]]) -> str:
    """The result of the first to return; the others are cancelled.

    None of them may use `asyncio.wait_for`: until Python 3.12 it loses a cancellation that comes as the answer does, and what
    is waited for here would never end.
    """
    tasks = [asyncio.create_task(wait()) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # the loop may be closed next


def actor_processes(name: str) -> dict[str, dict[int, str]]:
    """The processes of live actors whose names start with `name`: by node id, each actor's class by pid."""
    by_node: dict[str, dict[int, str]] = {}
    for actor in state.actors(actor_state_name="ALIVE").values():
        if actor["Name"].startswith(name):
            by_node.setdefault(actor["Address"]["NodeID"], {})[actor["Pid"]] = actor["ActorClassName"]
    return by_node


async def actor_died(name: str) -> str:
    """Wait until an actor whose name starts with `name` is dead; returns which.

    Ray keeps up to 100,000 dead actors of a cluster. So the job of the first such actor is looked for among the living, and
    from then on only that job's actors are asked for: an engine is a job of its own.
    """
    while not (job := await asyncio.to_thread(_job_of, name)):  # noqa: ASYNC110  Ray tells nobody
        await asyncio.sleep(TIMINGS.dead_actors_s)
    while True:
        dead = await asyncio.to_thread(state.actors, job_id=job, actor_state_name="DEAD")
        for actor in dead.values():
            if actor["Name"].startswith(name):
                return f"{actor['ActorClassName']} on {actor['Address']['IPAddress']} died ({actor['Name']})"
        await asyncio.sleep(TIMINGS.dead_actors_s)


def _job_of(name: str) -> ray.JobID | None:
    for actor in state.actors(actor_state_name="ALIVE").values():
        if actor["Name"].startswith(name):
            return ray.JobID(bytes.fromhex(actor["JobID"]))
    return None


@contextlib.contextmanager
def watched_in_a_thread(
    watch: Callable[[], Coroutine[Any, Any, str]], lost: Callable[[str], None]
) -> Iterator[None]:
    """Inside the block, a thread with an event loop of its own waits for `watch` and hands the result to `lost`.

    For a block that blocks the caller's event loop. A watch that fails, as where the head restarts, begins anew.
    """
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(_watched_through(watch))

    def run() -> None:
        try:
            reason = loop.run_until_complete(waiting)
        except asyncio.CancelledError:
            return
        finally:
            loop.close()
        lost(reason)

    thread = threading.Thread(target=run, name="start-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed already: the slice is being given up
            loop.call_soon_threadsafe(waiting.cancel)
        thread.join()


async def _watched_through(watch: Callable[[], Coroutine[Any, Any, str]]) -> str:
    while True:
        try:
            return await watch()
        except Exception:
            logger.exception("the watch over a start failed, and begins anew")
            await asyncio.sleep(TIMINGS.host_notice_s)


def _beside(needs: Needs, host: SliceHost, hosts: Iterable[SliceHost]) -> Needs:
    """The needs of one host: it has to reach the others."""
    peers = tuple((other.ip, other.port) for other in hosts if other != host and other.port)
    return dataclasses.replace(needs, peers=peers)


async def _unfit(host: SliceHost, actor: Any, needs: Needs) -> str:
    """What a host lacks; without an actor it is the caller's own."""
    name = f"host {host.worker_id} ({host.ip})"
    if actor is None:
        facts = await asyncio.to_thread(look, needs, TIMINGS.chips_free_s)
    else:
        asked = asyncio.wrap_future(actor.look.remote(needs).future())
        try:
            async with asyncio.timeout(TIMINGS.host_first_answer_s):
                facts = await asked
        except TimeoutError:
            return f"{name}: no answer for {TIMINGS.host_first_answer_s:.0f} s"
        except RayError as error:
            return f"{name}: it is gone ({type(error).__name__})"
    return "; ".join(f"{name}: {problem}" for problem in problems(needs, facts))


async def _stacks(actor: Any, processes: Mapping[int, str]) -> str:
    asked = asyncio.wrap_future(actor.stacks.remote(processes).future())
    try:
        async with asyncio.timeout(2 * TIMINGS.stacks_s):
            return str(await asked)
    except (TimeoutError, RayError) as error:
        return f"no stacks: {type(error).__name__}"


async def _process_ended(host: SliceHost, actor: Any, processes: Mapping[int, str]) -> str:
    try:
        ended = await actor.first_dead.remote(processes)
    except RayError as error:
        return f"host {host.worker_id} ({host.ip}) is gone ({type(error).__name__})"
    return f"host {host.worker_id} ({host.ip}): {ended}"


async def _own_process_ended(processes: Mapping[int, str]) -> str:
    return f"host 0: {await first_dead(processes)}"


async def _gone(host: SliceHost, actor: Any) -> str:
    try:
        await actor.stay.remote()
    except RayError as error:
        return f"host {host.worker_id} ({host.ip}) is gone ({type(error).__name__})"
    return f"host {host.worker_id} ({host.ip}) ended its sentinel"


async def silent(
    host: SliceHost,
    actor: Any,
    first_s: float = TIMINGS.host_first_answer_s,
    later_s: float = TIMINGS.host_silent_s,
    late_s: float = 1.0,
) -> str:
    """Wait until a sentinel does not answer a ping for that long; returns which.

    A timeout that comes `late_s` late says that this process stood still itself, and nothing of the host: it is asked again.
    """
    patience_s = first_s
    while True:
        asked = time.monotonic()
        try:
            async with asyncio.timeout(patience_s):
                await asyncio.wrap_future(actor.ping.remote().future())
        except (TimeoutError, GetTimeoutError):
            silent_s = time.monotonic() - asked
            if silent_s - patience_s < late_s:
                return f"host {host.worker_id} ({host.ip}) has not answered for {silent_s:.0f} s"
        except RayError as error:
            return f"host {host.worker_id} ({host.ip}) is gone ({type(error).__name__})"
        patience_s = later_s
        await asyncio.sleep(min(TIMINGS.host_ping_s, later_s))
