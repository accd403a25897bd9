"""Watches processes of this host: the kernel tells the moment one ends."""

import asyncio
import contextlib
import os
from collections.abc import Mapping

import psutil


async def first_dead(processes: Mapping[int, str]) -> str:
    """Wait until one of these processes (name by pid) has ended; returns its name and pid. Without processes, waits for ever."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()
    with contextlib.ExitStack() as descriptors:
        for pid, name in processes.items():
            message = f"{name} (pid {pid}) has ended"
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return message
            descriptors.callback(os.close, descriptor)
            loop.add_reader(descriptor, _end, ended, message)
            descriptors.callback(loop.remove_reader, descriptor)
        return await ended


def descendants(pid: int) -> dict[int, str]:
    """The names of a process's descendants by pid, without those that end meanwhile."""
    names = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                names[process.pid] = process.name()
    return names


def _end(ended: "asyncio.Future[str]", message: str) -> None:
    if not ended.done():
        ended.set_result(message)
