"""The production engine's options and environment that a simulated host changes."""

from pathlib import Path
from typing import Any

from serving.engine.vllm import Overrides
from serving.planning import Plan
from serving.planning.cache import page_tokens
from serving.simulation import stand_in

# XLA's CPU backend pays for every padded token and every block of KV, so both stay small.
_BATCHED_TOKENS = 256
_SEQUENCES = 32
_KV_TOKENS = 16384


# Options of libtpu's compiler, which ends XLA's for CPUs, Pallas kernels that have no stand-in there, and the choice of vLLM's
# models, which need torchvision; the stand-in is a Llama, which tpu-inference has in JAX.
_FOR_TPUS = frozenset(
    {
        "LIBTPU_INIT_ARGS",
        "MODEL_IMPL_TYPE",
        "USE_BATCHED_RPA_KERNEL",
        "USE_BATCHED_RPA_SEQ_ON_LANE",
        "USE_MOE_EP_KERNEL",
        "USE_UNFUSED_MEGABLOCKS",
        "XLA_FLAGS",
    }
)


def overrides(plan: Plan, cache: Path) -> Overrides:
    """Overrides for a plan; `cache` keeps compiled programs and the stand-in model between runs."""
    return Overrides(_options(plan, cache), {"VLLM_XLA_CACHE_PATH": str(cache / "xla")}, _FOR_TPUS)


def _options(plan: Plan, cache: Path) -> dict[str, Any]:
    """The stand-in's weights where the YAML names a hub's model, fp32, and small sizes."""
    checkpoint = stand_in.checkpoint(plan, cache)
    engine = plan.engine
    stands_in = checkpoint != Path(plan.model.model)
    length = min(engine.get("max_model_len") or stand_in.MAX_MODEL_LEN, stand_in.MAX_MODEL_LEN)
    return {
        "model": str(checkpoint),
        # The stand-in can't load adapters of the real weights; it answers in their names.
        "served_model_name": [plan.model.name, *plan.adapters],
        "lora_modules": None,
        "enable_lora": False,
        "dtype": "float32",
        "quantization": None,
        "load_format": "auto",
        "max_model_len": length,
        "max_num_seqs": min(engine.get("max_num_seqs") or _SEQUENCES, _SEQUENCES),
        "max_num_batched_tokens": _BATCHED_TOKENS,
        # A seeded model that may write white space fills the whole answer with it.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "num_gpu_blocks_override": _KV_TOKENS // page_tokens(length, _SEQUENCES),
        **(_parsers(plan) if stands_in else {}),
    }


def _parsers(plan: Plan) -> dict[str, Any]:
    """Parsers look for tokens that only their family's tokenizer has. Hermes' needs none, and a stand-in never ends a thought."""
    return {
        "tool_call_parser": "hermes" if plan.engine.get("tool_call_parser") else None,
        "reasoning_parser": None,
    }
