"""Finds processes by the tags they inherited in their environment, whatever their names, and ends them."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from serving.errors import SimulationError

_KILL_TIMEOUT_S = 10
_LISTEN = "0A"  # TCP_LISTEN in /proc/PID/net/tcp


def processes(tags: Mapping[str, str]) -> list[psutil.Process]:
    """Every process but this one that carries all of these tags."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and tags.items() <= environment(process).items()
    ]


def kill(find: Callable[[], list[psutil.Process]]) -> int:
    """SIGKILL what `find` finds until it finds nothing; returns how many processes that took.

    Python's resource trackers go last: they unlink the shared memory of a dead owner, then end by themselves.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while alive := find():
        if time.monotonic() > deadline:
            raise SimulationError(f"processes {[process.pid for process in alive]} survive SIGKILL")
        others = [process for process in alive if not _is_resource_tracker(process)]
        last_resort = time.monotonic() > deadline - _KILL_TIMEOUT_S / 2
        for process in alive if last_resort else others:
            killed.add(process.pid)
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=0.2)
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


def called(title: str, candidates: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those with a text in their command line, which for workers is Ray's title."""
    found = []
    for process in candidates:
        with contextlib.suppress(psutil.Error):  # it has ended since
            if title in " ".join(process.cmdline()):
                found.append(process)
    return found


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """The IPv4 addresses and ports that a process listens on, in its own network namespace; psutil sees only the caller's."""
    proc = Path("/proc", str(process.pid))
    sockets = set()
    with contextlib.suppress(OSError):
        for descriptor in (proc / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed since
                sockets.add(str(descriptor.readlink()))
        rows = [line.split() for line in (proc / "net" / "tcp").read_text().splitlines()[1:]]
        local = [row[1].split(":") for row in rows if row[3] == _LISTEN and f"socket:[{row[9]}]" in sockets]
        return {(socket.inet_ntoa(bytes.fromhex(ip)[::-1]), int(port, 16)) for ip, port in local}
    return set()
