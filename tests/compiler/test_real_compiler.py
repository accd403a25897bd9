"""libtpu's own compiler on a small model. `make libtpu` brings it, here into ~/.cache/tpu-serving, once."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.cli.main import main
from serving.compiler import processes
from serving.compiler.libtpu import library
from serving.compiler.records import Job, Stage
from serving.compiler.report import available_bytes
from serving.config import IMPORT_PATH
from serving.tpu.generations import GIB

pytestmark = [pytest.mark.compiler, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TEXT: dict[str, Any] = {
    name: value for name, value in CONFIG.items() if name not in ("architectures", "model_type")
}
PICTURES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
# One by tpu-inference's implementation, one by vLLM's.
WITH_ENCODERS: dict[str, dict[str, Any]] = {
    "flax_nnx": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": TEXT
        | {
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 256,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
        "vision_config": PICTURES
        | {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64},
    },
    "vllm": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": TEXT | {"rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}},
        "vision_config": PICTURES
        | {
            "depth": 1,
            "num_heads": 4,
            "out_hidden_size": 1024,
            "deepstack_visual_indexes": [0],
            "spatial_merge_size": 2,
        },
    },
}


@pytest.fixture(scope="module", autouse=True)
def libtpu() -> None:
    subprocess.run(["lock/install-libtpu.sh"], cwd=ROOT, check=True, timeout=600)


def deployment(
    folder: Path,
    generation: str,
    topology: str,
    pipeline: int = 1,
    config: Mapping[str, Any] = CONFIG,
    **engine: object,
) -> str:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(config))
    model: dict[str, Any] = {
        "name": "small",
        "model": str(checkpoint),
        "slice": {"generation": generation, "topology": topology},
        "engine": {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 32, **engine},
    }
    if pipeline > 1:
        model |= {"parallel": {"pipeline": pipeline}, "slice": {**model["slice"], "hosts": pipeline}}
    path = folder / "service.yaml"
    application = {"name": "a", "import_path": IMPORT_PATH, "args": {"models": [model]}}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return str(path)


@pytest.mark.parametrize(
    ("generation", "topology", "devices", "implementation", "engine"),
    [("v6e", "2x2", 4, "flax_nnx", {}), ("v7x", "2x2x1", 8, "vllm", {"model_impl": "vllm"})],
)
def test_a_small_model_compiles_for_a_slice(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    generation: str,
    topology: str,
    devices: int,
    implementation: str,
    engine: dict[str, str],
) -> None:
    cache = tmp_path / "cache"
    file = deployment(tmp_path, generation, topology, **engine)
    status = main(["compile", file, "--json", "--cache", str(cache)])
    printed = capsys.readouterr()
    print(printed.err)
    (answer,) = json.loads(printed.out)
    assert (status, answer["unbuildable"]) == (0, []), printed.err
    (stage,) = answer["stages"]
    assert (stage["implementation"], stage["mesh"]) == (implementation, {"model": devices})
    assert {program["outcome"] for program in stage["programs"]} == {"compiled"}
    assert len(list(cache.iterdir())) == len(stage["programs"])
    table = CONFIG["vocab_size"] * CONFIG["hidden_size"] * 2
    layer = (4 * CONFIG["hidden_size"] + 3 * CONFIG["intermediate_size"]) * CONFIG["hidden_size"] * 2
    cut = (2 * table + CONFIG["num_hidden_layers"] * layer) / devices
    assert cut < stage["weight_bytes"] < 1.05 * cut  # every device holds its part, and norms
    steps = [program for program in stage["programs"] if program["name"] == "backbone"]
    assert [step["bucket"]["num_tokens"] for step in steps] == [16, 32]
    # Weights and cache go in, and the cache comes out in its place.
    assert all(step["aliased_bytes"] >= stage["cache_bytes"] for step in steps)
    head = CONFIG["vocab_size"] * CONFIG["hidden_size"] * 2 // devices  # which a step does not take
    taken = stage["weight_bytes"] - head + stage["cache_bytes"]
    assert all(0.99 * taken < step["argument_bytes"] < 1.01 * taken for step in steps)
    for cycles in (step["schedule"] for step in steps):
        assert cycles["product_cycles"] > 10_000
        # Attention's kernel of a layer, for decodes and for the rest, and where devices add up: the embedding, and twice a layer.
        counts = cycles["unestimated"]
        layers = CONFIG["num_hidden_layers"]
        assert sum(counts[name] for name in counts if name.startswith("RPA")) == 2 * layers, counts
        assert counts["all-reduce"] == 2 * layers + 1, counts
    assert stage["ledger"]["backbone"]["buckets"]["num_tokens"] == [16, 32]
    assert answer["needs_bytes"] > stage["weight_bytes"] + stage["cache_bytes"]


@pytest.mark.parametrize("implementation", WITH_ENCODERS)
def test_a_model_with_an_encoder_compiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], implementation: str
) -> None:
    file = deployment(tmp_path, "v6e", "1x1", config=WITH_ENCODERS[implementation])
    status = main(["compile", file, "--json"])
    printed = capsys.readouterr()
    (answer,) = json.loads(printed.out)
    assert (status, answer["unbuildable"]) == (0, []), printed.err
    (stage,) = answer["stages"]
    assert stage["implementation"] == implementation
    names = {program["name"] for program in stage["programs"]}
    assert {"input_embeddings_merger", "backbone with embeds"} <= names
    assert ("vllm embed_multimodal" in names) == (implementation == "vllm")


@pytest.mark.parametrize("engine", [{}, {"model_impl": "vllm"}], ids=["flax_nnx", "vllm"])
def test_stages_of_a_pipeline_compile_on_a_host_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: dict[str, str]
) -> None:
    status = main(["compile", deployment(tmp_path, "v6e", "2x4", pipeline=2, **engine), "--json"])
    printed = capsys.readouterr()
    (answer,) = json.loads(printed.out)
    assert (status, answer["unbuildable"]) == (0, []), printed.err
    first, last = answer["stages"]
    assert (first["stage"], last["stage"]) == (1, 2)
    assert first["mesh"] == last["mesh"] == {"model": 4}
    assert set(first["ledger"]) == {"backbone"}  # the last stage samples
    assert {"backbone", "compute_logits", "sample"} <= set(last["ledger"])


def test_a_cache_that_does_not_fit_is_refused_in_the_compiler_s_words(tmp_path: Path) -> None:
    file = deployment(tmp_path, "v6e", "1x1")
    job = Job(file, "small", "v6e-1x1-1h-on-demand", str(library()), programs=(0,), blocks=2**17)  # 32 GiB
    running = processes.Running()
    outcome = processes.run(job, tmp_path / "log", print, limit_s=600, running=running)
    assert outcome.built is not None, outcome.reason
    assert outcome.built.cache_bytes == 32 * GIB
    (step,) = outcome.compiled
    assert step.outcome == "refused"
    assert available_bytes([Stage(outcome.built, outcome.compiled)]) == int(31.24 * GIB), step.reason
