"""Ray's autoscaler v2 on a manifest of ours, without Kubernetes: its reconciler, scheduler and KubeRay provider are Ray's own.

What stands in is on either side of them. `Kubernetes` is the API server and KubeRay's operator: it keeps the RayCluster,
makes `replicas` x `numOfHosts` pods, and with a pod that is to go it unmakes the whole replica of it (multi-host indexing,
KubeRay 1.5). `Autoscaled` says of the pods that run what Ray's control store would say of their raylets, and a round of
it is one turn of the autoscaler's loop. Time is not waited for: a test says how long a host has been idle.
"""

import copy
import functools
import itertools
import json
import os
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import ParseDict
from ray.autoscaler._private import constants
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler.v2.instance_manager import config
from ray.autoscaler.v2.instance_manager.cloud_providers.kuberay.cloud_provider import KubeRayProvider
from ray.autoscaler.v2.instance_manager.instance_manager import InstanceManager, InstanceUpdatedSubscriber
from ray.autoscaler.v2.instance_manager.instance_storage import InstanceStorage
from ray.autoscaler.v2.instance_manager.reconciler import Reconciler
from ray.autoscaler.v2.instance_manager.storage import InMemoryStorage
from ray.autoscaler.v2.instance_manager.subscribers.cloud_instance_updater import CloudInstanceUpdater
from ray.autoscaler.v2.instance_manager.subscribers.cloud_resource_monitor import CloudResourceMonitor
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler
from ray.core.generated.autoscaler_pb2 import ClusterResourceState, GangResourceRequest
from ray.core.generated.instance_manager_pb2 import Instance

from serving.tpu import Slice

_POD_TYPE, _SLICE, _WORKER = "ray.io/tpu-pod-type", "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"


@dataclass
class Pod:
    name: str
    group: str
    replica: str
    host: int
    number: int
    running: bool = False
    idle_s: float = 0
    ray: bool = True


class Kubernetes:
    """A RayCluster and its pods, as KubeRay's operator keeps them; speaks what the provider asks of an API server."""

    def __init__(self, cluster: dict[str, Any]) -> None:
        self.cluster = {
            "metadata": {"name": "cluster", "namespace": "default"},
            "spec": copy.deepcopy(cluster),
        }
        self.pods: dict[str, Pod] = {}
        self._numbers = itertools.count(1)

    @property
    def groups(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.cluster["spec"]["workerGroupSpecs"]
        return found

    def group(self, name: str) -> dict[str, Any]:
        return next(group for group in self.groups if group["groupName"] == name)

    def get(self, path: str) -> dict[str, Any]:
        if path.startswith("rayclusters/"):
            return copy.deepcopy(self.cluster)
        head = _pod("head", "head", "headgroup", running=True)
        pods = [_pod(pod.name, "worker", pod.group, running=pod.running) for pod in self.pods.values()]
        return {"metadata": {"resourceVersion": "1"}, "items": [head, *pods]}

    def patch(self, path: str, payload: list[dict[str, Any]]) -> dict[str, Any]:
        assert path == "rayclusters/cluster"
        for one in payload:
            *keys, index, field = one["path"].removeprefix("/").split("/")
            assert (one["op"], keys) == ("replace", ["spec", "workerGroupSpecs"])
            self.groups[int(index)][field] = one["value"]
        return self.cluster

    def operate(self) -> None:
        """KubeRay's operator, until it has nothing more to do."""
        for group in self.groups:
            name, hosts = group["groupName"], group["numOfHosts"]
            doomed = {
                self.pods[pod].replica
                for pod in group.get("scaleStrategy", {}).get("workersToDelete", [])
                if pod in self.pods
            }
            doomed |= {replica for replica in self.replicas(name) if len(self.replica(replica)) < hosts}
            self.pods = {key: pod for key, pod in self.pods.items() if pod.replica not in doomed}
            wanted = min(max(group["replicas"], group["minReplicas"]), group["maxReplicas"])
            for _ in range(wanted - len(self.replicas(name))):
                replica = f"{name}-{next(self._numbers)}"
                for host in range(hosts):
                    pod = Pod(f"{replica}-{host}", name, replica, host, next(self._numbers))
                    self.pods[pod.name] = pod

    def replicas(self, group: str) -> list[str]:
        return list(dict.fromkeys(pod.replica for pod in self.pods.values() if pod.group == group))

    def replica(self, name: str) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.replica == name]


