"""Model architectures: which a plan can count, with the values that their config.json leaves out, and which no TPU serves.

A config.json holds what differs from the defaults of its class in transformers. The defaults are literal because importing
transformers takes seconds; tests hold them to the installed transformers, and the names to vLLM 0.26 and tpu-inference 0.26.
"""

import difflib
from typing import Any

from serving.errors import PlanError

_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_COHERE = {"vocab_size": 256000, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_RW = {"multi_query": True, "max_position_embeddings": 2048, "tie_word_embeddings": True}
_QWEN3_5 = {"full_attention_interval": 4, "attn_output_gate": True, "head_dim": 256}

# Architectures this reader was checked on, with the keys their config.json may leave to transformers' defaults.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Ministral3ForCausalLM": {},
    "MixtralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen2_5_VLForConditionalGeneration": {},
    "Qwen3ForCausalLM": {},
    "Qwen3VLForConditionalGeneration": {"head_dim": 128},
    "Qwen3MoeForCausalLM": {},
    "Qwen3VLMoeForConditionalGeneration": {"head_dim": 128},
    "Qwen3NextForCausalLM": _QWEN3_5 | {"mtp_num_hidden_layers": 1},
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForCausalLM": {"tie_word_embeddings": True},
    "Gemma4ForConditionalGeneration": {"tie_word_embeddings": True},
    "Gemma4UnifiedForConditionalGeneration": {"tie_word_embeddings": True},
    "GptOssForCausalLM": {},
    "DeepseekV3ForCausalLM": {},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "KimiK25ForConditionalGeneration": {},
    "Llama4ForConditionalGeneration": {"no_rope_layer_interval": 4},
    "Mistral3ForConditionalGeneration": {},
    "Glm4ForCausalLM": {},
    "Glm4MoeForCausalLM": {},
    "MiniMaxM2ForCausalLM": {},
    "Phi3ForCausalLM": {},
    "SeedOssForCausalLM": {"head_dim": 128},
    "GraniteForCausalLM": {},
    "Olmo3ForCausalLM": {},
    "Qwen2MoeForCausalLM": {},
    "OlmoeForCausalLM": {},
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": _COHERE | {"sliding_window_pattern": 4, "head_dim": 128},
    "BailingMoeForCausalLM": {},
    "BailingMoeV2ForCausalLM": {},
    "CwmForCausalLM": {},
    "DeepseekForCausalLM": {},
    "DeepseekV2ForCausalLM": {},
    "Ernie4_5ForCausalLM": {"tie_word_embeddings": True},
    "Ernie4_5_MoeForCausalLM": {"tie_word_embeddings": True},
    "Exaone4ForCausalLM": {},
    "GemmaForCausalLM": {"tie_word_embeddings": True},
    "GlmForCausalLM": {},
    "GraniteMoeForCausalLM": {},
    "HunYuanDenseV1ForCausalLM": {},
    "InternLM3ForCausalLM": {},
    "Qwen2VLForConditionalGeneration": {},
    "StableLmForCausalLM": {},
    "ApertusForCausalLM": {},
    "ArceeForCausalLM": {},
    "ExaoneForCausalLM": {},
    "GraniteMoeSharedForCausalLM": {},
    "InternLM2ForCausalLM": {},
    "MiMoForCausalLM": {},
    "NemotronForCausalLM": {},
    "PhiForCausalLM": {},
    "FalconForCausalLM": _RW,
    "GPT2LMHeadModel": {"tie_word_embeddings": True},
    "GPTJForCausalLM": {},
    "GPTNeoXForCausalLM": {},
    "Glm4vForConditionalGeneration": {},
    "Glm4vMoeForConditionalGeneration": {},
    "HunYuanMoEV1ForCausalLM": {},
    "HyperCLOVAXForCausalLM": {},
    "InternVLChatModel": {},
    "InternVLForConditionalGeneration": {},
    "IQuestCoderForCausalLM": {},
    "MiniCPMForCausalLM": {},
    "OPTForCausalLM": {"tie_word_embeddings": True},
    "OrionForCausalLM": {},
    "SolarForCausalLM": {},
    "AfmoeForCausalLM": {"attn_output_gate": True},
    "AXK1ForCausalLM": {},
    "ChatGLMForConditionalGeneration": {},
    "ChatGLMModel": {},
    "ExaoneMoEForCausalLM": {},
    "Fairseq2LlamaForCausalLM": {},
    "FlexOlmoForCausalLM": {},
    "GritLM": {},
    "HYV3ForCausalLM": {},
    "Jais2ForCausalLM": {},
    "LLaMAForCausalLM": {},
    "MellumForCausalLM": {},
    "PanguEmbeddedForCausalLM": {},
    "Param2MoEForCausalLM": {},
    "Rnj1ForCausalLM": {"tie_word_embeddings": True},
    "RWForCausalLM": _RW,
    "SarvamMLAForCausalLM": {},
    "SarvamMoEForCausalLM": {},
    "StableLMEpochForCausalLM": {},
    "TeleChat2ForCausalLM": {},
    "TeleChat3ForCausalLM": {},
    "TeleFLMForCausalLM": {},
    "DbrxForCausalLM": {},
    "DeciLMForCausalLM": {},
    "LagunaForCausalLM": {"head_dim": 128, "max_position_embeddings": 131072, "mlp_only_layers": [0]},
    "MiniCPM3ForCausalLM": {"tie_word_embeddings": True},
    "OuroForCausalLM": {"total_ut_steps": 4},
    "PanguUltraMoEForCausalLM": {},
    "Plamo3ForCausalLM": {"tie_word_embeddings": True},
    "Step3TextForCausalLM": {},
    "BertModel": {},
    "Gemma3TextModel": _GEMMA3 | {"vocab_size": 262144},
    "ModernBertModel": {},
    "RobertaModel": {},
    "XLMRobertaModel": {},
}
# Encoders: a text's tokens attend to all others, before and after them, and nothing is cached. vLLM embeds and scores texts with
# them, by the attention that tpu-inference has since 0.25 (PR 2753).
ENCODERS = ("BertModel", "Gemma3TextModel", "ModernBertModel", "RobertaModel", "XLMRobertaModel")
# Whose positions are a table beside the embedding; OPT's has two rows more.
LEARNED_POSITIONS = {
    "BertModel": 0,
    "GPT2LMHeadModel": 0,
    "OPTForCausalLM": 2,
    "RobertaModel": 0,
    "XLMRobertaModel": 0,
}
# Whose MLP is two matrices, not three: it has no gate.
WITHOUT_GATES = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BertModel",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "Jais2ForCausalLM",
    "NemotronForCausalLM",
    "OPTForCausalLM",
    "PhiForCausalLM",
    "RWForCausalLM",
    "RobertaModel",
    "XLMRobertaModel",
)
# Whose MLP is four times as wide as the model unless the config says otherwise.
FOUR_TIMES_AS_WIDE = ("FalconForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM", "RWForCausalLM")
# Whose layers for multi-token prediction have an MLP for experts, and the model's own embedding and head.
DENSE_DRAFTS = ("Ernie4_5_MoeForCausalLM", "ExaoneMoEForCausalLM", "MiMoForCausalLM")

