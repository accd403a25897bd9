from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import ParallelSpec
from serving.errors import PlanError
from serving.planning.cache import (
    page_tokens,
    separate_batches,
    sequence_bytes,
    token_bytes,
    whole_pages,
    windowed_tokens,
)
from serving.planning.engine_sizes import engine_sizes
from serving.planning.fit import measure
from serving.planning.known_models import CONFIGS
from serving.planning.layout import Layout
from serving.planning.parallelism import derive
from serving.planning.shapes import shape_of
from serving.planning.weights import checkpoint_params, device_bytes, tensor_groups
from serving.tpu import Slice, every_slice

pytestmark = pytest.mark.unit

# Billions of parameters, all and active for a token, as model cards give them.
PUBLISHED = {
    "meta-llama/Llama-3.1-8B-Instruct": (8.03, 8.03),
    "meta-llama/Llama-3.3-70B-Instruct": (70.55, 70.55),
    "meta-llama/Llama-3.1-405B-Instruct": (405.85, 405.85),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (108.6, 17),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": (401.6, 17),
    "Qwen/Qwen2.5-32B": (32.76, 32.76),
    "Qwen/Qwen3-4B": (4.02, 4.02),
    "Qwen/Qwen3-8B": (8.19, 8.19),
    "Qwen/Qwen3-32B": (32.76, 32.76),
    "Qwen/Qwen3-30B-A3B": (30.53, 3.3),
    "Qwen/Qwen3-235B-A22B": (235.1, 22),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": (480.2, 35),
    "Qwen/Qwen3.5-397B-A17B": (397, 17),
    "google/gemma-3-27b-it": (27.43, 27.43),
    "google/gemma-4-31B-it": (31.2, 31.2),
    "google/gemma-4-26B-A4B-it": (25.8, 3.8),
    "google/gemma-4-E2B-it": (5.1, 2.3),
    "google/gemma-4-E4B-it": (8.0, 4.5),
    "openai/gpt-oss-20b": (20.91, 3.61),
    "openai/gpt-oss-120b": (116.83, 5.13),
    "deepseek-ai/DeepSeek-V3": (671.03, 37),
    "moonshotai/Kimi-K2.6": (1027, 32),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (46.7, 12.9),
    "mistralai/Mistral-Small-24B-Instruct-2501": (23.57, 23.57),
    "mistralai/Mistral-Small-4-119B-2603": (119.4, 6.5),
}

# Billions of parameters of a whole checkpoint, as Hugging Face's pages of the models add up their files. Layers that only
# draft tokens are among them.
CHECKPOINTS = {
    "meta-llama/Llama-3.2-1B-Instruct": 1.236,
    "meta-llama/Llama-3.2-3B-Instruct": 3.213,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.248,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 140.6,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen2.5-3B-Instruct": 3.086,
    "Qwen/Qwen2.5-14B-Instruct": 14.77,
    "Qwen/Qwen3-Embedding-0.6B": 0.596,
    "google/gemma-3-1b-it": 1.000,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.544,
    "Qwen/Qwen2.5-7B-Instruct": 7.616,
    "Qwen/Qwen2.5-72B-Instruct": 72.71,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8.292,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-14B": 14.77,
    "Qwen/Qwen3-VL-8B-Instruct": 8.767,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31.07,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 81.32,
    "Qwen/Qwen3.5-27B": 27.78,
    "Qwen/Qwen3.5-35B-A3B": 35.95,
    "google/gemma-3-4b-it": 4.300,
    "google/gemma-3-12b-it": 12.187,
    "deepseek-ai/DeepSeek-V3": 684.5,
    "zai-org/GLM-4.5": 358.34,
    "zai-org/GLM-4.5-Air": 110.47,
    "zai-org/GLM-4.6": 356.8,
    "zai-org/GLM-4.7-Flash": 31.22,
    "MiniMaxAI/MiniMax-M2": 228.7,
    "microsoft/phi-4": 14.66,
    "microsoft/Phi-4-mini-instruct": 3.836,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36.15,
    "ibm-granite/granite-3.3-8b-instruct": 8.171,
    "allenai/Olmo-3-7B-Instruct": 7.298,
    "allenai/Olmo-3-32B-Think": 32.23,
    "mistralai/Devstral-2-123B-Instruct-2512": 125.0,
    "CohereLabs/c4ai-command-a-03-2025": 111.06,
    "BAAI/bge-m3": 0.5678,
    "BAAI/bge-reranker-v2-m3": 0.5678,
    "google/embeddinggemma-300m": 0.3029,
    "Alibaba-NLP/gte-modernbert-base": 0.149,
}

