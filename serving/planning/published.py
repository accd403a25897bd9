"""Published output rates of vLLM with tpu-inference on TPUs: what speeds are fitted to and held against.

A row is one server and the loads it was measured under. `floor` rows are what tpu-inference's CI demands of a run: CI sets
its bars at 0.85 to 0.94 of what ran (PR 3408, PR 1006), so the rate is taken as the bar over 0.9. No price was fitted to
the rows of `HELD`: they were found later, and say what a plan is worth for a run that it has not seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_FLOOR = 0.9

# (prompt, answer, requests in flight) -> output tokens a second
Rates = Mapping[tuple[int, int, int], float]


@dataclass(frozen=True)
class Published:
    """A published run: the server's options as a YAML has them, and output tokens a second by load."""

    model: str
    slice: str  # generation, topology, hosts
    source: str
    date: str  # of the run; of a bar, when it was set
    rates: Rates
    engine: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, int | str] = field(default_factory=dict)
    floor: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    sampled: bool = False  # as the model's generation_config says, not greedily: what `vllm bench serve` asks for since 2026

    @property
    def family(self) -> str:
        """The models that are measured or not as one: of one maker and generation, dense or not."""
        return _FAMILIES[self.model]

    @property
    def quantized(self) -> bool:
        """Whether weights are smaller than bf16, in the checkpoint or while it is loaded."""
        return "FP8" in self.model or "quantization" in self.engine.get("additional_config", {})


_FAMILIES = {
    "meta-llama/Llama-3.1-8B-Instruct": "Llama 3",
    "meta-llama/Llama-3.3-70B-Instruct": "Llama 3",
    "google/gemma-3-27b-it": "Gemma 3",
    "google/gemma-4-31B-it": "Gemma 4",
    "google/gemma-4-12B-it": "Gemma 4",
    "google/gemma-4-E2B-it": "Gemma 4 E",
    "google/gemma-4-E4B-it": "Gemma 4 E",
    "Qwen/Qwen3-4B": "Qwen3",
    "Qwen/Qwen3-32B": "Qwen3",
    "Qwen/Qwen3-30B-A3B": "Qwen3 MoE",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": "Qwen3 MoE",
    "Qwen/Qwen3.5-27B": "Qwen3.5",
    "Qwen/Qwen3.5-397B-A17B-FP8": "Qwen3.5 MoE",
    "deepseek-ai/DeepSeek-R1": "DeepSeek",
}

_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes inference"
_PULLS = "https://github.com/vllm-project/tpu-inference/pull"
_CI = "https://github.com/vllm-project/tpu-inference .buildkite/models"
_RIGS = "https://github.com/xbill9/gemma4-dev"
_FIRST_BARS = "2025-10"


def _bar(prompt: int, answer: int, sequences: int, requests_per_s: float) -> Rates:
    """CI sends 1000 prompts at once: as many run as the engine allows."""
    return {(prompt, answer, sequences): requests_per_s * answer / _FLOOR}