_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_CHATGLM_NAMES = {
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "seq_length",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "multi_query_group_num",
    "vocab_size": "padded_vocab_size",
}
# Mappings of a config.json beside each other that together hold a decoder's sizes.
PARTS = {"DbrxForCausalLM": ("attn_config", "ffn_config")}
_SHARED_EXPERTS = {"n_shared_experts": "num_shared_experts"}
# Whose keys and values are projected by way of a compressed vector, and cached in full.
WHOLE_CACHE = ("MiniCPM3ForCausalLM",)
# Keys that a family names its own way: this reader's name -> the family's.
OWN_NAMES: dict[str, dict[str, str]] = {
    "AfmoeForCausalLM": {
        "first_k_dense_replace": "num_dense_layers",
        "sliding_window_pattern": "global_attn_every_n_layers",
        **_SHARED_EXPERTS,
    },
    "BailingMoeForCausalLM": _SHARED_EXPERTS,
    "BailingMoeV2ForCausalLM": _SHARED_EXPERTS,
    "ChatGLMForConditionalGeneration": _CHATGLM_NAMES,
    "ChatGLMModel": _CHATGLM_NAMES,
    "DbrxForCausalLM": {
        "hidden_size": "d_model",
        "max_position_embeddings": "max_seq_len",
        "moe_intermediate_size": "ffn_hidden_size",
        "num_attention_heads": "n_heads",
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "num_hidden_layers": "n_layers",
        "num_key_value_heads": "kv_n_heads",
    },
    "Ernie4_5_MoeForCausalLM": {
        "first_k_dense_replace": "moe_layer_start_index",
        "n_shared_experts": "moe_num_shared_experts",
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
    },
    "ExaoneForCausalLM": {"num_hidden_layers": "num_layers"},  # as the checkpoint's own config class has it
    "ExaoneMoEForCausalLM": _SHARED_EXPERTS,
    "FalconForCausalLM": {"num_key_value_heads": "num_kv_heads"},
    "GPT2LMHeadModel": _GPT2_NAMES,
    "GPTJForCausalLM": _GPT2_NAMES,
    "GraniteMoeSharedForCausalLM": {"shared_expert_intermediate_size": "shared_intermediate_size"},
    "HunYuanMoEV1ForCausalLM": {
        "head_dim": "attention_head_dim",
        "moe_intermediate_size": "moe_intermediate_size",
        "n_shared_experts": "num_shared_expert",
        "num_experts_per_tok": "moe_topk",
    },
    "HYV3ForCausalLM": {"moe_intermediate_size": "expert_hidden_dim", **_SHARED_EXPERTS},
    "ModernBertModel": {
        "sliding_window": "local_attention",
        "sliding_window_pattern": "global_attn_every_n_layers",
    },
    "OPTForCausalLM": {"intermediate_size": "ffn_dim"},
    "Param2MoEForCausalLM": {
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        **_SHARED_EXPERTS,
    },
    "Plamo3ForCausalLM": {"sliding_window": "window_size"},
    "RWForCausalLM": {
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "num_key_value_heads": "n_head_kv",
    },
    "SarvamMLAForCausalLM": _SHARED_EXPERTS,
    "SarvamMoEForCausalLM": _SHARED_EXPERTS,
    "Step3TextForCausalLM": {
        "max_position_embeddings": "max_position_embedding",
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "num_key_value_heads": "num_attention_groups",
        "shared_expert_intermediate_size": "share_expert_dim",
    },
    "TeleChat2ForCausalLM": {
        "intermediate_size": "ffn_hidden_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
}
# Whose vLLM implementation chooses experts by a function of its own. tpu-inference 0.26 gives its kernels the router's logits and
# heeds no such function (layers/vllm/interface/moe.py), nor groups of experts.
OWN_ROUTING = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
)

