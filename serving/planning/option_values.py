"""What each of vLLM's options takes: the kind of its value, the keys of a mapping, the names that are registered.

All literal, as importing vLLM takes 15 s; a test holds them to vLLM 0.26.
"""

import difflib
from collections.abc import Mapping
from typing import Any

SWITCHES = frozenset(
    {
        "aggregate_engine_logging",
        "allow_deprecated_quantization",
        "async_scheduling",
        "calculate_kv_scales",
        "cudagraph_metrics",
        "disable_cascade_attn",
        "disable_chunked_mm_input",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "disable_log_stats",
        "disable_nccl_for_dp_synchronization",
        "disable_sliding_window",
        "enable_bf16x3_router_gemm",
        "enable_chunked_prefill",
        "enable_cumem_allocator",
        "enable_dbo",
        "enable_elastic_ep",
        "enable_ep_weight_filter",
        "enable_eplb",
        "enable_expert_parallel",
        "enable_flashinfer_autotune",
        "enable_layerwise_nvtx_tracing",
        "enable_log_requests",
        "enable_logging_iteration_details",
        "enable_lora",
        "enable_mamba_cache_stochastic_rounding",
        "enable_mfu_metrics",
        "enable_mixed_moe_lora_format",
        "enable_mm_embeds",
        "enable_moe_shared_loras",
        "enable_prefix_caching",
        "enable_prompt_embeds",
        "enable_return_routed_experts",
        "enable_sleep_mode",
        "enable_tower_connector_lora",
        "enforce_eager",
        "fail_on_environ_validation",
        "fully_sharded_loras",
        "interleave_mm_strings",
        "jit_monitor_verbose",
        "kv_cache_metrics",
        "kv_sharing_fast_prefill",
        "language_model_only",
        "mm_encoder_only",
        "ray_workers_use_nsight",
        "scheduler_reserve_full_isl",
        "skip_mm_profiling",
        "skip_tokenizer_init",
        "specialize_active_lora",
        "trust_remote_code",
        "use_fp64_gumbel",
        "use_tqdm_on_load",
    }
)
WHOLE_NUMBERS = frozenset(
    {
        "block_size",
        "cp_kv_cache_interleave_size",
        "cpu_distributed_timeout_seconds",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "dcp_kv_cache_interleave_size",
        "distributed_timeout_seconds",
        "kv_cache_memory_bytes",
        "long_prefill_token_threshold",
        "mamba_block_size",
        "mamba_cache_philox_rounds",
        "max_cpu_loras",
        "max_cudagraph_capture_size",
        "max_logprobs",
        "max_long_partial_prefills",
        "max_loras",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_partial_prefills",
        "max_num_scheduled_tokens",
        "max_num_seqs",
        "max_parallel_loading_workers",
        "mm_shm_cache_max_object_size_mb",
        "num_gpu_blocks_override",
        "offload_group_size",
        "offload_num_in_group",
        "offload_prefetch_step",
        "prefill_schedule_interval",
        "prefix_match_unit",
        "renderer_num_workers",
        "safetensors_prefetch_block_size",
        "safetensors_prefetch_num_threads",
        "seed",
        "spec_tokens",
        "stream_interval",
        "ubatch_size",
    }
)
NUMBERS = frozenset(
    {
        "cpu_offload_gb",
        "gpu_memory_utilization",
        "kv_cache_metrics_sample",
        "kv_offloading_size",
        "mm_encoder_fp8_scale_save_margin",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_cache_gb",
        "video_pruning_rate",
        "watermark",
    }
)
TEXTS = frozenset(
    {
        "allowed_local_media_path",
        "code_revision",
        "config_format",
        "download_dir",
        "generation_config",
        "hf_config_path",
        "io_processor_plugin",
        "load_format",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_path",
        "model_impl",
        "otlp_traces_endpoint",
        "override_attention_dtype",
        "quantization",
        "reasoning_parser_plugin",
        "revision",
        "show_hidden_metrics_for_version",
        "spec_model",
        "tokenizer",
        "tokenizer_revision",
    }
)
LISTS = frozenset(
    {
        "allowed_media_domains",
        "cpu_offload_params",
        "cudagraph_capture_sizes",
        "ignore_patterns",
        "kv_cache_dtype_skip_layers",
        "logits_processors",
        "lora_target_modules",
        "offload_params",
    }
)
MAPPINGS = frozenset(
    {
        "additional_config",
        "attention_config",
        "compilation_config",
        "default_mm_loras",
        "diffusion_config",
        "ec_transfer_config",
        "eplb_config",
        "hf_overrides",
        "ir_op_priority",
        "kernel_config",
        "kv_events_config",
        "kv_transfer_config",
        "limit_mm_per_prompt",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "model_class_overrides",
        "model_loader_extra_config",
        "override_generation_config",
        "pooler_config",
        "profiler_config",
        "quantization_config",
        "reasoning_config",
        "speculative_config",
        "structured_outputs_config",
        "weight_transfer_config",
    }
)
# Keys of the mappings that vLLM makes a config of; it refuses any other.
KEYS: dict[str, tuple[str, ...]] = {
    "attention_config": (
        "backend",
        "backend_per_kind",
        "disable_flashinfer_q_quantization",
        "flash_attn_max_num_splits_for_cuda_graph",
        "flash_attn_version",
        "flex_attn_block_m",
        "flex_attn_block_n",
        "flex_attn_kv_block_size",
        "flex_attn_q_block_size",
        "indexer_kv_dtype",
        "mla_prefill_backend",
        "sparse_mla_force_mqa",
        "tq_max_kv_splits_for_cuda_graph",
        "use_fp4_indexer_cache",
        "use_non_causal",
        "use_prefill_decode_attention",
        "use_prefill_query_quantization",
        "use_trtllm_attention",
    ),
    "compilation_config": (
        "backend",
        "cache_dir",
        "compile_cache_save_format",
        "compile_mm_encoder",
        "compile_ranges_endpoints",
        "compile_sizes",
        "cudagraph_capture_sizes",
        "cudagraph_copy_inputs",
        "cudagraph_mm_encoder",
        "cudagraph_mode",
        "cudagraph_num_of_warmups",
        "cudagraph_specialize_lora",
        "custom_ops",
        "debug_dump_path",
        "dynamic_shapes_config",
        "encoder_cudagraph_max_frames_per_batch",
        "encoder_cudagraph_max_vision_items_per_batch",
        "encoder_cudagraph_token_budgets",
        "fast_moe_cold_start",
        "inductor_compile_config",
        "inductor_passes",
        "ir_enable_torch_wrap",
        "max_cudagraph_capture_size",
        "mode",
        "pass_config",
        "splitting_ops",
        "use_inductor_graph_partition",
    ),
    "ec_transfer_config": (
        "ec_buffer_device",
        "ec_buffer_size",
        "ec_connector",
        "ec_connector_extra_config",
        "ec_connector_module_path",
        "ec_ip",
        "ec_parallel_size",
        "ec_port",
        "ec_rank",
        "ec_role",
        "engine_id",
    ),
    "eplb_config": (
        "communicator",
        "log_balancedness",
        "log_balancedness_interval",
        "num_redundant_experts",
        "policy",
        "step_interval",
        "use_async",
        "window_size",
    ),
    "ir_op_priority": (
        "fused_add_rms_norm",
        "rms_norm",
    ),
    "kernel_config": (
        "enable_bf16x3_router_gemm",
        "enable_cutedsl_warmup",
        "enable_flashinfer_autotune",
        "ir_op_priority",
        "linear_backend",
        "moe_backend",
    ),
    "kv_events_config": (
        "buffer_steps",
        "enable_kv_cache_events",
        "endpoint",
        "hwm",
        "max_queue_size",
        "publisher",
        "replay_endpoint",
        "topic",
    ),
    "kv_transfer_config": (
        "enable_permute_local_kv",
        "engine_id",
        "kv_buffer_device",
        "kv_buffer_size",
        "kv_connector",
        "kv_connector_extra_config",
        "kv_connector_module_path",
        "kv_ip",
        "kv_load_failure_policy",
        "kv_parallel_size",
        "kv_port",
        "kv_rank",
        "kv_role",
    ),
    "pooler_config": (
        "dimensions",
        "enable_chunked_processing",
        "logit_mean",
        "logit_sigma",
        "max_embed_len",
        "pooling_type",
        "returned_token_ids",
        "seq_pooling_type",
        "step_tag_id",
        "task",
        "tok_pooling_type",
        "use_activation",
    ),
    "profiler_config": (
        "active_iterations",
        "capture_torch_profiler",
        "delay_iterations",
        "detailed_trace_annotation",
        "ignore_frontend",
        "max_iterations",
        "profiler",
        "torch_profiler_dir",
        "torch_profiler_dump_cuda_time_total",
        "torch_profiler_record_shapes",
        "torch_profiler_use_gzip",
        "torch_profiler_with_flops",
        "torch_profiler_with_memory",
        "torch_profiler_with_stack",
        "wait_iterations",
        "warmup_iterations",
    ),
    "reasoning_config": (
        "reasoning_end_str",
        "reasoning_parser",
        "reasoning_start_str",
    ),
    "speculative_config": (
        "attention_backend",
        "code_revision",
        "disable_padded_drafter_batch",
        "draft_load_config",
        "draft_model_config",
        "draft_parallel_config",
        "draft_sample_method",
        "draft_tensor_parallel_size",
        "enforce_eager",
        "kv_cache_dtype",
        "max_model_len",
        "method",
        "model",
        "moe_backend",
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
        "parallel_drafting",
        "prompt_lookup_max",
        "prompt_lookup_min",
        "quantization",
        "rejection_sample_method",
        "revision",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_min_token_prob",
        "synthetic_acceptance_length",
        "synthetic_acceptance_rates",
        "target_model_config",
        "target_parallel_config",
        "tensor_parallel_size",
        "use_heterogeneous_vocab",
        "use_local_argmax_reduction",
    ),
    "structured_outputs_config": (
        "backend",
        "disable_additional_properties",
        "disable_any_whitespace",
        "enable_in_reasoning",
        "reasoning_parser",
        "reasoning_parser_plugin",
    ),
    "weight_transfer_config": ("backend",),
}
# Names that vLLM or tpu-inference 0.26 registers, where a flag takes any text.
REGISTERED: dict[str, tuple[Any, ...]] = {
    "attention_backend": ("FLASH_ATTN", "FLASH_ATTN_MLA"),  # what TpuPlatform.get_attn_backend_cls gives
    "config_format": ("auto", "hf", "mistral"),
    "load_format": (
        "auto",
        "bitsandbytes",
        "dummy",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "jax_dummy",
        "mistral",
        "modelexpress",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
        "tensorizer",
        "tpu_streaming_loader",
    ),
    "model_impl": ("auto", "vllm"),  # "transformers" and "terratorch" are not seen by tpu-inference
    "optimization_level": (0, 1, 2, 3),
    "tokenizer_mode": (
        "auto",
        "deepseek_v32",
        "deepseek_v4",
        "hf",
        "inkling",
        "kimi_audio",
        "mistral",
        "slow",
    ),
}
# Every option whose kind of value, or whose names, stand above.
KINDS = SWITCHES | WHOLE_NUMBERS | NUMBERS | TEXTS | LISTS | MAPPINGS | REGISTERED.keys()