# GB of checkpoints that are not all bf16, as their repositories hold.
PUBLISHED_GB = {
    "openai/gpt-oss-120b": 65.2,
    "openai/gpt-oss-20b": 13.8,
    "deepseek-ai/DeepSeek-R1": 680,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": 482,
    "moonshotai/Kimi-K2.6": 595,
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_parameters_are_those_of_the_model_card(model: str) -> None:
    shape = shape_of(model)
    groups = [group for group in tensor_groups(shape, engine_sizes({}, shape), Layout(1)) if not group.made]
    total, active = PUBLISHED[model]
    assert sum(group.params for group in groups) / 1e9 == pytest.approx(total, rel=0.01)
    assert sum(group.active for group in groups) / 1e9 == pytest.approx(active, rel=0.08)


@pytest.mark.parametrize("model", CHECKPOINTS)
def test_parameters_of_the_whole_checkpoint_are_those_of_the_hub(model: str) -> None:
    assert checkpoint_params(shape_of(model)) / 1e9 == pytest.approx(CHECKPOINTS[model], rel=0.01)


@pytest.mark.parametrize("model", PUBLISHED_GB)
def test_bytes_are_those_of_the_checkpoint(model: str) -> None:
    shape = shape_of(model)
    groups = tensor_groups(shape, engine_sizes({}, shape), Layout(1))
    assert sum(group.bytes for group in groups) / 1e9 == pytest.approx(PUBLISHED_GB[model], rel=0.02)


@pytest.mark.parametrize(
    ("model", "engine", "tensor", "kib"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", {}, 1, 128),
        ("meta-llama/Llama-3.1-8B-Instruct", {"kv_cache_dtype": "fp8"}, 1, 64),
        ("meta-llama/Llama-3.3-70B-Instruct", {}, 8, 320),
        ("meta-llama/Llama-3.3-70B-Instruct", {}, 16, 640),  # 8 KV heads copied twice
        ("meta-llama/Llama-3.3-70B-Instruct", {"kv_cache_dtype": "fp8"}, 4, 160),
        # one KV head a device: key and value fill half of a packed row of four bytes
        ("meta-llama/Llama-3.3-70B-Instruct", {"kv_cache_dtype": "fp8"}, 8, 320),
        ("openai/gpt-oss-120b", {}, 1, 36),  # half its layers keep a window only; head_dim 64 is not padded
        ("google/gemma-4-E2B-it", {}, 1, 18),  # 15 of 35 layers keep a cache; two head sizes
        ("Qwen/Qwen3.5-397B-A17B-FP8", {}, 1, 30),  # 15 of 60 layers keep a cache
        ("deepseek-ai/DeepSeek-R1", {}, 8, 8 * 76.25),  # 512 + 64 padded to 640, whole on every device
        ("deepseek-ai/DeepSeek-R1", {"kv_cache_dtype": "fp8"}, 16, 16 * 38.125),
    ],
)
def test_a_token_takes_what_the_engine_lays_out(
    model: str, engine: dict[str, str], tensor: int, kib: float
) -> None:
    shape = shape_of(model)
    layout = Layout(tensor, attention_data=tensor if "deepseek" in model else 1)
    assert token_bytes(shape, engine_sizes(engine, shape), layout) * tensor / 1024 == pytest.approx(kib)


def test_a_window_bounds_what_a_sequence_keeps() -> None:
    shape = shape_of("google/gemma-3-27b-it")
    sizes = engine_sizes({"max_num_batched_tokens": 1024}, shape)
    short, long = (sequence_bytes(shape, sizes, Layout(1), length) for length in (2048, 131072))
    layer = 2 * 16 * 128 * 2
    page = page_tokens(131072, sizes.sequences)
    assert short == (2048 * (10 + 60) + 60 * page) * layer
    kept = whole_pages(1023 + 2 * 1024, page) + page
    assert long == (131072 * 10 + kept * 60) * layer  # 52 layers in groups of ten


@pytest.mark.parametrize(
    ("engine", "pipeline", "steps"),
    [
        ({}, 1, 2),
        ({"async_scheduling": False}, 1, 1),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, 1, 1),
        ({"runner": "pooling"}, 1, 1),
        ({"runner": "pooling", "async_scheduling": True}, 1, 2),
        ({}, 4, 4),
    ],
)
def test_a_window_keeps_the_tokens_of_all_steps_that_vllm_schedules_at_once(
    engine: dict[str, Any], pipeline: int, steps: int
) -> None:
    shape = shape_of("google/gemma-3-27b-it")
    asked = {"max_num_batched_tokens": 1024, "max_model_len": 65536, "block_size": 128, **engine}
    kept = windowed_tokens(engine_sizes(asked, shape), Layout(1, pipeline=pipeline), 1024, 65536)
    assert kept == 1024 * (1 + steps) + 128


