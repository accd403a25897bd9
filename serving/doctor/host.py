"""One host's look at itself for `serving doctor`. Runs there, in an actor without resources that ends with the command."""

import contextlib
import hashlib
import os
import resource
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil

from serving import hub, secret
from serving.doctor.facts import VARIABLES, HostFacts, is_asked
from serving.doctor.versions import PACKAGES, VLLM
from serving.doctor.weights import unreadable
from serving.environment import is_simulated
from serving.gke.storage import folders
from serving.planning import Plan
from serving.slices import preflight
from serving.slices.preflight import Needs

_PROJECT = "tpu-serving"
_DIGEST = 12  # letters: enough to tell two secrets apart, too few to find one


class HostLook:
    """Holds a port open for its peers, then looks."""

    def __init__(self, ip: str) -> None:
        """Raises OSError where the host can't open a port on its own address."""
        self._listener = socket.create_server((ip, 0))

    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def look(self, plans: Sequence[Plan], peers: Sequence[tuple[str, int]]) -> HostFacts:
        """Facts of this host, which may get slices of these plans and has to reach these peers."""
        needs = _needs(plans, peers)
        return HostFacts(
            has=preflight.look(needs, until_free_s=0),
            needs=needs,
            devices=tuple(preflight.devices()),
            environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
            memlock_bytes=_memlock_bytes(),
            hugepages=hugepages(),
            memory_bytes=memory_bytes(),
            cpus=preflight.cpus(),
            cores=os.cpu_count() or 0,
            versions=versions(),
            secret=_digest(secret.of_this_process()),
            weights={} if is_simulated() else _unreadable(plans),
            simulated=is_simulated(),
        )


def _needs(plans: Sequence[Plan], peers: Sequence[tuple[str, int]]) -> Needs:
    """The most that an engine of these plans needs; a simulated host's has the weights of a stand-in model."""
    all_needs = [preflight.engine_needs(plan, plan.model.model) for plan in plans] or [Needs()]
    most = max(all_needs, key=lambda needs: needs.disk_bytes)
    disk = 0 if is_simulated() else most.disk_bytes
    return Needs(most.folder, disk, most.memory_bytes, tuple(peers))


def _unreadable(plans: Sequence[Plan]) -> dict[str, str]:
    """Of models, and of folders that vLLM reads beside one: adapters, a draft, a tokenizer."""
    named = dict.fromkeys(name for plan in plans for name in (plan.model.model, *folders(plan)))
    return {name: unreadable(name, hub.config_of) for name in named if is_asked(name)}


def versions() -> dict[str, str]:
    """Installed versions by package, without those that are not there; vLLM's by whichever distribution has it."""
    installed = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in (*PACKAGES, _PROJECT):
        for distribution in VLLM if package == "vllm" else (package,):
            with contextlib.suppress(metadata.PackageNotFoundError):
                installed.setdefault(package, metadata.version(distribution))
    return installed


def _memlock_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory of the host, or of the container where that is less."""
    total = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):
        return min(total, int((cgroup / "memory.max").read_text()))
    return total


def hugepages(file: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> str:
    """Of `always [madvise] never` the word that is chosen; empty where the kernel has none."""
    with contextlib.suppress(OSError):
        return file.read_text().partition("[")[2].partition("]")[0]
    return ""


def _digest(text: str | None) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST] if text else ""