# What TpuPlatform.check_and_update_config lets in.
CONNECTORS = ("TPUConnector", "TPUConnectorHMA", "TPUOffloadConnector", "RaidenOffloadConnector")
_MICROBATCHES = "vLLM 0.26 splits steps for exchanges between GPUs alone (all2all_backend)"
# Options of GPUs, with what a TPU's engine makes of them.
_NOT_FOR_TPUS = {
    "enable_cumem_allocator": "vLLM 0.26 has it on CUDA and ROCm only",
    "enable_dbo": _MICROBATCHES,
    "enable_elastic_ep": "vLLM 0.26 has it with enable_eplb alone, which is for CUDA and ROCm",
    "enable_eplb": "vLLM 0.26 balances experts on CUDA and ROCm only",
    "enable_mamba_cache_stochastic_rounding": "vLLM 0.26 has it in kernels of GPUs alone",
    "enable_sleep_mode": "vLLM 0.26 has it on CUDA and ROCm only",
    "kv_cache_memory_bytes": "tpu-inference 0.26 does not read it; set gpu_memory_utilization or num_gpu_blocks_override",
    "kv_offloading_size": "vLLM's connector for it is not for TPUs; set kv_transfer_config with kv_connector: TPUOffloadConnector",
    "ray_workers_use_nsight": "it is NVIDIA's profiler",
    "ubatch_size": _MICROBATCHES,
}
# The least that vLLM takes, and for shares what they stay below.
BOUNDS: dict[str, tuple[int, int | None]] = {
    "block_size": (1, None),
    "cpu_offload_gb": (0, None),
    "dbo_decode_token_threshold": (0, None),
    "dbo_prefill_token_threshold": (0, None),
    "long_prefill_token_threshold": (0, None),
    "mamba_block_size": (1, None),
    "max_logprobs": (-1, None),
    "max_loras": (1, None),
    "max_num_scheduled_tokens": (0, None),
    "max_parallel_loading_workers": (1, None),
    "mm_ipc_gpu_memory_gb": (0, None),
    "mm_processor_cache_gb": (0, None),
    "mm_shm_cache_max_object_size_mb": (0, None),
    "offload_group_size": (0, None),
    "offload_num_in_group": (1, None),
    "offload_prefetch_step": (0, None),
    "prefill_schedule_interval": (1, None),
    "prefix_match_unit": (1, None),
    "safetensors_prefetch_block_size": (1, None),
    "safetensors_prefetch_num_threads": (1, None),
    "stream_interval": (1, None),
    "ubatch_size": (0, None),
    "video_pruning_rate": (0, 1),
    "watermark": (0, 1),
}
# Which YAML may read as numbers: commits and versions.
_VERSIONS = ("code_revision", "revision", "show_hidden_metrics_for_version", "tokenizer_revision")
_ONE = ("max_long_partial_prefills", "max_num_partial_prefills")


