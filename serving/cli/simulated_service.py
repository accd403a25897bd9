"""`serving sim run`: a YAML tried on simulated slices, from nothing to a service, and to nothing again on Ctrl-C."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.status import Status

from serving import config, environment, hub
from serving.errors import ServingError, SimulationError
from serving.planning import Plan
from serving.planning.service import every_plan
from serving.simulation.cluster import SimulatedCluster, cache_directory
from serving.state.gcs import Store, show_token
from serving.state.records import SliceRecord, SliceState
from serving.status import terminal

_OWN_ERROR = re.compile(r"serving\.errors\.\w+: (.+)$")  # in a traceback of Serve's
_POLL_S = 0.5
_LOG_LINES = 25


@dataclass(frozen=True)
class SimulatedService:
    """A YAML's service, up on simulated slices."""

    cluster: SimulatedCluster
    address: str
    plans: list[Plan]
    log: Path
    serve: "subprocess.Popen[bytes]"
    store: Store


def run(
    path: Path,
    *,
    spare: int,
    directory: Path,
    engine: str = "vllm",
    startup: str = "",
    network: str | None = None,
) -> None:
    """Bring the YAML's service up on simulated slices, say how to use it, and wait for Ctrl-C.

    Raises ServingError where the YAML, the port or the start is at fault. No process outlives the call.
    """
    console = Console()
    started = time.monotonic()
    with running(
        path,
        spare=spare,
        directory=directory,
        console=console,
        engine=engine,
        startup=startup,
        network=network,
    ) as service:
        snapshot = service.store.read()
        console.print(terminal.slices(snapshot.wanted, snapshot.slices))
        console.print(
            _how_to_use(service.plans, service.address, time.monotonic() - started),
            highlight=False,
            soft_wrap=True,
        )
        console.print(f"log: {service.log}    Ctrl-C ends all of it", highlight=False, soft_wrap=True)
        service.serve.wait()
        raise SimulationError(why_ended(service.cluster, service.log))


