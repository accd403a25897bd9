"""What `engine_env:` may set, and `gke.env` may not: variables that the engine reads, less those that another key decides.

The names are those of tpu-inference 0.26 (tpu_inference/envs.py), literal because importing it takes seconds; a test holds
the two equal. vLLM's stand in vllm_variables; those of JAX, XLA and libtpu are known by prefix.
"""

import difflib
import re
from collections.abc import Mapping

from serving.errors import ConfigError
from serving.planning.vllm_variables import VARIABLES

_BY_PLACE = "it follows from the slice and its hosts; remove it"
_WITH_THE_MODEL = "set it in the model's engine_env, with which the plan counts"
_BY_PARALLEL = "it follows from parallel; remove it"

# Name -> the key that sets it, or why none does.
DERIVED = {
    "DRAFT_MODEL_IMPL_TYPE": "it follows from the draft model; remove it",
    "JAX_PLATFORMS": _BY_PLACE,
    "LORA_MODULE_PATH": "set engine.lora_modules",
    "MODEL_IMPL_TYPE": "set engine.model_impl",
    "NEW_MODEL_DESIGN": _BY_PARALLEL,
    "NUM_SLICES": _BY_PLACE,
    "PREFILL_SLICES": _BY_PLACE,
    "DECODE_SLICES": _BY_PLACE,
    "RAY_USAGE_STATS_ENABLED": "set it in the environment of Ray",
    "TPU_ACCELERATOR_TYPE": _BY_PLACE,
    "TPU_MULTIHOST_BACKEND": _BY_PLACE,
    "TPU_MULTIPROCESS_DP": _BY_PARALLEL,
    "TPU_NAME": _BY_PLACE,
    "TPU_WORKER_ID": _BY_PLACE,
    "USE_2D_TP": "its two axes for heads are not planned; remove it",
    "VLLM_ENGINE_READY_TIMEOUT_S": "a start has no limit; see start_s",
    "VLLM_HOST_IP": _BY_PLACE,
    "VLLM_RAY_BUNDLE_INDICES": _BY_PLACE,
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": _BY_PLACE,
    "VLLM_WORKER_MULTIPROC_METHOD": "a forked engine would outlive its replica; remove it",
}

