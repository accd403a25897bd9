"""`config.json` of models people serve, cut to the keys a plan reads, so that planning works without a network.

The values are those of the Hugging Face repositories of these names, under the same keys. A test compares the parameter
counts that follow with the published ones, which a wrong key would miss.
"""

from typing import Any

_Config = dict[str, Any]

_FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}

_LLAMA: _Config = {
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_LLAMA_8B = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_LLAMA_1B = _LLAMA | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
_LLAMA_3B = _LLAMA | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
_LLAMA_70B = _LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_LLAMA_405B = _LLAMA | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
_LLAMA4: _Config = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1408,
        "intermediate_size": 5632,
        "num_hidden_layers": 34,
        "projector_input_dim": 4096,
    },
}
_LLAMA4_TEXT: _Config = {
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
    "vocab_size": 202048,
    "tie_word_embeddings": False,
}
_SCOUT = _LLAMA4 | {
    "text_config": _LLAMA4_TEXT
    | {"num_local_experts": 16, "interleave_moe_layer_step": 1, "max_position_embeddings": 10485760}
}
_MAVERICK = _LLAMA4 | {
    "text_config": _LLAMA4_TEXT
    | {"num_local_experts": 128, "interleave_moe_layer_step": 2, "max_position_embeddings": 1048576}
}

_QWEN2_32B: _Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN3: _Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN3_4B = _QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": True,
}
_QWEN3_8B = _QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
_QWEN3_32B = _QWEN3 | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
}
_QWEN3_30B = _QWEN3_MOE | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
}
_QWEN3_235B = _QWEN3_MOE | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
_QWEN3_CODER_480B = _QWEN3_MOE | {
    "hidden_size": 6144,
    "intermediate_size": 8192,
    "moe_intermediate_size": 2560,
    "num_hidden_layers": 62,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "num_experts": 160,
    "max_position_embeddings": 262144,
}
_QWEN35_397B: _Config = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "mtp_num_hidden_layers": 1,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "out_hidden_size": 4096},
}

_SIGLIP: _Config = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}
_GEMMA3_27B: _Config = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "vision_config": _SIGLIP,
    "text_config": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}
_GEMMA4_TEXT: _Config = {
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 0,
    "vocab_size": 262144,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
_GEMMA4: _Config = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "vision_config": _SIGLIP | {"num_key_value_heads": 16, "head_dim": 72},
}
_GEMMA4_31B = _GEMMA4 | {
    "text_config": _GEMMA4_TEXT
    | {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    }
}
_GEMMA4_26B = _GEMMA4 | {
    "text_config": _GEMMA4_TEXT
    | {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "enable_moe_block": True,
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "top_k_experts": 8,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    }
}
_GEMMA4_12B: _Config = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "vision_config": {"mm_embed_dim": 3840},
    "audio_config": {"audio_embed_dim": 640},
    "text_config": _GEMMA4_TEXT
    | {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    },
}
_GEMMA4_E2B: _Config = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16},
    "audio_config": {"hidden_size": 1024, "num_hidden_layers": 12},
    "text_config": _GEMMA4_TEXT
    | {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "use_double_wide_mlp": True,
        "num_hidden_layers": 35,
        "num_kv_shared_layers": 20,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 131072,
    },
}

_GEMMA4_E4B = _GEMMA4_E2B | {
    "text_config": _GEMMA4_E2B["text_config"]
    | {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "use_double_wide_mlp": False,
        "num_hidden_layers": 42,
        "num_kv_shared_layers": 18,
        "num_key_value_heads": 2,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    },
}

_GPT_OSS_120B: _Config = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_GPT_OSS_20B = _GPT_OSS_120B | {
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}

_DEEPSEEK_V3: _Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_group": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": _FP8_BLOCKS,
}
_KIMI_K2: _Config = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
    "text_config": _DEEPSEEK_V3
    | {
        "first_k_dense_replace": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "num_nextn_predict_layers": 0,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "group_size": 32,
                        "type": "int",
                        "strategy": "group",
                        "symmetric": True,
                    },
                }
            },
            "ignore": [
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|down)_proj.*",
                "lm_head",
            ],
        },
    },
}