def test_a_window_bounds_nothing_where_heads_are_of_two_sizes() -> None:
    """Gemma 4 has windows with heads of 256 beside whole layers with heads of 512."""
    shape = shape_of("google/gemma-4-12B-it")
    sizes = engine_sizes({}, shape)
    assert sizes.by_vllm
    whole, half = (sequence_bytes(shape, sizes, Layout(1), length) for length in (131072, 65536))
    assert whole == 2 * half == 131072 * token_bytes(shape, sizes, Layout(1))


def check_conserved(slice_: Slice, model: str, cache: str) -> None:
    shape = shape_of(model)
    sizes = engine_sizes({"kv_cache_dtype": cache}, shape)
    try:
        layout, _ = derive(shape, sizes, slice_, ParallelSpec())
    except PlanError:
        odd_experts = sizes.quantization and sizes.quantization.format == "mxfp4" and 6 % slice_.devices
        odd_heads = shape.num_attention_heads % slice_.devices or shape.num_key_value_heads % slice_.devices
        assert odd_heads or odd_experts
        return
    assert layout.devices == slice_.devices
    assert shape.num_attention_heads % layout.tensor == 0
    assert layout.attention_groups * layout.head_shards == layout.width == layout.tensor
    groups = tensor_groups(shape, sizes, layout)
    single = tensor_groups(shape, sizes, Layout(1))
    assert [(group.name, group.params, group.bytes) for group in groups] == [
        (group.name, group.params, group.bytes) for group in single
    ]
    held = device_bytes(groups, shape, layout) * layout.width * layout.pipeline
    assert held >= sum(group.bytes for group in groups if group.padding)  # 0: the engine leaves it out
    fit = measure(shape, sizes, slice_, layout)
    if not fit.problems:
        assert fit.weight_bytes + fit.state_bytes + fit.cache_bytes + fit.withheld_bytes <= fit.usable_bytes
        in_one_group = fit.sequences // separate_batches(layout)
        assert in_one_group * sequence_bytes(shape, sizes, layout, fit.max_model_len) <= fit.cache_bytes
        assert sequence_bytes(shape, sizes, layout, fit.longest) <= fit.cache_bytes


@pytest.mark.parametrize("model", CONFIGS)
def test_chips_bytes_and_heads_are_conserved_on_every_slice(model: str) -> None:
    for slice_ in every_slice():
        if slice_.chips <= 256:
            check_conserved(slice_, model, "auto")


@given(
    st.sampled_from(list(every_slice())), st.sampled_from(sorted(CONFIGS)), st.sampled_from(["auto", "fp8"])
)
def test_they_are_on_the_largest_too(slice_: Slice, model: str, cache: str) -> None:
    check_conserved(slice_, model, cache)


@pytest.mark.parametrize(
    ("length", "sequences", "page"),
    [
        (512, 256, 32),
        (2048, 256, 128),
        (8192, 256, 256),
        (9216, 64, 16),
        (16384, 256, 32),
        (131072, 256, 256),
    ],
)
def test_pages_are_those_of_tpu_inference_s_attention(length: int, sequences: int, page: int) -> None:
    assert page_tokens(length, sequences) == page
    assert page_tokens(length, sequences, latent=True) == 1024


def test_what_the_engine_makes_at_start_is_no_parameter() -> None:
    """Llama 4 Scout has a row of sines and cosines for each of ten million positions."""
    shape = shape_of("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    groups = tensor_groups(shape, engine_sizes({}, shape), Layout(8))
    (tables,) = (group for group in groups if group.made)
    assert tables.held_bytes == 8 * tables.bytes == 8 * 10_485_760 * 128 * 2
    assert sum(group.params for group in groups if not group.made) == checkpoint_params(shape)
