"""The check of the application's pods in Kubernetes: why one does not run, before Ray on it could say anything."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from serving.doctor.facts import Facts
from serving.doctor.findings import Finding, failed, not_looked_at, not_yet, ok, together, warning
from serving.slices.tpu_hosts import counted, listed

_GUIDE = "docs/guides/gke.md"
# What a container that comes up waits for.
_COMES = ("PodInitializing", "ContainerCreating")
_ENDED = ("Failed", "Succeeded")
_REMEDIES = {
    "ImagePullBackOff": f"see the image's name, and whether the nodes' service account may read it ({_GUIDE}, step 3)",
    "ErrImagePull": f"see the image's name, and whether the nodes' service account may read it ({_GUIDE}, step 3)",
    "InvalidImageName": "see gke.image, or --image of `serving manifest`",
    "CreateContainerConfigError": f"make the secret in the pods' namespace ({_GUIDE}, step 4)",
}


def pods(facts: Facts) -> list[Finding]:
    """Whether all pods of head, slices and Redis run."""
    deployed = facts.deployed
    if isinstance(deployed, str):
        return [not_looked_at(deployed)]
    live = [pod for pod in deployed.pods if not pod["metadata"].get("deletionTimestamp")]
    if not live:
        return [not_yet(f"no pod of {deployed.label} in the namespace {deployed.namespace}")]
    starting = [pod for pod in live if not _runs(pod)]
    troubles = [(pod["metadata"]["name"], _trouble(pod, deployed.namespace)) for pod in starting]
    if starting and not any(finding for _, finding in troubles):
        progress = (
            f"{len(starting)} of {counted(len(live), 'pod')} start ({listed(name for name, _ in troubles)})"
        )
        # Kubernetes tells of a volume that it can't mount in events alone.
        look = f"where that takes long, `kubectl describe pod -n {deployed.namespace}` names the secret or claim that is missing"
        return [not_yet(f"{progress}; {look}")]
    return together(troubles, f"{counted(len(live), 'pod')} run")


def nodes(facts: Facts) -> list[Finding]:
    """Whether the hosts of each slice are of one node pool, as GKE makes one of every multi-host slice.

    TPU_NAME alone makes a slice in Ray: hosts of two real ones under one name look whole there, and their chips have no links.
    """
    deployed = facts.deployed
    if isinstance(deployed, str):
        return [not_looked_at(deployed)]
    if isinstance(deployed.node_pools, str):
        return [not_looked_at(deployed.node_pools)]
    pools: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for slice_, node in _slices(deployed.pods):
        if pool := deployed.node_pools.get(node):
            pools[slice_].add(pool)
    if not pools:
        return [not_yet("no pod of a slice is on a node of GKE's")]
    remedy = (
        f"delete these pods; a TPU webhook of 1.3.2 or newer keeps a slice's pods together ({_GUIDE}, step 2)"
    )
    mixed = [
        failed(
            f"pods of slice {name} are on {len(of)} node pools ({listed(sorted(of))}): two slices have one TPU_NAME",
            remedy,
        )
        for (_, name), of in sorted(pools.items())
        if len(of) > 1
    ]
    return mixed or [ok(f"{counted(len(pools), 'slice')}, of one node pool each")]


def _slices(pods: Iterable[Mapping[str, Any]]) -> Iterable[tuple[tuple[str, str], str]]:
    """RayCluster, TPU_NAME and node of each pod that has all: the TPU webhook writes TPU_NAME into pods, by RayCluster."""
    for pod in pods:
        metadata, spec = pod["metadata"], pod.get("spec") or {}
        ended = metadata.get("deletionTimestamp") or (pod.get("status") or {}).get("phase") in _ENDED
        entries = (
            entry for container in spec.get("containers") or () for entry in container.get("env") or ()
        )
        name = next((entry.get("value") for entry in entries if entry["name"] == "TPU_NAME"), None)
        if name and spec.get("nodeName") and not ended:
            cluster = (metadata.get("labels") or {}).get("ray.io/cluster", "")
            yield (cluster, name), spec["nodeName"]


def _runs(pod: Mapping[str, Any]) -> bool:
    status = pod.get("status") or {}
    return status.get("phase") == "Running" and all(
        "running" in (container.get("state") or {}) for container in status.get("containerStatuses") or ()
    )


def _trouble(pod: Mapping[str, Any], namespace: str) -> Finding | None:
    """What keeps a pod from running, by Kubernetes; nothing of one that comes up."""
    status, look = pod.get("status") or {}, f"see `kubectl describe pod -n {namespace}`"
    ended = status.get("phase") == "Failed"
    problem = f"{status.get('reason') or 'it failed'}: {status.get('message') or 'without a message'}"
    if ended and status.get(
        "reason"
    ):  # of a pod that was evicted each container says no more than that it was killed
        return failed(problem, look)
    finding = _of_containers(status, namespace) or _unscheduled(status, namespace)
    return failed(problem, look) if ended and not finding else finding


def _of_containers(status: Mapping[str, Any], namespace: str) -> Finding | None:
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        name, state = container["name"], container.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if (reason := waiting.get("reason")) and reason not in _COMES:
            problem = f"{name}: {reason}: {waiting.get('message') or 'without a message'}"
            look = f"see `kubectl describe pod -n {namespace}` and the container's log"
            return failed(problem, _REMEDIES.get(reason, look))
        if ended.get("exitCode"):
            problem = f"{name} ended with status {ended['exitCode']} ({ended.get('reason') or 'Error'})"
            return failed(problem, f"see `kubectl logs -n {namespace} POD -c {name}`")
    return None


def _unscheduled(status: Mapping[str, Any], namespace: str) -> Finding | None:
    for condition in status.get("conditions") or ():
        if condition.get("reason") == "SchedulingGated":
            return warning(
                "Kueue has not admitted it",
                f"see `kubectl get workloads -n {namespace}`, and the quota of its queue",
            )
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            remedy = f"wait for a node that is ordered; else see the manifest's `gcloud` lines, quota and zone ({_GUIDE}, steps 5 and 6)"
            return warning(f"no node: {condition.get('message') or condition.get('reason')}", remedy)
    return None
