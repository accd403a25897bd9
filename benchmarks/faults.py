"""What can go wrong with a service on simulated slices, and what a fault left behind.

Hosts are killed and stopped by the tag that all their processes carry, raylet included: to the rest a killed host is one
without power. Preemption takes all hosts of a slice. A cable can be cut where hosts have network namespaces of their own.
"""

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import psutil
from ray._private.state import GlobalState
from ray._raylet import GcsClient, GcsClientOptions  # type: ignore[attr-defined]  # compiled
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from serving import secret
from serving.cli.simulated_service import SimulatedService
from serving.simulation import processes
from serving.simulation.cluster import SimulatedCluster
from serving.simulation.processes import called
from serving.state.records import SliceRecord

NOTICE_S = 5
_POISON, _POISONS = "a poisonous prompt", 5
_FAR = 1  # the host that does not have the replica
_ENDING_S = 30.0  # for Ray to end what belonged to a lost slice
# Ray's own on every host, slice or not; an idle worker is kept for the next task.
_DAEMONS = ("raylet", "DashboardAgent", "RuntimeEnvAgent", "log_monitor", "ray::IDLE", "agent")
_REMOVED = "REMOVED"

Act = Callable[[SimulatedService, SliceRecord], None]


def _nothing(_: SimulatedService, __: SliceRecord) -> None:
    return


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, by name: `happens` is done to a running service, to this slice, `follows` some time later.

    `takes_slice`: whether the slice has to be given up, and routers have to be told. `slices`: how many have to serve.
    """

    name: str
    tells: str
    happens: Act = _nothing
    takes_slice: bool = True
    slices: int = 2
    follows: Act = _nothing
    follows_s: float = 1.0


def _tell(trial: SimulatedService, victim: SliceRecord, **faults: float | str) -> None:
    shown = secret.headers(trial.cluster.secret)
    httpx.post(f"{victim.address}/simulator/faults", json=faults, headers=shown, timeout=5).raise_for_status()


def _kill_engine(trial: SimulatedService, victim: SliceRecord) -> None:
    if trial.cluster.engine == "simulated":
        _tell(trial, victim, die=True)
    for process in called("EngineCore", trial.cluster.processes(victim.slice, 0)):
        process.kill()


def _kill_worker(worker_id: int) -> Act:
    def kill(trial: SimulatedService, victim: SliceRecord) -> None:
        for process in called("RayWorkerProc", trial.cluster.processes(victim.slice, worker_id)):
            process.kill()

    return kill


def _kill_sentinel(trial: SimulatedService, victim: SliceRecord) -> None:
    for process in called("ray::_Sentinel", trial.cluster.processes(victim.slice, _FAR)):
        process.kill()


def _hang_worker(trial: SimulatedService, victim: SliceRecord) -> None:
    if trial.cluster.engine == "simulated":
        _tell(trial, victim, hang=True)
    for process in called("RayWorkerProc", trial.cluster.processes(victim.slice, _FAR)):
        process.suspend()


def _kill_replica(trial: SimulatedService, victim: SliceRecord) -> None:
    port = int(victim.address.rpartition(":")[2])
    for process in trial.cluster.processes(victim.slice, 0):
        if port in {listened for _, listened in processes.listening(process)}:
            process.kill()
            return


def _kill_host(worker_id: int) -> Act:
    return lambda trial, victim: [trial.cluster.kill_host(victim.slice, worker_id)].clear()


def _stop_host(worker_id: int) -> Act:
    def stop(trial: SimulatedService, victim: SliceRecord) -> None:
        for process in trial.cluster.processes(victim.slice, worker_id):
            process.suspend()

    return stop


def _cut_cable(trial: SimulatedService, victim: SliceRecord) -> None:
    trial.cluster.cut_cable(victim.slice, _FAR)


def _give_notice(trial: SimulatedService, victim: SliceRecord) -> None:
    """What `ray drain-node` does, and Ray itself on a pod's SIGTERM: every host of the slice will go."""
    client = GcsClient(address=trial.cluster.address)
    until_ms = int((time.time() + NOTICE_S) * 1000)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    for node, info in client.get_all_node_info().items():
        if info.node_manager_address in victim.hosts:
            client.drain_node(node.hex(), reason, "chaos", until_ms)


def _poison(trial: SimulatedService, _: SliceRecord) -> None:
    """One client sends a request that ends any engine it reaches, once a second."""
    for entry in trial.store.slices():
        if entry.serves:
            _tell(trial, entry, die_on=_POISON)
    request = {"model": trial.plans[0].model.name, "prompt": _POISON, "max_tokens": 4}
    for _ in range(_POISONS):
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{trial.address}/v1/completions", json=request, timeout=60)
        time.sleep(1)


def _preempt(trial: SimulatedService, victim: SliceRecord) -> None:
    trial.cluster.kill_slice(victim.slice)


def _kill_router(trial: SimulatedService, _: SliceRecord) -> None:
    routers(trial.cluster)[0].kill()


def _restart_head(trial: SimulatedService, _: SliceRecord) -> None:
    trial.cluster.restart_head()


def _kill_controller(trial: SimulatedService, _: SliceRecord) -> None:
    controllers(trial.cluster)[0].kill()


def _kill_haproxy(trial: SimulatedService, _: SliceRecord) -> None:
    for process in called("haproxy -dS", trial.cluster.processes()):
        process.kill()


