"""The plan's mesh is the engine's: tpu-inference's own derivation is asked for every deployment and a matrix of options."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.config import ModelSpec, load
from serving.errors import PlanError
from serving.planning import Plan, plan
from serving.planning.engine_environment import DERIVED, SETTABLE
from serving.planning.layout import AXES, SHORT_AXES
from serving.planning.service import plan_service

pytestmark = pytest.mark.engine

DEPLOYMENTS = sorted((Path(__file__).parents[2] / "deployments").glob("*.yaml"))
MODELS = {
    "meta-llama/Llama-3.3-70B-Instruct": False,  # 64 heads, 8 KV heads of 128
    "Qwen/Qwen3-30B-A3B": True,  # 32 heads, 4 KV heads of 128, 128 experts
    "openai/gpt-oss-120b": True,  # 64 heads, 8 KV heads of 64
    "deepseek-ai/DeepSeek-R1": True,  # 128 heads over one latent vector
}


class Engine:
    """The installed tpu-inference, in a process of its own (support.engine_meshes)."""

    def __init__(self) -> None:
        script = Path(__file__).parents[1] / "support" / "engine_meshes.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.known: dict[str, Any] = json.loads(self.process.stdout.readline())

    def mesh(self, found: Plan) -> dict[str, Any]:
        """What ShardingConfigManager makes of the options and the environment that the engine is started with."""
        shape = found.shape
        asked = {
            "parallel": {
                "decode_context_parallel_size": 1,
                "prefill_context_parallel_size": 1,
                "data_parallel_rank": 0,
                "data_parallel_size_local": 1,
                **found.parallel_options,
            },
            "additional_config": found.engine.get("additional_config") or {},
            "latent": shape.latent is not None,
            "kv_heads": shape.num_key_value_heads,
            "head_dim": shape.head_dim,
            "cache_dtype": found.engine.get("kv_cache_dtype", "auto"),
            "lora": bool(found.sizes.lora_rank),
            "environment": dict(found.environment),
        }
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    started = Engine()
    yield started
    started.process.communicate(timeout=30)
    assert started.process.returncode == 0


def check_same(found: Plan, told: dict[str, Any]) -> None:
    mesh = dict(zip(AXES, told["sizes"], strict=True))
    assert found.mesh == {axis: mesh[axis] for axis in found.mesh}
    assert tuple(found.mesh) == (AXES if found.environment.get("NEW_MODEL_DESIGN") else SHORT_AXES)
    assert all(size == 1 for axis, size in mesh.items() if axis not in found.mesh)
    assert told["devices"] * found.pipeline == found.slice.devices
    assert told["groups"] * found.sizes.sequences == found.most_sequences


def test_the_axes_are_those_of_the_installed_engine(engine: Engine) -> None:
    assert (tuple(engine.known["axes"]), tuple(engine.known["short_axes"])) == (AXES, SHORT_AXES)


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.stem)
def test_every_deployment_has_the_engine_s_mesh(path: Path, engine: Engine) -> None:
    for service in load(path).services.values():
        for found in itertools.chain.from_iterable(plan_service(service)):
            check_same(found, engine.mesh(found))


def asked(model: str, cache: str, **parallel: Any) -> ModelSpec:
    engine = {
        "max_model_len": 2048,
        "kv_cache_dtype": cache,
        "max_num_seqs": 1 if parallel.get("prefill_context", 1) > 1 else 16,
        "max_num_batched_tokens": 512,
        "enable_expert_parallel": model.startswith("openai"),  # its experts have six blocks to cut
    }
    return ModelSpec.model_validate(
        {
            "model": model,
            "slice": {"generation": "v7x", "topology": "2x2x2" if model.startswith("deep") else "2x2x1"},
            "engine": engine,
            "parallel": parallel,
        }
    )


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("model", MODELS)
def test_a_matrix_of_strategies_has_the_engine_s_mesh(model: str, cache: str, engine: Engine) -> None:
    """Where the plan refuses, nothing is asked; those of the engine's own refusals that sizes decide are the plan's too."""
    planned = 0
    sharing = (None, "auto", 1, 2, 4, 8)
    for expert, shared, data, decode, prefill in itertools.product(
        (1, 2, 4, 8, 16), sharing, (1, 2), (1, 2, 4), (1, 2)
    ):
        sizes = {"expert": expert, "data": data, "decode_context": decode, "prefill_context": prefill}
        try:
            found = plan(asked(model, cache, attention_data=shared, **sizes))
        except PlanError:
            continue
        check_same(found, engine.mesh(found))
        planned += 1
    assert planned > 10


@pytest.mark.parametrize(
    ("model", "parallel", "mesh"),
    [
        ("deepseek-ai/DeepSeek-R1", {"tensor": 1, "expert": 16}, {"attn_dp_expert": 16}),
        ("deepseek-ai/DeepSeek-R1", {}, {"attn_dp": 16}),
        ("deepseek-ai/DeepSeek-R1", {"tensor": 8, "expert": 2}, {"attn_dp": 8, "attn_dp_expert": 2}),
        (
            "Qwen/Qwen3-30B-A3B",
            {"tensor": 1, "expert": 8, "attention_data": "auto"},
            {"attn_dp_expert": 2, "expert": 4},
        ),
        ("Qwen/Qwen3-30B-A3B", {"attention_data": "auto"}, {"attn_dp": 2, "model": 4}),
        ("Qwen/Qwen3-30B-A3B", {"expert": 4}, {"expert": 4, "model": 2}),
        ("Qwen/Qwen3-30B-A3B", {"decode_context": 2}, {"model": 4, "dcp": 2}),
        ("Qwen/Qwen3-30B-A3B", {"prefill_context": 2}, {"model": 4, "pcp": 2}),
    ],
)
def test_a_strategy_makes_this_mesh(
    model: str, parallel: dict[str, Any], mesh: dict[str, int], engine: Engine
) -> None:
    found = plan(asked(model, "auto", **parallel))
    assert {axis: size for axis, size in found.mesh.items() if size > 1} == mesh
    check_same(found, engine.mesh(found))
    assert " x ".join(f"{axis}={size}" for axis, size in found.mesh.items()) in " ".join(found.reasons)


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"attention_data": 1}, "attention_data=1 leaves 8 devices for 4 rows of KV heads"),
        ({"attention_data": 3}, "attention_data=3 does not divide tensor=8"),
    ],
)
def test_what_the_engine_can_t_derive_is_refused_with_what_would_do(
    parallel: dict[str, Any], says: str, engine: Engine
) -> None:
    found = plan(asked("Qwen/Qwen3-30B-A3B", "auto", attention_data=2))
    strategy = found.engine["additional_config"]["sharding"]["sharding_strategy"]
    strategy["attn_dp_size"] = parallel["attention_data"]
    assert "error" in engine.mesh(found)
    with pytest.raises(PlanError, match=says):
        plan(asked("Qwen/Qwen3-30B-A3B", "auto", **parallel))


def test_variables_are_those_of_the_installed_engine(engine: Engine) -> None:
    known = set(engine.known["variables"])
    assert known <= SETTABLE | DERIVED.keys()
    assert known >= SETTABLE
    assert {name for name in DERIVED.keys() - known if not name.startswith("VLLM_")} == set()
