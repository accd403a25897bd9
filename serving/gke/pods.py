"""Pods of head and slices: containers, their environment, what they mount, and what they may do.

They meet Kubernetes' "restricted" Pod Security Standard. No program is root, the root file system is read-only, and what
has to be written goes to volumes with a limit.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from serving.gke import nodepools
from serving.gke.application import Application, Pool
from serving.gke.storage import CACHE, GB, STORE, WEIGHTS
from serving.planning.starts import compilations

METRICS_PORT = 8080
GCS_PORT, DASHBOARD_PORT, AGENT_PORT = 6379, 8265, 52365
# Versions decide what XLA compiles: a folder of its own for each can be deleted as a whole.
TPU_INFERENCE_VERSION = "0.26.0"

# Both are beyond drain_s. On a pod's SIGTERM `ray start --block` tells the control store that its node will go. It
# ends when nothing runs there or the first time is over (Ray's own: 30 s). Kubernetes kills the rest after the second.
_NOTICE_S, _GRACE_S = 30, 60
# With Ray's autoscaler (0.5) and the GCS FUSE sidecar (0.25) 6.75 of the 7.9 that an 8-vCPU node has for pods.
_HEAD_CPU, _HEAD_MEMORY_GB = 6, 16
_HEAD_SHARED_MEMORY_GB = (
    6  # Ray's object store takes 30% of the memory, and goes to /tmp where /dev/shm has less
)
_CPUS_PER_CHIP = 6  # asked for, no limit: Google's samples ask for 20 to 24 on 4 chips
_SYSTEM_PODS_BYTES = 4 * GB  # what GKE's own pods ask for on a node, and the file cache's sidecar
_SHARED_MEMORY_SHARE = 0.2  # of the pod's memory, for /dev/shm, which counts as the pod's
# Ray's object store takes up to 10 GB whatever /dev/shm has, and goes to /tmp, which is a disk here, where that is more.
_SHARED_MEMORY_BYTES = 11 * GB
_HOST_INDEX_LABEL = "ray.io/replica-host-index"  # KubeRay 1.6 sets it on hosts of slices that have several
_TMP = "/tmp"  # noqa: S108  Ray, HAProxy and libtpu keep sockets, logs and locks there
# The kernel's default of 64 KiB keeps libtpu from its buffers; in KiB, as GKE's page on TPUs has it. It takes SYS_RESOURCE where
# the node's own limit is lower. KubeRay puts `ray start` behind a container's command.
_RAISE_MEMLOCK = "{ ulimit -l 68719476736 || true; }"
# Kubernetes' variables for each Service of the namespace. For one named `vllm` there is a VLLM_PORT that ends vLLM's start.
_SERVICE_LINKS = False
_TOKEN = "autoscaler-token"  # noqa: S105  a volume's name


def head(app: Application) -> dict[str, Any]:
    """KubeRay's headGroupSpec: no TPU; the control store, Serve's controller, the routers and HAProxy."""
    ports = {"gcs": GCS_PORT, "dashboard": DASHBOARD_PORT, "serve": app.port, "metrics": METRICS_PORT}
    memory = f"{_HEAD_MEMORY_GB}Gi"
    disk = {"ephemeral-storage": "20G"}
    # Serve may build the application on the head, where models and configurations of the bucket are read. None has to be in it
    # yet: a first one behind the others must not change the head.
    bucket = app.gke.weights_bucket is not None
    container = {
        "name": "ray-head",
        "image": app.image,
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "env": [
            *_secrets(app),
            *_database(app),
            *_plain({"HOME": _TMP, "HF_HOME": f"{_TMP}/huggingface"} | _as_it_is(app.gke.head_env)),
        ],
        "resources": {
            "requests": {"cpu": str(_HEAD_CPU), "memory": memory, **disk},
            "limits": {"memory": memory, **disk},
        },
        "securityContext": _container_security(app),
        "volumeMounts": [
            {"name": "tmp", "mountPath": _TMP},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
            *_keys_mount(app),
            *([{"name": "store", "mountPath": STORE}] if app.gke.store_claim else []),
            *([{"name": "weights", "mountPath": WEIGHTS, "readOnly": True}] if bucket else []),
        ],
        **_probes("/api/gcs_healthz", DASHBOARD_PORT),
    }
    volumes = [
        {"name": "tmp", "emptyDir": {"sizeLimit": "15G"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{_HEAD_SHARED_MEMORY_GB}Gi"}},
        {"name": "autoscaler-tmp", "emptyDir": {"sizeLimit": "1G"}},
        _autoscaler_token(),
        *_keys_volume(app),
        *_store_volume(app),
        *(_weights_volumes(app, app.pools[0], read_only=True) if bucket else []),
    ]
    return {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
        "template": {
            "metadata": {
                "labels": {"app": app.label},
                "annotations": _annotations(fuse=bucket),
            },
            "spec": {
                "serviceAccountName": app.head_account,
                "automountServiceAccountToken": False,
                "enableServiceLinks": _SERVICE_LINKS,
                "priorityClassName": app.priority_class,
                "restartPolicy": "Never",
                "securityContext": _pod_security(app) | _low_port(app),
                "nodeSelector": {"cloud.google.com/gke-nodepool": app.head_pool},
                "containers": [container],
                "volumes": volumes,
            },
        },
    }


def autoscaler(app: Application) -> dict[str, Any]:
    """Options of the autoscaler's container in the head's pod. It alone has the token that may change the cluster."""
    return {
        "resources": {
            "requests": {"cpu": "500m", "memory": "1Gi"},
            "limits": {"memory": "1Gi"},
        },
        "securityContext": _container_security(app),
        "volumeMounts": [
            {"name": "autoscaler-tmp", "mountPath": _TMP},
            {
                "name": _TOKEN,
                "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
                "readOnly": True,
            },
        ],
    }


def host(app: Application, pool: Pool) -> dict[str, Any]:
    """The pod template of a slice's hosts."""
    claims = nodepools.needs_network_claims(pool.plan, app.gke)
    spec = {
        "serviceAccountName": app.slice_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": _SERVICE_LINKS,
        "priorityClassName": app.priority_class,
        "restartPolicy": "Never",  # autoscaler v2 replaces pods, it does not restart them
        "terminationGracePeriodSeconds": round(pool.plan.model.drain_s) + _GRACE_S,
        "securityContext": _pod_security(app),
        "nodeSelector": nodepools.node_selector(pool),
        "containers": [_worker(app, pool)],
        "volumes": [
            {"name": "tmp", "emptyDir": {"sizeLimit": "10G"}},
            {"name": "cache", "emptyDir": {"sizeLimit": _gb(_cache_bytes(pool))}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _gb(_shared_memory(pool))}},
            *(_weights_volumes(app, pool, read_only=False) if app.gke.weights_bucket else []),
        ],
    }
    if tolerations := nodepools.tolerations(pool):
        spec["tolerations"] = tolerations
    if claims:
        spec["resourceClaims"] = [{"name": "nics", "resourceClaimTemplateName": pool.owned}]
    return {
        "metadata": {
            "labels": {"app": app.label, **_host_index(pool)},
            "annotations": _annotations(fuse=app.gke.weights_bucket is not None),
        },
        "spec": spec,
    }