_NO_STATE_SPACE = (
    "it has state-space, short-convolution or linear-attention layers for which tpu-inference 0.26 has no kernel; it has one "
    "for gated delta nets (Qwen3-Next, Qwen3.5)"
)
_NO_INDEXER = (
    "its sparse attention needs vLLM's indexer, which vLLM 0.26 runs on CUDA, ROCm and XPU only "
    "(sparse_attn_indexer.py, forward_native)"
)
NO_ALIBI = "tpu-inference 0.26 has no attention with ALiBi (layers/vllm/backends/flash_attn.py)"
_NO_SOFT_CAP = "tpu-inference 0.26 drops the soft cap of its attention scores (layers/vllm/backends/flash_attn.py): answers would be wrong"
_NO_CROSS_ATTENTION = "tpu-inference 0.26 has no attention between encoder and decoder"
_NO_ROUTING = (
    "tpu-inference 0.26 drops the function by which it chooses and weighs experts (layers/vllm/interface/moe.py): answers would be "
    "wrong"
)
_NO_DIFFERING_VALUES = (
    "its values are narrower than its keys, for which vLLM 0.26 has attention on GPUs alone (FLASH_ATTN_DIFFKV, "
    "TRITON_ATTN_DIFFKV)"
)
_BY_TRANSFORMERS = (
    "vLLM 0.26 has no implementation of it and runs transformers' own, which nobody has shown on a TPU"
)
# Architectures that vLLM 0.26 knows and that do not run on TPUs, with the reason.
NOT_ON_TPU: dict[str, str] = {
    **dict.fromkeys(("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"), _NO_INDEXER),
    **dict.fromkeys(
        (
            "BailingMoeV2_5ForCausalLM",
            "FalconH1ForCausalLM",
            "FalconMambaForCausalLM",
            "GraniteMoeHybridForCausalLM",
            "JambaForCausalLM",
            "KimiLinearForCausalLM",
            "Lfm2ForCausalLM",
            "Lfm2MoeForCausalLM",
            "MambaForCausalLM",
            "Lfm2VlForConditionalGeneration",
            "Mamba2ForCausalLM",
            "NemotronHForCausalLM",
            "NemotronHPuzzleForCausalLM",
            "NemotronH_Nano_Omni_Reasoning_V3",
            "NemotronH_Nano_VL_V2",
            "NemotronH_Super_Omni_Reasoning_V3",
            "OlmoHybridForCausalLM",
            "Plamo2ForCausalLM",
            "Zamba2ForCausalLM",
        ),
        _NO_STATE_SPACE,
    ),
    **dict.fromkeys(("BloomForCausalLM", "MPTForCausalLM", "MptForCausalLM", "Step1ForCausalLM"), NO_ALIBI),
    "Gemma2ForCausalLM": _NO_SOFT_CAP,
    **dict.fromkeys(
        (
            "CohereAsrForConditionalGeneration",
            "NemotronParseForConditionalGeneration",
            "WhisperForConditionalGeneration",
        ),
        _NO_CROSS_ATTENTION,
    ),
    **dict.fromkeys(
        ("Cohere2MoeForCausalLM", "InternS1ProForConditionalGeneration", "PhiMoEForCausalLM"), _NO_ROUTING
    ),
    "HrmTextForCausalLM": (
        "its prompts attend both ways, by a mark of vLLM's that tpu-inference 0.26's attention does not read (flash_attn.py): "
        "answers would be wrong"
    ),
    "IQuestLoopCoderForCausalLM": (
        "its second round reads the first one's cache without keys of its own, which tpu-inference 0.26's attention can't "
        "(flash_attn.py)"
    ),
    **dict.fromkeys(
        ("InklingForCausalLM", "InklingForConditionalGeneration", "MiniMaxM3SparseForCausalLM"),
        "vLLM 0.26 has it for GPUs alone (vllm/models), and tpu-inference 0.26 has no model of its own",
    ),
    "Step3p5ForCausalLM": (
        "some of its experts clip their activations (swiglustep), which tpu-inference 0.26's kernels for experts refuse "
        "(gmm_v2.py, apply_act_fn)"
    ),
    "ArcticForCausalLM": (
        "its experts run by vLLM's kernels for GPUs (arctic.py, fused_experts), not by the layer that tpu-inference has its own for"
    ),
    **dict.fromkeys(
        ("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"),
        "some of its experts have no weights, which vLLM 0.26 adds by a kernel for GPUs (zero_expert_router.py)",
    ),
    **dict.fromkeys(
        ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "PanguProMoEV2ForCausalLM"), _NO_DIFFERING_VALUES
    ),
    **dict.fromkeys(
        (
            "GPTBigCodeForCausalLM",
            "OlmoForCausalLM",
            "Olmo2ForCausalLM",
            "SmolLM3ForCausalLM",
            "Starcoder2ForCausalLM",
        ),
        _BY_TRANSFORMERS,
    ),
}

