"""ray.serve.llm against vLLM's own server, interleaved: a real tiny model on vLLM's CPU backend, newest vLLM.

    make bench                        # this among the rest
    python -m benchmarks.ray_llm      # this alone

In an environment of its own (peers/ray-llm.txt): ray.serve.llm as it comes, and with direct streaming and HAProxy, each
with an engine of its own, all of them with the same options. The model is this project's stand-in for a tiny Llama.
"""

import json
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks import accounting, peers
from benchmarks.bare import Size, loads, run
from benchmarks.client import Client
from benchmarks.rounds import Contestant, Results, compete
from benchmarks.service import plan_of
from serving.simulation import stand_in
from serving.simulation.cluster import cache_directory
from serving.simulation.ports import free_port

BARE, DEFAULT, DIRECT = "vLLM's own server", "ray.serve.llm", "ray.serve.llm, direct streaming"
PINS = "ray-llm.txt"
MODEL = "llama"
# Eager: compiling would take minutes and is not what is compared.
_OPTIONS = {
    "max_model_len": stand_in.MAX_MODEL_LEN,
    "max_num_seqs": 256,
    "dtype": "float32",
    "enforce_eager": True,
}
_START_TIMEOUT_S = 240
_ENGINE = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
}


def vllm_command(folder: Path, port: int) -> list[str]:
    """The `vllm` command of vllm-cpu does not start: it looks for a package named vllm."""
    options = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in _OPTIONS.items()
    ]
    return [
        *("python", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(folder), "--served-model-name", MODEL, "--disable-uvicorn-access-log"),
        # As ray.serve.llm has it on CPUs.
        *("--distributed-executor-backend", "mp"),
        *options,
    ]


def ray_command(folder: Path, port: int, directory: Path) -> list[str]:
    script = Path(peers.__file__).parent / "peers" / "ray_llm.py"
    return ["python", str(script), str(folder), MODEL, str(port), str(directory), json.dumps(_OPTIONS)]


def haproxy(directory: Path) -> dict[str, str]:
    """Direct streaming, and HAProxy with its files apart from any other's on this machine."""
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{directory}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{directory}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{directory}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
    }


@contextmanager
def contestant(
    name: str, home: Path, command: list[str], port: int, log: Path, variables: Mapping[str, str], bare: str
) -> Iterator[Contestant]:
    tag = uuid.uuid4().hex
    with peers.started(
        name,
        home,
        command,
        port,
        log=log,
        tag=tag,
        variables=_ENGINE | dict(variables),
        timeout_s=_START_TIMEOUT_S,
        ready=peers.chats(MODEL),
    ) as address:
        yield Contestant(name, (address,), MODEL, partial(_processes, tag), bare)


def _processes(tag: str) -> dict[psutil.Process, str]:
    return accounting.by_role(accounting.of_bench(tag))


def measure(size: Size, console: Console) -> tuple[Results, list[Contestant]]:
    """The whole run; what it started ends with it."""
    results = Results()
    say = partial(console.print, highlight=False, soft_wrap=True)
    try:
        home = peers.environment(PINS)
    except peers.PeerError as error:
        results.missing["ray.serve.llm and vLLM's own server"] = str(error)
        return results, []
    folder = stand_in.checkpoint(plan_of("llama"), cache_directory())
    contestants: list[Contestant] = []
    with ExitStack() as stack:
        client = stack.enter_context(Client())
        logs = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="sv"))
        )  # Unix sockets: a short path
        for name, bare in ((BARE, ""), (DEFAULT, BARE), (DIRECT, BARE)):
            port, directory = free_port(), logs / str(len(contestants))
            directory.mkdir(exist_ok=True)
            command = vllm_command(folder, port) if name == BARE else ray_command(folder, port, directory)
            variables = haproxy(directory) if name == DIRECT else {}
            log = logs / f"{name}.log"
            try:
                contestants.append(
                    stack.enter_context(contestant(name, home, command, port, log, variables, bare))
                )
                say(f"{name} is up")
            except peers.PeerError as error:
                say(str(error))
                results.missing[name] = str(error)
        compete(client, contestants, loads(size), size.sets, dict, results, say)
    return results, contestants


if __name__ == "__main__":
    run(__doc__, measure)
