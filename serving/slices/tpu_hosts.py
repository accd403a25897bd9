"""The TPU hosts that Ray lists, put together into slices, and why none of them is free. Decisions on plain data.

Ray makes a slice of hosts by their label `ray.io/tpu-slice-name`, which it takes from TPU_NAME. Google's TPU webhook sets that
variable, with TPU_WORKER_ID, on pods that are made while it is there.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.tpu import (
    POD_TYPE_LABEL,
    POOL_LABEL,
    SLICE_LABEL,
    TOPOLOGY_LABEL,
    WORKER_LABEL,
    Slice,
    serves_pool,
)

_SHOWN = 4
WEBHOOK = "Google's TPU webhook sets it: install the webhook, then delete the pods"


@dataclass(frozen=True)
class TpuHost:
    """One live host with TPUs, as Ray lists it. `slice`, `pod_type`, `topology` and `pool` are empty, `worker_id` None without the label.

    `chips` is the host's resource TPU, `is_head` whether it has the resource of worker 0.
    """

    node_id: str
    ip: str
    port: int = 0
    slice: str = ""
    worker_id: int | None = None
    pod_type: str = ""
    topology: str = ""
    chips: int = 0
    is_head: bool = False
    pool: str = ""

    @property
    def named(self) -> bool:
        """Whether Ray knows which worker of which slice the host is."""
        return bool(self.slice) and self.worker_id is not None


def tpu_hosts(nodes: Iterable[Mapping[str, Any]]) -> list[TpuHost]:
    """The hosts with TPUs among Ray's nodes (`ray.nodes()`), by slice and worker."""
    alive = [_host(node) for node in nodes if node["Alive"]]
    hosts = [host for host in alive if host.chips or host.slice or host.pod_type]
    return sorted(hosts, key=lambda host: (host.slice, host.worker_id or 0, host.ip))


def _host(node: Mapping[str, Any]) -> TpuHost:
    labels, resources = node["Labels"], node["Resources"]
    worker_id, pod_type = labels.get(WORKER_LABEL, ""), labels.get(POD_TYPE_LABEL, "")
    return TpuHost(
        node_id=node["NodeID"],
        ip=node["NodeManagerAddress"],
        port=node.get("NodeManagerPort", 0),
        slice=labels.get(SLICE_LABEL, ""),
        worker_id=int(worker_id) if worker_id.isdecimal() else None,
        pod_type=pod_type,
        topology=labels.get(TOPOLOGY_LABEL, ""),
        chips=int(resources.get("TPU", 0)),
        is_head=f"TPU-{pod_type}-head" in resources,
        pool=labels.get(POOL_LABEL, ""),
    )


def by_slice(hosts: Iterable[TpuHost]) -> dict[str, list[TpuHost]]:
    """The named hosts of each slice, in worker order."""
    slices: defaultdict[str, list[TpuHost]] = defaultdict(list)
    for host in hosts:
        if host.named:
            slices[host.slice].append(host)
    return {name: sorted(slices[name], key=lambda host: host.worker_id or 0) for name in sorted(slices)}


def is_of(hosts: Sequence[TpuHost], shape: Slice) -> bool:
    """Whether these hosts are of a slice of this shape. Hosts that are missing, or lack a chip, do not matter; chips beyond the
    machine's do: a v6e 2x4 of one host has the pod type and topology of one of two.
    """
    return all(
        host.pod_type == shape.pod_type
        and host.topology in ("", shape.topology)
        and host.chips <= shape.chips_per_host
        for host in hosts
    )


def lacks(name: str, hosts: Sequence[TpuHost], shape: Slice) -> str:
    """What a slice lacks to be whole, in words; empty where it is whole."""
    there = Counter(host.worker_id for host in hosts)
    if twice := sorted(worker for worker, count in there.items() if worker is not None and count > 1):
        ips = [host.ip for host in hosts if host.worker_id == twice[0]]
        return f"slice {name} has worker {twice[0]} {there[twice[0]]} times ({listed(ips)}): two slices have one TPU_NAME"
    if beyond := [host for host in hosts if (host.worker_id or 0) >= shape.hosts]:
        return f"slice {name} has a worker {beyond[-1].worker_id}, and {shape} has {counted(shape.hosts, 'host')}"
    if missing := [worker for worker in range(shape.hosts) if worker not in there]:
        noun = "worker" if len(missing) == 1 else "workers"
        verb = "is" if len(missing) == 1 else "are"
        return (
            f"{len(hosts)} of {shape.hosts} hosts of slice {name} are there; "
            f"{noun} {listed(missing)} {verb} missing"
        )
    if short := [host for host in hosts if host.chips != shape.chips_per_host]:
        return (
            f"host {short[0].worker_id} ({short[0].ip}) of slice {name} has {counted(short[0].chips, 'chip')} in Ray, "
            f"and {shape} has {shape.chips_per_host} a host"
        )
    if not hosts[0].is_head:
        return f"worker 0 of slice {name} ({hosts[0].ip}) lacks the resource {shape.head_resource}"
    return ""


def nameless(hosts: Iterable[TpuHost]) -> str:
    """Which hosts have no TPU_NAME, or no TPU_WORKER_ID, in words; empty where all have both."""
    hosts = list(hosts)
    problems = []
    if unnamed := [host.ip for host in hosts if not host.slice]:
        problems.append(f"{counted(len(unnamed), 'host')} without TPU_NAME ({listed(unnamed)})")
    if unnumbered := [host.ip for host in hosts if host.slice and host.worker_id is None]:
        problems.append(f"{counted(len(unnumbered), 'host')} without TPU_WORKER_ID ({listed(unnumbered)})")
    return ", ".join(problems)


def why_waiting(
    pools: Iterable[tuple[Slice, str]],
    hosts: Sequence[TpuHost],
    taken: Collection[str],
    left_out: Collection[str] = (),
) -> str:
    """Why no slice is free for these pools, each by its shape and its key, in words.

    Slices in `taken` are held by replicas, those in `left_out` are in quarantine. Empty where a whole slice is free: Ray is
    about to place on it.
    """
    slices, unnamed = by_slice(hosts), nameless(hosts)
    reasons = [f"{unnamed}; {WEBHOOK}"] if unnamed else []
    for shape, pool in pools:
        alike = {name: members for name, members in slices.items() if is_of(members, shape)}
        of_pool = {name: members for name, members in alike.items() if serves_pool(members[0].pool, pool)}
        broken = {name: lacks(name, members, shape) for name, members in of_pool.items()}
        free = [name for name in of_pool if not broken[name] and name not in taken]
        if any(name not in left_out for name in free):
            return ""
        reasons += [problem for problem in broken.values() if problem]
        reasons += [f"slice {name} is in quarantine" for name in free]
        held = [name for name in of_pool if name in taken]
        if held:
            reasons.append(f"{_are(len(held), shape)} in use")
        elif not of_pool and alike:
            labels = sorted({members[0].pool for members in alike.values()})
            reasons.append(
                f"{_are(len(alike), shape)} of another pool ({listed(labels)}), and none of {pool}"
            )
        elif not of_pool and not unnamed:
            reasons.append(f"no host of {shape} ({shape.pod_type}) has joined")
    return "; ".join(dict.fromkeys(reasons))


def _are(slices: int, shape: Slice) -> str:
    return f"{counted(slices, 'slice')} of {shape} {'is' if slices == 1 else 'are'}"


def counted(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def listed(values: Iterable[object]) -> str:
    """The first few of them, and how many more there are."""
    texts = [str(value) for value in values]
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
