"""The engine options that decide HBM, as numbers: lengths, batch, formats.

Defaults are those vLLM 0.26 takes for its HTTP server (EngineArgs.get_batch_defaults, CacheConfig).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.errors import ConfigError, PlanError
from serving.planning.adapters import leaves_experts_out
from serving.planning.architectures import FULL_SIZE_IN_JAX, JAX_MODELS, NOT_STREAMED
from serving.planning.checkpoints import Hub, embeds, no_hub
from serving.planning.quantization import Quantization
from serving.planning.shapes import ModelShape, draft_shape_of
from serving.planning.start_refusals import check_matmul_kernel, check_model, check_scaled_cache, check_video

DEFAULT_UTILIZATION = 0.92
DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_SEQUENCES = 256
_DEFAULT_LORA_RANK = 16

# Checkpoint formats that JAX_MODELS load (layers/jax/quantization); only vLLM's own models load the others.
JAX_FORMATS = ("", "compressed-tensors", "fp8", "mxfp4")
# Ways of speculative decoding that tpu-inference 0.26 has (runner/tpu_runner.py, _init_speculative_decoding).
DRAFTING = ("ngram", "eagle", "eagle3", "dflash", "mtp")
# vLLM's options that say the same as a key of `speculative_config`.
_SPECULATIVE = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
_BUCKETS = ("gs://", "s3://", "az://")  # SUPPORTED_SCHEMES of runai-model-streamer
_A_LINEAR_LAYER = "model.layers.0.self_attn.o_proj"
_AN_EXPERT = "model.layers.1.mlp.experts.0.gate_proj"
# Names that vLLM takes for `quantization` beside a checkpoint's own.
_ALSO = {
    "awq": ("auto_awq", "awq_marlin"),
    "mxfp4": ("gpt_oss_mxfp4",),
    "modelopt": ("modelopt_fp4",),
}
# Formats that experts can be given while they are loaded (utils.to_jax_dtype).
_EXPERT_FORMATS = {
    "fp4": "fp4",
    "float4_e2m1fn": "fp4",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "int8": "int8",
    "int4": "int4",
}
_QWIX_FORMATS = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "int8": "int8", "int4": "int4"}


@dataclass(frozen=True)
class EngineSizes:
    """Sizes the engine will be started with. `quantization` is the format of the weights in HBM."""

    max_model_len: int | None  # None: as long as fits
    sequences: int
    batched_tokens: int
    utilization: float
    weight_format: str
    cache_itemsize: int
    quantization: Quantization | None
    # In which experts are stored whatever the checkpoint's format is; None: the checkpoint's.
    expert_format: str | None
    loads_full_size: bool  # weights lie in HBM at full size before they are quantised
    towers: bool
    whole_towers: bool  # each device of tpu-inference's own models holds the encoders whole and works on pictures of its own
    lora_rank: int  # summed over the adapters held at once; 0 without
    draft: ModelShape | None  # the draft model of speculative decoding
    draft_layers: int  # of the checkpoint's own, loaded to draft tokens (MTP)
    pools: bool  # embeds or scores texts: no output head, no sampling, no output tokens
    by_vllm: bool  # runs vLLM's implementation through torchax, not tpu-inference's own in JAX
    encoder_programs: bool  # the multimodal encoder is compiled for every token budget
    expert_parallel: bool
    schedules_ahead: bool = True  # a step while another runs
    blocks: int | None = None  # of the cache, in place of as many as fit
    block_tokens: int | None = None  # in place of the engine's choice


def engine_sizes(
    engine: Mapping[str, Any],
    shape: ModelShape,
    hub: Hub = no_hub,
    environment: Mapping[str, str] | None = None,
    model: str = "",
) -> EngineSizes:
    """Read the options and variables a plan depends on; raises ConfigError for a value of the wrong kind.

    `model` is the checkpoint's name, for what is streamed from a bucket.
    """
    weight_format = "float32" if engine.get("dtype") in ("float", "float32") else "bf16"
    cache = _cache_format(engine, shape)
    full_itemsize = 4 if weight_format == "float32" else 2
    max_model_len = _max_model_len(engine, shape, environment or {})
    length = max_model_len or shape.max_position_embeddings
    if engine.get("max_model_len") is None:  # of a RoBERTa vLLM takes every row of its table for a position
        length = max(length, shape.position_rows)
    sequences, batched_tokens = _batch(engine, length, in_chunks=not shape.encodes)
    speculative = _speculative(engine)
    draft, draft_in_jax = _draft(speculative, hub)
    draft_layers = _draft_layers(speculative, shape)
    by_vllm = (
        shape.architecture not in JAX_MODELS
        or _fails_in_jax(shape)
        or shape.scores
        or engine.get("model_impl") == "vllm"
        or (shape.quantization is not None and not _loads_in_jax(shape.quantization, shape.architecture))
        or (shape.architecture in NOT_STREAMED and _streamed(engine, model))
        or bool(engine.get("enable_lora"))  # tpu-inference's own models have no adapters (get_flax_model)
        # Target and draft have to be of one implementation (Eagle3Proposer).
        or (draft is not None and not draft_in_jax)
        or draft_layers > 0
        or engine.get("convert")
        == "classify"  # of poolers, tpu-inference's own models have that of embeddings alone
    )
    check_matmul_kernel(shape, environment or {}, by_vllm=by_vllm)
    check_model(engine, shape)
    if by_vllm:
        check_scaled_cache(engine, shape)
    if engine.get("enable_lora") and shape.experts and not leaves_experts_out(engine):
        raise ConfigError(
            "engine.enable_lora: tpu-inference 0.26 has no LoRA for experts, and vLLM gives them adapters unless it is told not to; set "
            "engine.lora_target_modules to the projections of attention, as [q_proj, k_proj, v_proj, o_proj], or unset it"
        )
    quantization = _quantization(engine, shape, by_vllm=by_vllm)
    towers = shape.tower_params > 0 and not _leaves_towers_out(engine, by_vllm=by_vllm)
    if towers:
        check_video(engine, shape, batched_tokens)
    pools = (
        shape.scores
        or engine.get("runner") == "pooling"
        or engine.get("convert") in ("embed", "classify")
        or (engine.get("runner") in (None, "auto") and embeds(model))
    )
    compilation = engine.get("compilation_config")
    compilation = compilation if isinstance(compilation, Mapping) else {}
    return EngineSizes(
        max_model_len=max_model_len,
        sequences=sequences,
        batched_tokens=batched_tokens,
        utilization=_share(engine),
        weight_format=weight_format,
        cache_itemsize=1 if cache.startswith(("fp8", "int8")) else full_itemsize,
        quantization=quantization,
        expert_format=_expert_format(environment or {}),
        loads_full_size=quantization is not shape.quantization
        and not _nested(engine, "quantization", "qwix").get("use_abstract_model"),
        towers=towers,
        whole_towers=_nested(engine).get("mm-encoder-tp-mode") == "data",
        lora_rank=_whole(engine, "max_loras", 1) * _whole(engine, "max_lora_rank", _DEFAULT_LORA_RANK)
        if engine.get("enable_lora")
        else 0,
        draft=draft,
        draft_layers=draft_layers,
        pools=pools,
        by_vllm=by_vllm,
        encoder_programs=towers
        and by_vllm
        and (shape.architecture in JAX_MODELS or compilation.get("cudagraph_mm_encoder") is True),
        expert_parallel=engine.get("enable_expert_parallel") is True,
        schedules_ahead=_schedules_ahead(engine, speculative, pools=pools),
        blocks=_whole(engine, "num_gpu_blocks_override", 0) or None,
        block_tokens=_whole(engine, "block_size", 0) or None,
    )


def _cache_format(engine: Mapping[str, Any], shape: ModelShape) -> str:
    """The YAML's, else the checkpoint's (resolve_kv_cache_dtype_string)."""
    asked = engine.get("kv_cache_dtype") or "auto"
    if asked != "auto" or shape.quantization is None:
        return str(asked)
    if shape.quantization.cache == "nvfp4":
        raise ConfigError(
            "the checkpoint asks for a cache in NVFP4, which is not for TPUs; set engine.kv_cache_dtype to fp8 or bfloat16"
        )
    return shape.quantization.cache


def _batch(engine: Mapping[str, Any], length: int, *, in_chunks: bool) -> tuple[int, int]:
    """Sequences and tokens of a step; raises ConfigError where they are fewer than sequences, or than a prompt read at once.

    Defaults are vLLM's (EngineArgs._set_default_max_num_seqs_and_batched_tokens_args), but that tokens follow sequences.
    `in_chunks`: whether prompts of the model are read in steps where the YAML says nothing.
    """
    asked_chunks = engine.get("enable_chunked_prefill")
    at_once = 1 if (in_chunks if asked_chunks is None else asked_chunks) else length
    scale = 2 if engine.get("performance_mode") == "throughput" else 1
    asked = _whole(engine, "max_num_seqs", 0)
    sequences = asked or DEFAULT_SEQUENCES * scale
    tokens = _whole(engine, "max_num_batched_tokens", 0)
    if not tokens:
        tokens = max(DEFAULT_BATCHED_TOKENS * scale, at_once)
        tokens = max(min(tokens, sequences * length), sequences)
    elif not asked:
        sequences = min(sequences, tokens)
    if tokens < sequences:
        raise ConfigError(f"engine.max_num_batched_tokens: {tokens} is below max_num_seqs, {sequences}")
    if tokens < at_once:
        raise ConfigError(
            f"engine.max_num_batched_tokens: {tokens} is below max_model_len, {length}, and prompts are not read in chunks; raise it, or "
            "lower max_model_len"
        )
    return sequences, tokens


def _schedules_ahead(engine: Mapping[str, Any], speculative: Mapping[str, Any], *, pools: bool) -> bool:
    """vLLM's choice where the YAML makes none (VllmConfig.__post_init__)."""
    asked = engine.get("async_scheduling")
    if asked is not None:
        return asked is True
    return not pools and speculative.get("method") != "ngram"


