"""Bytes of cached keys and values, as tpu-inference 0.26 lays them out.

Sources: tpu_inference/runner/kv_cache_manager.py, utils.get_padded_head_dim and get_padded_num_heads, and
get_kv_cache_shape of the attention kernels (ragged_paged_attention/v3, mla/v2). Checked on a published boot log: Gemma 4
E2B on one v5e chip holds 321,376 tokens in 5.52 GiB, 18 KiB a token.
"""

import math

from serving.planning.engine_sizes import EngineSizes
from serving.planning.layout import Layout
from serving.planning.shapes import AttentionLayers, ModelShape

_LANES = 128  # kernels pad their last axis to this
_SUBLANE_BYTES = 4  # kernels pack narrower values to this
_LATENT_PAGE = 1024
_LEAST_PAGE = 16
_LONG = 8192  # tokens; longer contexts take the smallest page that the table of pages has room for
_TABLE_ENTRIES = 1024 * 1024 // 2


def token_bytes(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> float:
    """Bytes of one more token on a device, in layers that keep every token."""
    layers = sum(
        _layer_bytes(shape, kind, sizes, layout) * kind.cached
        for kind in shape.attention
        if not _window(shape, sizes, kind)
    )
    return layers * _stage(shape, layout) + _draft_bytes(sizes, layout)


def sequence_bytes(shape: ModelShape, sizes: EngineSizes, layout: Layout, length: int) -> float:
    """Bytes of a sequence of `length` tokens on a device; windowed layers keep a window and the batches that run."""
    windowed = sum(
        _layer_bytes(shape, kind, sizes, layout)
        * _in_whole_groups(shape, kind)
        * windowed_tokens(sizes, layout, window, length)
        for kind in shape.attention
        if (window := _window(shape, sizes, kind))
    )
    return windowed * _stage(shape, layout) + token_bytes(shape, sizes, layout) * length


def windowed_tokens(sizes: EngineSizes, layout: Layout, window: int, length: int) -> int:
    """Tokens that a layer with a window keeps of a sequence: a page more than it needs, as a window begins inside of one.

    Tokens of steps that run are kept, and vLLM schedules one ahead unless there are stages
    (SlidingWindowSpec.max_admission_blocks_per_request, VllmConfig.max_in_flight_tokens).
    """
    steps = layout.pipeline if layout.pipeline > 1 else 1 + sizes.schedules_ahead
    page = sizes.block_tokens or page_tokens(sizes.max_model_len or length, sizes.sequences)
    return whole_pages(min(length, window - 1 + steps * sizes.batched_tokens), page) + page


def read_bytes(shape: ModelShape, sizes: EngineSizes, layout: Layout, length: int) -> float:
    """Bytes that attention reads of a sequence of `length` tokens on a device: a window's alone, whatever the layer keeps.

    Layers that keep none read another layer's.
    """
    layers = sum(
        _layer_bytes(shape, kind, sizes, layout) * kind.count * min(length, kind.window or length)
        for kind in shape.attention
    )
    return layers * _stage(shape, layout) + _draft_bytes(sizes, layout) * length


def state_bytes(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> int:
    """Bytes of linear attention's fixed states on a device: one state for each sequence, and one spare.

    A state is float32, its convolution's tail bf16: 4,268,032 bytes a layer of Qwen3.5-397B, as in its boot log.
    """
    if not (linear := shape.linear):
        return 0
    state = (
        linear.value_heads * linear.key_dim * linear.value_dim * 4 + linear.channels * (linear.kernel - 1) * 2
    )
    per_sequence = state * linear.count / layout.head_shards * _stage(shape, layout)
    return math.ceil(per_sequence * (sizes.sequences + 1))


def page_tokens(length: int, sequences: int, *, latent: bool = False) -> int:
    """tpu-inference's page size for a context length, where `block_size` does not set it.

    Sources: get_page_size and get_min_page_size of layers/vllm/backends/flash_attn.py and flash_attn_mla.py.
    """
    if latent:
        return _LATENT_PAGE
    page = _LEAST_PAGE if length > _LONG else min(256, max(_LEAST_PAGE, _power_of_2(length) // 16))
    return max(page, _power_of_2(math.ceil(length / max(_TABLE_ENTRIES // sequences // 4, 1))))


def whole_pages(tokens: int, page: int) -> int:
    """The tokens that the pages of a sequence have room for."""
    return _padded(tokens, page)


def separate_batches(layout: Layout) -> int:
    """Groups of devices that run different requests; a token is cached in one group alone."""
    return layout.data * layout.attention_groups


def rows_of_heads(shape: ModelShape, sizes: EngineSizes, *, on_lanes: bool = False) -> float:
    """Packed rows of four bytes that a token's keys and values fill: more devices than rows hold copies.

    `on_lanes`: the kernel lays tokens, not heads, beside one another.
    """
    heads = 1 if shape.latent else shape.num_key_value_heads
    packing = _SUBLANE_BYTES // sizes.cache_itemsize * (2 if shape.head_dim == 64 else 1)
    return max(1, heads * 2 / (1 if on_lanes else packing))


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _draft_bytes(sizes: EngineSizes, layout: Layout) -> float:
    """Bytes of one token in a draft model, which keeps every token."""
    if sizes.draft is None:
        return 0.0
    return sum(_layer_bytes(sizes.draft, kind, sizes, layout) * kind.cached for kind in sizes.draft.attention)


def _layer_bytes(shape: ModelShape, kind: AttentionLayers, sizes: EngineSizes, layout: Layout) -> float:
    """Bytes of one token in a layer, which has a cache for each time that the token passes it."""
    return shape.rounds * _bytes_of_a_round(shape, kind, sizes, layout)


def _bytes_of_a_round(shape: ModelShape, kind: AttentionLayers, sizes: EngineSizes, layout: Layout) -> float:
    size = sizes.cache_itemsize
    packing = _SUBLANE_BYTES // size
    if shape.latent:  # one vector a token, whole on every device that attends to the token
        return (_padded(shape.latent.kv_rank, _LANES) + _padded(shape.latent.rope_dim, _LANES)) * size
    heads = heads_of_device(kind.kv_heads, sizes, layout)
    if kind.head_dim == 64:  # this size has its own kernel: key and value share the lanes
        return _padded(heads, packing) * _LANES * size / layout.context
    return _padded(2 * heads, packing) * _padded(kind.head_dim, _LANES) * size / layout.context


def heads_of_device(kv_heads: int, sizes: EngineSizes, layout: Layout) -> int:
    """KV heads that a device caches: all are copied until the axes have one each, then cut over model and expert.

    tpu-inference's own models count the context's devices among those axes, vLLM's do not (get_kv_cache_spec).
    """
    axes = layout.mesh["model"] if sizes.by_vllm else layout.head_shards
    return max(kv_heads, axes) // layout.attention_tensor


def _window(shape: ModelShape, sizes: EngineSizes, kind: AttentionLayers) -> int | None:
    """The window that bounds a layer's cache; None where the layer caches every token.

    tpu-inference's own models cache every token in every layer. So do vLLM's whose heads are of several sizes, as Gemma 4's
    are (get_kv_cache_spec, disable_sliding_window), and layers that attend in chunks.
    """
    heads = {_padded(layers.head_dim, _LANES) for layers in shape.attention}
    return kind.window if sizes.by_vllm and len(heads) == 1 and not kind.chunked else None


def _in_whole_groups(shape: ModelShape, kind: AttentionLayers) -> int:
    """Layers that a windowed kind takes blocks for: vLLM puts layers in groups of one size and pads the last of each kind.

    Source: _get_kv_cache_groups_uniform_page_size of vLLM's v1/core/kv_cache_utils.py.
    """
    counts = [layers.cached for layers in shape.attention if layers.cached]
    if not counts:
        return 0
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    return math.ceil(kind.cached / size) * size


def _stage(shape: ModelShape, layout: Layout) -> float:
    return math.ceil(shape.layers / layout.pipeline) / shape.layers


def _padded(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
