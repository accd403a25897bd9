"""`config.json` as vLLM reads it, from the keys that a plan reads: the same model with fewer layers, if asked."""

from collections.abc import Mapping
from typing import Any

from serving.errors import CompileError

# The model_type of known configs, which are kept without it; everything else they leave out is transformers' default.
_TYPES = {
    "Cohere2ForCausalLM": "cohere2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3TextModel": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "ministral3",
    "Mistral3ForConditionalGeneration": "mistral3",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "ModernBertModel": "modernbert",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "SeedOssForCausalLM": "seed_oss",
    "XLMRobertaForSequenceClassification": "xlm-roberta",
    "XLMRobertaModel": "xlm-roberta",
}
_GEMMA4_IMAGE_TOKENS = 280  # in every checkpoint's vision_config; transformers has no default
_BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")


def checkpoint_config(config: Mapping[str, Any], layers: int | None = None) -> dict[str, Any]:
    """The config with a model_type, and with `layers` layers; raises CompileError where the first can't be known."""
    whole = dict(config)
    if "model_type" not in whole:
        architecture = str(next(iter(whole.get("architectures") or []), None))
        if architecture not in _TYPES:
            raise CompileError(
                f"{architecture}: no model_type is known for it; give a checkpoint's folder with its config.json"
            )
        whole["model_type"] = _TYPES[architecture]
    vision = whole.get("vision_config")
    if whole["model_type"] == "gemma4" and isinstance(vision, Mapping):
        whole["vision_config"] = {"default_output_length": _GEMMA4_IMAGE_TOKENS, **vision}
    if (quantization := whole.get("quantization_config")) and quantization.get("quant_method") == "fp8":
        whole["quantization_config"] = {"activation_scheme": "dynamic", **quantization}
    if layers is None:
        return whole
    text = whole.get("text_config")
    if isinstance(text, Mapping):
        return {**whole, "text_config": _cut(text, layers)}
    return _cut(whole, layers)


def quick_layers(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Two depths that hold every kind of layer in the model's own proportion; None where no small depth does."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    if text.get("num_kv_shared_layers"):
        return None
    first = int(text.get("first_k_dense_replace", 0))
    period = int(text.get("full_attention_interval") or text.get("interleave_moe_layer_step") or 1)
    if kinds := list(text.get("layer_types") or []):
        period = next(
            (n for n in range(1, len(kinds)) if kinds == (kinds[:n] * len(kinds))[: len(kinds)]), len(kinds)
        )
    shallow, deep = first + period, first + 3 * period
    return (shallow, deep) if deep < int(text["num_hidden_layers"]) else None


def _cut(text: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {
        **text,
        "num_hidden_layers": layers,
        **{key: list(text[key])[:layers] for key in _BY_LAYER if text.get(key)},
    }