_MIXTRAL_8X7B: _Config = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_MIXTRAL_8X22B = _MIXTRAL_8X7B | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "vocab_size": 32768,
    "max_position_embeddings": 65536,
}
_MISTRAL_7B: _Config = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_MISTRAL_SMALL_TEXT: _Config = {
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "tie_word_embeddings": False,
}
_MISTRAL_SMALL_3 = _MISTRAL_SMALL_TEXT | {
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
_MISTRAL_SMALL_31: _Config = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    "text_config": _MISTRAL_SMALL_TEXT | {"max_position_embeddings": 131072},
}

# Transformers' Mistral4Config has this checkpoint's sizes for defaults.
_MISTRAL_SMALL_4: _Config = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "static"},
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
    },
    "text_config": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 36,
        "first_k_dense_replace": 0,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "vocab_size": 131072,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
    },
}

_QWEN25: _Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN25_7B = _QWEN25 | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
_QWEN25_72B = _QWEN25 | {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_QWEN25_1_5B = _QWEN25 | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_QWEN25_0_5B = _QWEN25_1_5B | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}
_QWEN25_3B = _QWEN25_1_5B | {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
}
_QWEN25_14B = _QWEN25 | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
_QWEN25_VL_7B = _QWEN25_7B | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "max_position_embeddings": 128000,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "spatial_merge_size": 2,
    },
}
_QWEN3_0_6B = _QWEN3 | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
_QWEN3_1_7B = _QWEN3 | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
_QWEN3_14B = _QWEN3 | {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}
_QWEN3_VL: _Config = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
}
_QWEN3_VL_8B: _Config = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "tie_word_embeddings": False,
    "vision_config": _QWEN3_VL | {"deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": 4096},
    "text_config": {
        key: value for key, value in _QWEN3_8B.items() if key not in ("architectures", "tie_word_embeddings")
    }
    | {"max_position_embeddings": 262144},
}
_QWEN3_VL_30B = _QWEN3_VL_8B | {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "text_config": {
        key: value for key, value in _QWEN3_30B.items() if key not in ("architectures", "tie_word_embeddings")
    }
    | {"max_position_embeddings": 262144, "norm_topk_prob": True},
}
_GATED_DELTA_NET: _Config = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
_QWEN3_NEXT_80B = _GATED_DELTA_NET | {
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
_QWEN35_27B: _Config = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "vision_config": _QWEN3_VL,
    "text_config": _GATED_DELTA_NET
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "mtp_num_hidden_layers": 1,
        "vocab_size": 248320,
        "dtype": "bfloat16",
    },
}
_QWEN35_35B: _Config = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "vision_config": _QWEN3_VL,
    "text_config": _GATED_DELTA_NET
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "vocab_size": 248320,
        "dtype": "bfloat16",
    },
}

# Gemma 3's smaller ones leave heads, their size and the vocabulary to the class of the config.
_GEMMA3_1B: _Config = {
    "architectures": ["Gemma3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
}
_GEMMA3_4B: _Config = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "vision_config": _SIGLIP,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}
_GEMMA3_12B = _GEMMA3_4B | {
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    }
}

