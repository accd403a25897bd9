"""How many programs an engine compiles at once: what its pod says, else what its host's CPUs allow."""

from pathlib import Path

import pytest

from serving import config
from serving.engine.server import EngineSite
from serving.engine.vllm import VllmServer
from serving.planning import plan
from serving.planning.starts import compilations
from serving.slices.held_slice import HeldSlice, SliceHost
from serving.slices.preflight import cpus

pytestmark = pytest.mark.unit
LLAMA = Path(__file__).parents[2] / "deployments" / "llama.yaml"
VARIABLE = "NUM_PRECOMPILE_WORKERS"


def engine() -> VllmServer:
    (service,) = config.load(LLAMA).services.values()
    hosts = tuple(SliceHost(worker, worker, f"n{worker}", f"10.0.0.{worker}") for worker in range(2))
    return VllmServer(plan(service.models[0]), EngineSite(HeldSlice("slice-0", hosts), None, "", "replica"))


def test_the_hosts_cpus_decide_where_the_pod_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert engine()._environment()[VARIABLE] == str(compilations(int(cpus())))
    monkeypatch.setenv(VARIABLE, "12")
    assert engine()._environment()[VARIABLE] == "12"


def test_workers_on_other_hosts_are_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        class parallel_config:  # noqa: N801  vLLM's name
            ray_runtime_env = None

    monkeypatch.setenv(VARIABLE, "12")
    assert engine()._worker_environment(Config)["env_vars"][VARIABLE] == "12"
