"""Families without a known model here: parameters of one member each, against those of transformers' class of that config."""

from typing import Any

import pytest

from serving.config import ModelSpec
from serving.errors import ConfigError, PlanError
from serving.planning import plan
from serving.planning.cache import token_bytes
from serving.planning.engine_sizes import engine_sizes
from serving.planning.layout import Layout
from serving.planning.shapes import ModelShape, read_config
from serving.planning.weights import checkpoint_params, tensor_groups

pytestmark = pytest.mark.unit


def dense(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
    }


# DBRX's own names; databricks/dbrx-instruct has 131.6 billion parameters.
DBRX = {
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 40,
    "max_seq_len": 32768,
    "vocab_size": 100352,
    "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
}
QWEN2_VL = dense(3584, 18944, 28, 28, 4, 152064) | {
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "spatial_merge_size": 2,
    }
}
MOE = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
}
V2_LITE = (
    dense(2048, 10944, 27, 16, 16, 102400)
    | MOE
    | {
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts_per_tok": 6,
    }
)
ERNIE_MOE = dense(2560, 12288, 28, 20, 4, 103424) | {
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
# Ling-mini-2.0's and DeepSeek-MoE's are not counted by transformers: 16.26 and 16.4 billion by their model cards.
LING_MINI = dense(2048, 5120, 20, 16, 4, 157184) | {
    "head_dim": 128,
    "num_experts": 256,
    "num_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "n_group": 8,
    "topk_group": 4,
}
EXAONE = dense(4096, 14336, 32, 32, 8, 102400)
EXAONE["num_layers"] = EXAONE.pop("num_hidden_layers")
GRANITE_SHARED = dense(1536, 512, 32, 24, 8, 49155) | {
    "num_local_experts": 40,
    "num_experts_per_tok": 8,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
}
FALCON = {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024}
GLM_TOWER = {"depth": 24, "hidden_size": 1536, "intermediate_size": 10944, "spatial_merge_size": 2}
GLM_4_5V = {
    "text_config": dense(4096, 10944, 46, 96, 8, 151552)
    | {
        "head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
    },
    "vision_config": GLM_TOWER,
}
GPT2_XL = {
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    "n_positions": 1024,
    "n_inner": None,
    "vocab_size": 50257,
}
GPT_J = {
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "n_positions": 2048,
    "n_inner": None,
    "vocab_size": 50400,
}
HUNYUAN = dense(4096, 3072, 32, 32, 8, 128167) | {
    "attention_head_dim": 128,
    "moe_intermediate_size": [3072] * 32,
    "moe_topk": [8] * 32,
    "num_experts": 64,
    "num_shared_expert": [1] * 32,
    "tie_word_embeddings": True,
}
INTERNVIT = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
OPT = dense(4096, 16384, 32, 32, 32, 50272) | {"max_position_embeddings": 2048}
OPT["ffn_dim"] = OPT.pop("intermediate_size")
MODERN_BERT = dense(768, 1152, 22, 12, 12, 50368) | {"global_attn_every_n_layers": 3, "local_attention": 128}
EMBEDDING_GEMMA = dense(768, 1152, 24, 3, 1, 262144) | {
    "head_dim": 256,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
}
BERT_LARGE = dense(1024, 4096, 24, 16, 16, 30522) | {"max_position_embeddings": 512, "type_vocab_size": 2}
BGE_M3 = dense(1024, 4096, 24, 16, 16, 250002) | {"max_position_embeddings": 8194, "type_vocab_size": 1}
WINDOWS = {"sliding_window": 4096, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16}

# An older Falcon's config.
RW = {
    "hidden_size": 4544,
    "n_head": 71,
    "n_layer": 32,
    "vocab_size": 65024,
    "multi_query": True,
    "alibi": False,
}
AFMOE = dense(2048, 6144, 32, 32, 4, 200192) | {
    "head_dim": 128,
    "global_attn_every_n_layers": 4,
    "sliding_window": 2048,
    "num_dense_layers": 2,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
}
EXAONE_MOE = dense(6144, 18432, 48, 64, 8, 153600) | {
    "head_dim": 128,
    "is_moe_layer": [False] + [True] * 47,
    "moe_intermediate_size": 2048,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
}
HY3 = dense(4096, 13312, 80, 64, 8, 120832) | {
    "head_dim": 128,
    "expert_hidden_dim": 1536,
    "first_k_dense_replace": 1,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
}
MELLUM = dense(2304, 7168, 28, 32, 4, 98304) | {
    "head_dim": 128,
    "mlp_layer_types": ["sparse"] * 28,
    "moe_intermediate_size": 896,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
PARAM2 = dense(2048, 9216, 21, 16, 8, 128000) | {
    "head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "moe_shared_expert_intermediate_size": 2048,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
}
TELECHAT2 = {
    "ffn_hidden_size": 12288,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "n_head": 32,
    "n_layer": 30,
    "num_key_value_heads": 32,
    "vocab_size": 131072,
}
CHATGLM3 = {
    "ffn_hidden_size": 13696,
    "hidden_size": 4096,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_layers": 28,
    "padded_vocab_size": 65024,
    "seq_length": 8192,
}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
AXK1 = (
    dense(7168, 18432, 61, 64, 64, 163840)
    | LATENT
    | {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 192,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
    }
)
OURO = dense(2048, 5632, 48, 16, 16, 49152) | {"total_ut_steps": 4}
PANGU_ULTRA = (
    dense(7680, 18432, 61, 128, 128, 153600)
    | LATENT
    | {
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
    }
)
PLAMO3 = dense(4096, 13312, 32, 32, 4, 100000) | {
    "head_dim": 128,
    "sliding_window_pattern": 8,
    "window_size": 2048,
}
STEP3 = {
    "head_dim": 256,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embedding": 65536,
    "moe_intermediate_size": 5120,
    "moe_layers_enum": ",".join(map(str, range(4, 60))),
    "moe_num_experts": 48,
    "moe_top_k": 3,
    "num_attention_groups": 1,
    "num_attention_heads": 64,
    "num_hidden_layers": 61,
    "share_expert_dim": 5120,
    "share_q_dim": 2048,
    "vocab_size": 128815,
}
LAGUNA = dense(2048, 8192, 40, 48, 8, 100352) | {
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 10,
    "moe_intermediate_size": 512,
    "num_attention_heads_per_layer": ([48] + [64] * 3) * 10,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
    "sliding_window": 512,
}
MINICPM3 = dense(2560, 6400, 62, 40, 40, 73448) | {
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
}


def searched(layer: int) -> dict[str, Any]:
    """A layer of a searched architecture: of each eight, two have no attention and one has no MLP."""
    if layer % 4 == 1:
        return {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"ffn_mult": 1.3125}}
    if layer % 8 == 2:
        return {"attention": {"n_heads_in_group": 16}, "ffn": {"intermediate_size": 7168}}
    mlp = {"no_op": True} if layer % 8 == 6 else {"ffn_mult": 5.25, "no_op": False}
    return {"attention": {"no_op": False, "n_heads_in_group": 8}, "ffn": mlp}


NEMOTRON = dense(8192, 28672, 80, 64, 8, 128256) | {"block_configs": [searched(layer) for layer in range(80)]}
del NEMOTRON["intermediate_size"], NEMOTRON["num_key_value_heads"]

FAMILIES: dict[str, tuple[dict[str, Any], float]] = {
    # The parameters of vLLM 0.26's own class of this config, made on torch's meta device; AXK1's by its model card.
    "AXK1ForCausalLM": (AXK1, 519),
    "AfmoeForCausalLM": (AFMOE, 26.124),
    "ChatGLMModel": (CHATGLM3, 6.244),
    "ExaoneMoEForCausalLM": (EXAONE_MOE, 236.571),
    "FlexOlmoForCausalLM": (
        dense(4096, 11008, 32, 32, 32, 100352) | {"num_experts": 7, "num_experts_per_tok": 5},
        33.271,
    ),
    "HYV3ForCausalLM": (HY3, 295.034),
    "Jais2ForCausalLM": (dense(3328, 26624, 32, 26, 26, 150272), 8.090),
    "LLaMAForCausalLM": (dense(4096, 11008, 32, 32, 32, 32000), 6.738),
    "MellumForCausalLM": (MELLUM, 12.150),
    "PanguEmbeddedForCausalLM": (dense(4096, 12800, 34, 32, 8, 153376), 8.031),
    "Param2MoEForCausalLM": (PARAM2, 9.153),
    "RWForCausalLM": (RW, 6.922),
    "StableLMEpochForCausalLM": (dense(2560, 6912, 32, 32, 32, 50304), 2.795),
    "TeleChat2ForCausalLM": (TELECHAT2, 7.617),
    "DeciLMForCausalLM": (NEMOTRON, 44.549),
    "OuroForCausalLM": (OURO, 2.668),
    "PanguUltraMoEForCausalLM": (PANGU_ULTRA, 719.094),
    "Plamo3ForCausalLM": (PLAMO3, 6.853),
    "Step3TextForCausalLM": (STEP3, 316.295),
    "TeleFLMForCausalLM": (dense(8192, 21824, 64, 64, 64, 80000), 52.818),
    # Of transformers' classes.
    "LagunaForCausalLM": (LAGUNA, 33.443),
    "MiniCPM3ForCausalLM": (MINICPM3, 4.074),
    "ApertusForCausalLM": (dense(4096, 21504, 32, 32, 8, 131072), 8.053),
    "ArceeForCausalLM": (dense(2560, 18432, 36, 20, 4, 128004), 4.619),
    "BailingMoeV2ForCausalLM": (LING_MINI, 16.26),
    "CwmForCausalLM": (dense(6144, 21504, 64, 48, 8, 128256) | WINDOWS, 32.581),
    "DeepseekForCausalLM": (dense(2048, 10944, 28, 16, 16, 102400) | MOE | {"num_experts_per_tok": 6}, 16.38),
    "DeepseekV2ForCausalLM": (V2_LITE, 15.706),
    "Ernie4_5ForCausalLM": (dense(1024, 3072, 18, 16, 2, 103424) | {"head_dim": 128}, 0.3607),
    "Ernie4_5_MoeForCausalLM": (ERNIE_MOE, 21.825),
    "ExaoneForCausalLM": (EXAONE, 7.818),
    "FalconForCausalLM": (FALCON, 6.922),
    "GPT2LMHeadModel": (GPT2_XL, 1.558),
    "GPTJForCausalLM": (GPT_J, 6.051),
    "GPTNeoXForCausalLM": (dense(5120, 20480, 36, 40, 40, 50688), 11.846),
    "Glm4vForConditionalGeneration": (
        {
            "text_config": dense(4096, 13696, 40, 32, 2, 151552),
            "vision_config": GLM_TOWER | {"intermediate_size": 13696},
        },
        10.29,
    ),
    "Glm4vMoeForConditionalGeneration": (GLM_4_5V, 107.7),
    "HunYuanMoEV1ForCausalLM": (HUNYUAN, 80.39),
    "InternVLChatModel": (
        {"llm_config": dense(3584, 18944, 28, 28, 4, 151674), "vision_config": INTERNVIT},
        7.944,
    ),
    "OPTForCausalLM": (OPT, 6.658),
    "BertModel": (BERT_LARGE, 0.3351),
    "BertForSequenceClassification": (BERT_LARGE, 0.3351),
    "Gemma3TextModel": (EMBEDDING_GEMMA, 0.3029),
    "ModernBertModel": (MODERN_BERT, 0.149),
    "XLMRobertaModel": (BGE_M3, 0.5678),
    "DbrxForCausalLM": (DBRX, 131.6),
    "Exaone4ForCausalLM": (dense(5120, 27392, 64, 40, 8, 102400) | WINDOWS, 32.003),
    "GemmaForCausalLM": (dense(3072, 24576, 28, 16, 16, 256000) | {"head_dim": 256}, 8.538),
    "GlmForCausalLM": (dense(4096, 13696, 40, 32, 2, 151552), 9.400),
    "GraniteMoeForCausalLM": (
        dense(1536, 512, 32, 24, 8, 49155)
        | {"num_local_experts": 40, "num_experts_per_tok": 8, "tie_word_embeddings": True},
        3.299,
    ),
    "GraniteMoeSharedForCausalLM": (GRANITE_SHARED, 3.450),
    "HunYuanDenseV1ForCausalLM": (
        dense(4096, 14336, 32, 32, 8, 128167) | {"tie_word_embeddings": True},
        7.505,
    ),
    "InternLM2ForCausalLM": (dense(4096, 14336, 32, 32, 8, 92544), 7.738),
    "InternLM3ForCausalLM": (dense(4096, 10240, 48, 32, 2, 128512) | {"head_dim": 128}, 8.80),
    "MiMoForCausalLM": (dense(4096, 11008, 36, 32, 8, 151680) | {"num_nextn_predict_layers": 1}, 7.833),
    "NemotronForCausalLM": (dense(3072, 9216, 32, 24, 8, 256000), 4.191),
    "PhiForCausalLM": (dense(2560, 10240, 32, 32, 32, 51200), 2.780),
    "Qwen2VLForConditionalGeneration": (QWEN2_VL, 8.291),
    "StableLmForCausalLM": (dense(2560, 6912, 32, 32, 32, 50304), 2.795),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_parameters_of_a_family_are_counted(architecture: str) -> None:
    config, billions = FAMILIES[architecture]
    shape = read_config({"architectures": [architecture], **config}, where=architecture)
    assert checkpoint_params(shape) / 1e9 == pytest.approx(billions, rel=0.005)


def test_an_older_falcon_has_the_key_value_heads_that_it_names() -> None:
    config = {"architectures": ["RWForCausalLM"], **RW}
    assert read_config(config, where="falcon").num_key_value_heads == 1
    assert read_config(config | {"n_head": 128, "n_head_kv": 8}, where="falcon").num_key_value_heads == 8


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"ffn_config": 3}, "ffn_config is 3, not a mapping"),
        ({"ffn_config": {}}, "has no"),
        ({"attn_config": {"kv_n_heads": "8"}}, "num_key_value_heads is '8', not a number"),
    ],
)
def test_sizes_of_dbrx_stand_in_mappings_of_their_own(odd: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read_config({"architectures": ["DbrxForCausalLM"], **DBRX, **odd}, where="dbrx")


def test_layers_that_draft_for_ernie_have_no_experts() -> None:
    """vLLM's ernie_mtp.py: a layer of Llama's, and a matrix of two hidden sizes."""
    config = {"architectures": ["Ernie4_5_MoeForCausalLM"], **ERNIE_MOE}
    without, drafting = (
        checkpoint_params(read_config(config | {"num_nextn_predict_layers": count}, where="ernie"))
        for count in (0, 1)
    )
    attention = 2 * 2560 * (20 + 4) * 128
    assert drafting - without == attention + 3 * 2560 * 12288 + 2 * 2560**2


def spec(config: dict[str, Any], architecture: str, **more: Any) -> ModelSpec:
    overrides = {"architectures": [architecture], **config}
    engine = {"max_model_len": 4096, "hf_overrides": overrides, **more.pop("engine", {})}
    model = {"model": "Qwen/Qwen3-4B", "slice": {"generation": "v7x", "topology": "2x2x1"}, "engine": engine}
    return ModelSpec.model_validate(model | more)


def test_experts_that_are_chosen_from_groups_are_planned_with_a_warning() -> None:
    found = plan(spec(LING_MINI | {"num_key_value_heads": 8}, "BailingMoeV2ForCausalLM"))
    assert any("chosen from all 8 groups" in reason for reason in found.reasons)


@pytest.mark.parametrize(("engine", "warned"), [({}, False), ({"model_impl": "vllm"}, True)])
def test_gemma_4_s_experts_are_chosen_rightly_by_tpu_inference_s_own_model_alone(
    engine: dict[str, Any], warned: bool
) -> None:
    model = {
        "model": "google/gemma-4-26B-A4B-it",
        "slice": {"generation": "v7x", "topology": "1x1x1"},
        "engine": {"max_model_len": 4096, **engine},
    }
    found = plan(ModelSpec.model_validate(model))
    assert any("answers may be wrong" in reason for reason in found.reasons) is warned


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("PhiMoEForCausalLM", "drops the function by which it chooses and weighs experts"),
        ("NemotronH_Nano_VL_V2", "state-space"),
        ("NemotronParseForConditionalGeneration", "no attention between encoder and decoder"),
        ("ArcticForCausalLM", "its experts run by vLLM's kernels for GPUs"),
        ("LongcatFlashForCausalLM", "some of its experts have no weights"),
        ("MiMoV2FlashForCausalLM", "its values are narrower than its keys"),
    ],
)
def test_what_a_tpu_s_engine_has_no_code_for_is_refused_with_that_reason(
    architecture: str, reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        read_config({"architectures": [architecture]}, where="model")


@pytest.mark.parametrize(
    "architecture", ["BertModel", "ModernBertForSequenceClassification", "Gemma3TextModel"]
)
def test_an_encoder_is_planned_without_a_cache_and_reads_a_text_at_once(architecture: str) -> None:
    config = FAMILIES[architecture.replace("ForSequenceClassification", "Model")][0]
    model = spec(
        config, architecture, slice={"generation": "v6e", "topology": "1x1"}, engine={"max_model_len": 512}
    )
    found = plan(model)
    assert found.shape.encodes
    assert found.sizes.pools
    assert found.fit.cache_bytes == 0
    assert found.fit.sequences == found.most_sequences == 256
    assert any("untried" in reason for reason in found.reasons)
    short = {"max_model_len": 4096, "max_num_batched_tokens": 512, "max_num_seqs": 16}
    with pytest.raises(
        ConfigError, match="512 is below max_model_len, 4096, and prompts are not read in chunks"
    ):
        plan(spec(config | {"max_position_embeddings": 8192}, architecture, engine=short))


def test_positions_of_a_roberta_are_those_that_tokens_may_have() -> None:
    """BAAI/bge-m3 has a table of 8,194 rows and says 8,192 to sentence-transformers."""
    shape = read_config({"architectures": ["XLMRobertaModel"], **BGE_M3}, where="bge-m3")
    assert (shape.max_position_embeddings, shape.position_rows) == (8192, 8195)
    assert (
        engine_sizes({}, shape).batched_tokens >= 8194
    )  # vLLM's own max_model_len, and a text is read at once
    assert engine_sizes({"max_model_len": 8192}, shape).batched_tokens == 8192


def test_a_model_with_alibi_is_refused_with_that_reason() -> None:
    with pytest.raises(PlanError, match="with ALiBi, which is not served on TPUs"):
        read_config({"architectures": ["FalconForCausalLM"], "alibi": True, **FALCON}, where="falcon-rw")


def test_a_missing_width_is_asked_for_by_its_own_name() -> None:
    config = dense(4096, 1, 32, 32, 8, 32000)
    del config["intermediate_size"]
    with pytest.raises(
        PlanError, match=r"has no intermediate_size; give it as engine\.hf_overrides\.intermediate_size"
    ):
        read_config({"architectures": ["LlamaForCausalLM"], **config}, where="model")


def shape_like(architecture: str, **changes: Any) -> ModelShape:
    return read_config(
        {"architectures": [architecture], **FAMILIES[architecture][0], **changes}, architecture
    )


def held(shape: ModelShape) -> tuple[float, float]:
    """Bytes of a token's cache on one device, and the weights that work on a token."""
    sizes, layout = engine_sizes({}, shape), Layout(1)
    groups = tensor_groups(shape, sizes, layout)
    return token_bytes(shape, sizes, layout), sum(group.active for group in groups if group.layered)


def test_each_time_that_a_token_passes_the_layers_has_its_own_cache_and_work() -> None:
    (once, work), (four, more) = (
        held(shape_like("OuroForCausalLM", total_ut_steps=1)),
        held(shape_like("OuroForCausalLM")),
    )
    assert once == 48 * 2 * 16 * 128 * 2
    assert (four, more) == (4 * once, 4 * work)


def test_keys_and_values_of_minicpm3_are_cached_in_full() -> None:
    """Heads of 96 take whole lanes of 128 (vLLM's minicpm3.py pads values to the keys' width)."""
    assert held(shape_like("MiniCPM3ForCausalLM"))[0] == 62 * 2 * 40 * 128 * 2


def test_layers_without_attention_cache_nothing_and_others_their_own_heads() -> None:
    assert held(shape_like("DeciLMForCausalLM"))[0] == (50 * 8 + 10 * 4) * 2 * 128 * 2


def test_every_layer_s_heads_divide_by_the_devices() -> None:
    heads = ([64] + [72] * 3) * 10
    config = LAGUNA | {"num_attention_heads_per_layer": heads}
    sixteen = {"slice": {"generation": "v6e", "topology": "4x4"}, "parallel": {"tensor": 16}}
    with pytest.raises(PlanError, match="72 attention heads do not divide by tensor=16"):
        plan(spec(config, "LagunaForCausalLM", **sixteen))


@pytest.mark.parametrize(
    ("architecture", "changes", "says"),
    [
        (
            "LagunaForCausalLM",
            {"num_attention_heads_per_layer": [48]},
            "per_layer has 1 layers, num_hidden_layers is 40",
        ),
        ("LagunaForCausalLM", {"num_attention_heads_per_layer": [0] * 40}, "per_layer has 0, not a number"),
        (
            "DeciLMForCausalLM",
            {"block_configs": [searched(0)]},
            "block_configs has 1 layers, num_hidden_layers is 80",
        ),
        (
            "DeciLMForCausalLM",
            {"block_configs": [{"ffn": {}}] * 80},
            r"\(block 0\): a block has attention and ffn",
        ),
        (
            "DeciLMForCausalLM",
            {"block_configs": [searched(0) | {"attention": {"replace_with_linear": True}}] * 80},
            "replace_with_linear is set, which vLLM 0.26 does not read",
        ),
        (
            "DeciLMForCausalLM",
            {"block_configs": [searched(0) | {"ffn": {"ffn_mult": "2"}}] * 80},
            "ffn_mult is '2'",
        ),
        ("DeciLMForCausalLM", {"block_configs": [7] * 80}, "is 7, not a mapping"),
        ("OuroForCausalLM", {"total_ut_steps": 0}, "total_ut_steps is 0"),
        ("Step3TextForCausalLM", {"moe_layers_enum": ",".join("9" * 70)}, "-9 layers without experts"),
    ],
)
def test_odd_layers_are_refused(architecture: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        shape_like(architecture, **changes)