_GLM45: _Config = {
    "architectures": ["Glm4MoeForCausalLM"],
    "partial_rotary_factor": 0.5,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "first_k_dense_replace": 3,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_GLM45_AIR = _GLM45 | {
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
}
_GLM47_FLASH: _Config = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "first_k_dense_replace": 1,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 1,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_MINIMAX_M2: _Config = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 200064,
    "max_position_embeddings": 196608,
    "tie_word_embeddings": False,
    "quantization_config": _FP8_BLOCKS
    | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
}
_PHI4: _Config = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "vocab_size": 100352,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_PHI4_MINI = _PHI4 | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "vocab_size": 200064,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
}
_SEED_OSS_36B: _Config = {
    "architectures": ["SeedOssForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 155136,
    "max_position_embeddings": 524288,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_GRANITE33_8B: _Config = {
    "architectures": ["GraniteForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 49159,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_OLMO3_7B: _Config = {
    "architectures": ["Olmo3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "sliding_window": 4096,
    "vocab_size": 100278,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_OLMO3_32B = _OLMO3_7B | {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
}
_DEVSTRAL2_123B: _Config = {
    "architectures": ["Ministral3ForCausalLM"],
    "hidden_size": 12288,
    "intermediate_size": 28672,
    "num_hidden_layers": 88,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
_COMMAND_A: _Config = {
    "architectures": ["Cohere2ForCausalLM"],
    "hidden_size": 12288,
    "intermediate_size": 36864,
    "num_hidden_layers": 64,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}

_BGE_M3: _Config = {
    "architectures": ["XLMRobertaModel"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 250002,
    "max_position_embeddings": 8194,
    "position_embedding_type": "absolute",
    "type_vocab_size": 1,
    "torch_dtype": "float32",
}
_EMBEDDING_GEMMA: _Config = {
    "architectures": ["Gemma3TextModel"],
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 2048,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
    "torch_dtype": "float32",
}
_MODERN_BERT: _Config = {
    "architectures": ["ModernBertModel"],
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "vocab_size": 50368,
    "max_position_embeddings": 8192,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "torch_dtype": "bfloat16",
}

# Models whose files are sentence-transformers': vLLM embeds texts with them where no `runner` is set.
EMBED = frozenset(f"Qwen/Qwen3-Embedding-{size}" for size in ("0.6B", "4B", "8B"))

CONFIGS: dict[str, _Config] = {
    "meta-llama/Llama-3.1-8B": _LLAMA_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA_70B,
    "meta-llama/Llama-3.1-70B-Instruct": _LLAMA_70B,
    "meta-llama/Llama-3.1-405B": _LLAMA_405B,
    "meta-llama/Llama-3.1-405B-Instruct": _LLAMA_405B,
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_70B,
    "meta-llama/Meta-Llama-3-8B": _LLAMA_8B | {"max_position_embeddings": 8192},
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA_8B | {"max_position_embeddings": 8192},
    "meta-llama/Meta-Llama-3-70B-Instruct": _LLAMA_70B | {"max_position_embeddings": 8192},
    "meta-llama/Llama-3.2-1B": _LLAMA_1B,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA_1B,
    "meta-llama/Llama-3.2-3B": _LLAMA_3B,
    "meta-llama/Llama-3.2-3B-Instruct": _LLAMA_3B,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": _SCOUT,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": _MAVERICK,
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN25_0_5B,
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN25_1_5B,
    "Qwen/Qwen2.5-3B-Instruct": _QWEN25_3B,
    "Qwen/Qwen2.5-14B-Instruct": _QWEN25_14B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN25_7B,
    "Qwen/Qwen2.5-72B-Instruct": _QWEN25_72B,
    "Qwen/Qwen2.5-VL-7B-Instruct": _QWEN25_VL_7B,
    "Qwen/Qwen2.5-32B": _QWEN2_32B,
    "Qwen/Qwen2.5-32B-Instruct": _QWEN2_32B | {"max_position_embeddings": 32768},
    "Qwen/QwQ-32B": _QWEN2_32B | {"max_position_embeddings": 40960},
    "Qwen/Qwen3-0.6B": _QWEN3_0_6B,
    "Qwen/Qwen3-1.7B": _QWEN3_1_7B,
    "Qwen/Qwen3-14B": _QWEN3_14B,
    "Qwen/Qwen3-Embedding-0.6B": _QWEN3_0_6B | {"vocab_size": 151669, "max_position_embeddings": 32768},
    "Qwen/Qwen3-Embedding-4B": _QWEN3_4B | {"vocab_size": 151665},
    "Qwen/Qwen3-Embedding-8B": _QWEN3_8B | {"vocab_size": 151665},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _QWEN3_NEXT_80B,
    "Qwen/Qwen3-VL-8B-Instruct": _QWEN3_VL_8B,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": _QWEN3_VL_30B,
    "Qwen/Qwen3.5-27B": _QWEN35_27B,
    "Qwen/Qwen3.5-35B-A3B": _QWEN35_35B,
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-8B": _QWEN3_8B,
    "Qwen/Qwen3-32B": _QWEN3_32B,
    "Qwen/Qwen3-32B-FP8": _QWEN3_32B | {"quantization_config": _FP8_BLOCKS},
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _QWEN3_30B | {"max_position_embeddings": 262144},
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": _QWEN3_30B | {"max_position_embeddings": 262144},
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B | {"max_position_embeddings": 262144},
    "Qwen/Qwen3-235B-A22B": _QWEN3_235B,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": _QWEN3_235B | {"max_position_embeddings": 262144},
    "Qwen/Qwen3-235B-A22B-FP8": _QWEN3_235B | {"quantization_config": _FP8_BLOCKS},
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": _QWEN3_CODER_480B,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": _QWEN3_CODER_480B | {"quantization_config": _FP8_BLOCKS},
    "Qwen/Qwen3.5-397B-A17B": _QWEN35_397B,
    "Qwen/Qwen3.5-397B-A17B-FP8": _QWEN35_397B | {"quantization_config": _FP8_BLOCKS},
    "google/gemma-3-1b-it": _GEMMA3_1B,
    "google/gemma-3-4b-it": _GEMMA3_4B,
    "google/gemma-3-12b-it": _GEMMA3_12B,
    "google/gemma-3-27b-it": _GEMMA3_27B,
    "google/gemma-4-31B-it": _GEMMA4_31B,
    "google/gemma-4-26B-A4B-it": _GEMMA4_26B,
    "google/gemma-4-12B-it": _GEMMA4_12B,
    "google/gemma-4-E2B-it": _GEMMA4_E2B,
    "google/gemma-4-E4B-it": _GEMMA4_E4B,
    "openai/gpt-oss-20b": _GPT_OSS_20B,
    "openai/gpt-oss-120b": _GPT_OSS_120B,
    "unsloth/gpt-oss-120b-BF16": {
        key: value for key, value in _GPT_OSS_120B.items() if key != "quantization_config"
    },
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-R1": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-V3-0324": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-V3.1": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-R1-0528": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _LLAMA_8B,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": _LLAMA_70B,
    "moonshotai/Kimi-K2.6": _KIMI_K2,
    "BAAI/bge-m3": _BGE_M3,
    "BAAI/bge-reranker-v2-m3": _BGE_M3 | {"architectures": ["XLMRobertaForSequenceClassification"]},
    "google/embeddinggemma-300m": _EMBEDDING_GEMMA,
    "Alibaba-NLP/gte-modernbert-base": _MODERN_BERT,
    "zai-org/GLM-4.5": _GLM45,
    "zai-org/GLM-4.5-Air": _GLM45_AIR,
    "zai-org/GLM-4.6": _GLM45 | {"max_position_embeddings": 202752},
    "zai-org/GLM-4.7-Flash": _GLM47_FLASH,
    "MiniMaxAI/MiniMax-M2": _MINIMAX_M2,
    "microsoft/phi-4": _PHI4,
    "microsoft/Phi-4-mini-instruct": _PHI4_MINI,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": _SEED_OSS_36B,
    "ibm-granite/granite-3.3-8b-instruct": _GRANITE33_8B,
    "allenai/Olmo-3-7B-Instruct": _OLMO3_7B,
    "allenai/Olmo-3-32B-Think": _OLMO3_32B,
    "mistralai/Devstral-2-123B-Instruct-2512": _DEVSTRAL2_123B,
    "CohereLabs/c4ai-command-a-03-2025": _COMMAND_A,
    "mistralai/Mistral-7B-Instruct-v0.3": _MISTRAL_7B,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _MIXTRAL_8X7B,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": _MIXTRAL_8X22B,
    "mistralai/Mistral-Small-24B-Instruct-2501": _MISTRAL_SMALL_3,
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": _MISTRAL_SMALL_31,
    "mistralai/Mistral-Small-4-119B-2603": _MISTRAL_SMALL_4,
}
