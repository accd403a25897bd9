"""Whether every host of a slice is still there, told at once.

Ray's GCS calls a dead node dead after 15 s. A sentinel actor on each other host is seen to die with its connection,
within a second or two; a host that hangs is found by a sentinel that no longer answers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serving.slices.group import HeldSlice, Host

PING_S = 1.0
# A sentinel answers in milliseconds; on a host that is busy compiling it may wait for a core.
SILENT_S = 8.0


class _Sentinel:
    """Stands on a host and answers."""

    async def ping(self) -> None:
        return None

    async def stay(self) -> None:
        await asyncio.Event().wait()


class HostWatch:
    """Sentinels on all hosts of a slice but the watcher's own."""

    def __init__(self, held: HeldSlice, group: Any, own_node: str) -> None:
        sentinel = ray.remote(num_cpus=0, max_concurrency=2)(_Sentinel)
        self._hosts: list[tuple[Host, Any]] = [
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
        self._slice = held.name

    async def lost(self) -> str:
        """Wait until a host is gone or silent; returns which and how it was noticed."""
        if not self._hosts:
            await asyncio.Event().wait()
        tasks = [
            asyncio.create_task(watch(host, actor))
            for host, actor in self._hosts
            for watch in (_gone, _silent)
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return f"{next(iter(done)).result()} of slice {self._slice}"
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        for _, actor in self._hosts:
            ray.kill(actor)
        self._hosts = []


async def _gone(host: Host, actor: Any) -> str:
    try:
        await actor.stay.remote()
    except RayError as error:
        return f"host {host.worker_id} ({host.ip}) is gone ({type(error).__name__})"
    return f"host {host.worker_id} ({host.ip}) ended its sentinel"


async def _silent(host: Host, actor: Any) -> str:
    while True:
        asked = time.monotonic()
        try:
            await asyncio.wait_for(_as_awaitable(actor.ping.remote), SILENT_S)
        except (TimeoutError, GetTimeoutError):
            return f"host {host.worker_id} ({host.ip}) has not answered for {time.monotonic() - asked:.0f} s"
        except RayError as error:
            return f"host {host.worker_id} ({host.ip}) is gone ({type(error).__name__})"
        await asyncio.sleep(PING_S)


async def _as_awaitable(call: Callable[[], Awaitable[None]]) -> None:
    await call()