def _fails_in_jax(shape: ModelShape) -> bool:
    """tpu-inference 0.26's own Qwen2 looks for `text_config` as it makes an output head, which Qwen2's config has not.

    models/jax/qwen2.py, Qwen2ForCausalLM: AttributeError at start. A model with a tied head makes none.
    """
    return shape.architecture == "Qwen2ForCausalLM" and not shape.tied_embeddings


def _loads_in_jax(quantization: Quantization, architecture: str) -> bool:
    """Of compressed-tensors, tpu-inference's own models load fp8 alone, and Gemma 4 none in blocks.

    Source: layers/jax/quantization/compressed_tensors.py, whose merged layers, which Gemma 4 has, take no blocks.
    """
    if architecture in FULL_SIZE_IN_JAX:
        return False
    if quantization.method == "compressed-tensors":
        return quantization.format == "fp8" and not (
            quantization.blocks and architecture.startswith("Gemma4")
        )
    return quantization.method in JAX_FORMATS


def _leaves_towers_out(engine: Mapping[str, Any], *, by_vllm: bool) -> bool:
    """vLLM's own models load no encoder whose every kind of input has the limit 0 (SupportsMultiModal._mark_tower_model)."""
    given = engine.get("limit_mm_per_prompt")
    limits = given if isinstance(given, Mapping) else {}
    none = limits.get("image") == limits.get("video") == limits.get("audio", 0) == 0
    return engine.get("language_model_only") is True or (by_vllm and none)


