"""A service as Kubernetes objects for GKE with KubeRay: one stream for `kubectl apply -f -`, in the order it is applied.

A pool is a worker group and a slice is one of its replicas, of `numOfHosts` pods, which KubeRay makes and deletes
together. The head has no TPU and carries the router. Comments on top hold the `gcloud` lines for the nodes.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import yaml

from serving.config import ON_DISK, GkeSpec
from serving.gke import nodepools
from serving.planning.plan import Plan
from serving.tpu import POD_TYPE_LABEL

RAY_VERSION = "2.60.0"

_WEIGHTS = "/weights"
# Both are beyond drain_s. On a pod's SIGTERM `ray start --block` tells the control store that its node will go. It
# ends when nothing runs there or the first time is over (Ray's own: 30 s). Kubernetes kills the rest after the second.
_NOTICE_S, _GRACE_S = 30, 60
_IDLE_S = 600  # a slice takes minutes to get and to load
# Limits of Ray's autoscaler that hold for pods and are wrong for slices:
_AUTOSCALER = {
    # Ray asks for 10 pods at once; the part of a slice among them is ordered nowhere.
    "AUTOSCALER_MAX_CONCURRENT_LAUNCHES": "10000",
    # Ray deletes pods that have waited for an hour, and with them their place in the queue for hardware.
    "RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S": str(30 * 24 * 3600),
    # Ray's KubeRay provider ignores a repeated request. Until the last repeat has timed out (40 minutes at Ray's 3), the
    # pods of an order for part of a slice count as coming.
    "RAY_AUTOSCALER_RECONCILE_MAX_NUM_RETRY_REQUEST_TO_ALLOCATE": "0",
}
_HEAD_CPU, _HEAD_MEMORY = "8", "16Gi"
_WORKER_VCPUS = 24  # tokenising and feeding a host's chips; Google's samples ask for 20 to 24
_MEMORY_SHARE = 0.75  # of the VM's memory; the rest is the node's own
_METRICS_PORT = 8080


def render(name: str, gke: GkeSpec, document: dict[str, Any], plans: list[Plan]) -> str:
    """The manifest of an application and its planned pools as text; `document` is Serve's config file."""
    pools = list(zip(plans, _group_names(plans), strict=True))
    lines = [line for plan, pool in pools for line in nodepools.gcloud_lines(plan, pool, gke)]
    resources = [
        *(nodepools.compute_class(plan, pool) for plan, pool in pools if nodepools.falls_back(plan)),
        *(
            nodepools.network_claims(pool, gke.namespace)
            for plan, pool in pools
            if nodepools.needs_network_claims(plan)
        ),
        _ray_service(_slug(name), gke, _text(document), pools),
        *_pod_monitorings(_slug(name), gke),
    ]
    head = f"# {name}: serving manifest FILE | kubectl apply -f -\n"
    if lines:
        head += "# Nodes first:\n" + "".join(f"#   {line}\n" for line in lines)
    return head + "".join(f"---\n{_text(resource)}" for resource in resources)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and every list and mapping in full."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


def _text(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120)


def _group_names(plans: list[Plan]) -> list[str]:
    """Names of the worker groups, short and stable: pod host names hold them, and end at 63 letters."""
    names: Counter[str] = Counter()
    groups = []
    for plan in plans:
        name = f"{_slug(plan.model.name)[:30].rstrip('-')}-{plan.slice.generation}-{plan.slice.topology}"
        groups.append(f"{name}-{names[name]}" if names[name] else name)
        names[name] += 1
    return groups


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _ray_service(
    label: str, gke: GkeSpec, serve_config: str, pools: list[tuple[Plan, str]]
) -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": label, "namespace": gke.namespace},
        "spec": {
            "serveConfigV2": serve_config,
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                **_control_store(gke),
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": {
                    "version": "v2",
                    "idleTimeoutSeconds": _IDLE_S,
                    "env": [{"name": name, "value": value} for name, value in _AUTOSCALER.items()],
                },
                "headGroupSpec": _head(label, gke),
                "workerGroupSpecs": _worker_groups(pools, label, gke),
            },
        },
    }