def _host_index(pool: Pool) -> dict[str, str]:
    """The host's index, which KubeRay leaves out of a slice of one host.

    Without an index the TPU webhook ignores KubeRay's number of the slice and counts by itself. Then the host that replaces a lost
    one gets the name of a slice that serves.
    """
    return {_HOST_INDEX_LABEL: "0"} if pool.plan.slice.hosts == 1 else {}


def _worker(app: Application, pool: Pool) -> dict[str, Any]:
    # All chips of the VM, or the pod is not admitted.
    chips = {"google.com/tpu": str(pool.plan.slice.chips_per_host)}
    memory = {"memory": _gb(_memory_bytes(pool))} if _memory_bytes(pool) else {}
    disk = {"ephemeral-storage": _gb(pool.storage.pod_disk_bytes)}
    # Without a number of CPUs the autoscaler crashes. Without a limit the host's others are the compiler's.
    cpus = {"cpu": str(_CPUS_PER_CHIP * pool.plan.slice.chips_per_host)}
    claims = {"claims": [{"name": "nics"}]} if nodepools.needs_network_claims(pool.plan, app.gke) else {}
    return {
        "name": "ray-worker",
        "image": app.image,
        "command": [_RAISE_MEMLOCK],
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        "env": _environment(app, pool),
        "resources": {
            "requests": {**chips, **cpus, **memory, **disk},
            "limits": {**chips, **memory, **disk},
            **claims,
        },
        "securityContext": _container_security(app, app.gke.capabilities),
        "volumeMounts": [
            {"name": "tmp", "mountPath": _TMP},
            {"name": "cache", "mountPath": CACHE},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  where JAX and vLLM keep shared memory
            *([{"name": "weights", "mountPath": WEIGHTS}] if app.gke.weights_bucket else []),
        ],
        # Both probes in full: KubeRay's own readiness probe asks for a Serve proxy, which stands on the head alone.
        **_probes("/api/local_raylet_healthz", AGENT_PORT),
    }