def _streamed(engine: Mapping[str, Any], model: str) -> bool:
    """Whether Run:ai's streamer reads the weights; vLLM takes it for buckets by itself (config/vllm.py)."""
    return engine.get("load_format") == "runai_streamer" or model.lower().startswith(_BUCKETS)


def _max_model_len(
    engine: Mapping[str, Any], shape: ModelShape, environment: Mapping[str, str]
) -> int | None:
    if engine.get("max_model_len") in (-1, "auto"):
        return None
    positions = shape.max_position_embeddings
    length = _whole(engine, "max_model_len", shape.default_length or positions)
    at_own_risk = environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").lower() in ("1", "true")
    if length > max(positions, shape.longest_allowed) and not at_own_risk:
        raise ConfigError(
            f"engine.max_model_len: {length} is beyond the model's {positions} positions; a model that was made for more says so "
            "in rope_parameters, which engine.hf_overrides may give"
        )
    return length


def _whole(engine: Mapping[str, Any], key: str, default: int) -> int:
    value = engine.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"engine.{key}: a whole number of at least 1 (got {value!r})")
    return value


def _share(engine: Mapping[str, Any]) -> float:
    value = engine.get("gpu_memory_utilization")
    if value is None:
        return DEFAULT_UTILIZATION
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise ConfigError(f"engine.gpu_memory_utilization: a number above 0 and at most 1 (got {value!r})")
    return float(value)


