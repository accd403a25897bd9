"""What processes cost, by what they are for: CPU seconds, and memory as PSS (pages shared are split between sharers).

Processes are found by a tag in their environment, which what they start inherits: by it they are also ended, all of
them and nothing else.
"""

import signal
import sys
from collections import Counter
from collections.abc import Iterable, Mapping

import psutil

from serving.simulation import processes

TAG = "SERVING_BENCH"
OTHER = "Ray and the rest"
# What a process is for, by a word of its command line; the first that fits.
ROLES = (
    ("DefaultWorker", OTHER),  # in a raylet's command line, which would start Java workers by it
    ("haproxy", "HAProxy"),
    (":router", "router replica"),
    ("OpenAiIngress", "router replica"),  # ray.serve.llm's
    ("LLMRouter", "router replica"),
    ("ProxyActor", "Serve's Python proxy"),
    ("ServeReplica", "engine's replica (HTTP)"),
    ("APIServer", "engine's replica (HTTP)"),
    ("api_server", "engine's replica (HTTP)"),
    ("EngineCore", "EngineCore"),
    ("Worker", "engine workers"),
    ("Serve", "Serve controller"),
    ("HAProxyManager", "Serve controller"),
)
CLIENT = "load client"
ELSEWHERE = "not of this run"  # the machine was not quiet where this is not small


def role(command: str) -> str:
    return next((name for word, name in ROLES if word in command), OTHER)


def of_bench(tag: str) -> list[psutil.Process]:
    """Every other process that carries this bench's tag."""
    return processes.processes({TAG: tag})


def unwind_on_sigterm() -> None:
    """Let a `timeout` or a CI job end this process as Ctrl-C does, so that it ends what it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def end(tag: str) -> None:
    """Kill what carries this bench's tag until nothing does."""
    processes.kill(lambda: of_bench(tag))


def by_role(processes: Iterable[psutil.Process], name: str = "") -> dict[psutil.Process, str]:
    """Each process with what it is for: `name` where all of them are one thing."""
    roles = {}
    for process in processes:
        try:
            roles[process] = name or role(" ".join([process.name(), *process.cmdline()]))
        except psutil.Error:
            continue
    return roles


def cpu_s(roles: Mapping[psutil.Process, str]) -> Counter[str]:
    """CPU seconds so far."""
    seconds: Counter[str] = Counter()
    for process, what in roles.items():
        try:
            used = process.cpu_times()
        except psutil.Error:
            continue
        seconds[what] += used.user + used.system
    return seconds


def pss_bytes(roles: Mapping[psutil.Process, str]) -> Counter[str]:
    used: Counter[str] = Counter()
    for process, what in roles.items():
        try:
            used[what] += process.memory_full_info().pss
        except psutil.Error:
            continue
    return used


def machine_cpu_s() -> float:
    """CPU seconds of the whole machine so far, with what its hypervisor took from it."""
    used = psutil.cpu_times()
    return float(used.user + used.nice + used.system + used.irq + used.softirq + used.steal)
