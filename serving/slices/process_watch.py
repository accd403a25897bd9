"""Whether processes of this host are still there, told by the kernel the moment one ends."""

import asyncio
import contextlib
import os
from collections.abc import Mapping

import psutil


async def first_dead(processes: Mapping[int, str]) -> str:
    """Wait until one of these processes (name by pid) has ended; returns its name and pid. Waits for ever where none is given."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()
    with contextlib.ExitStack() as descriptors:
        for pid, name in processes.items():
            said = f"{name} (pid {pid}) has ended"
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return said
            descriptors.callback(os.close, descriptor)
            loop.add_reader(descriptor, _end, ended, said)
            descriptors.callback(loop.remove_reader, descriptor)
        return await ended


def descendants(pid: int) -> dict[int, str]:
    """The processes below one, by pid; those that end meanwhile are left out."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[process.pid] = process.name()
    return found


def _end(ended: "asyncio.Future[str]", said: str) -> None:
    if not ended.done():
        ended.set_result(said)
