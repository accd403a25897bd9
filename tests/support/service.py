"""A service under test: a YAML of deployments/ on simulated slices, reached as a user reaches it."""

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from serving import config
from serving.planning import plan
from serving.simulation.cluster import SimulatedCluster, free_port
from serving.state.gcs import Store
from serving.state.records import SliceRecord

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "deployments" / "llama.yaml"
MODEL = "llama-3.1-8b-instruct"


class Service:
    """A running service and the simulated cluster under it."""

    def __init__(self, cluster: SimulatedCluster, deployment: Path, port: int, log: Path) -> None:
        self.cluster = cluster
        self.deployment = deployment
        self.address = f"http://127.0.0.1:{port}"
        self.log = log
        self.store = Store(cluster.address)

    def entries(self) -> list[SliceRecord]:
        return self.store.slices()

    def serving(self) -> list[SliceRecord]:
        return [entry for entry in self.entries() if entry.serves]

    def until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Wait for a condition to hold and return its value; fails with the log's end."""
        deadline = time.monotonic() + timeout_s
        while not (value := _tried(condition)):
            failed = (
                "failed" if "Failed to update the deployments" in self.log.read_text(errors="replace") else ""
            )
            if failed or time.monotonic() > deadline:
                end = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
                raise AssertionError(f"not within {timeout_s:.0f} s: {what}\nboard: {self.entries()}\n{end}")
            time.sleep(0.2)
        return value

    def until_serving(self, slices: int, timeout_s: float = 180) -> list[SliceRecord]:
        """Wait until as many slices serve and the front door knows it."""

        def there() -> list[SliceRecord]:
            answer = httpx.get(f"{self.address}/v1/models", timeout=5)
            ready = answer.is_success and answer.json()["data"][0]["slices_ready"]
            return self.serving() if ready == slices == len(self.serving()) else []

        found: list[SliceRecord] = self.until(there, timeout_s, f"{slices} slices serving")
        return found

    def deploy(self, budget: dict[str, Any] | None = None, **changes: Any) -> None:
        """Deploy the YAML again with changes to its first model, as `serve deploy` does, and return at once."""
        raw = yaml.safe_load(self.deployment.read_text())
        arguments = raw["applications"][0]["args"]
        arguments["models"][0] |= changes
        arguments |= {"budget": budget} if budget else {}
        self.deployment.write_text(yaml.safe_dump(raw))
        with self.log.open("a") as output:
            subprocess.run(
                [str(Path(sys.executable).parent / "serve"), "run", "--non-blocking", str(self.deployment)],
                env=self.cluster.environment | {"COLUMNS": "200"},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=120,
                check=False,
            )

    def post(self, path: str, timeout_s: float = 120, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.address}{path}", json={"model": MODEL, **fields}, timeout=timeout_s)


def _tried(condition: Callable[[], Any]) -> Any:
    """The condition's value; None where what it asked does not answer, or not yet in its own words."""
    try:
        return condition()
    except (httpx.HTTPError, json.JSONDecodeError):
        return None


@contextmanager
def service(
    directory: Path,
    *,
    slices: int,
    source: Path = LLAMA,
    wait: bool = True,
    engine: str = "vllm",
    options: dict[str, Any] | None = None,
    startup: str = "",
    before: Callable[[SimulatedCluster], object] = lambda _: None,
    router: dict[str, Any] | None = None,
    budget: dict[str, Any] | None = None,
    **changes: Any,
) -> Iterator[Service]:
    """`serve run` a YAML with `changes` to its first model, `router` and `budget` on fresh simulated slices; all ends with the block.

    `engine` is what runs on the slices, `options` what the YAML says under that key.
    """
    raw = copy.deepcopy(yaml.safe_load(source.read_text()))
    port = free_port()
    raw["http_options"]["port"] = port
    arguments = raw["applications"][0]["args"]
    arguments["models"][0] |= changes | ({"engine": options} if options else {})
    arguments |= {"router": router or {}, "budget": budget or {}}
    directory.mkdir(parents=True, exist_ok=True)
    deployment = directory.with_suffix(".yaml")
    deployment.write_text(yaml.safe_dump(raw))
    models = [model for one in config.load(deployment).services.values() for model in one.models]
    cluster = SimulatedCluster.up(
        [plan(models[0]).slice] * slices, directory=directory, engine=engine, startup=startup
    )
    try:
        log = directory.with_suffix(".log")
        before(cluster)
        with log.open("w") as output:
            subprocess.Popen(
                [str(Path(sys.executable).parent / "serve"), "run", str(deployment)],
                env=cluster.environment | {"COLUMNS": "200"},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running = Service(cluster, deployment, port, log)
        if wait:
            running.until_serving(models[0].replicas.min)
        yield running
    finally:
        cluster.down()


def leftovers(simulation: str) -> list[str]:
    """Processes of a simulation that are still there, by command line."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SERVING_SIMULATION") == simulation and process.pid != os.getpid():
                found.append(" ".join(process.cmdline())[:100])
        except (psutil.Error, OSError):
            continue
    return found