# Other decoders of vLLM 0.26, whose bytes this reader can't count, with the reason. Nobody has shown one of them on a TPU.
NOT_COUNTED: dict[str, str] = {
    "DeepseekV4ForCausalLM": (
        "its caches are of several kinds in one; tpu-inference 0.26 calls its model of it experimental (models/vllm/experimental)"
    ),
    "Gemma3nForCausalLM": "it mixes several residual streams, by layers that no other family has",
    **dict.fromkeys(
        ("HCXVisionForCausalLM", "HCXVisionV2ForCausalLM"), "its encoder is a model of another family"
    ),
    "Llama4ForCausalLM": "no checkpoint without an encoder is published, and tpu-inference's own model of this name is another",
    "MistralLarge3ForCausalLM": "its sizes are in params.json, which this plan does not read",
}

# Implemented in JAX by tpu-inference 0.26, and not among those for which it prefers vLLM's implementation; of all others it
# runs vLLM's through torchax (models/common/model_loader.py).
JAX_MODELS = (
    "DeepseekV3ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
)

# tpu-inference 0.26 has another model at this name, the dense Llama Guard 4, and takes it unless it is told not to.
TAKEN_FOR_ANOTHER = ("Llama4ForConditionalGeneration",)
# Of JAX_MODELS, those without a WeightLoader: vLLM's run where weights are streamed from a bucket (resolve_model_architecture).
NOT_STREAMED = ("DeepseekV3ForCausalLM", "Qwen3ForCausalLM")
# Of JAX_MODELS, those whose layers have no other format than the model's own: a checkpoint's scales have no place there
# (models/jax/llama3.py and qwen2_5_vl.py), and the engine ended at start with an fp8 Llama. vLLM's load such checkpoints.
FULL_SIZE_IN_JAX = ("LlamaForCausalLM", "Qwen2_5_VLForConditionalGeneration")
# Of JAX_MODELS, those without pipeline stages: vLLM's run in stages (_PP_DISABLED_MODELS).
NOT_STAGED = ("DeepseekV3ForCausalLM",)
# Of vLLM's models these take the embedding itself for a tied output head. The others give a head of its own the same weights,
# and tpu-inference puts each of the two on the devices (VllmUnquantizedEmbeddingMethod.process_weights_after_loading): Gemma 4 12B
# takes 24.56 GiB as vLLM's and 22.18 as tpu-inference's own.
EMBEDDINGS_AS_HEADS = (
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "FalconForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4vForConditionalGeneration",
    "MiMoForCausalLM",
    "OPTForCausalLM",
    "Olmo3ForCausalLM",
    "OuroForCausalLM",
    "Param2MoEForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "RWForCausalLM",
    "SarvamMLAForCausalLM",
    "SarvamMoEForCausalLM",
    "SeedOssForCausalLM",
)
# Checkpoints of draft models, and the architecture whose layers they have; embedding and head may be the target's own.
DRAFTS = {
    "LlamaForCausalLMEagle3": "LlamaForCausalLM",
    "Eagle3LlamaForCausalLM": "LlamaForCausalLM",
    "DFlashDraftModel": "Qwen3ForCausalLM",
    "DFlashForCausalLM": "Qwen3ForCausalLM",
}
# Of drafts, as vLLM names them, those that tpu-inference 0.26 has in JAX; vLLM's own run with no target but vLLM's own.
_DRAFTS_IN_JAX = ("DFlashDraftModel", "DFlashForCausalLM", "Eagle3LlamaForCausalLM")
_DRAFT_PREFIX = {"eagle": "Eagle", "eagle3": "Eagle3", "dflash": "DFlash"}
# Decoders without their output head: vLLM embeds texts with them.
_EMBEDDING = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")

