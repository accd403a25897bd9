"""The environment of a simulation's processes: what they inherit of the caller's, and what Ray and Serve read of it."""

import os
import sys
from pathlib import Path

from serving.simulation.ports import Ports

# A step of the engine takes fresh buffers each time; with glibc's defaults two thirds of its time went into page faults
# on mmap (prototype: 174 ms to 76 ms a step). So there is one arena, which keeps its memory.
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
# Settings of the caller's shell that hosts must not inherit: they would change what a host is.
_NOT_INHERITED = ("TPU_", "JAX_", "XLA_", "VLLM_", "RAY_", "MALLOC_", "SERVING_SIMULATION")
_RAY_TOKEN = "ray-token"  # noqa: S105  a file


def inherited() -> dict[str, str]:
    """The caller's, with the commands of this Python first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    return kept | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "SPT_NOENV": "1",  # process titles must not overwrite the environment, which holds the tags
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def ray_token(directory: Path) -> Path:
    """The file of Ray's token, in the simulation's directory."""
    return directory / _RAY_TOKEN


def of_ray(directory: Path) -> dict[str, str]:
    """Ray's variables; `directory` is the simulation's."""
    return {
        "RAY_TMPDIR": str(directory),
        "TMPDIR": str(directory / "tmp"),  # a killed vLLM leaves its sockets there
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(ray_token(directory)),
        "RAY_USAGE_STATS_ENABLED": "0",
        # The control store on disk, as a Redis keeps it on a cluster: slices outlive a restart of the head.
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(directory / "gcs"),
        # Ray's own 10 s are for a fleet; here a person watches.
        "RAY_metrics_report_interval_ms": "2000",
        # Else Ray starts workers for tasks of each driver; this service's have none.
        "RAY_prestart_worker_first_driver": "0",
        # At Ray's 15, other work on the machine starves an engine until it looks hung.
        "RAY_worker_niceness": "0",
    }


def of_serve(ports: Ports, haproxy: Path) -> dict[str, str]:
    """Serve's variables; `haproxy` is the folder of HAProxy's files, for which Serve has one place on the whole machine."""
    return {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(sys.executable).parent / "serving-haproxy"),
        # Serve kills a proxy that is not there after three times as long, by default 5 s. On two busy cores one is imported in 15 s.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
        # As the image has it (Dockerfile).
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # Two simulations' proxies would share a fallback port, and each answer the other's clients.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports.fallback_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports.first_router),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.last_router),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{haproxy}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{haproxy}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{haproxy}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{haproxy}/metrics.sock",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.haproxy_metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.haproxy_stats),
    }