def _quantization(engine: Mapping[str, Any], shape: ModelShape, *, by_vllm: bool) -> Quantization | None:
    """The checkpoint's own format, else the format that a qwix rule for every module gives it while loading."""
    if quantization := shape.quantization:
        _check_format(quantization, engine.get("quantization"), shape)
        if quantization.no_linear and quantization.applies_to(_A_LINEAR_LAYER):
            name = quantization.format.partition("-")[0]
            raise ConfigError(
                f"the checkpoint's linear layers are {name} {quantization.no_linear}, which tpu-inference does not load; name one with "
                "fp8 or int8 weights and activations (W8A8), or in NVFP4"
            )
        return quantization
    if method := engine.get("quantization"):
        raise ConfigError(
            f"engine.quantization: {method!r} needs a checkpoint in that format, this one is {shape.dtype}; name one that "
            "is, or quantise it while loading by engine.additional_config.quantization.qwix"
        )
    rules = _qwix_rules(engine)
    if by_vllm:  # whose weights qwix never sees (models/common/model_loader.py)
        return None
    formats = [
        _QWIX_FORMATS.get(str(rule.get("weight_qtype")))
        for rule in rules
        if isinstance(rule, Mapping) and rule.get("module_path") == ".*"
    ]
    return next((Quantization(name) for name in formats if name), None)


def _qwix_rules(engine: Mapping[str, Any]) -> list[Any]:
    rules = _nested(engine, "quantization", "qwix").get("rules") or []
    if not isinstance(rules, list):
        raise ConfigError(f"engine.additional_config.quantization.qwix.rules: a list (got {rules!r})")
    return rules


def unheeded(engine: Mapping[str, Any], shape: ModelShape, sizes: EngineSizes) -> list[str]:
    """Options that the engine takes and does not heed, as notes."""
    if not sizes.by_vllm or shape.quantization or not _qwix_rules(engine):
        return []
    note = (
        f"engine.additional_config.quantization.qwix is of no effect on {shape.architecture}, which runs as vLLM's own model here: "
        f"weights stay {sizes.weight_format}; name a checkpoint in the format"
    )
    return [note]


def _check_format(quantization: Quantization, asked: Any, shape: ModelShape) -> None:
    """Refuse a format that this model's layers are not loaded in, and an option that contradicts the checkpoint."""
    if asked is not None and asked not in (quantization.method, *_ALSO.get(quantization.method, ())):
        raise ConfigError(
            f"engine.quantization: the checkpoint is quantised with {quantization.method}, vLLM refuses {asked!r}; remove it"
        )
    if quantization.format == "mxfp4" and shape.architecture != "GptOssForCausalLM":
        raise ConfigError(
            f"the checkpoint is in MXFP4, which tpu-inference 0.26 loads for gpt-oss alone, not for {shape.architecture}"
        )
    if (
        quantization.method == "compressed-tensors"
        and shape.experts
        and quantization.applies_to(_AN_EXPERT)
        and (
            quantization.format in ("int8", "nvfp4")
            or (quantization.format == "fp8" and quantization.weight_only)
        )
    ):
        raise ConfigError(
            f"the checkpoint's experts are {quantization.format} by compressed-tensors, of which tpu-inference 0.26 loads experts in fp8 "
            "with fp8 activations and in int4 (compressed_tensors_moe.py); name a checkpoint in one of these"
        )


