"""Measurements on TPUs, and the factors that bring the simulated engine to them.

A family of models shares one set of factors: dense models and those with experts, on v6e and on v7x; other generations
take v6e's, as the roofline's shares do. `benchmarks/calibration.py` runs every row in simulated time, fits the factors
to the rows marked `fits` and prints the errors of the others. A test holds the factors to its results.
"""

from dataclasses import dataclass

from serving.planning import Plan
from serving.simulation.engine.physics import Factors

_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes inference"
_LLAMA = f"{_RECIPES}/trillium/vLLM/Llama3.x"
_QWEN3 = f"{_RECIPES}/ironwood/vLLM/Qwen3-32B"
_CODER = f"{_RECIPES}/ironwood/vLLM/Qwen3-Coder-480B-A35B"
_QWEN35 = f"{_RECIPES}/ironwood/vLLM/Qwen3.5-397B"
_GEMMA = "a third party's log of one ct6e-standard-1t, 2026-07"


@dataclass(frozen=True)
class Load:
    """A run of `vllm bench serve`. Lengths are in tokens, from the share `shortest` of the full length up."""

    prompt: int
    answer: int
    concurrency: int
    prompts: int
    shortest: float = 1.0


@dataclass(frozen=True)
class Published:
    """The result of a run on the slice of a deployment; factors are fitted to it where `fits` is set."""

    deployment: str
    load: Load
    tokens_per_s: float
    source: str
    fits: bool
    tpot_s: float | None = None
    ttft_s: float | None = None  # median


# Llama ran 3000 prompts: ten times the concurrency is enough for a steady state. Each family is fitted to runs with a short
# and, where there is one, a long prompt.
PUBLISHED = (
    Published("llama-70b-v6e-8", Load(1000, 1000, 64, 640), 2495, _LLAMA, True, 0.02535, 0.19881),
    Published("llama-70b-v6e-8", Load(1000, 1000, 128, 1280), 3544, _LLAMA, False, 0.03512, 0.22909),
    Published("gemma-4-e2b-v6e-1", Load(1024, 128, 64, 640), 2140, _GEMMA, True),
    Published("gemma-4-e2b-v6e-1", Load(1024, 128, 100, 100), 2215, _GEMMA, False),
    Published("qwen3-32b-v7x-2", Load(1024, 1024, 320, 320, 0.8), 6557, _QWEN3, True),
    Published("qwen3-32b-v7x-2", Load(8192, 1024, 320, 320, 0.8), 1382, _QWEN3, True),
    Published("qwen3-32b-v7x-2", Load(1024, 8192, 320, 320, 0.8), 3960, _QWEN3, False),
    Published("qwen3-coder-480b-v7x-8", Load(1024, 1024, 64, 320, 0.8), 1996, _CODER, True),
    Published("qwen3-coder-480b-v7x-8", Load(8192, 1024, 64, 320, 0.8), 1053, _CODER, False),
    Published("qwen3-coder-480b-v7x-8", Load(1024, 8192, 64, 320, 0.8), 2075, _CODER, False),
    Published("qwen3.5-397b-v7x-8", Load(8192, 1024, 128, 320, 0.8), 2281, _QWEN35, True),
    Published("qwen3.5-397b-v7x-8", Load(1024, 8192, 128, 640, 0.8), 5172, _QWEN35, False),
)

FACTORS = {
    "dense on v6e": Factors(decode=0.95, prefill=0.99, cache=0.99, attention=1.0),
    "Gemma 4 E on v6e": Factors(decode=1.74, prefill=1.11, cache=1.05, attention=1.01),
    "dense on v7x": Factors(decode=0.49, prefill=1.16, cache=1.08, attention=1.42),
    "experts on v7x": Factors(decode=0.97, prefill=1.13, cache=0.99, attention=1.01),
}


def family(plan: Plan) -> str:
    """The key of FACTORS for a plan. Gemma's E models do so little a token that time outside the roofline rules them."""
    if plan.slice.generation == "v7x":
        return "experts on v7x" if plan.shape.experts else "dense on v7x"
    return "Gemma 4 E on v6e" if plan.shape.per_layer_embedding else "dense on v6e"


def factors_for(plan: Plan) -> Factors:
    return FACTORS[family(plan)]
