"""Resolves a slice that a user names to one machine type and number of hosts, or refuses and lists those sold.

2x4 on v5e and v6e is sold twice, as one 8-chip VM and as two 4-chip VMs. A wrong guess waits for VMs that never come,
so the caller says which.
"""

import difflib
import hashlib
import math
import re
from dataclasses import dataclass
from functools import cache

from serving.errors import TopologyError
from serving.tpu.generations import GENERATIONS, Generation, Machine, chips_of

# What people, Ray and Google also call a generation.
_ALIASES = {"v5litepod": "v5e", "tpu7x": "v7x", "v7": "v7x", "trillium": "v6e", "ironwood": "v7x"}
_LISTED = 12
_MOST_DIGITS = 9  # of an axis; no shape has as many
# Labels that Ray sets on every host of a slice, from the variables that GKE gives its pod.
POD_TYPE_LABEL = "ray.io/tpu-pod-type"
SLICE_LABEL = "ray.io/tpu-slice-name"
WORKER_LABEL = "ray.io/tpu-worker-id"
TOPOLOGY_LABEL = "ray.io/tpu-topology"
# Label of the hosts that are bought for one pool. `serving manifest` gives it to worker groups.
POOL_LABEL = "tpu-serving/pool"
_LABEL_LETTERS, _MARK_LETTERS = 63, 8


@dataclass(frozen=True)
class Slice:
    """One whole slice: what a replica owns. Made by `resolve`, which checks that it exists."""

    generation: str
    topology: str
    hosts: int
    machine_type: str

    def __str__(self) -> str:
        chips = "1 chip" if self.chips_per_host == 1 else f"{self.chips_per_host} chips"
        return f"{self.generation} {self.topology} ({_counted(self.hosts)} x {chips})"

    @property
    def key(self) -> str:
        """The shape as a name that never changes, for identities; `str` is for people."""
        return f"{self.generation}-{self.topology}-{self.hosts}h"

    @property
    def hardware(self) -> Generation:
        return GENERATIONS[self.generation]

    @property
    def chips(self) -> int:
        return chips_of(self.topology)

    @property
    def chips_per_host(self) -> int:
        return self.chips // self.hosts

    @property
    def devices(self) -> int:
        """JAX devices of the whole slice; parallelism counts these, Ray's TPU resource counts chips."""
        return self.chips * self.hardware.devices_per_chip

    @property
    def devices_per_host(self) -> int:
        return self.devices // self.hosts

    @property
    def pod_type(self) -> str:
        return f"{self.hardware.pod_prefix}-{self.chips * self.hardware.cores_per_chip}"

    @property
    def head_resource(self) -> str:
        """The resource Ray gives to worker 0 of the slice, and to no other host."""
        return f"TPU-{self.pod_type}-head"

    @property
    def ray_accelerator_type(self) -> str:
        return self.hardware.ray_accelerator_type

    @property
    def gke_accelerator(self) -> str:
        return self.hardware.gke_accelerator

    def bundles(self) -> list[dict[str, float]]:
        """Placement bundles, one a host with all its chips; bundle 0 can only be worker 0."""
        bundles: list[dict[str, float]] = [{"TPU": self.chips_per_host} for _ in range(self.hosts)]
        bundles[0] = {self.head_resource: 1, **bundles[0]}
        return bundles

    @property
    def host_bounds(self) -> str:
        """How the chips of a host lie along the three axes, as GKE says it in TPU_CHIPS_PER_HOST_BOUNDS."""
        return _HOST_BOUNDS[self.chips_per_host]

    def host_environment(self, name: str, worker_id: int) -> dict[str, str]:
        """What GKE sets on a pod of this slice; Ray makes its TPU resources and labels from it."""
        return {
            "TPU_NAME": name,
            "TPU_WORKER_ID": str(worker_id),
            "TPU_ACCELERATOR_TYPE": self.pod_type,
            "TPU_TOPOLOGY": self.topology,
        }


# Chips of a VM: one, two by two, or two by four (https://cloud.google.com/tpu/docs/v6e, v5e, v5p, v4: VM types).
_HOST_BOUNDS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}


