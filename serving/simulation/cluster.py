"""TPU slices on one machine: every host is a Ray node of its own, labelled by Ray's own production code.

A host is `ray start` in the environment that GKE gives a TPU VM (TPU_NAME, TPU_WORKER_ID, ...), on a loopback address
of its own. Its processes inherit two tags in their environment: the simulation's id and the host's name. Hosts are killed
and simulations ended by these tags, not by process names: nothing outlives a simulation, nothing else is touched.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Self

import psutil

from serving import secret
from serving.environment import CACHE, CHIPS, ENGINE, HOST, SIMULATION, STARTUP
from serving.errors import SimulationError
from serving.simulation import chips, host_environment, processes
from serving.simulation.network import LOOPBACK, Namespaces, best, free_subnet, network
from serving.simulation.ports import Ports, is_free
from serving.tpu import POOL_LABEL, Slice, pool_label, resolve

HEAD = "head"
ENGINES = ("vllm", "simulated")
_START_TIMEOUT_S = 180  # a loaded machine once took more than 60
_HOSTS_A_CORE = 2  # Ray gives a host 30 s to join the cluster; a host that starts alone takes six
_STARTS = 3  # of a host that misses this
_OBJECT_STORE_BYTES = 80 << 20  # nothing but actor arguments goes through it
# Ray's command line without that of Serve, which costs every host that starts more CPU time to import than all else here.
_RAY = "import sys; sys.modules['ray.serve.scripts'] = None; from ray.scripts.scripts import main; main()"

# A Unix socket's path has 107 bytes at most; of Ray's, below a host's folder, this is the longest, with a process id of Linux's.
_SOCKET_BYTES, _LONGEST_SOCKET = 107, "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"

_ACCESS = ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", secret.VARIABLE)

Report = Callable[[str], None]


@dataclass(frozen=True)
class SimulatedSlice:
    """One simulated slice: its shape by name, its number among the simulation's slices, its hosts' addresses, and which are cut off or alive.

    `pool` is the key of the pool that it is bought for; without one its hosts have no label of a pool.
    """

    name: str
    generation: str
    topology: str
    hosts: int
    subnet: int
    ips: tuple[str, ...] = ()
    cut: tuple[int, ...] = ()
    alive: tuple[bool, ...] = ()
    pool: str = ""

    @property
    def shape(self) -> Slice:
        return resolve(self.generation, self.topology, hosts=self.hosts)


def default_directory(name: str = "sim") -> Path:
    """Where a simulation of this name keeps its state and Ray its sessions (short, for the sake of its sockets)."""
    return Path(tempfile.gettempdir()) / f"tpu-serving-{os.getuid()}" / name


def _command(directory: Path) -> str:
    """What reaches the simulation of this directory."""
    return "serving sim" if directory == default_directory() else f"serving sim --name {directory.name}"


def cache_directory() -> Path:
    """Where stand-in models and compiled programs are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpu-serving"


def _new_id(kind: str) -> str:
    """An id whose ports nobody listens on, and whose addresses nobody has."""
    while not (
        all(map(is_free, Ports.of(simulation := uuid.uuid4().hex[:12])))
        and (kind == LOOPBACK or Namespaces(simulation).free())
    ):
        continue
    return simulation