def _control_store(gke: GkeSpec) -> dict[str, Any]:
    """With a lasting store, KubeRay's workers wait 10 minutes for a head; Ray's own minute would end their slices."""
    if gke.control_store is None:
        return {}
    if gke.control_store == ON_DISK:
        return {"gcsFaultToleranceOptions": {"backend": ON_DISK}}
    secret = {"name": gke.redis_secret, "key": "password"}
    password = {"redisPassword": {"valueFrom": {"secretKeyRef": secret}}} if gke.redis_secret else {}
    return {"gcsFaultToleranceOptions": {"redisAddress": gke.control_store, **password}}


def _head(label: str, gke: GkeSpec) -> dict[str, Any]:
    ports = {"gcs": 6379, "dashboard": 8265, "client": 10001, "serve": 8000, "metrics": _METRICS_PORT}
    size = {"cpu": _HEAD_CPU, "memory": _HEAD_MEMORY}
    container = {
        "name": "ray-head",
        "image": gke.image,
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "env": [_token(gke)],
        "resources": {"requests": size, "limits": size},
        **_probes("/api/gcs_healthz", 8265),
    }
    return {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
        "template": {
            "metadata": {"labels": {"app": label}},
            "spec": {
                "serviceAccountName": gke.service_account,
                "restartPolicy": "Never",
                "containers": [container],
            },
        },
    }


def _worker_groups(pools: list[tuple[Plan, str]], label: str, gke: GkeSpec) -> list[dict[str, Any]]:
    """One a pool. Without priorities the autoscaler alternates hosts of groups of one shape, and orders no whole slice."""
    shapes = Counter(plan.slice.pod_type for plan, _ in pools)
    return [
        _worker_group(plan, name, label, gke)
        | ({"priority": len(pools) - place} if shapes[plan.slice.pod_type] > 1 else {})
        for place, (plan, name) in enumerate(pools)
    ]


def _worker_group(plan: Plan, name: str, label: str, gke: GkeSpec) -> dict[str, Any]:
    counts = plan.model.replicas
    worker = _worker(plan, gke)
    # The autoscaler crashes on a group without a number of CPUs. Any number will do: nothing of ours asks Ray for CPUs.
    has_cpus = "cpu" in worker["resources"]["limits"]
    annotations = {"gke-gcsfuse/volumes": "true"} if gke.weights_bucket else {}
    claims = {"resourceClaims": [{"name": "nics", "resourceClaimTemplateName": name}]}
    return {
        "groupName": name,
        "replicas": counts.min,
        # Serve's own minimum holds its slices. A minimum here would keep as many idle hosts, of any slices.
        "minReplicas": 0,
        "maxReplicas": counts.max,
        "numOfHosts": plan.slice.hosts,
        "rayStartParams": {} if has_cpus else {"num-cpus": str(_WORKER_VCPUS)},
        # Ray labels the hosts so itself; the autoscaler has to know the label before there are hosts.
        "labels": {POD_TYPE_LABEL: plan.slice.pod_type},
        "template": {
            "metadata": {"labels": {"app": label}, **({"annotations": annotations} if annotations else {})},
            "spec": {
                "serviceAccountName": gke.service_account,
                "restartPolicy": "Never",  # autoscaler v2 replaces pods, it does not restart them
                "terminationGracePeriodSeconds": round(plan.model.drain_s) + _GRACE_S,
                "nodeSelector": nodepools.node_selector(plan, name),
                **(claims if nodepools.needs_network_claims(plan) else {}),
                "containers": [worker],
                "volumes": _volumes(gke),
            },
        },
    }


