"""What `engine:` may set: vLLM's own options, less those that the slice or another key decides.

Names and values are those of `vllm.engine.arg_utils.AsyncEngineArgs` in vLLM 0.26, literal because importing vLLM takes
15 s; a test holds the two equal.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from serving.errors import ConfigError
from serving.planning import option_values

_FROM_PLAN = "the executor and the processes follow from the slice's hosts; remove it"
_NO_FLAG = "vLLM 0.26 has no flag for it; remove it"
_NO_DATA_PARALLEL = "a slice is a replica; set replicas for more of them"

# Name -> the key that sets it, or why none does.
DERIVED = {
    "_api_process_count": _FROM_PLAN,
    "_api_process_rank": _FROM_PLAN,
    "data_parallel_address": _NO_DATA_PARALLEL,
    "data_parallel_backend": _NO_DATA_PARALLEL,
    "data_parallel_external_lb": _NO_DATA_PARALLEL,
    "data_parallel_hybrid_lb": _NO_DATA_PARALLEL,
    "data_parallel_multi_port_external_lb": _NO_DATA_PARALLEL,
    "data_parallel_rank": _NO_DATA_PARALLEL,
    "data_parallel_rpc_port": _NO_DATA_PARALLEL,
    "data_parallel_size": "set parallel.data",
    "data_parallel_size_local": _NO_DATA_PARALLEL,
    "data_parallel_start_rank": _NO_DATA_PARALLEL,
    "decode_context_parallel_size": "set parallel.decode_context",
    "device_ids": _FROM_PLAN,
    "distributed_executor_backend": _FROM_PLAN,
    "enable_mm_processor_stats": _NO_FLAG,
    "mamba_config": _NO_FLAG,
    "master_addr": _FROM_PLAN,
    "master_port": _FROM_PLAN,
    "model": "set model beside engine",
    "model_weights": "set model beside engine",
    "nnodes": "set slice.topology and slice.hosts",
    "node_rank": _FROM_PLAN,
    "numa_bind": _FROM_PLAN,
    "numa_bind_cpus": _FROM_PLAN,
    "numa_bind_nodes": _FROM_PLAN,
    "pipeline_parallel_size": "set parallel.pipeline",
    "prefill_context_parallel_size": "set parallel.prefill_context",
    "served_model_name": "set name",
    "shutdown_timeout": "set drain_s",
    "tensor_parallel_size": "set parallel.tensor",
    "tokens_only": _NO_FLAG,
    "worker_cls": _FROM_PLAN,
    "worker_extension_cls": _FROM_PLAN,
}

# Options of vLLM's HTTP server: the replica owns its listener, the router the API surface.
_SERVER = {
    "api_server_count": "one HTTP server a slice; remove it",
    "enable_auto_tool_choice": "set tool_call_parser",
    "host": "the replica chooses where it listens; remove it",
    "port": "the replica chooses where it listens; remove it",
    "root_path": "set route_prefix of the application",
    "uds": "the replica chooses where it listens; remove it",
}

# Keys of tpu-inference's own `additional_config.sharding.sharding_strategy` -> the key that sets it, or why none does.
_STRATEGY = {
    "attn_dp_size": "set parallel.attention_data",
    "data_parallelism": "set parallel.data",
    "decode_context_parallelism": "set parallel.decode_context",
    "device_indexes": "the engine takes all devices of its slice; remove it",
    "enable_dp_attention": "set parallel.attention_data: auto",
    "expert_parallelism": "set parallel.expert",
    "prefill_context_parallelism": "set parallel.prefill_context",
    "sequence_parallelism": "tpu-inference 0.26 has no axis for it in its meshes; remove it",
    "tensor_parallelism": "set parallel.tensor",
}

# The options of vLLM's server that a YAML may set: its adapters are part of the model, and so is the form of its tool calls.
ADAPTERS = "lora_modules"
TOOL_PARSER = "tool_call_parser"
OF_SERVER = frozenset({ADAPTERS, TOOL_PARSER, "enable_prompt_tokens_details"})

# Options of vLLM's that are off by default and have no flag that turns them off.
ONLY_ON = frozenset({"aggregate_engine_logging", "disable_log_stats"})

# vLLM 0.26's own values of the options that take one of a list (its argument parser's `choices`); a test holds the two equal.
CHOICES: dict[str, tuple[Any, ...]] = {
    "all2all_backend": (
        "allgather_reducescatter",
        "deepep_high_throughput",
        "deepep_low_latency",
        "deepep_v2",
        "flashinfer_all2allv",
        "flashinfer_nvlink_one_sided",
        "flashinfer_nvlink_two_sided",
        "mori_high_throughput",
        "mori_low_latency",
        "naive",
        "nixl_ep",
        "pplx",
    ),
    "convert": ("auto", "classify", "embed", "none"),
    "dcp_comm_backend": ("a2a", "ag_rs"),
    "dtype": ("auto", "bfloat16", "float", "float16", "float32", "half"),
    "expert_placement_strategy": ("linear", "round_robin"),
    "gdn_prefill_backend": ("cutedsl", "flashinfer", "triton"),
    "jit_monitor_mode": ("error", "warn"),
    "kv_cache_dtype": (
        "auto",
        "bfloat16",
        "float16",
        "fp8",
        "fp8_ds_mla",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp8_inc",
        "fp8_per_token_head",
        "int4_per_token_head",
        "int8_per_token_head",
        "nvfp4",
        "turboquant_3bit_nc",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "turboquant_k8v4",
    ),
    "kv_offloading_backend": ("lmcache", "native"),
    "linear_backend": (
        "aiter",
        "auto",
        "conch",
        "cutlass",
        "deep_gemm",
        "emulation",
        "exllama",
        "fbgemm",
        "flashinfer_b12x",
        "flashinfer_cudnn",
        "flashinfer_cutedsl",
        "flashinfer_cutlass",
        "flashinfer_trtllm",
        "humming",
        "machete",
        "marlin",
        "torch",
        "triton",
        "xpu",
        "xpu_woq",
    ),
    "logprobs_mode": ("processed_logits", "processed_logprobs", "raw_logits", "raw_logprobs"),
    "lora_dtype": ("auto", "bfloat16", "float16"),
    "mamba_cache_dtype": ("auto", "bfloat16", "float16", "float32"),
    "mamba_cache_mode": ("align", "all", "none"),
    "mamba_ssm_cache_dtype": ("auto", "bfloat16", "float16", "float32"),
    "max_lora_rank": (1, 8, 16, 32, 64, 128, 256, 320, 512),
    "mm_encoder_attn_dtype": ("fp8",),
    "mm_encoder_tp_mode": ("data", "weights"),
    "mm_processor_cache_type": ("lru", "shm"),
    "mm_tensor_ipc": ("direct_rpc", "torch_shm"),
    "moe_backend": (
        "aiter",
        "auto",
        "cutlass",
        "deep_gemm",
        "deep_gemm_mega_moe",
        "emulation",
        "flashinfer_b12x",
        "flashinfer_cutedsl",
        "flashinfer_cutlass",
        "flashinfer_trtllm",
        "flydsl",
        "hpc",
        "humming",
        "marlin",
        "triton",
        "triton_unfused",
    ),
    "offload_backend": ("auto", "prefetch", "uva"),
    "performance_mode": ("balanced", "interactivity", "throughput"),
    "prefix_caching_hash_algo": ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
    "runner": ("auto", "draft", "generate", "pooling"),
    "safetensors_load_strategy": ("eager", "lazy", "prefetch", "torchao"),
    "scheduling_policy": ("fcfs", "priority"),
    "spec_method": (
        "bailing_hybrid_mtp",
        "custom_class",
        "deepseek_mtp",
        "dflash",
        "draft_model",
        "dspark",
        "eagle",
        "eagle3",
        "ernie_mtp",
        "exaone4_5_mtp",
        "exaone_moe_mtp",
        "extract_hidden_states",
        "gemma4_mtp",
        "glm4_moe_lite_mtp",
        "glm4_moe_mtp",
        "glm_ocr_mtp",
        "hy_v3_mtp",
        "inkling_mtp",
        "longcat_flash_mtp",
        "medusa",
        "mimo_mtp",
        "mimo_v2_mtp",
        "minimax_m3_mtp",
        "mlp_speculator",
        "mtp",
        "nemotron_h_mtp",
        "ngram",
        "ngram_gpu",
        "pangu_ultra_moe_mtp",
        "qwen3_5_mtp",
        "qwen3_next_mtp",
        "step3p5_mtp",
        "suffix",
    ),
}

# The parsers that vLLM 0.26 registers, by the option that names one (vllm.tool_parsers, vllm.reasoning); a test holds the two
# equal.
PARSERS: dict[str, tuple[str, ...]] = {
    TOOL_PARSER: (
        "apertus",
        "cohere_command3",
        "cohere_command4",
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_v32",
        "deepseek_v4",
        "ernie45",
        "functiongemma",
        "gemma4",
        "gigachat3",
        "glm45",
        "glm47",
        "granite",
        "granite-20b-fc",
        "granite4",
        "hermes",
        "hunyuan_a13b",
        "hy_v3",
        "inkling",
        "internlm",
        "jamba",
        "kimi_k2",
        "lfm2",
        "llama3_json",
        "llama4_json",
        "llama4_pythonic",
        "longcat",
        "mimo",
        "minicpm5",
        "minimax_m2",
        "minimax_m3",
        "mistral",
        "olmo3",
        "openai",
        "phi4_mini_json",
        "poolside_v1",
        "pythonic",
        "qwen3_coder",
        "qwen3_xml",
        "seed_oss",
        "step3",
        "step3p5",
        "xlam",
    ),
    "reasoning_parser": (
        "cohere_command3",
        "cohere_command4",
        "deepseek_r1",
        "deepseek_v3",
        "deepseek_v4",
        "ernie45",
        "gemma4",
        "glm45",
        "glm47",
        "granite",
        "holo2",
        "hunyuan_a13b",
        "hy_v3",
        "inkling",
        "kimi_k2",
        "mimo",
        "minimax_m2",
        "minimax_m2_append_think",
        "minimax_m3",
        "mistral",
        "nemotron_v3",
        "olmo3",
        "openai_gptoss",
        "poolside_v1",
        "qwen3",
        "seed_oss",
        "step3",
        "step3p5",
    ),
}
# A file of the user's own that registers more of them.
_PLUGINS = {"reasoning_parser": "reasoning_parser_plugin"}

# Options that take values of several kinds, which nothing below or in option_values tells.
_OF_SEVERAL_KINDS = frozenset(
    {
        "collect_detailed_traces",
        "hf_token",
        "mamba_backend",
        "mm_encoder_attn_backend",
        "pt_load_map_location",
        "scheduler_cls",
    }
)
SETTABLE = frozenset(option_values.KINDS | CHOICES.keys() | PARSERS.keys() | _OF_SEVERAL_KINDS) - OF_SERVER

# Of vLLM's values, those that tpu-inference 0.26 runs (utils.to_jax_dtype, tpu_runner.py).
_ON_TPU: dict[str, tuple[str, ...]] = {
    "dcp_comm_backend": ("ag_rs",),
    "kv_cache_dtype": ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "offload_backend": ("auto", "uva"),
    "runner": ("auto", "generate", "pooling"),
}


def check(engine: Mapping[str, Any]) -> None:
    """Refuse options that are derived or that vLLM does not know, and values it does not take, all in one message."""
    problems = [
        problem
        for name, value in sorted(engine.items())
        if (
            problem := _value_problem(name, value, engine) if name in SETTABLE | OF_SERVER else _problem(name)
        )
    ]
    problems += [
        f"engine.{path}: keys are text (YAML reads on, off, yes and no as true and false; quote them)"
        for name, value in sorted(engine.items())
        for path in _keys_that_are_no_text(value, name)
    ]
    problems += [
        problem for name, value in sorted(engine.items()) for problem in option_values.problems(name, value)
    ]
    problems += _strategy_problems(engine.get("additional_config"))
    if problems:
        raise ConfigError("; ".join(problems))


def _keys_that_are_no_text(value: Any, path: str) -> list[str]:
    if isinstance(value, list):
        return [key_path for entry in value for key_path in _keys_that_are_no_text(entry, path)]
    if not isinstance(value, Mapping):
        return []
    wrong = [f"{path}.{key!r}" for key in value if not isinstance(key, str)]
    return wrong + [
        key_path
        for key, entry in value.items()
        for key_path in _keys_that_are_no_text(entry, f"{path}.{key}")
    ]


def _strategy_problems(additional: Any) -> list[str]:
    sharding = additional.get("sharding") if isinstance(additional, Mapping) else None
    if not isinstance(sharding, Mapping | None):
        return [f"engine.additional_config.sharding: a mapping (got {sharding!r})"]
    strategy = (sharding or {}).get("sharding_strategy")
    if strategy is None:
        return []
    where = "engine.additional_config.sharding.sharding_strategy"
    if not isinstance(strategy, Mapping):
        return [f"{where}: not settable; the sizes are those of parallel"]
    return [
        f"{where}.{name}: not settable, {_STRATEGY.get(name, 'tpu-inference 0.26 does not know it; remove it')}"
        for name in strategy
    ]


def _value_problem(name: str, value: Any, engine: Mapping[str, Any]) -> str | None:
    every = PARSERS.get(name) or CHOICES.get(name) or option_values.REGISTERED.get(name)
    if value is None or every is None or engine.get(_PLUGINS.get(name, "")):
        return None
    choices = _ON_TPU.get(name, every)
    if isinstance(value, str | int) and value in choices:
        return None
    known = ", ".join(map(str, choices))
    if isinstance(value, str | int) and value in every:
        return f"engine.{name}: {value!r} is not for TPUs; tpu-inference takes {known}"
    near = difflib.get_close_matches(str(value), map(str, choices), n=1)
    return f"engine.{name}: vLLM takes {known} (got {value!r}" + (
        f"; did you mean {near[0]!r}?)" if near else ")"
    )


def _problem(name: str) -> str:
    plain = name.replace("-", "_").removeprefix("__")
    if reason := DERIVED.get(plain) or _SERVER.get(plain):
        return f"engine.{name}: not settable, {reason}"
    if plain in SETTABLE | OF_SERVER:
        return f"engine.{name}: write {plain}"
    if near := difflib.get_close_matches(plain, SETTABLE | OF_SERVER | DERIVED.keys(), n=1):
        hint = f", which is not settable: {DERIVED[near[0]]}" if near[0] in DERIVED else ""
        return f"engine.{name}: not an option of vLLM; did you mean {near[0]!r}{hint}?"
    return f"engine.{name}: not an option of vLLM"
