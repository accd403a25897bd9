"""Facts of a healthy cluster, for the doctor's tests to put faults into."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from serving import config
from serving.doctor.facts import Deployed, Endpoints, Facts, HostFacts
from serving.doctor.versions import locked
from serving.planning import Plan, plan
from serving.slices.preflight import Facts as Preflight
from serving.slices.preflight import Needs
from serving.slices.tpu_hosts import TpuHost
from serving.tpu.generations import GIB

LLAMA = Path(__file__).parents[2] / "deployments" / "llama.yaml"
HERE = {"ray": "2.60.0", "python": "3.12.9"}


@cache
def llama() -> Plan:
    """Llama 3.1 8B on v6e 2x4, two hosts of four chips."""
    (service,) = config.load(LLAMA).services.values()
    return plan(service.models[0])


def host(worker: int, name: str = "a") -> TpuHost:
    return TpuHost(f"{name}{worker}", f"10.0.0.{worker}", 700, name, worker, "v6e-8", "2x4", 4, worker == 0)


def told(worker: int, name: str = "a") -> HostFacts:
    """What a healthy host of a real v6e slice tells."""
    return HostFacts(
        has=Preflight({}, disk_bytes=100 * GIB, memory_bytes=600 * GIB, unreached={}),
        needs=Needs("/cache", disk_bytes=16 * GIB, memory_bytes=2 * GIB),
        devices=tuple(f"/dev/vfio/{chip}" for chip in range(4)),
        environment={
            "TPU_NAME": name,
            "TPU_WORKER_ID": str(worker),
            "TPU_WORKER_HOSTNAMES": "a-0,a-1",
            "RAY_AUTH_MODE": "token",
        },
        hugepages="always",
        memory_bytes=700 * GIB,
        cpus=180,
        cores=180,
        versions={**locked(simulated=False), "python": HERE["python"], "tpu-serving": "0.1.0"},
        secret="abc",
        weights={"meta-llama/Llama-3.1-8B-Instruct": ""},
    )


def head() -> HostFacts:
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_REDIS_ADDRESS": "llama-redis:6379",
        "RAY_SERVE_HAPROXY_BINARY_PATH": "/usr/local/bin/serving-haproxy",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    }
    return replace(told(0), devices=(), environment=environment)


def as_rendered(**found: Any) -> Deployed:
    """A RayService and its RayCluster that are what a YAML renders; `found` is what the cluster has instead."""
    cluster = {"headGroupSpec": {"rayStartParams": {"num-cpus": "0"}}, "workerGroupSpecs": []}
    service = {"metadata": {"name": "llama"}, "spec": {"rayClusterConfig": cluster}}
    own = {"metadata": {"name": "llama-abcde"}, "spec": cluster | found}
    pod = {"metadata": {"name": "llama-head", "labels": {}}, "status": {"phase": "Running"}}
    pods = pod, on_node("node-0"), on_node("node-1")
    pools = {"node-0": "llama-v6e-2x4-0", "node-1": "llama-v6e-2x4-0"}
    return Deployed("llama", "default", service, service, (own,), pods, node_pools=pools)


def on_node(node: str, slice_: str = "a", cluster: str = "llama-abcde") -> dict[str, Any]:
    """A pod of a slice that runs, as the TPU webhook has named it."""
    container = {"name": "ray-worker", "env": [{"name": "TPU_NAME", "value": slice_}]}
    return {
        "metadata": {"name": f"{cluster}-{slice_}-{node}", "labels": {"ray.io/cluster": cluster}},
        "spec": {"nodeName": node, "containers": [container]},
        "status": {"phase": "Running"},
    }


def healthy(workers: int = 2) -> Facts:
    """One whole slice before `serve run`."""
    hosts = [host(worker) for worker in range(workers)]
    return Facts(
        plans=[llama()],
        models={"": [llama().model.name]},
        cluster=HERE,
        here=HERE,
        hosts=hosts,
        told={entry.node_id: told(entry.worker_id or 0) for entry in hosts},
        head=head(),
        endpoints=[Endpoints("llama", ("10.0.1.1",), ("10.0.1.1",))],
        deployed=as_rendered(),
    )