def _inferencex(sharding: str, prompt: int, rates: Mapping[int, float]) -> Published:
    """A sharding of PR 3079's sweep; the pull request gives prompt and output tokens a second together."""
    data = {"TP8": 1, "DP4TP2": 4, "DP8": 8}[sharding]
    most = max(rates)
    return Published(
        "Qwen/Qwen3.5-397B-A17B-FP8",
        "v7x 2x2x1",
        f"{_PULLS}/3079",
        "2026-07",
        {(prompt, 1024, load): total * 1024 / (prompt + 1024) for load, total in rates.items()},
        {
            "max_model_len": prompt + 1044,
            "max_num_seqs": max(1, 2 * most // data),
            "max_num_batched_tokens": max(min(max(prompt // data, 1024), 2048), 2 * most // data),
            "gpu_memory_utilization": 0.9,
            "kv_cache_dtype": "fp8",
            "enable_expert_parallel": True,
            "language_model_only": True,
        },
        {"attention_data": data} if data > 1 else {},
    )


PUBLISHED = (
    Published(
        "meta-llama/Llama-3.3-70B-Instruct",
        "v6e 2x4 1",
        f"{_RECIPES}/trillium/vLLM/Llama3.x",
        "2025-12",
        {(1000, 1000, 64): 2495, (1000, 1000, 128): 3544},
        {
            "max_model_len": 2048,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 512,
            "gpu_memory_utilization": 0.98,
        },
    ),
    Published(
        "google/gemma-4-E2B-it",
        "v6e 1x1",
        "a run on ct6e-standard-1t, not by Google",
        "2026-07",
        {(1024, 128, 64): 2140, (1024, 128, 100): 2215},
        {
            "max_model_len": 8192,
            "max_num_batched_tokens": 4096,
            "gpu_memory_utilization": 0.9,
            "kv_cache_dtype": "fp8",
        },
        sampled=True,
    ),
    Published(
        "google/gemma-4-E2B-it",
        "v6e 1x1",
        f"{_RIGS} tpu-vllm-v6e1-2b 2026-08-10-article-validation-v6e1",
        "2026-08",
        {(128, 128, 1): 203, (1024, 128, 16): 1508, (8192, 128, 32): 758, (16000, 128, 64): 446},
        {"max_model_len": 32768, "max_num_batched_tokens": 4096},
        sampled=True,
    ),
    Published(
        "Qwen/Qwen3-32B",
        "v7x 1x1x1",
        f"{_RECIPES}/ironwood/vLLM/Qwen3-32B",
        "2026-03",
        {(1024, 1024, 320): 6557, (1024, 8192, 320): 3960, (8192, 1024, 320): 1382},
        {
            "max_model_len": 9216,
            "max_num_seqs": 135,
            "max_num_batched_tokens": 4096,
            "gpu_memory_utilization": 0.98,
            "kv_cache_dtype": "fp8",
            "additional_config": {
                "quantization": {"qwix": {"rules": [{"module_path": ".*", "weight_qtype": "float8_e4m3fn"}]}}
            },
        },
    ),
    Published(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
        "v7x 2x2x1",
        f"{_RECIPES}/ironwood/vLLM/Qwen3-Coder-480B-A35B",
        "2026-04",
        {(1024, 1024, 64): 1996, (1024, 8192, 64): 2075, (8192, 1024, 64): 1053},
        {
            "max_model_len": 10240,
            "max_num_seqs": 512,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.8,
            "kv_cache_dtype": "fp8",
            "enable_expert_parallel": True,
        },
    ),
    Published(
        "Qwen/Qwen3.5-397B-A17B-FP8",
        "v7x 2x2x1",
        f"{_RECIPES}/ironwood/vLLM/Qwen3.5-397B",
        "2026-07",
        {(1024, 8192, 128): 5172, (8192, 1024, 128): 2281},
        {
            "max_model_len": 9216,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 1024,
            "enable_expert_parallel": True,
        },
        {"attention_data": "auto"},
    ),
    _inferencex("TP8", 1024, {4: 666.3, 8: 1213.1}),
    _inferencex("DP4TP2", 1024, {16: 2229.0, 32: 3659.5, 64: 5988.5, 128: 9146.1}),
    _inferencex("TP8", 8192, {4: 2717.4, 8: 4860.2}),
    _inferencex("DP4TP2", 8192, {16: 8348.7, 32: 12504.3}),
    _inferencex("DP8", 8192, {64: 17825.2, 128: 24904.6, 256: 32584.8}),
    Published(
        "meta-llama/Llama-3.1-8B-Instruct",
        "v6e 1x1",
        _CI,
        _FIRST_BARS,
        _bar(1800, 128, 256, 10.77),
        {"max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 1024},
        floor=True,
    ),
    Published(
        "meta-llama/Llama-3.3-70B-Instruct",
        "v6e 2x4 1",
        _CI,
        _FIRST_BARS,
        _bar(1800, 128, 256, 7.0),
        {"max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 4096},
        floor=True,
    ),
    Published(
        "Qwen/Qwen3-4B",
        "v6e 1x1",
        _CI,
        _FIRST_BARS,
        _bar(1800, 128, 94, 11.0),
        {"max_model_len": 2048, "max_num_seqs": 94, "max_num_batched_tokens": 4096},
        floor=True,
    ),
    Published(
        "Qwen/Qwen3-32B",
        "v6e 2x4 1",
        _CI,
        _FIRST_BARS,
        _bar(1800, 128, 512, 12.46),
        {"max_model_len": 2048, "max_num_seqs": 512, "max_num_batched_tokens": 4096},
        floor=True,
    ),
    Published(
        "Qwen/Qwen3-30B-A3B",
        "v6e 2x2",  # four devices when the bar was set
        _CI,
        "2025-11",
        _bar(1800, 128, 94, 7.2),
        {"max_model_len": 2048, "max_num_seqs": 94, "max_num_batched_tokens": 1024},
        floor=True,
    ),
    Published(
        "google/gemma-3-27b-it",
        "v6e 2x4 1",
        _CI,
        "2025-11",
        _bar(1000, 100, 512, 21.0),
        {"max_model_len": 1280, "max_num_seqs": 512, "max_num_batched_tokens": 2048},
        floor=True,
    ),
)

_QWIX_FP8 = {
    "quantization": {"qwix": {"rules": [{"module_path": ".*", "weight_qtype": "float8_e4m3fn"}]}},
}
_CODER = {
    "max_model_len": 10240,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.95,
    "kv_cache_dtype": "fp8",
}


def _sweep(model: str, max_model_len: int, rates: Rates) -> Published:
    """One model of a sweep over prompts and users on one v6e chip, all with answers of 128 tokens.

    It asked the same prompts again for more users, and the engine had them in its cache: of long prompts only those count that
    its cache had no room for.
    """
    return Published(
        model,
        "v6e 1x1",
        f"{_RIGS} 2026-07-25-vllm-sweep-v6e1",
        "2026-07",
        rates,
        {"max_model_len": max_model_len, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.9},
        sampled=True,
    )


def _deepseek(pull: int, sequences: int, utilization: float, rates: Rates) -> Published:
    """A daily run of tpu-inference's CI (.buildkite/benchmark/cases/daily/deepseek_dp_attention.json), before the pull's change.

    All requests come at once, and those in flight are all that there are.
    """
    return Published(
        "deepseek-ai/DeepSeek-R1",
        "v7x 2x2x1",
        f"{_PULLS}/{pull}",
        "2026-06",
        rates,
        {
            "model_impl": "vllm",
            "max_model_len": 9216,
            "max_num_seqs": sequences,
            "max_num_batched_tokens": 1024,
            "gpu_memory_utilization": utilization,
            "kv_cache_dtype": "fp8",
            "enable_expert_parallel": True,
        },
        environment={"MOE_REQUANTIZE_WEIGHT_DTYPE": "fp4", "MOE_REQUANTIZE_BLOCK_SIZE": "512"},
        sampled=True,
    )


HELD = (
    Published(
        "Qwen/Qwen3-32B",
        "v7x 1x1x1",
        f"{_PULLS}/730",
        "2025-09",
        {(1024, 4096, 1000): 2929},
        {
            "max_model_len": 5120,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.96,
            "kv_cache_dtype": "fp8",
            "additional_config": _QWIX_FP8,
        },
    ),
    Published(
        "meta-llama/Llama-3.1-8B-Instruct",
        "v6e 1x1",
        f"{_PULLS}/1006",
        "2025-11",
        {(1199, 123, 1000): 1415},
        {"max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 1024},
    ),
    Published(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
        "v7x 2x2x1",
        f"{_PULLS}/1691",
        "2026-02",
        {(922, 922, 64): 1493, (7373, 922, 64): 720},
        {**_CODER, "enable_expert_parallel": True},
    ),
    Published(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
        "v7x 2x2x1",
        f"{_PULLS}/1745",
        "2026-02",
        {(922, 922, 64): 2023, (7373, 922, 64): 727},
        _CODER,
    ),
    Published(
        "Qwen/Qwen3-32B",
        "v7x 1x1x1",
        f"{_PULLS}/1961",
        "2026-03",
        {(920, 7418, 320): 4055},
        {
            "max_model_len": 9216,
            "max_num_seqs": 135,
            "max_num_batched_tokens": 4096,
            "gpu_memory_utilization": 0.98,
            "kv_cache_dtype": "fp8",
            "block_size": 256,
            "additional_config": _QWIX_FP8,
        },
    ),
    Published(
        "google/gemma-4-31B-it",
        "v7x 1x1x1",
        "https://github.com/AI-Hypercomputer/tpu-recipes/pull/243",
        "2026-04",
        {(1024, 1024, 320): 1727},
        {
            "max_model_len": 16384,
            "max_num_batched_tokens": 16384,
            "gpu_memory_utilization": 0.9,
            "block_size": 256,
        },
    ),
    *(
        replace(
            _inferencex(sharding, prompt, dict.fromkeys(rates, 0.0)),
            source=f"{_PULLS}/3050",
            date="2026-06",
            rates={(prompt, 1024, load): float(rate) for load, rate in rates.items()},
        )
        for sharding, prompt, rates in (
            ("DP4TP2", 1024, {4: 291, 8: 509, 16: 983}),
            ("DP4TP2", 8192, {4: 246, 8: 495, 16: 773, 32: 1162}),
            ("DP8", 8192, {64: 1643, 128: 2308, 256: 3161}),
        )
    ),
    Published(
        "google/gemma-4-E2B-it",
        "v6e 1x1",
        f"{_RIGS} tpu-vllm-v6e1-2b 2026-08-10-article-validation-v6e1",
        "2026-08",
        {
            (128, 128, 8): 1195,
            (4096, 128, 64): 1360,
            (8192, 128, 64): 870,
            (16000, 128, 32): 433,
            (16000, 128, 112): 466,
            (32000, 128, 16): 243,
            (32000, 128, 32): 229,
        },
        {"max_model_len": 32768, "max_num_batched_tokens": 4096},
        sampled=True,
    ),
    Published(
        "google/gemma-4-E2B-it",
        "v5e 1x1",
        f"{_RIGS} tpu-vllm-v5e1-2b",
        "2026-08",
        {
            (128, 128, 1): 120,
            (128, 128, 4): 419,
            (128, 128, 16): 1022,
            (128, 128, 64): 1382,
            (1024, 128, 1): 120,
            (8192, 128, 1): 94,
        },
        {"max_model_len": 16384, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.92},
        sampled=True,
    ),
    Published(
        "google/gemma-4-31B-it",
        "v6e 2x2",
        f"{_RIGS} 31B on ct6e-standard-4t",
        "2026-08",
        {(32, 128, 256): 2031},
        {"max_model_len": 32768},
        sampled=True,
    ),
    _sweep(
        "google/gemma-4-E2B-it",
        65536,
        {
            (128, 128, 1): 212,
            (128, 128, 8): 1244,
            (128, 128, 16): 1876,
            (128, 128, 32): 1777,
            (128, 128, 64): 2452,
        },
    ),
    _sweep(
        "google/gemma-4-E4B-it",
        65536,
        {
            (128, 128, 1): 111,
            (128, 128, 8): 798,
            (128, 128, 16): 1301,
            (128, 128, 32): 1396,
            (128, 128, 64): 2063,
            (8192, 128, 32): 404,
            (8192, 128, 64): 404,
        },
    ),
    _sweep(
        "google/gemma-4-12B-it",
        8192,
        {
            (128, 128, 1): 45,
            (128, 128, 8): 347,
            (128, 128, 32): 924,
            (128, 128, 64): 939,
            (512, 128, 1): 45,
            (512, 128, 8): 312,
            (512, 128, 32): 473,
            (512, 128, 64): 473,
            (2048, 128, 1): 43,
            (2048, 128, 8): 136,
            (2048, 128, 32): 134,
            (2048, 128, 64): 134,
        },
    ),
    Published(
        "Qwen/Qwen3.5-27B",  # of Qwen3.8-27B, whose layers are the same
        "v6e 2x2",
        "https://github.com/AI-Hypercomputer/tpu-recipes/pull/276",
        "2026-08",
        {(1024, 1024, 64): 1870},
        {"max_model_len": 16384, "kv_cache_dtype": "fp8"},
        sampled=True,
    ),
    _deepseek(3019, 96, 0.95, {(1024, 8192, 768): 11642}),
    _deepseek(3022, 64, 0.9, {(8192, 1024, 512): 1077}),
    _deepseek(3027, 64, 0.9, {(8192, 1024, 512): 1092}),
)
