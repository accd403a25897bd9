"""The plan's cache is the engine's: the installed vLLM groups the layers of models with windows."""

import pytest

from serving.planning.cache import page_tokens, sequence_bytes
from serving.planning.engine_sizes import engine_sizes
from serving.planning.layout import Layout
from serving.planning.shapes import shape_of

pytestmark = pytest.mark.engine

LONG, BATCHED = 1 << 16, 2048


@pytest.mark.parametrize(
    "model",
    [
        "google/gemma-3-4b-it",
        "google/gemma-3-12b-it",
        "google/gemma-3-27b-it",
        "CohereLabs/c4ai-command-a-03-2025",
        "allenai/Olmo-3-7B-Instruct",
    ],
)
def test_windowed_layers_take_the_blocks_of_vllm_s_groups(model: str) -> None:
    import torch
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape = shape_of(model)
    sizes = engine_sizes({"max_num_batched_tokens": BATCHED, "max_model_len": LONG}, shape)
    block = page_tokens(LONG, sizes.sequences)
    specs = {}
    for kind in shape.attention:
        for layer in range(kind.cached):
            numbers = {"block_size": block, "num_kv_heads": kind.kv_heads, "head_size": kind.head_dim}
            name, page = f"{kind.window}.{layer}", {**numbers, "dtype": torch.bfloat16}
            specs[name] = (
                SlidingWindowSpec(**page, sliding_window=kind.window)
                if kind.window
                else FullAttentionSpec(**page)
            )
    groups = _get_kv_cache_groups_uniform_page_size(specs)
    layers = max(len(group.layer_names) for group in groups)
    blocks = sum(
        group.kv_cache_spec.max_admission_blocks_per_request(2 * BATCHED, LONG)
        if isinstance(group.kv_cache_spec, SlidingWindowSpec)
        else LONG // block
        for group in groups
    )
    kind = shape.attention[0]
    assert (
        sequence_bytes(shape, sizes, Layout(1), LONG)
        == blocks * layers * block * 2 * kind.kv_heads * max(kind.head_dim, 128) * 2
    )