FAULTS = (
    Fault("nothing", "for comparison", takes_slice=False),
    Fault("engine", "an engine's process dies", _kill_engine),
    Fault("worker", "an engine's worker hangs, connections stand", _hang_worker),
    Fault("first-worker", "SIGKILL to the engine's worker beside EngineCore", _kill_worker(0)),
    Fault("far-worker", "SIGKILL to the engine's worker on the other host", _kill_worker(_FAR)),
    Fault("sentinel", "SIGKILL to the sentinel that a replica has on the other host", _kill_sentinel),
    Fault("replica", "SIGKILL to a slice's replica", _kill_replica),
    Fault("host", "a host is gone", _kill_host(_FAR)),
    Fault("first-host", "a host is gone, the one with the replica", _kill_host(0)),
    Fault("hung-host", "a host and its raylet hang", _stop_host(_FAR)),
    Fault("cable", "a host's network cable is cut, its processes run on", _cut_cable),
    Fault(
        "hung-first-host",
        "the same of the host with the replica, whose connections stand",
        _stop_host(0),
    ),
    Fault("preempted", "all hosts of a slice are gone at once", _preempt),
    Fault(
        "notice",
        f"the same, {NOTICE_S} s after Ray was told",
        _give_notice,
        follows=_preempt,
        follows_s=NOTICE_S,
    ),
    Fault("poison", "a request that ends engines comes once a second", _poison),
    Fault(
        "corrupt",
        "a slice gives wrong tokens; of three, one of five greedy answers asked again",
        lambda trial, victim: _tell(trial, victim, corrupt=True),
        slices=3,
    ),
    Fault("controller", "SIGKILL to the Serve controller", _kill_controller, takes_slice=False),
    Fault("router", "SIGKILL to one of two routers", _kill_router, takes_slice=False),
    Fault("haproxy", "SIGKILL to HAProxy", _kill_haproxy, takes_slice=False),
    Fault(
        "head",
        "the head is gone and started again, its control store on disk",
        _restart_head,
        takes_slice=False,
    ),
    Fault(
        "errors",
        "half of a slice's requests are answered with 500",
        lambda trial, victim: _tell(trial, victim, error_rate=0.5),
        takes_slice=False,
        follows=lambda trial, victim: _tell(trial, victim, error_rate=0),
    ),
)
SIMULATED_ONLY = ("errors", "poison", "corrupt")
VLLM_ONLY = ("first-worker", "far-worker")  # the simulated engine is one process
NAMESPACES_ONLY = ("cable",)


def routers(cluster: SimulatedCluster) -> list[psutil.Process]:
    return called(":router", cluster.processes())


def controllers(cluster: SimulatedCluster) -> list[psutil.Process]:
    return called("ServeController", cluster.processes())


def mend(trial: SimulatedService, victim: SliceRecord) -> None:
    """Hosts that hang go on, lost ones come back as new VMs: the spare of the next fault."""
    cluster = trial.cluster
    (shape,) = {one.shape for one in cluster.status()}
    for one in cluster.status():
        if not all(one.alive):
            cluster.kill_slice(one.name)
    for failed in trial.store.read().slice_failures:  # as `serving slices release` does
        trial.store.delete_slice_failures(failed)
    if victim.slice not in {one.name for one in cluster.status()}:
        cluster.add_slice(shape, name=victim.slice)


@dataclass(frozen=True)
class Left:
    """What was still there of a slice that was given up, well after its successor served."""

    groups: int = 0
    processes: tuple[str, ...] = ()
    ports: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.groups}, {len(self.processes)}, {len(self.ports)}"


class Belongings:
    """What a slice's replica has before a fault: its processes on all hosts and the ports they listen on."""

    def __init__(self, trial: SimulatedService, victim: SliceRecord, replicas: int) -> None:
        self._trial = trial
        self._replicas = replicas
        self._began = time.time()
        self._processes: dict[psutil.Process, str] = {}
        self._ports: set[tuple[str, int]] = set()
        for worker_id in range(len(victim.hosts)):
            for process in trial.cluster.processes(victim.slice, worker_id):
                with contextlib.suppress(psutil.Error):
                    line = " ".join(process.cmdline())
                    if not any(daemon in line for daemon in _DAEMONS):
                        self._processes[process] = line[:100]
                        self._ports |= processes.listening(process)

    def resume(self, victim: SliceRecord) -> None:
        """Let what was stopped go on: it has to end by itself."""
        for worker_id in range(len(victim.hosts)):
            for process in self._trial.cluster.processes(victim.slice, worker_id):
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGCONT)

    def left(self) -> Left:
        """What is there still, once Ray had the time to end it."""
        until_s = time.monotonic() + _ENDING_S
        while (found := self._look()) != Left() and time.monotonic() < until_s:
            time.sleep(0.5)
        return found

    def _look(self) -> Left:
        alive = [
            line for process, line in self._processes.items() if process.is_running() and _lives(process)
        ]
        old = [one for one in self._trial.cluster.processes() if one.create_time() < self._began]
        held = {port for process in old for port in processes.listening(process)}
        groups = _groups(self._trial.cluster.address)
        return Left(max(0, groups - self._replicas), tuple(alive), tuple(sorted(held & self._ports)))


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _groups(address: str) -> int:
    state = GlobalState()
    options = GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    state._initialize_global_state(options)  # noqa: SLF001  the public table needs a driver
    return sum(group["state"] != _REMOVED for group in state.placement_group_table().values())