def _environment(app: Application, pool: Pool) -> list[dict[str, Any]]:
    plan = pool.plan
    machine = plan.slice.hardware.machine(plan.slice.machine_type)
    plain = {
        "HOME": _TMP,
        "HF_HOME": f"{CACHE}/huggingface",
        "JAX_PLATFORMS": "tpu,cpu",  # "tpu" alone fails in JAX's weight loader: unknown backend cpu
        "TPU_BACKEND_TYPE": "jax",
        "ENABLE_PJRT_COMPATIBILITY": "true",
        "NUM_PRECOMPILE_WORKERS": str(compilations(machine.vcpus if machine else None)),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(round(plan.model.drain_s) + _NOTICE_S),
        "VBAR_CONTROL_SERVICE_URL": "$(NODE_IP):8353",
        # GKE's device plugin reports what libtpu measures; Ray's agent on the host reads it there.
        "TPU_DEVICE_PLUGIN_ADDR": "$(NODE_IP):2112",
        "VLLM_XLA_CACHE_PATH": _compiled(app, pool),
    }
    if plan.slice.hosts > 1:
        plain["TPU_MULTIHOST_BACKEND"] = "ray"
    fields = {"NODE_IP": "status.hostIP"}
    if plan.slice.hosts > 1:
        fields["HOST_INDEX"] = f"metadata.labels['{_HOST_INDEX_LABEL}']"
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        *_secrets(app),
        *_plain(plain | _as_it_is(app.gke.env)),
    ]


def _compiled(app: Application, pool: Pool) -> str:
    """Where XLA's programs are kept. Without jax.distributed every host counts as JAX's first and writes: a folder each."""
    folder = f"{WEIGHTS if app.gke.weights_bucket else CACHE}/xla"
    host = "/host-$(HOST_INDEX)" if pool.plan.slice.hosts > 1 else ""
    return f"{folder}/tpu-inference-{TPU_INFERENCE_VERSION}/{pool.plan.slice.pod_type}{host}"


def _secrets(app: Application) -> list[dict[str, Any]]:
    """A pod whose secret is missing does not start, and says which."""
    wanted = {"SERVING_CLUSTER_SECRET": (app.gke.cluster_secret, "secret")}
    if app.asks_the_hub and app.gke.token_secret:
        wanted["HF_TOKEN"] = (app.gke.token_secret, "token")
    if app.gke.tracing_secret:
        wanted["OTEL_EXPORTER_OTLP_HEADERS"] = (app.gke.tracing_secret, "headers")
    return [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for variable, (secret, key) in wanted.items()
    ]


def _database(app: Application) -> list[dict[str, Any]]:
    """The password of the store's database, whose process runs on the head."""
    secret = {"name": app.gke.database_secret, "key": "password"}
    return [{"name": "PGPASSWORD", "valueFrom": {"secretKeyRef": secret}}] if app.gke.database_secret else []


def _as_it_is(variables: Mapping[str, str]) -> dict[str, str]:
    """Values that Kubernetes leaves alone: it takes $(NAME) for another variable's value and $$ for a $."""
    return {name: value.replace("$", "$$") for name, value in variables.items()}