def resolve(
    generation: str, topology: str, hosts: int | None = None, machine_type: str | None = None
) -> Slice:
    """The slice of that shape; hosts or machine type decide where it is sold twice. Raises TopologyError."""
    row = _generation(generation)
    shape = topology.strip().lower()
    if shape not in row.topologies:
        raise TopologyError(_no_such_topology(row, topology))
    options = _options(row, shape)
    offers = " or ".join(_describe(machine, count) for machine, count in options)
    if machine_type is not None and row.machine(machine_type) is None:
        known = ", ".join(machine.name for machine in row.machines)
        raise TopologyError(
            f"{row.name} has no machine type {machine_type!r}; it has {known}{_near(machine_type, known)}"
        )
    chosen = [
        (machine, count)
        for machine, count in options
        if hosts in (None, count) and machine_type in (None, machine.name)
    ]
    if not chosen:
        wanted = " on ".join(
            part
            for part in (
                _counted(hosts) if hosts is not None else "",
                f"machine type {machine_type}" if machine_type else "",
            )
            if part
        )
        raise TopologyError(
            f"{row.name} {shape} does not come as {wanted}: its {chips_of(shape)} chips are {offers}"
        )
    if len(chosen) > 1:
        raise TopologyError(f"{row.name} {shape} is sold as {offers}; name hosts or machine_type")
    machine, count = chosen[0]
    return Slice(generation=row.name, topology=shape, hosts=count, machine_type=machine.name)


def pool_label(pool: str) -> str:
    """POOL_LABEL's value for a pool's key; a mark of the key ends a value that is not the key itself."""
    value = re.sub(r"[^A-Za-z0-9._-]+", "-", pool)
    if value == pool and len(value) <= _LABEL_LETTERS and value[-1:].isalnum():
        return value
    mark = hashlib.sha256(pool.encode()).hexdigest()[:_MARK_LETTERS]
    return f"{value[: _LABEL_LETTERS - _MARK_LETTERS - 1].rstrip('._-')}-{mark}"


def serves_pool(label: str, pool: str) -> bool:
    """Whether hosts of this POOL_LABEL serve the pool of this key. Hosts without the label serve every pool of their shape."""
    return label in ("", pool_label(pool))


@cache
def every_slice() -> tuple[Slice, ...]:
    """Every slice that is sold, generation by generation, the smaller first."""
    return tuple(
        Slice(generation=row.name, topology=topology, hosts=count, machine_type=machine.name)
        for row in GENERATIONS.values()
        for topology in row.topologies
        for machine, count in _options(row, topology)
    )


def _generation(name: str) -> Generation:
    wanted = name.strip().lower()
    row = GENERATIONS.get(_ALIASES.get(wanted, wanted))
    if row is None:
        known = ", ".join(GENERATIONS)
        raise TopologyError(f"there is no TPU generation {name!r}; there are {known}{_near(wanted, known)}")
    return row


def _options(row: Generation, topology: str) -> list[tuple[Machine, int]]:
    chips = chips_of(topology)
    return [
        (machine, chips // machine.chips)
        for machine in row.machines
        if machine.alone == topology
        or (machine.joins and chips > machine.chips and chips % machine.chips == 0)
    ]


def _describe(machine: Machine, count: int) -> str:
    return f"{_counted(count)} of {machine.name} ({machine.chips} chips each)"


def _counted(hosts: int) -> str:
    return "1 host" if hosts == 1 else f"{hosts} hosts"


def _no_such_topology(row: Generation, topology: str) -> str:
    listed = ", ".join(row.topologies[:_LISTED])
    nearest = _nearest_topology(row, topology)
    return (
        f"{row.name} has no topology {topology!r}; it has {listed} ({row.topology_rule}); nearest: {nearest}"
    )


def _nearest_topology(row: Generation, topology: str) -> str:
    """The same axes in another order if they are sold, else the closest number of chips, then the closest text."""
    parts = [part.strip() for part in topology.lower().split("x")]
    axes = [int(part) for part in parts if part.isdecimal() and len(part) <= _MOST_DIGITS]
    chips = max(math.prod(axes), 1) if axes else 1

    def distance(candidate: str) -> tuple[bool, float, float]:
        same = sorted(int(axis) for axis in candidate.split("x")) == sorted(axes)
        alike = difflib.SequenceMatcher(None, topology, candidate).ratio()
        return not same, abs(math.log(chips_of(candidate) / chips)), -alike

    return min(row.topologies, key=distance)


def _near(wrong: str, known: str) -> str:
    near = difflib.get_close_matches(wrong, known.split(", "), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
