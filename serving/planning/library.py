"""`config.json` of models people serve, cut to the keys a plan reads, so that planning works without a network.

Carried from the named repositories on Hugging Face; keys keep their names there.
"""

from typing import Any

_LLAMA: dict[str, Any] = {
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

_QWEN3: dict[str, Any] = {
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

CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": _LLAMA_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA_70B,
    "meta-llama/Llama-3.1-70B-Instruct": _LLAMA_70B,
    "meta-llama/Llama-3.1-405B": _LLAMA_405B,
    "meta-llama/Llama-3.1-405B-Instruct": _LLAMA_405B,
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_70B,
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-8B": _QWEN3_8B,
    "Qwen/Qwen3-32B": _QWEN3_32B,
}