class SimulatedCluster:
    """A running simulation. Make one with `up` or find a running one with `attach`; `down` ends all of it."""

    def __init__(
        self,
        directory: Path,
        simulation: str,
        engine: str = "vllm",
        startup: str = "",
        *,
        cluster_secret: str,
        network_kind: str = LOOPBACK,
    ) -> None:
        self.directory = directory
        self.id = simulation
        self._ports = Ports.of(simulation)
        self.network_kind = network_kind
        self._network = network(network_kind, simulation)
        self.address = f"{self._network.head_ip}:{self._ports.control_store}"
        self.engine = engine
        self._startup = startup
        self.secret = cluster_secret
        # Serve adds 67 characters for its socket, of the 97 that HAProxy takes.
        self._haproxy = Path(tempfile.gettempdir()) / f"sv{simulation}"
        self._slices: dict[str, SimulatedSlice] = {}

    @classmethod
    def refuse_running(cls, directory: Path) -> None:
        """Raises SimulationError if a simulation runs in this directory."""
        if not (directory / "cluster.json").exists():
            return
        old = cls.attach(directory)
        if old._processes():  # noqa: SLF001
            raise SimulationError(
                f"a simulation already runs in {directory} ({_counted(len(old.status()))}); `{_command(directory)} down` ends it, "
                "--name starts another beside it"
            )

    @classmethod
    def up(
        cls,
        shapes: Sequence[Slice],
        *,
        pools: Sequence[str] = (),
        directory: Path | None = None,
        engine: str = "vllm",
        startup: str = "",
        network_kind: str | None = None,
        report: Report = lambda _: None,
    ) -> Self:
        """Start a head and slices of these shapes; raises SimulationError if one runs in this directory already.

        `pools` are the keys of the pools that the first of the slices are bought for. `engine` is what replicas run, one of ENGINES.
        `startup` is how long the simulated engine takes to start. `network_kind` is one of network.NETWORKS, by default namespaces
        where this user may make them.
        """
        network_kind = network_kind or best()
        if engine not in ENGINES:
            raise SimulationError(f"no engine is named {engine!r}; there are {', '.join(ENGINES)}")
        directory = directory or default_directory()
        _refuse_long(directory, shapes)
        cls.refuse_running(directory)
        if (directory / "cluster.json").exists():
            cls.attach(directory).down()
        cluster = cls(
            directory,
            _new_id(network_kind),
            engine,
            startup,
            cluster_secret=secret.new(),
            network_kind=network_kind,
        )
        cluster._make_directory()
        cluster._save()
        try:
            report("starting the head")
            cluster._network.up()
            cluster._start_head()
            entries = [
                cluster._added(shape, pool=pool)
                for shape, pool in zip(shapes, chain(pools, repeat("")), strict=False)
            ]
            hosts = [(entry, worker_id) for entry in entries for worker_id in range(entry.hosts)]
            cluster._start_hosts(hosts, report)
        except BaseException:
            cluster.down()
            raise
        return cluster

    @classmethod
    def attach(cls, directory: Path | None = None) -> Self:
        """The simulation that runs in this directory; raises SimulationError if there is none, or none that this version knows."""
        directory = directory or default_directory()
        file = directory / "cluster.json"
        try:
            return cls._of(directory, json.loads(file.read_text()))
        except FileNotFoundError:
            raise SimulationError(
                f"no simulation runs in {directory}; `{_command(directory)} up` starts one"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise SimulationError(
                f"{file} is damaged, or of another version of this command; end the processes that have RAY_TMPDIR={directory} in "
                f"their environment, and delete {directory}"
            ) from None

    @classmethod
    def _of(cls, directory: Path, state: dict[str, Any]) -> Self:
        """The simulation as `_save` kept it; raises KeyError or TypeError for a state of another version."""
        cluster = cls(
            directory,
            state["id"],
            state["engine"],
            state["startup"],
            cluster_secret=state["secret"],
            network_kind=state["network"],
        )
        cluster._slices = {
            entry["name"]: SimulatedSlice(**entry | {"ips": tuple(entry["ips"]), "cut": tuple(entry["cut"])})
            for entry in state["slices"]
        }
        return cluster

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which a driver on this machine (`serve run`) reaches the simulation."""
        return {"RAY_ADDRESS": self.address, **self._environment(HEAD)}

    @property
    def access(self) -> dict[str, str]:
        """Of `environment`, what a shell of the caller lacks."""
        environment = self.environment
        return {name: environment[name] for name in _ACCESS}

    def add_slice(
        self, shape: Slice, *, name: str | None = None, pool: str = "", without: Sequence[str] = ()
    ) -> str:
        """Start every host of one more slice, bought for the pool of this key or for any; returns its name.

        `without` are variables that the hosts lack, as TPU_NAME where Google's webhook was not there in time; raises SimulationError
        for one that hosts don't have anyway. Of a start that fails or is interrupted nothing stays.
        """
        _check_variables(shape, without)
        entry = self._added(shape, name, pool)
        try:
            self._start_hosts([(entry, worker_id) for worker_id in range(shape.hosts)], without=without)
        except BaseException:
            self.kill_slice(entry.name)
            raise
        return entry.name

    def restart_host(self, name: str, worker_id: int) -> None:
        """Start a killed host of a slice again, as a new VM under the old name."""
        entry = self._slice(name)
        _check_host(entry, worker_id)
        if self.status(name)[0].alive[worker_id]:
            raise SimulationError(f"host {worker_id} of {name} is alive; kill it first")
        self.kill_host(name, worker_id)  # of a host whose cable is cut the processes run on
        self._slices[name] = replace(entry, cut=tuple(number for number in entry.cut if number != worker_id))
        self._save()
        self._start_hosts([(entry, worker_id)])

    def restart_head(self) -> None:
        """End the head as a power cut does, and start it again on its disk: the control store's records are kept.

        The Serve controller, the routers, HAProxy and every driver on the head end with it; slices wait for the head.
        """
        processes.kill(lambda: self._processes(HEAD))
        # The slices' raylets are on the same machine: with this file, Ray takes them for a running head.
        (self.directory / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        self._start_head()

    def kill_host(self, name: str, worker_id: int) -> int:
        """End a host as a power cut does: every process on it at once. Returns how many there were."""
        entry = self._slice(name)
        _check_host(entry, worker_id)
        return processes.kill(lambda: self._processes(f"{name}/{worker_id}"))

    def corrupt(self, name: str, worker_id: int) -> None:
        """Have engines that start on a host from now on compute with a wrong weight, as long as the host lives."""
        _check_host(self._slice(name), worker_id)
        chips.corrupt(self._chips(name, worker_id))

    def cut_cable(self, name: str, worker_id: int) -> None:
        """Take a host off its network while its processes run on; needs hosts with a network of their own."""
        entry = self._slice(name)
        _check_host(entry, worker_id)
        self._network.cut(entry.subnet, worker_id)
        self._slices[name] = replace(entry, cut=(*entry.cut, worker_id))
        self._save()

    def _chips(self, name: str, worker_id: int) -> Path:
        return self.directory / "chips" / f"{name}-{worker_id}"

    def kill_slice(self, name: str) -> None:
        """End every host of a slice and forget the slice."""
        entry = self._slice(name)
        processes.kill(
            lambda: [
                process
                for worker_id in range(entry.hosts)
                for process in self._processes(f"{name}/{worker_id}")
            ]
        )
        for worker_id in range(entry.hosts):
            self._network.remove(entry.subnet, worker_id)
        del self._slices[name]
        self._save()

    def status(self, *names: str) -> list[SimulatedSlice]:
        """The slices, each with which of its hosts are alive: their raylet runs, and their cable is whole."""
        alive = {
            environment[HOST]
            for process in self._processes()
            if (environment := processes.environment(process)) and processes.name(process) == "raylet"
        }
        return [
            SimulatedSlice(
                **{
                    **asdict(entry),
                    "alive": tuple(
                        f"{entry.name}/{i}" in alive and i not in entry.cut for i in range(entry.hosts)
                    ),
                }
            )
            for entry in self._slices.values()
            if not names or entry.name in names
        ]

    def down(self) -> None:
        """End every process of the simulation and delete its directory."""
        processes.kill(self._processes)
        self._network.down()
        shutil.rmtree(self._haproxy, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def processes(self, name: str | None = None, worker_id: int | None = None) -> list[psutil.Process]:
        """The processes of the simulation, or of one host of it."""
        return self._processes(None if name is None else f"{name}/{worker_id}")

    def _slice(self, name: str) -> SimulatedSlice:
        if name not in self._slices:
            raise SimulationError(
                f"there is no slice {name!r}; the slices are {', '.join(self._slices) or 'none'}"
            )
        return self._slices[name]

    def _environment(self, host: str) -> dict[str, str]:
        """What every process of a host starts with: its tags, by which it is found again, among them."""
        tags = {
            SIMULATION: self.id,
            HOST: host,
            CACHE: str(cache_directory()),
            ENGINE: self.engine,
            STARTUP: self._startup,
            secret.VARIABLE: self.secret,
        }
        return (
            host_environment.inherited()
            | tags
            | host_environment.of_ray(self.directory)
            | host_environment.of_serve(self._ports, self._haproxy)
        )

    def _start_head(self) -> None:
        ip, port = self.address.split(":")
        start = self._ray_start(
            self._environment(HEAD),
            [
                "--head",
                f"--port={port}",
                f"--node-ip-address={ip}",
                f"--num-cpus={os.cpu_count()}",
                "--no-monitor",
            ]
            + [f"--ray-client-server-port={self._ports.ray_client}", "--include-dashboard=false"],
        )
        _finish(start)

    def _added(self, shape: Slice, name: str | None = None, pool: str = "") -> SimulatedSlice:
        subnet = free_subnet(((entry.subnet, entry.hosts) for entry in self._slices.values()), shape.hosts)
        name = name or f"slice-{subnet - 1}"
        if name in self._slices:
            raise SimulationError(
                f"there is a slice {name!r} already; the slices are {', '.join(self._slices)}"
            )
        ips = tuple(self._network.ip(subnet, worker_id) for worker_id in range(shape.hosts))
        entry = SimulatedSlice(name, shape.generation, shape.topology, shape.hosts, subnet, ips, pool=pool)
        self._slices[name] = entry
        self._save()
        return entry

    def _start_hosts(
        self,
        hosts: Sequence[tuple[SimulatedSlice, int]],
        report: Report = lambda _: None,
        without: Sequence[str] = (),
    ) -> None:
        """In groups large enough to keep the machine's cores busy while a host waits for its parts.

        Ray gives a host 30 s to start (_private/node.py). On a busy machine a group can miss that; such a host starts again by itself.
        """
        at_once = _HOSTS_A_CORE * (os.cpu_count() or 1)
        for first in range(0, len(hosts), at_once):
            group = hosts[first : first + at_once]
            report(f"starting host {first + 1} to {first + len(group)} of {len(hosts)}, {group[0][0].shape}")
            starts = [
                (entry, worker_id, self._start_host(entry, worker_id, without)) for entry, worker_id in group
            ]
            late = []
            for entry, worker_id, start in starts:
                try:
                    _finish(start)
                except SimulationError:
                    late.append((entry, worker_id))
            for entry, worker_id in late:
                self._start_again(entry, worker_id, report, without)

    def _start_again(
        self, entry: SimulatedSlice, worker_id: int, report: Report, without: Sequence[str]
    ) -> None:
        """A host that missed its time, alone; raises SimulationError where it misses it once more each time."""
        for left in reversed(range(_STARTS - 1)):
            report(f"host {worker_id} of {entry.name} did not start in time; starting it again")
            processes.kill(partial(self._processes, f"{entry.name}/{worker_id}"))
            try:
                _finish(self._start_host(entry, worker_id, without))
            except SimulationError:
                if not left:
                    raise
            else:
                break

    def _start_host(
        self, entry: SimulatedSlice, worker_id: int, without: Sequence[str] = ()
    ) -> "subprocess.Popen[str]":
        shape = entry.shape
        folder = self._chips(entry.name, worker_id)
        chips.make(folder, shape.chips_per_host)
        environment = (
            self._environment(f"{entry.name}/{worker_id}")
            | shape.host_environment(entry.name, worker_id)
            | (host_environment.MALLOC if self.engine == "vllm" else {})
            | {
                "JAX_PLATFORMS": "cpu",
                CHIPS: str(folder),
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={shape.devices_per_host}",
                "OMP_NUM_THREADS": "1",
                "SKIP_JAX_PRECOMPILE": "1",
            }
        )
        environment = {name: value for name, value in environment.items() if name not in without}
        resources = json.dumps({"TPU": shape.chips_per_host})
        labels = [f"--labels={POOL_LABEL}={pool_label(entry.pool)}"] if entry.pool else []
        self._network.add(entry.subnet, worker_id)
        return self._ray_start(
            environment,
            [f"--address={self.address}", f"--node-ip-address={entry.ips[worker_id]}"]
            # Hosts that start together in one folder would pick the same socket names.
            + [f"--temp-dir={self.directory / f'{entry.name}-{worker_id}'}"]
            + ["--num-cpus=2", f"--resources={resources}", *labels],
            self._network.command(entry.subnet, worker_id),
        )

    def _ray_start(
        self, environment: Mapping[str, str], arguments: list[str], within: Sequence[str] = ()
    ) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*within, sys.executable, "-c", _RAY, "start", *arguments]
            + ["--disable-usage-stats", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
            + ["--min-worker-port=0", "--max-worker-port=0"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _processes(self, host: str | None = None) -> list[psutil.Process]:
        return processes.processes({SIMULATION: self.id} | ({HOST: host} if host else {}))

    def _make_directory(self) -> None:
        (self.directory / "tmp").mkdir(parents=True, exist_ok=True)
        self.directory.chmod(stat.S_IRWXU)  # secrets are kept there
        host_environment.ray_token(self.directory).write_text(secret.new())

    def _save(self) -> None:
        slices = [
            {key: value for key, value in asdict(entry).items() if key != "alive"}
            for entry in self._slices.values()
        ]
        state = {
            "id": self.id,
            "engine": self.engine,
            "startup": self._startup,
            "secret": self.secret,
            "network": self.network_kind,
            "slices": slices,
        }
        draft = self.directory / "cluster.json.new"
        draft.write_text(json.dumps(state, indent=1))
        draft.replace(self.directory / "cluster.json")


def _refuse_long(directory: Path, shapes: Sequence[Slice]) -> None:
    """Raises SimulationError where the paths of Ray's sockets below the folder would be longer than Unix takes."""
    host = f"slice-{max(len(shapes) - 1, 0)}-{max((shape.hosts for shape in shapes), default=1) - 1}"
    beyond = len(os.fsencode(directory / host / _LONGEST_SOCKET)) - _SOCKET_BYTES
    if beyond > 0:
        raise SimulationError(
            f"{directory} is {beyond} bytes too long for Ray's sockets below it; give a shorter --name, or set TMPDIR to a shorter "
            "folder, as /tmp"
        )


def _counted(slices: int) -> str:
    return f"{slices} slice{'' if slices == 1 else 's'}"


def _check_host(entry: SimulatedSlice, worker_id: int) -> None:
    if worker_id not in range(entry.hosts):
        raise SimulationError(f"{entry.name} has hosts 0 to {entry.hosts - 1}, not {worker_id}")


def _check_variables(shape: Slice, without: Sequence[str]) -> None:
    known = shape.host_environment("", 0)
    for name in without:
        if name not in known:
            raise SimulationError(
                f"hosts of {shape} have no variable {name!r} to lack; they have {', '.join(known)}"
            )


def _finish(start: "subprocess.Popen[str]") -> None:
    try:
        output, _ = start.communicate(timeout=_START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        start.kill()
        raise SimulationError(
            f"`ray start` gave no answer in {_START_TIMEOUT_S} s; is the machine overloaded?"
        ) from None
    if start.returncode:
        last = "\n".join(output.strip().splitlines()[-12:])
        raise SimulationError(f"`ray start` failed:\n{last}")