def _worker(plan: Plan, gke: GkeSpec) -> dict[str, Any]:
    machine = plan.slice.hardware.machine(plan.slice.machine_type)
    # All chips of the VM, or the pod is not admitted.
    size = {"google.com/tpu": str(plan.slice.chips_per_host)}
    if machine and machine.vcpus and machine.memory_gb:
        size["cpu"] = str(min(_WORKER_VCPUS, machine.vcpus // 2))
        size["memory"] = f"{int(machine.memory_gb * _MEMORY_SHARE)}G"
    claims = {"claims": [{"name": "nics"}]} if nodepools.needs_network_claims(plan) else {}
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108  where JAX and vLLM keep shared memory
    if gke.weights_bucket:
        mounts.append({"name": "weights", "mountPath": _WEIGHTS})
    return {
        "name": "ray-worker",
        "image": gke.image,
        "ports": [{"name": "metrics", "containerPort": _METRICS_PORT}],
        "env": _environment(plan, gke),
        "resources": {"requests": size, "limits": size, **claims},
        "volumeMounts": mounts,
        # Both probes in full: KubeRay's own readiness probe asks for a Serve proxy, which stands on the head alone.
        **_probes("/api/local_raylet_healthz", 52365),
    }


def _environment(plan: Plan, gke: GkeSpec) -> list[dict[str, Any]]:
    plain = {
        "JAX_PLATFORMS": "tpu,cpu",  # "tpu" alone fails in JAX's weight loader: unknown backend cpu
        "TPU_BACKEND_TYPE": "jax",
        "ENABLE_PJRT_COMPATIBILITY": "true",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(round(plan.model.drain_s) + _NOTICE_S),
        "VBAR_CONTROL_SERVICE_URL": "$(NODE_IP):8353",
        # GKE's device plugin reports what libtpu measures; Ray's agent on the host reads it there.
        "TPU_DEVICE_PLUGIN_ADDR": "$(NODE_IP):2112",
        # On local disk where a slice has several hosts, which would race on one bucket.
        "VLLM_XLA_CACHE_PATH": f"{_WEIGHTS}/xla"
        if gke.weights_bucket and plan.slice.hosts == 1
        else "/tmp/xla",  # noqa: S108
    }
    if plan.slice.hosts > 1:
        plain["TPU_MULTIHOST_BACKEND"] = "ray"
    if gke.weights_bucket:
        plain["HF_HOME"] = f"{_WEIGHTS}/huggingface"
    return [
        {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
        _token(gke),
        *({"name": name, "value": value} for name, value in sorted((plain | plan.environment).items())),
    ]


def _token(gke: GkeSpec) -> dict[str, Any]:
    reference = {"name": gke.token_secret, "key": "token", "optional": True}
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}


def _volumes(gke: GkeSpec) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if gke.weights_bucket:
        options = "implicit-dirs,file-cache:enable-parallel-downloads:true,file-cache:max-size-mb:-1"
        attributes = {"bucketName": gke.weights_bucket, "mountOptions": options}
        volumes.append(
            {
                "name": "weights",
                "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes},
            }
        )
    return volumes


def _probes(path: str, port: int) -> dict[str, Any]:
    """KubeRay's delays, on raylet or control store alone: a model that loads is Serve's state, not the pod's."""
    check = {"httpGet": {"path": path, "port": port}, "periodSeconds": 5, "timeoutSeconds": 5}
    return {
        "livenessProbe": {**check, "initialDelaySeconds": 30, "failureThreshold": 120},
        "readinessProbe": {**check, "initialDelaySeconds": 10, "failureThreshold": 10},
    }


def _pod_monitorings(label: str, gke: GkeSpec) -> Iterator[dict[str, Any]]:
    """Scrapes of the service's page, once, at the front door, and of Ray's own metrics on every pod."""
    service = {"app": label, "ray.io/node-type": "head"}
    for name, labels, endpoint in (
        (label, service, {"port": "serve", "path": "/metrics", "interval": "30s"}),
        (f"{label}-ray", {"app": label}, {"port": "metrics", "interval": "30s"}),
    ):
        yield {
            "apiVersion": "monitoring.googleapis.com/v1",
            "kind": "PodMonitoring",
            "metadata": {"name": name, "namespace": gke.namespace},
            "spec": {"selector": {"matchLabels": labels}, "endpoints": [endpoint]},
        }
