"""What a host lacks for an engine, found before the engine starts there and said in words.

`look` reads facts on the host itself, `problems` decides on plain data.
"""

import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from serving.environment import CHIPS
from serving.planning import Plan
from serving.planning.checkpoints import folder_of, hub_cache, snapshot
from serving.tpu.generations import GIB

_DEVICES = ((Path("/dev/vfio"), "[0-9]*"), (Path("/dev"), "accel[0-9]*"))
_MEMORY_BYTES = 2 * GIB  # replica, EngineCore and a worker with vLLM and JAX loaded, before any weight
_LOOK_S = 0.5
_REACH_S = 3.0
_SHOWN = 3


@dataclass(frozen=True)
class Needs:
    """What an engine needs of each host: bytes on the disk under a folder, bytes of memory, and peers by address and port."""

    folder: str = "/"
    disk_bytes: int = 0
    memory_bytes: int = 0
    peers: tuple[tuple[str, int], ...] = ()


def engine_needs(plan: Plan, model: str) -> Needs:
    """What an engine of the plan needs of this host: memory, and disk for the whole checkpoint unless it is there or streamed.

    `model` is the checkpoint that the engine loads: on simulated hosts not the plan's.
    """
    there = (folder_of(model) or snapshot(model)) is not None
    streamed = "://" in model or str(plan.engine.get("load_format", "")).startswith("runai")
    weights = 0 if there or streamed else plan.checkpoint_bytes
    return Needs(str(hub_cache()), weights, _MEMORY_BYTES)


@dataclass(frozen=True)
class Facts:
    """What a host has. `holders` are processes that hold its chips, by device; `unreached` peers with the error of each.

    `closed` are chips that `user`, whose process looked, may not open.
    """

    holders: Mapping[str, str]
    disk_bytes: int
    memory_bytes: int
    unreached: Mapping[str, str]
    closed: tuple[str, ...] = ()
    user: int = 0


@dataclass(frozen=True)
class Problem:
    """One thing that a host lacks, of CHIPS_FREE, DISK, MEMORY and PEERS, and what to change."""

    lacks: str
    said: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.said}; {self.remedy}"


CHIPS_FREE, DISK, MEMORY, PEERS = "chips", "disk", "memory", "peers"


def problems(needs: Needs, facts: Facts) -> list[Problem]:
    """What the host lacks, each with what to change."""
    lacking = []
    if facts.closed:
        lacking.append(
            Problem(
                CHIPS_FREE,
                f"its chips can't be opened by user {facts.user}: {_shown(sorted(facts.closed))}",
                "see the devices' owner and mode; on GKE set gke.run_as_user: 0",
            )
        )
    if facts.holders:
        held = [f"{device} by {holder}" for device, holder in sorted(facts.holders.items())]
        lacking.append(Problem(CHIPS_FREE, f"its chips are held: {_shown(held)}", "end that process"))
    if facts.disk_bytes < needs.disk_bytes:
        lacking.append(
            Problem(
                DISK,
                f"{gib(facts.disk_bytes)} of disk are free under {needs.folder}, and the weights take {gib(needs.disk_bytes)}",
                "free some, or point HF_HOME at a larger disk",
            )
        )
    if facts.memory_bytes < needs.memory_bytes:
        lacking.append(
            Problem(
                MEMORY,
                f"{gib(facts.memory_bytes)} of memory are available, and an engine's processes take {gib(needs.memory_bytes)}",
                "end what uses it, or raise the pod's limit",
            )
        )
    if facts.unreached:
        peers = [f"{peer} ({error})" for peer, error in sorted(facts.unreached.items())]
        lacking.append(
            Problem(
                PEERS, f"it does not reach {', '.join(peers)}", "see network and firewall between the hosts"
            )
        )
    return lacking


def _shown(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return f"{', '.join(entries[:_SHOWN])}{more}"


def look(needs: Needs, until_free_s: float) -> Facts:
    """Facts of this host; blocks. Waits up to `until_free_s` for an engine that is just ending to let its chips go."""
    until_s = time.monotonic() + until_free_s
    while (holders := chip_holders(devices())) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    unreached = {}
    for address, port in needs.peers:
        try:
            socket.create_connection((address, port), timeout=_REACH_S).close()
        except OSError as error:
            unreached[f"{address}:{port}"] = str(error)
    closed = tuple(device for device in devices() if not os.access(device, os.R_OK | os.W_OK))
    return Facts(
        holders, free_disk_bytes(needs.folder), available_memory_bytes(), unreached, closed, os.getuid()
    )


def chip_holders(chips: Iterable[str]) -> dict[str, str]:
    """Processes that this one can see and that have a device open, by device."""
    there = set(chips)
    holders: dict[str, str] = {}
    for process in psutil.process_iter() if there else ():
        with suppress(OSError, psutil.Error):
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    if (target := str(descriptor.readlink())) in there:
                        holders[target] = f"pid {process.pid} ({process.name()})"
    return holders


def free_disk_bytes(folder: str) -> int:
    """Of the disk that a folder lies on, or will."""
    path = Path(folder)
    while not os.path.exists(path):  # noqa: PTH110  Path's raises where this user may not look
        path = path.parent
    return shutil.disk_usage(path).free


def available_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Of the host, or of the container where that is less."""
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text())
        lines = (cgroup / "memory.stat").read_text().splitlines()
        cache = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        used = int((cgroup / "memory.current").read_text())
        return min(available, limit - used + cache)
    return available


def cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """The CPUs that this process may use: those it is bound to, or its container's limit where that is less."""
    bound = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        return min(bound, int(quota) / int(period))
    return bound


def devices() -> list[str]:
    """The chips of this host, each a file; a simulated host has a folder of its own for them."""
    folder = os.environ.get(CHIPS)
    patterns = ((Path(folder), "*"),) if folder else _DEVICES
    return [str(device) for there, pattern in patterns for device in there.glob(pattern)]


def gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