def _plain(variables: dict[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in sorted(variables.items())]


def _keys_mount(app: Application) -> list[dict[str, Any]]:
    if not app.router.keys_file:
        return []
    # The folder, not the file: Kubernetes changes a mounted secret only so.
    return [{"name": "keys", "mountPath": app.router.keys_file.rpartition("/")[0], "readOnly": True}]


def _keys_volume(app: Application) -> list[dict[str, Any]]:
    if not app.router.keys_file:
        return []
    file = app.router.keys_file.rpartition("/")[2]
    secret = {"secretName": app.gke.keys_secret, "items": [{"key": "keys.yaml", "path": file}]}
    return [{"name": "keys", "secret": secret}]


def _store_volume(app: Application) -> list[dict[str, Any]]:
    claim = app.gke.store_claim
    return [{"name": "store", "persistentVolumeClaim": {"claimName": claim}}] if claim else []


def _weights_volumes(app: Application, pool: Pool, *, read_only: bool) -> list[dict[str, Any]]:
    """The bucket by GCS FUSE, and the volume of its file cache, by the name that the driver looks for."""
    cache = _gb(pool.storage.file_cache_bytes) if not read_only else "1G"
    in_memory = {"medium": "Memory"} if pool.storage.file_cache_in_memory and not read_only else {}
    user = app.gke.run_as_user
    attributes = {
        "bucketName": app.gke.weights_bucket,
        "fileCacheCapacity": cache,
        # The driver's own owner is root.
        "mountOptions": f"implicit-dirs,uid={user},gid={user},file-mode=664,dir-mode=775,file-cache:enable-parallel-downloads:true",
    }
    return [
        {
            "name": "weights",
            "csi": {
                "driver": "gcsfuse.csi.storage.gke.io",
                **({"readOnly": True} if read_only else {}),
                "volumeAttributes": attributes,
            },
        },
        {"name": "gke-gcsfuse-cache", "emptyDir": {**in_memory, "sizeLimit": _gb_more(cache)}},
    ]


def _annotations(*, fuse: bool) -> dict[str, str]:
    keep = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    if not fuse:
        return keep
    # "0": no limit. The sidecar's own limits, 256 MiB and 250m CPU, slow the loading of weights.
    limits = {f"gke-gcsfuse/{of}-limit": "0" for of in ("cpu", "memory", "ephemeral-storage")}
    return {**keep, "gke-gcsfuse/volumes": "true", **limits}


def _autoscaler_token() -> dict[str, Any]:
    """What Kubernetes mounts by itself into every container of a pod, for one container alone."""
    certificate = {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    return {
        "name": _TOKEN,
        "projected": {
            "sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
                {"configMap": certificate},
                {"downwardAPI": {"items": [namespace]}},
            ]
        },
    }


def _pod_security(app: Application) -> dict[str, Any]:
    user = app.gke.run_as_user
    return {
        "runAsNonRoot": user != 0,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _low_port(app: Application) -> dict[str, Any]:
    """What lets a door below 1024 be opened by who is not root: containerd does so by itself from 2.0 on."""
    first = {"name": "net.ipv4.ip_unprivileged_port_start", "value": str(app.port)}
    return {"sysctls": [first]} if app.port < 1024 else {}


def _container_security(app: Application, capabilities: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "runAsNonRoot": app.gke.run_as_user != 0,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], **({"add": list(capabilities)} if capabilities else {})},
    }


def _memory_bytes(pool: Pool) -> int:
    """What the pod asks for and may have: the node's memory but for GKE, its pods and a file cache in memory.

    A loader may hold a whole checkpoint on each host. 0 where no page gives the machine's memory.
    """
    machine = pool.plan.slice.hardware.machine(pool.plan.slice.machine_type)
    if machine is None or machine.memory_gb is None:
        return 0
    cache = pool.storage.file_cache_bytes * 11 // 10 if pool.storage.file_cache_in_memory else 0
    return int(_allocatable_gb(machine.memory_gb) * GB) - _SYSTEM_PODS_BYTES - cache


def _allocatable_gb(memory_gb: float) -> float:
    """What GKE leaves of a node's memory (https://cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes)."""
    kept, rest = 0.1, memory_gb  # what is kept for eviction, to begin with
    for size_gb, share in ((4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06), (math.inf, 0.02)):
        part = min(rest, size_gb)
        kept += part * share
        rest -= part
    return memory_gb - kept


def _shared_memory(pool: Pool) -> int:
    return max(int(_memory_bytes(pool) * _SHARED_MEMORY_SHARE), _SHARED_MEMORY_BYTES)


def _cache_bytes(pool: Pool) -> int:
    return (
        pool.storage.pod_disk_bytes
        - 10 * GB
        - (0 if pool.storage.file_cache_in_memory else pool.storage.file_cache_bytes)
    )


def _gb(size: int) -> str:
    return f"{-(-size // GB)}G"


def _gb_more(size: str) -> str:
    """A tenth more than the capacity: GCS FUSE goes over it before it evicts."""
    return f"{-(-int(size.removesuffix('G')) * 11 // 10)}G"


def _probes(path: str, port: int) -> dict[str, Any]:
    """KubeRay's delays, on raylet or control store alone: a model that loads is Serve's state, not the pod's."""
    check = {"httpGet": {"path": path, "port": port}, "periodSeconds": 5, "timeoutSeconds": 5}
    return {
        "livenessProbe": {**check, "initialDelaySeconds": 30, "failureThreshold": 120},
        "readinessProbe": {**check, "initialDelaySeconds": 10, "failureThreshold": 10},
    }