_SCORING = "ForSequenceClassification"  # vLLM makes a reranker of any causal model by this ending
_CAUSAL = "ForCausalLM"
_ALIKE = 0.85  # of two names without their common ending; a typo keeps more, GraniteMoe and Granite are 0.82


def counted(architecture: str, where: str) -> tuple[str, bool]:
    """The architecture whose layers a model has, and whether it scores or embeds texts and writes none; raises PlanError."""
    if (encoder := architecture.replace(_SCORING, "Model")) in ENCODERS:
        return encoder, True
    scores = architecture.endswith(_SCORING) or architecture in _EMBEDDING
    causal = architecture.removesuffix(_SCORING).removesuffix("Model") + _CAUSAL if scores else architecture
    if causal in ARCHITECTURES:
        return causal, scores
    if reason := NOT_ON_TPU.get(causal):
        raise PlanError(f"{where} is a {architecture}, which is not served on TPUs: {reason}")
    if reason := NOT_COUNTED.get(causal):
        raise PlanError(f"{where} is a {architecture}, whose bytes this plan can't count: {reason}")
    near = nearest(architecture)
    hint = f"; did you mean {near}?" if near else ""
    raise PlanError(
        f"{where} is a {architecture}, whose bytes this plan can't count{hint}; it counts "
        f"{', '.join(map(_short, ARCHITECTURES))}"
    )


def drafts_in_jax(method: str, architecture: str) -> bool:
    """Whether tpu-inference has a draft model in JAX, by the name that vLLM gives it (EAGLEConfig)."""
    prefix = _DRAFT_PREFIX.get(method, "")
    named = architecture.startswith(prefix) or architecture.endswith(prefix)
    return (architecture if named else f"{prefix}{architecture}") in _DRAFTS_IN_JAX


def _short(architecture: str) -> str:
    return architecture.partition("For")[0]


def nearest(architecture: str) -> str | None:
    """A counted architecture whose name differs by a typo; None where none does."""
    stems = {_stem(name): name for name in reversed(ARCHITECTURES)}  # of LLaMA and Llama the first
    near = difflib.get_close_matches(_stem(architecture), stems, n=1, cutoff=_ALIKE)
    return stems[near[0]] if near and _digits(near[0]) == _digits(_stem(architecture)) else None


def _stem(architecture: str) -> str:
    return _short(architecture).lower()


def _digits(name: str) -> str:
    return "".join(character for character in name if character.isdigit())