def problems(name: str, value: Any) -> list[str]:
    """What is wrong with an option's value, with its keys, or with it on a TPU."""
    if value is None:
        return []
    if wrong := _wrong(name, value):
        return [f"engine.{name}{wrong}"]
    if name not in KEYS:
        return []
    unknown = [_unknown(name, key) for key in value if str(key).replace("-", "_") not in KEYS[name]]
    connector = value.get("kv_connector") if name == "kv_transfer_config" else None
    if connector is not None and connector not in CONNECTORS:
        unknown.append(
            f"engine.{name}.kv_connector: tpu-inference takes {', '.join(CONNECTORS)} (got {connector!r})"
        )
    return unknown


def _wrong(name: str, value: Any) -> str | None:
    """What follows the option's name where its value is of the wrong kind, out of bounds, or not for TPUs."""
    if wanted := _wanted(name, value):
        return f": {wanted} (got {value!r})"
    if name in BOUNDS:
        least, below = BOUNDS[name]
        if not (least <= value and (below is None or value < below)):
            return f": at least {least}{'' if below is None else f' and below {below}'} (got {value!r})"
    if name == "limit_mm_per_prompt":
        counts = (key for key, count in value.items() if not _is_limit(count))
        return next(
            (f".{key}: a whole number of at least 0, or a mapping (got {value[key]!r})" for key in counts),
            None,
        )
    if name == "kv_cache_metrics_sample" and not 0 < value <= 1:
        return f": above 0 and at most 1 (got {value!r})"
    if (reason := _NOT_FOR_TPUS.get(name)) and value and (name, value) != ("ubatch_size", 1):
        return f": not for TPUs: {reason}"
    return f": vLLM 0.26 takes 1 alone (got {value!r})" if name in _ONE and value != 1 else None


def _is_limit(count: Any) -> bool:
    return isinstance(count, Mapping) or (
        isinstance(count, int) and not isinstance(count, bool) and count >= 0
    )


def _unknown(name: str, key: Any) -> str:
    near = difflib.get_close_matches(str(key), KEYS[name], n=1)
    return f"engine.{name}.{key}: vLLM 0.26 has no such key" + (f"; did you mean {near[0]}?" if near else "")


def _wanted(name: str, value: Any) -> str | None:
    """The kind of value that an option takes, where this is none."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    kinds = (
        (SWITCHES, isinstance(value, bool), "true or false"),
        (WHOLE_NUMBERS, whole or (name, value) == ("max_model_len", "auto"), "a whole number"),
        (NUMBERS, whole or isinstance(value, float), "a number"),
        (
            TEXTS,
            isinstance(value, str) or (name in _VERSIONS and (whole or isinstance(value, float))),
            "a text",
        ),
        (LISTS, isinstance(value, str | list), "a list"),
        (MAPPINGS, isinstance(value, Mapping), "a mapping"),
    )
    return next((wanted for names, right, wanted in kinds if name in names and not right), None)