@contextmanager
def running(
    path: Path,
    *,
    spare: int = 0,
    directory: Path,
    console: Console,
    engine: str = "vllm",
    startup: str = "",
    network: str | None = None,
) -> Iterator[SimulatedService]:
    """The YAML's service on fresh simulated slices, ready for requests; every process ends with the block.

    Raises ServingError where the YAML, the port or the start is at fault.
    """
    deployment = config.load(path)
    plans = every_plan(deployment.services.values(), hub.config_of)
    bought = _bought(plans, spare)
    SimulatedCluster.refuse_running(directory)  # whose port is most likely the YAML's
    refuse_busy_port(deployment.port)
    cluster: SimulatedCluster | None = None
    try:
        if engine == "vllm":
            with _step(console, "stand-in model"):
                _write_stand_ins(plans)
        with _step(console, "simulated slices") as step:
            cluster = SimulatedCluster.up(
                [planned.slice for planned in bought],
                pools=[planned.pool for planned in bought],
                directory=directory,
                engine=engine,
                startup=startup,
                network_kind=network,
                report=step.detail,
            )
        # Next to the simulation's directory, which `down` deletes: after a failed start the log is read.
        log = directory.with_suffix(".log")
        environment.write(cluster.environment)
        show_token(cluster.environment)
        with log.open("w") as output:
            serve = subprocess.Popen(
                [str(Path(sys.executable).parent / "serve"), "run", str(path)],
                env=cluster.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        service = SimulatedService(
            cluster, f"http://localhost:{deployment.port}", plans, log, serve, Store(cluster.address)
        )
        _wait_until_ready(console, service)
        yield service
    finally:
        if cluster is not None:
            with _step(console, "ending every process"):
                cluster.down()


def why_ended(cluster: SimulatedCluster, log: Path, patience_s: float = 2.0) -> str:
    """Why `serve run` has ended, where nobody here ended it: with the whole simulation, or by itself."""
    until_s = time.monotonic() + patience_s
    while cluster.processes():
        if time.monotonic() > until_s:
            return f"`serve run` ended by itself\n{_tail(log)}"
        time.sleep(_POLL_S)
    return "the simulation was ended from elsewhere, as `serving sim down` does"


def refuse_busy_port(port: int) -> None:
    """Raises SimulationError naming the process that listens on the port."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,):
            raise SimulationError(
                f"port {port} is taken by {_process(connection.pid)}; end it, or set another http_options.port in the YAML"
            )


def _process(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})"
    except psutil.Error:
        return f"process {pid}"


def _write_stand_ins(plans: list[Plan]) -> None:
    from serving.simulation import stand_in

    try:
        for planned in plans:
            stand_in.checkpoint(planned, cache_directory())
    except OSError as error:
        raise SimulationError(
            f"stand-in models can't be written to {cache_directory()} ({error.strerror}); set XDG_CACHE_HOME to a folder of yours"
        ) from None


def _bought(plans: list[Plan], spare: int) -> list[Plan]:
    """The plan of each slice that the YAML starts with, and of the spare ones."""
    bought = [planned for planned in plans for _ in range(planned.model.replicas.min)] + plans[:1] * spare
    if not bought:
        raise SimulationError(
            "the YAML starts with no slice; set replicas.min to 1 or more, or give --spare 1"
        )
    return bought


def _wait_until_ready(console: Console, service: SimulatedService) -> None:
    needed = sum(planned.model.replicas.min for planned in service.plans)
    with _step(console, "Serve, slices and engines") as step:
        while True:
            if service.serve.poll() is not None:
                raise SimulationError(f"`serve run` failed\n{_tail(service.log)}")
            entries = service.store.slices()
            if any(entry.state is SliceState.LOST for entry in entries):
                reasons = "; ".join(entry.reason for entry in entries if entry.reason)
                raise SimulationError(f"a slice did not start: {reasons}\n{_tail(service.log)}")
            if reason := refusal(service.log):
                raise SimulationError(reason)
            if sum(entry.serves for entry in entries) >= needed and answers(f"{service.address}/v1/models"):
                return
            step.detail(_phases(entries) or "starting Serve, waiting for a whole slice")
            time.sleep(_POLL_S)


def _phases(entries: list[SliceRecord]) -> str:
    return ", ".join(f"{entry.model} on {entry.slice or '?'}: {entry.phase}" for entry in entries)


def answers(url: str, timeout_s: float = 5) -> bool:
    """Whether a server answers with success."""
    try:
        return httpx.get(url, timeout=timeout_s).is_success
    except httpx.TransportError:
        return False


def refusal(log: Path) -> str | None:
    """The reason for which Serve gave the application up; None if it did not."""
    reason = ""  # of the replica that failed last
    for line in log.read_text(errors="replace").splitlines():
        if error := _OWN_ERROR.search(line):
            reason = f" {error[1]}"
        if "Failed to update the deployments" in line or ("Deploying app" in line and "failed" in line):
            return line.split(" -- ", 1)[-1] + reason
    return None


def _how_to_use(plans: list[Plan], address: str, seconds: float) -> str:
    name = plans[0].model.name
    return (
        f"\nready after {seconds:.0f} s: {address}/v1, to be seen at {address}/\n\n"
        f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}\'\n'
    )


@dataclass(frozen=True)
class _Step:
    """A step of the start, as its line in the terminal shows it."""

    name: str
    status: Status
    began_s: float = field(default_factory=time.monotonic)

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.began_s

    def detail(self, text: str) -> None:
        """Show what the step is doing behind its name and seconds."""
        self.status.update(f"{self.name} {self.took_s:.0f} s: {text}")


@contextmanager
def _step(console: Console, name: str) -> Iterator[_Step]:
    """Show a line with a spinner and seconds during the step, and after it the seconds it took."""
    with console.status(name) as status:
        step = _Step(name, status)
        try:
            yield step
        except ServingError:
            console.print(f"[red]✗[/red] {name}: {step.took_s:.1f} s", highlight=False)
            raise
    console.print(f"[green]✓[/green] {name}: {step.took_s:.1f} s", highlight=False)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
