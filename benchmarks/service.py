"""The service that is measured: a YAML of deployments/ on fresh simulated slices, on ports that are free."""

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml
from rich.console import Console

from benchmarks import accounting
from serving import config, secret
from serving.cli.simulated_service import SimulatedService, running
from serving.planning import Plan, plan
from serving.simulation.cluster import default_directory
from serving.simulation.ports import free_port

DEPLOYMENTS = Path(__file__).parent.parent / "deployments"
FRONT = ("HAProxy", "router replica")


@dataclass(frozen=True)
class Service:
    """What runs, and where: through HAProxy, through Serve's Python proxy, and the slices' own addresses."""

    trial: SimulatedService
    model: str
    address: str
    direct_address: str
    proxy_address: str
    engines: tuple[str, ...]

    def processes(self, *roles: str) -> dict[psutil.Process, str]:
        """Those of the simulation, with what they are for; of some roles where they are named."""
        found = accounting.by_role(self.trial.cluster.processes())
        return {process: what for process, what in found.items() if not roles or what in roles}


def plan_of(deployment: str) -> Plan:
    """The plan of a deployment's first model."""
    services = config.load(DEPLOYMENTS / f"{deployment}.yaml").services.values()
    return plan(next(model for service in services for model in service.models))


@contextmanager
def serving(deployment: str, slices: int, *, engine: str, console: Console) -> Iterator[Service]:
    """A deployment with so many slices, ready; every process ends with the block. Its routers have a door of their own too.

    In HAProxy mode Serve runs its Python proxy too, as what HAProxy falls back on: the same router behind it.
    """
    raw = yaml.safe_load((DEPLOYMENTS / f"{deployment}.yaml").read_text())
    port, direct_port, proxy_port = free_port(), free_port(), free_port()
    raw["http_options"]["port"] = port
    variables = raw["controller_options"]["runtime_env"]["env_vars"]
    variables["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] = str(proxy_port)
    args = raw["applications"][0]["args"]
    args["models"][0]["replicas"] = slices
    args["router"] = {**args.get("router", {}), "door": "direct", "direct_port": direct_port}
    # Other projects' routers stand before the same slices, and know no secret.
    raw["applications"][0]["runtime_env"]["env_vars"][secret.VARIABLE] = ""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(raw, file)
        file.flush()
        directory = default_directory(f"bench-{uuid.uuid4().hex[:4]}")
        with running(Path(file.name), directory=directory, console=console, engine=engine) as trial:
            yield Service(
                trial,
                trial.plans[0].model.name,
                f"http://127.0.0.1:{port}",
                f"http://127.0.0.1:{direct_port}",
                f"http://127.0.0.1:{proxy_port}",
                tuple(sorted(entry.address for entry in trial.store.slices() if entry.serves)),
            )