# What else tpu-inference 0.26 reads.
SETTABLE = frozenset(
    {
        "AGGREGATED_STATS_DIR",
        "ATTN_BUCKETIZED_NUM_REQS",
        "ATTN_CUSTOM_NUM_REQS_BUCKETS",
        "DISABLE_MLA_Q_ACTIVATION_QUANTIZATION",
        "DISABLE_WEIGHT_REQUANTIZATION",
        "DP_SCHED_BATCH_PREFILL",
        "DP_SCHED_BATCH_PREFILL_FLUSH_TIMEOUT_MS",
        "ENABLE_QUANTIZED_MATMUL_KERNEL",
        "ENABLE_RS_KERNEL",
        "FORCE_MOE_RANDOM_ROUTING",
        "JAX_PROFILER_SERVER_PORT",
        "JITTED_MM_MODULE_KEYS",
        "LAYOUT_Q_PROJ_AS_NDH",
        "MIN_TOKEN_BUCKET",
        "MLA_KV_PACKING_SIZE",
        "MLA_TRANSPOSE_KV_CACHE",
        "MLA_XPOSE_N_TILE_SIZE",
        "MOE_ALL_GATHER_ACTIVATION_DTYPE",
        "MOE_APPROX_TOPK",
        "MOE_APPROX_TOPK_RECALL_TARGET",
        "MOE_REQUANTIZE_BLOCK_SIZE",
        "MOE_REQUANTIZE_CLIP_PERCENTILE",
        "MOE_REQUANTIZE_WEIGHT_DTYPE",
        "MOE_ROUTE_PADDING_TO_EXPERT0",
        "NUM_PRECOMPILE_WORKERS",
        "ONEHOT_MOE_PERMUTE_THRESHOLD",
        "PHASED_PROFILING_DIR",
        "PROFILE_SINGLE_DEVICE",
        "PYTHON_TRACER_LEVEL",
        "REGISTER_MM_MODULE_CUSTOM_PYTREE_CLASSES",
        "REQUANTIZE_BLOCK_SIZE",
        "REQUANTIZE_WEIGHT_DTYPE",
        "RPA_V3_DECODE_BLOCK_SIZES",
        "RPA_V3_MIXED_BLOCK_SIZES",
        "RPA_V3_PREFILL_BLOCK_SIZES",
        "SC_ALLREDUCE_ALLGATHER_OFFLOAD_MIN_BYTES",
        "SKIP_JAX_PRECOMPILE",
        "SLICE_ROPE_CACHE",
        "TPU_MESH_SORT_BY_COORDS",
        "TPU_OFFLOAD_BATCHED_SAVE",
        "TPU_OFFLOAD_BLOCK_SIZE_BUCKETS",
        "TPU_OFFLOAD_DECODE_SAVE",
        "TPU_OFFLOAD_METRICS_LOG_INTERVAL",
        "TPU_OFFLOAD_NUM_CPU_CHUNKS",
        "TPU_OFFLOAD_NUM_STAGING_BLOCKS",
        "TPU_OFFLOAD_SAVE_THREADS",
        "TPU_OFFLOAD_SKIP_JAX_PRECOMPILE",
        "TPU_OFFLOAD_USE_UNPINNED_HOST",
        "USE_BATCHED_RPA_KERNEL",
        "USE_BATCHED_RPA_SEQ_ON_LANE",
        "USE_DENSE_MOE",
        "USE_JAX_PROFILER_SERVER",
        "USE_MOE_EP_KERNEL",
        "USE_UNFUSED_MEGABLOCKS",
        "VLLM_MOE_CHUNK_SIZE",
        "VLLM_TPU_BUCKET_PADDING_GAP",
        "VLLM_TPU_PATCH_MM_EMBEDDINGS",
        "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE",
        "VLLM_XLA_CHECK_RECOMPILATION",
    }
)
# Pods may set these all the same: of Ray itself, and of the host's CPUs.
_OF_PODS = frozenset({"NUM_PRECOMPILE_WORKERS", "RAY_USAGE_STATS_ENABLED"})
_PREFIXES = ("JAX_", "LIBTPU_", "XLA_")
_SECRET = re.compile(r"TOKEN$|SECRET|PASSWORD|API_KEY|CREDENTIAL")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check(variables: Mapping[str, str]) -> None:
    """Refuse variables that are derived, secret or read by nobody, all in one message; raises ConfigError."""
    problems = [problem for name in sorted(variables) if (problem := _problem(name))]
    if problems:
        raise ConfigError("; ".join(f"engine_env.{problem}" for problem in problems))


def instead_of_pods(name: str) -> str | None:
    """What sets a variable of tpu-inference's in place of the pods' environment, which no plan sees; None where pods may."""
    if name in _OF_PODS:
        return None
    return DERIVED.get(name, _WITH_THE_MODEL if name in SETTABLE else None)


def _problem(name: str) -> str | None:
    if not _NAME.fullmatch(name):
        return f"{name}: this is no name of an environment variable"
    if reason := DERIVED.get(name):
        return f"{name}: not settable, {reason}"
    if _SECRET.search(name):
        return f"{name}: a secret does not belong into the YAML; put it into the environment of the hosts (gke.token_secret)"
    if name in SETTABLE or name in VARIABLES or name.startswith(_PREFIXES):
        return None
    near = difflib.get_close_matches(name, SETTABLE | VARIABLES | DERIVED.keys(), n=1, cutoff=0.75)
    return f"{name}: neither tpu-inference 0.26 nor vLLM 0.26 reads it" + (
        f"; did you mean {near[0]}?"
        if near
        else "; for other libraries set gke.env, or the hosts' own environment"
    )
