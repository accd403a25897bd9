"""Processes found by the tags they inherited in their environment, whatever they are called, and their end."""

import os
import signal
import time
from collections.abc import Callable, Mapping

import psutil

from serving.errors import SimulationError

_KILL_TIMEOUT_S = 10


def processes(tags: Mapping[str, str]) -> list[psutil.Process]:
    """Every process but this one that carries all of these tags."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and tags.items() <= environment(process).items()
    ]


def kill(find: Callable[[], list[psutil.Process]]) -> int:
    """SIGKILL what `find` finds until it finds nothing; returns how many processes that took.

    Python's resource trackers go last: they end by themselves once their owner is dead, and unlink its shared memory.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while found := find():
        if time.monotonic() > deadline:
            raise SimulationError(f"processes {[process.pid for process in found]} survive SIGKILL")
        others = [process for process in found if not _is_resource_tracker(process)]
        last_resort = time.monotonic() > deadline - _KILL_TIMEOUT_S / 2
        for process in found if last_resort else others:
            killed.add(process.pid)
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=0.2)
    return len(killed)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except (psutil.Error, OSError):
        return {}


def name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