class Autoscaled:
    """A cluster with its autoscaler. `pending` is demand; `held` the hosts that somebody holds."""

    def __init__(self, cluster: dict[str, Any], shapes: dict[str, Slice]) -> None:
        self.kubernetes = Kubernetes(cluster)
        self.shapes = shapes  # by worker group
        self.pending: list[GangResourceRequest] = []
        self.held: set[str] = set()
        self._limits = _limits(
            tuple((entry["name"], entry["value"]) for entry in cluster["autoscalerOptions"].get("env", []))
        )
        self._monitor = CloudResourceMonitor()
        self._scheduler = ResourceDemandScheduler()
        self._provider = KubeRayProvider(
            "cluster", {"namespace": "default"}, gcs_client=None, k8s_api_client=self.kubernetes
        )
        self._manager = InstanceManager(
            InstanceStorage("session", InMemoryStorage()),
            [CloudInstanceUpdater(self._provider), self._monitor, _Drains(self.kubernetes)],
        )

    @property
    def replicas(self) -> list[str]:
        """Every slice there is or is on order, the oldest first."""
        return list(dict.fromkeys(pod.replica for pod in self.kubernetes.pods.values()))

    def rounds(self, count: int = 1) -> Any:
        """As many turns of the autoscaler's loop, each followed by the operator; returns Ray's last report."""
        for _ in range(count):
            report = Reconciler.reconcile(
                instance_manager=self._manager,
                scheduler=self._scheduler,
                cloud_provider=self._provider,
                cloud_resource_monitor=self._monitor,
                ray_cluster_resource_state=self._state(),
                non_terminated_cloud_instances=self._provider.get_non_terminated(),
                autoscaling_config=self._config(),
                cloud_provider_errors=self._provider.poll_errors(),
            )
            self.kubernetes.operate()
        return report

    def deliver(self, *replicas: str) -> None:
        """The hosts of these replicas, or of all, come up."""
        for pod in self.kubernetes.pods.values():
            pod.running |= not replicas or pod.replica in replicas

    def hold(self, *replicas: str) -> None:
        """The service takes whole slices."""
        for replica in replicas:
            self.held |= {pod.name for pod in self.kubernetes.replica(replica)}

    def free(self, replica: str, idle_s: Callable[[Pod], float]) -> None:
        """The service lets go of a slice, for so long already."""
        for pod in self.kubernetes.replica(replica):
            self.held.discard(pod.name)
            pod.idle_s = idle_s(pod)

    def slices(self) -> dict[str, int]:
        """Replicas of each worker group that are there or on order."""
        return {group["groupName"]: group["replicas"] for group in self.kubernetes.groups}

    def _config(self) -> "_Config":
        groups = [{**group, "replicas": 0, "scaleStrategy": {}} for group in self.kubernetes.groups]
        spec = {**self.kubernetes.cluster["spec"], "workerGroupSpecs": groups}
        return _Config(_derived(json.dumps({**self.kubernetes.cluster, "spec": spec})), self._limits)

    def _state(self) -> ClusterResourceState:
        state = ClusterResourceState(pending_gang_resource_requests=self.pending)
        state.node_states.add(
            node_id=b"\0" * 28,
            instance_id="head",
            ray_node_type_name="headgroup",
            status="RUNNING",
            total_resources={"node:__internal_head__": 1.0},
        )
        for pod in self.kubernetes.pods.values():
            if pod.running:
                self._host(pod, state.node_states.add())
        return state

    def _host(self, pod: Pod, node: Any) -> None:
        """What Ray's own code makes of a TPU pod's environment, and of what is taken on it."""
        shape, taken = self.shapes[pod.group], pod.name in self.held
        total = {"CPU": 24.0, "memory": 1e11, "TPU": float(shape.chips_per_host), pod.replica: 1.0}
        if pod.host == 0:
            total[shape.head_resource] = 1.0
        used = {"TPU", shape.head_resource} if taken else set()
        ParseDict(
            {
                "instanceId": pod.name,
                "rayNodeTypeName": pod.group,
                "status": "DEAD" if not pod.ray else "IDLE" if not taken else "RUNNING",
                "idleDurationMs": round(pod.idle_s * 1000),
                "totalResources": total,
                "availableResources": {key: 0.0 if key in used else size for key, size in total.items()},
                "labels": {
                    **self.kubernetes.group(pod.group).get("labels", {}),
                    _POD_TYPE: shape.pod_type,
                    _SLICE: pod.replica,
                    _WORKER: str(pod.host),
                },
            },
            node,
        )
        node.node_id = pod.number.to_bytes(28, "big")


class _Config(config.AutoscalingConfig):  # type: ignore[misc]
    """Ray's, with the limits of a process that was started with the environment of the manifest."""

    def __init__(self, derived: config.AutoscalingConfig, limits: tuple[int, Any]) -> None:
        self._configs = derived._configs
        self._limits = limits

    def get_max_concurrent_launches(self) -> int:
        return self._limits[0]

    def get_instance_reconcile_config(self) -> Any:
        return self._limits[1]


@functools.cache
def _derived(cluster: str) -> config.AutoscalingConfig:
    """What Ray reads from a RayCluster; kept, as it checks it against a schema, which takes most of a round."""
    derived = autoscaling_config._derive_autoscaling_config_from_ray_cr(json.loads(cluster))
    return config.AutoscalingConfig(derived, skip_content_hash=True)


@functools.cache
def _limits(environment: tuple[tuple[str, str], ...]) -> tuple[int, Any]:
    """Ray reads them when its modules are imported, so they are, once more."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        launches = runpy.run_path(constants.__file__)["AUTOSCALER_MAX_CONCURRENT_LAUNCHES"]
        return launches, runpy.run_path(config.__file__)["InstanceReconcileConfig"]()
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Drains(InstanceUpdatedSubscriber):  # type: ignore[misc]
    """A raylet that is asked to drain and has nothing to do ends at once."""

    def __init__(self, kubernetes: Kubernetes) -> None:
        self._kubernetes = kubernetes

    def notify(self, events: list[Any]) -> None:
        for event in events:
            if event.new_instance_status == Instance.RAY_STOP_REQUESTED:
                for pod in self._kubernetes.pods.values():
                    if pod.number.to_bytes(28, "big").hex() == event.termination_request.ray_node_id:
                        pod.ray = False


def _pod(name: str, kind: str, group: str, *, running: bool) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"ray.io/node-type": kind, "ray.io/group": group}},
        "status": {"containerStatuses": [{"state": {"running": {}}}]} if running else {},
    }