def _expert_format(environment: Mapping[str, str]) -> str | None:
    """The format that tpu-inference gives experts while it loads them (process_weights/moe_weights.py)."""
    name = environment.get("MOE_REQUANTIZE_WEIGHT_DTYPE")
    if not name:
        return None
    if name not in _EXPERT_FORMATS:
        raise ConfigError(
            f"engine_env.MOE_REQUANTIZE_WEIGHT_DTYPE: one of {', '.join(_EXPERT_FORMATS)} (got {name!r})"
        )
    block = environment.get("MOE_REQUANTIZE_BLOCK_SIZE")
    if block is not None and (not block.isdecimal() or int(block) < 1):
        raise ConfigError(
            f"engine_env.MOE_REQUANTIZE_BLOCK_SIZE: a whole number of at least 1 (got {block!r})"
        )
    return _EXPERT_FORMATS[name] + (f"-g{block}" if block else "")


def _speculative(engine: Mapping[str, Any]) -> Mapping[str, Any]:
    """`speculative_config` with what the three `spec_` options say beside it, as vLLM merges them; empty where it is unset.

    Raises ConfigError for what vLLM 0.26 and tpu-inference 0.26 refuse.
    """
    given = engine.get("speculative_config")
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"engine.speculative_config: a mapping (got {given!r})")
    options = {str(key).replace("-", "_"): value for key, value in (given or {}).items()}
    for option, key in _SPECULATIVE.items():
        if (value := engine.get(option)) is None:
            continue
        if key in options:
            raise ConfigError(f"engine.{option}: speculative_config has {key} already; set one of them")
        options[key] = value
    if not options:
        return {}
    if options.get("method") is None and options.get("model") in ("ngram", "[ngram]"):
        options |= {"method": "ngram", "model": None}
    if options.get("method") is None:
        raise ConfigError(
            f"engine.speculative_config: without a method vLLM drafts by a whole model, for which tpu-inference has no code; set "
            f"method to one of {', '.join(DRAFTING)}"
        )
    tokens = options.get("num_speculative_tokens")
    if (tokens is None and options["method"] == "ngram") or (
        tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1)
    ):
        raise ConfigError(
            f"engine.speculative_config.num_speculative_tokens: a whole number of at least 1 (got {tokens!r})"
        )
    least, most = options.get("prompt_lookup_min"), options.get("prompt_lookup_max")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        raise ConfigError(
            f"engine.speculative_config: prompt_lookup_min, {least}, is more than prompt_lookup_max, {most}; lower it"
        )
    return options


def _draft(speculative: Mapping[str, Any], hub: Hub) -> tuple[ModelShape | None, bool]:
    """The draft model, and whether tpu-inference has it in JAX."""
    if not speculative.get("model"):  # n-grams and a checkpoint's own layers need no draft model
        return None, True
    try:
        return draft_shape_of(str(speculative["model"]), str(speculative["method"]), hub)
    except PlanError as error:
        raise PlanError(f"engine.speculative_config.model: {error.message}") from None


def _draft_layers(speculative: Mapping[str, Any], shape: ModelShape) -> int:
    """The checkpoint's layers that draft tokens; raises ConfigError for a way to draft that needs what is not there."""
    method, model = speculative.get("method"), speculative.get("model")
    if method is None:
        return 0
    name = "mtp" if str(method).endswith("mtp") else method
    if name not in DRAFTING:
        raise ConfigError(
            f"engine.speculative_config.method: tpu-inference drafts by {', '.join(DRAFTING)} (got {method!r})"
        )
    if name == "ngram" or model:
        return 0
    if name != "mtp":
        raise ConfigError(
            f"engine.speculative_config: {name} needs a draft model; name it as model beside method"
        )
    if not shape.drafts:
        raise ConfigError(
            f"engine.speculative_config.method: {method} needs a checkpoint with layers for multi-token prediction, this "
            f"{shape.architecture} has none; use ngram, or eagle3 with a draft model"
        )
    return shape.drafts


def _nested(engine: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """A mapping inside `additional_config`, tpu-inference's own options; empty where unset."""
    value: Any = engine.get("additional_config") or {}
    for key in path:
        if not isinstance(value, Mapping):
            raise ConfigError(f"engine.additional_config: a mapping (got {value!r})")
        value = value.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"engine.additional_config.{'.'.join(path)}: a mapping (got {value!r})")
    return value
