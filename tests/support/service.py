"""A service under test: a YAML of deployments/ on simulated slices, reached as a user reaches it."""

import copy
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from serving import config, secret
from serving.environment import ENGINE, STARTUP
from serving.planning import Plan, plan
from serving.simulation.cluster import SimulatedCluster
from serving.state.gcs import Store, show_token
from serving.state.records import SliceRecord, Snapshot
from support.leases import Leases, Lent

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "deployments" / "llama.yaml"
MODEL = "llama-3.1-8b-instruct"
FAILED = "Failed to update the deployments"
# A wait ends a test that hangs and tells nothing of speed: on a machine with others' work Serve's worker that builds an
# application was up after 27 s instead of 3.
_PATIENCE_S = 600.0
# With two seconds, and once with five, clients of a busy machine met a router that had gone.
ROUTER_END_UNDER_LOAD_S = 15


class Service:
    """A running service and the simulated cluster under it."""

    def __init__(self, lent: Lent, deployment: Path, application: str) -> None:
        self.cluster = lent.cluster
        self.application = application
        self.deployment = deployment
        self.address = f"http://127.0.0.1:{lent.port}"
        show_token(lent.cluster.environment)
        self.store = Store(lent.cluster.address)
        self._lent = lent
        self._log_begins = 0

    def logged(self) -> str:
        """What was logged since the YAML was last deployed."""
        return self._lent.log.read_bytes()[self._log_begins :].decode(errors="replace")

    def groups(self) -> list[str]:
        """The states of all placement groups that are not removed."""
        found: list[str] = self._lent.ask("groups")
        return found

    def records(self) -> Snapshot:
        return self.store.read(self.application)

    def entries(self) -> list[SliceRecord]:
        return self.store.slices(self.application)

    def release_slices(self) -> None:
        """Let every slice out of quarantine, as `serving slices release` does."""
        for failures in self.records().slice_failures:
            self.store.delete_slice_failures(failures)

    def serving(self) -> list[SliceRecord]:
        return [entry for entry in self.entries() if entry.serves]

    def until(self, condition: Callable[[], Any], what: str, within_s: float = _PATIENCE_S) -> Any:
        """Wait for a condition to hold and return its value; fails with the log's end. `within_s` only where the time is the claim."""
        deadline = time.monotonic() + within_s
        while not (value := _tried(condition)):
            log = self.logged()
            if FAILED in log or time.monotonic() > deadline:
                end = "\n".join(log.splitlines()[-40:])
                raise AssertionError(f"not within {within_s:.0f} s: {what}\nboard: {self.entries()}\n{end}")
            time.sleep(0.1)
        return value

    def until_serving(self, slices: int) -> list[SliceRecord]:
        """Wait until as many slices serve and the front door knows it."""

        def there() -> list[SliceRecord]:
            answer = httpx.get(f"{self.address}/v1/models", timeout=5)
            ready = answer.is_success and answer.json()["data"][0].get(
                "slices_ready", slices
            )  # a private status does not tell
            return self.serving() if ready == slices == len(self.serving()) else []

        found: list[SliceRecord] = self.until(there, f"{slices} slices serving")
        return found

    def plan(self) -> Plan:
        return plan(config.load(self.deployment).services[self.application].models[0])

    def model(self) -> dict[str, Any]:
        """The model as the YAML has it now."""
        found: dict[str, Any] = yaml.safe_load(self.deployment.read_text())["applications"][0]["args"][
            "models"
        ][0]
        return found

    def deploy(self, budget: dict[str, Any] | None = None, **changes: Any) -> None:
        """Deploy the YAML again with changes to its first model, as `serve deploy` does, and return at once."""
        raw = yaml.safe_load(self.deployment.read_text())
        arguments = raw["applications"][0]["args"]
        arguments["models"][0] |= changes
        arguments |= {"budget": budget} if budget else {}
        self.deployment.write_text(yaml.safe_dump(raw))
        self._log_begins = self._lent.log.stat().st_size
        self._lent.ask("deploy", str(self.deployment))

    def delete(self) -> None:
        """Delete the application, and return once its replicas are gone."""
        self._lent.ask("delete")

    def until_deployed(self) -> None:
        """Wait until Serve has done all that was asked of it."""
        self.until(lambda: self.status() == "RUNNING", "the deployment")

    def status(self) -> str | None:
        """What Serve calls the application."""
        found: str | None = self._lent.ask("status").get(self.application)
        return found

    def fault(self, victim: SliceRecord, **faults: Any) -> None:
        """Have a simulated engine fail."""
        shown = secret.headers(self.cluster.secret)
        httpx.post(f"{victim.address}/simulator/faults", json=faults, headers=shown).raise_for_status()

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
    leases: Leases,
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
    store: str | None = None,
    router_end_s: int = 2,
    **changes: Any,
) -> Iterator[Service]:
    """A YAML with `changes` to its first model, `router`, `budget` and `store` on borrowed simulated slices; all of it ends with the block.

    `engine` is what runs on the slices, `options` what the YAML says under that key. `router_end_s` is what Serve leaves HAProxy to part
    from a router that goes, 30 s by itself; ROUTER_END_UNDER_LOAD_S where clients ask meanwhile.
    """
    raw = copy.deepcopy(yaml.safe_load(source.read_text()))
    application = raw["applications"][0]
    router_end = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(router_end_s)}
    application["runtime_env"]["env_vars"] |= {ENGINE: engine, STARTUP: startup, **router_end}
    raw["controller_options"]["runtime_env"]["env_vars"] |= router_end
    arguments = application["args"]
    arguments["models"][0] |= changes | ({"engine": options} if options else {})
    arguments |= {"router": router or {}, "budget": budget or {}, "store": store}
    model = config.parse(arguments).models[0]
    with leases.lend([plan(model.per_pool()[0]).slice] * slices) as lent:
        before(lent.cluster)
        raw["http_options"]["port"] = lent.port
        # The Serve controller, which stays, remembers what scaling decided for an application.
        application["name"] = f"llama-{leases.times}"
        deployment = lent.log.with_suffix(".yaml")
        deployment.write_text(yaml.safe_dump(raw))
        running = Service(lent, deployment, application["name"])
        running.deploy()
        if wait:
            running.until_serving(model.replicas.min)
        yield running


STALL_S = 15  # more than a step takes while another engine starts on the same two cores
PRECOMPILE_WORKERS = "3"  # a variable of `engine_env`, to be seen in the workers


def two_replicas(leases: Leases) -> Service:
    """Two replicas of the real engine on two of three slices, kept for the next module that asks; both serve.

    Deaths that an earlier borrower caused put no slice into quarantine.
    """
    changes = {"stall_s": STALL_S, "engine_env": {"NUM_PRECOMPILE_WORKERS": PRECOMPILE_WORKERS}}
    running = leases.keep("two replicas", partial(service, leases, slices=3, replicas=2, **changes))
    running.release_slices()
    running.until_serving(2)
    return running


def leftovers(simulation: str) -> list[str]:
    """Processes of a simulation that are still there, by command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SERVING_SIMULATION") == simulation and process.pid != os.getpid():
                found.append(" ".join(process.cmdline())[:100])
        except (psutil.Error, OSError):
            continue
    return found
