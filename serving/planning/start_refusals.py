"""What vLLM or tpu-inference refuse of a model at the start of its engine, beside what no engine may set."""

from collections.abc import Mapping
from typing import Any

from serving.errors import ConfigError
from serving.planning.shapes import ModelShape

_NOT_IN_FLOAT16 = ("Gemma3", "Glm4ForCausalLM")  # vLLM's _FLOAT16_NOT_SUPPORTED_MODELS
# Tokens of the largest input beside texts: vLLM's gemma4_mm.py takes 32 frames of a video, of 78 tokens each.
_VIDEO_TOKENS = {"Gemma4ForConditionalGeneration": 2496}


def check_model(engine: Mapping[str, Any], shape: ModelShape) -> None:
    """What vLLM's ModelConfig and LoRAConfig refuse of a model."""
    if shape.scores and engine.get("runner") == "generate":
        raise ConfigError(
            "engine.runner: the model embeds or scores texts and writes none; remove it, or set it to pooling"
        )
    if engine.get("dtype") in ("float16", "half") and shape.architecture.startswith(_NOT_IN_FLOAT16):
        raise ConfigError(
            f"engine.dtype: vLLM runs no {shape.architecture} in float16, for its numbers overflow; set it to bfloat16"
        )
    if engine.get("enable_expert_parallel") and shape.experts is None:
        raise ConfigError(
            "engine.enable_expert_parallel: vLLM refuses it for a model without experts; remove it"
        )
    loras, on_hosts = engine.get("max_loras") or 1, engine.get("max_cpu_loras")
    if engine.get("enable_lora") and on_hosts is not None and on_hosts < loras:
        raise ConfigError(
            f"engine.max_cpu_loras: {on_hosts} is below max_loras, {loras}; raise it, or remove it"
        )


def check_on_hosts(engine: Mapping[str, Any], shape: ModelShape) -> None:
    """What no engine over several hosts starts with: vLLM's Ray executor gives workers no lock (worker_base.py)."""
    if shape.tower_params and engine.get("mm_processor_cache_type") == "shm":
        raise ConfigError(
            "engine.mm_processor_cache_type: vLLM shares this cache with workers of one host alone; remove it, or take a slice of one host"
        )


def check_video(engine: Mapping[str, Any], shape: ModelShape, tokens: int) -> None:
    """vLLM ends a start where an input that is not cut is larger than a step (compute_mm_encoder_budget)."""
    limits = engine.get("limit_mm_per_prompt")
    videos = limits.get("video") if isinstance(limits, Mapping) else None
    largest = _VIDEO_TOKENS.get(shape.architecture, 0)
    whole = engine.get("disable_chunked_mm_input") is True
    if whole and engine.get("max_num_batched_tokens") and tokens < largest and videos is None:
        raise ConfigError(
            f"engine.max_num_batched_tokens: {tokens} is below the {largest} of a video, which disable_chunked_mm_input keeps whole; "
            "raise it, or set limit_mm_per_prompt.video to 0"
        )


def check_matmul_kernel(shape: ModelShape, environment: Mapping[str, str], *, by_vllm: bool) -> None:
    """tpu-inference ends a start with FP8 weights where one of two variables is set (layers/vllm/quantization/fp8.py)."""
    if not by_vllm or shape.quantization is None or shape.quantization.method != "fp8":
        return
    kernel = environment.get("ENABLE_QUANTIZED_MATMUL_KERNEL", "").lower() in ("1", "true")
    if kernel != bool(environment.get("REQUANTIZE_BLOCK_SIZE")):
        raise ConfigError(
            "engine_env: ENABLE_QUANTIZED_MATMUL_KERNEL and REQUANTIZE_BLOCK_SIZE go together for FP8 weights; set both, or none"
        )


def check_scaled_cache(engine: Mapping[str, Any], shape: ModelShape) -> None:
    """What a checkpoint of compressed-tensors with scales for an fp8 cache asks of the cache of vLLM's own model.

    Where no format is given the model makes keys and values fp8 (vLLM's Attention) when the runner has made its cache at full size
    (TPUModelRunner), and the kernel takes one format alone (ragged_paged_attention, static_validate_inputs).
    """
    if shape.quantization is None or not shape.quantization.scales_cache:
        return
    asked = engine.get("kv_cache_dtype")
    if asked in (None, "auto"):
        raise ConfigError(
            "engine.kv_cache_dtype: the checkpoint has scales for an fp8 cache (kv_cache_scheme), and vLLM's own model would write fp8 "
            "into a cache at full size, which ends the engine at start; set it to fp8"
        )
    if asked == "fp8_e5m2":
        raise ConfigError(
            "engine.kv_cache_dtype: vLLM refuses fp8_e5m2 for a checkpoint with scales for an fp8 cache (kv_cache_scheme); set it to fp8"
        )
