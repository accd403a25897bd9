from typing import Any

import pytest

from serving.config import ModelSpec
from serving.planning import plan

pytestmark = pytest.mark.unit


def said(generation: str, topology: str, **engine: Any) -> str:
    slice_ = {"generation": generation, "topology": topology}
    options = {
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "kv_cache_dtype": "fp8",
        **engine,
    }
    found = plan(
        ModelSpec.model_validate({"model": "deepseek-ai/DeepSeek-R1", "slice": slice_, "engine": options})
    )
    return " ".join(reason for reason in found.reasons if "loading" in reason)


def test_a_giant_that_every_host_reads_whole_is_held_against_its_memory() -> None:
    assert said("v7x", "2x2x2", model_impl="vllm") == (
        "loading reads all 707 GB of FP8 weights into each host's 960 GB of memory"
    )
    small = said("v6e", "8x8", model_impl="vllm", enable_expert_parallel=True)
    assert "loading may not fit" in small
    assert "of each host's 720 GB of memory" in small


def test_tpu_inference_s_own_models_read_tensor_by_tensor() -> None:
    assert said("v7x", "2x2x2") == ""
