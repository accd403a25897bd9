"""What an engine's processes are told by their environment, read as tpu-inference reads it."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from serving.config import ModelSpec
from serving.engine.server import EngineSite
from serving.engine.vllm import VllmServer
from serving.planning import plan
from serving.slices.held_slice import HeldSlice, SliceHost

pytestmark = pytest.mark.unit


def told(monkeypatch: pytest.MonkeyPatch, hosts: int = 1, **model: Any) -> ModuleType:
    """tpu-inference's module of variables, in the environment that an engine of this model has."""
    topology = {1: "2x2", 4: "4x4"}[hosts]
    spec = {
        "name": "llama",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "slice": {"generation": "v6e", "topology": topology},
        "engine": {"max_model_len": 2048},
    }
    held = HeldSlice(
        "slice-0",
        tuple(SliceHost(worker, worker, f"n{worker}", f"10.0.0.{worker}") for worker in range(hosts)),
    )
    server = VllmServer(plan(ModelSpec.model_validate(spec | model)), EngineSite(held, None, "", "replica"))
    for name, value in server._environment().items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    return variables()


def variables() -> ModuleType:
    """The module by itself: its package takes seconds."""
    package = importlib.util.find_spec("tpu_inference")
    assert package
    assert package.submodule_search_locations
    spec = importlib.util.spec_from_file_location(
        "envs", Path(package.submodule_search_locations[0], "envs.py")
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_prompt_is_held_back_to_start_with_others_unless_the_yaml_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With data parallelism tpu-inference by itself waits up to 30 s for more prompts."""
    copies = {"parallel": {"data": 2, "tensor": 2}}
    monkeypatch.delenv("DP_SCHED_BATCH_PREFILL", raising=False)
    assert variables().DP_SCHED_BATCH_PREFILL is True
    assert told(monkeypatch, **copies).DP_SCHED_BATCH_PREFILL is False
    asked = told(monkeypatch, engine_env={"DP_SCHED_BATCH_PREFILL": "1"}, **copies)
    assert asked.DP_SCHED_BATCH_PREFILL is True


@pytest.mark.parametrize(("hosts", "backend"), [(1, ""), (4, "ray")])
def test_ray_runs_the_workers_of_several_hosts_alone(
    monkeypatch: pytest.MonkeyPatch, hosts: int, backend: str
) -> None:
    monkeypatch.setenv("TPU_MULTIHOST_BACKEND", "ray")
    found = told(monkeypatch, hosts).TPU_MULTIHOST_BACKEND
    assert found == backend
