"""Ragged paged attention in plain jnp: the Pallas kernels' signatures, cache layouts and results, for XLA's CPU backend.

Work follows the real tokens, not the padded ones: a loop over the sequences of the step, and inside it a loop over a
sequence's blocks of KV with a running softmax. Decoding sequences take one row of queries, others PREFILL_ROWS at a time.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

PREFILL_ROWS = 32
KV_BLOCK_TOKENS = 128
_MASKED = -1e30  # not -inf: (-inf) - (-inf) is nan


class _Options(NamedTuple):
    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None


def ragged_paged_attention(
    queries: Array,
    keys: Array,
    values: Array,
    kv_cache: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    distribution: Array,
    *,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **_tuning: object,
) -> tuple[Array, Array]:
    """Stands in for kernels.ragged_paged_attention.v3.kernel; head_dim padded to 128, K and V heads interleaved.

    queries [T, H, D], keys and values [T, K, D], kv_cache [pages, page_size, 2K // packing, packing, 128n];
    returns [T, H, D] and the cache.
    """
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel  # noqa: PLC0415

    heads, dim = keys.shape[1:]

    def split(kv: Array) -> tuple[Array, Array]:
        pairs = kv.reshape(kv.shape[0], -1, kv.shape[-1])[:, : 2 * heads].reshape(kv.shape[0], heads, 2, -1)
        return pairs[:, :, 0, :dim], pairs[:, :, 1, :dim]

    options = _Options(sm_scale, use_causal_mask, sliding_window, soft_cap, q_scale, k_scale, v_scale)
    new = kernel.merge_kv(keys, values) if update_kv_cache else None
    batch = _Batch(kv_lens, page_indices.reshape(kv_lens.shape[0], -1), cu_q_lens, distribution)
    return _attend(queries, new, kv_cache, batch, split, heads, options, sinks=None)


def ragged_paged_attention_hd64(
    queries: Array,
    keys: Array,
    values: Array,
    kv_cache: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    distribution: Array,
    attention_sink: Array | None = None,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **_tuning: object,
) -> tuple[Array, Array]:
    """Stands in for kernels.ragged_paged_attention.v3.kernel_hd64; head_dim 64, K and V of a head side by side."""
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel_hd64  # noqa: PLC0415

    heads = keys.shape[1]

    def split(kv: Array) -> tuple[Array, Array]:
        rows = kv.reshape(kv.shape[0], -1, 128)[:, :heads]
        return rows[..., :64], rows[..., 64:]

    options = _Options(sm_scale, True, sliding_window, soft_cap, q_scale, k_scale, v_scale)
    batch = _Batch(kv_lens, page_indices.reshape(kv_lens.shape[0], -1), cu_q_lens, distribution)
    return _attend(
        queries, kernel_hd64.merge_kv(keys, values), kv_cache, batch, split, heads, options, attention_sink
    )


class _Batch(NamedTuple):
    """The sequences of a step: the first `distribution[0]` decode, up to `distribution[2]` are in prefill."""

    kv_lens: Array
    pages: Array
    cu_q_lens: Array
    distribution: Array

    def positions(self, tokens: int) -> tuple[Array, Array, Array]:
        """For each token: its sequence, its position in the sequence, and whether it is a token (not padding)."""
        token = jnp.arange(tokens)
        sequences = self.kv_lens.shape[0]
        count = self.distribution[2]
        starts = jnp.where(jnp.arange(sequences + 1) <= count, self.cu_q_lens[: sequences + 1], tokens + 1)
        sequence = jnp.clip(jnp.searchsorted(starts, token, side="right") - 1, 0, sequences - 1)
        written = self.kv_lens[sequence] - (self.cu_q_lens[sequence + 1] - self.cu_q_lens[sequence])
        return sequence, written + token - self.cu_q_lens[sequence], token < self.cu_q_lens[count]


def _attend(
    queries: Array,
    new_kv: Array | None,
    kv_cache: Array,
    batch: _Batch,
    split: Callable[[Array], tuple[Array, Array]],
    kv_heads: int,
    options: _Options,
    sinks: Array | None,
) -> tuple[Array, Array]:
    tokens, heads, dim = queries.shape
    page_size = kv_cache.shape[1]
    if new_kv is not None:
        kv_cache = _write(kv_cache, new_kv, batch)
    block_pages = max(1, KV_BLOCK_TOKENS // page_size)
    block = block_pages * page_size
    pages = jnp.pad(batch.pages, ((0, 0), (0, -batch.pages.shape[1] % block_pages)))
    group = heads // kv_heads
    scaled = (queries if options.q_scale is None else queries / options.q_scale).astype(jnp.float32)
    padded = jnp.pad(
        scaled.reshape(tokens, kv_heads, group, dim), ((0, PREFILL_ROWS), (0, 0), (0, 0), (0, 0))
    )
    start_max = (
        jnp.full((kv_heads, group), _MASKED)
        if sinks is None
        else sinks.reshape(kv_heads, group).astype(jnp.float32)
    )

    def rows_of(sequence: Array, offset: Array, rows: int, out: Array) -> Array:
        """Attention of `rows` queries of a sequence, from its query `offset` on, written into `out`."""
        first_token = batch.cu_q_lens[sequence] + offset
        queries_left = batch.cu_q_lens[sequence + 1] - first_token
        kv_len = batch.kv_lens[sequence]
        first = kv_len - queries_left
        position = first + jnp.arange(rows)
        q = lax.dynamic_slice(padded, (first_token, 0, 0, 0), (rows, kv_heads, group, dim))
        seen = jnp.minimum(first + rows, kv_len) if options.causal else kv_len
        from_block = 0 if options.window is None else jnp.maximum(first - options.window + 1, 0) // block

        def add_block(index: Array, running: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, mixed = running
            own = lax.dynamic_slice(pages, (sequence, index * block_pages), (1, block_pages))[0]
            held = [
                lax.dynamic_index_in_dim(kv_cache, own[page], keepdims=False) for page in range(block_pages)
            ]
            k, v = split(jnp.concatenate(held))
            kv_position = index * block + jnp.arange(block)
            visible = _visible(position[:, None], kv_position[None], kv_len, options)
            v = jnp.where((kv_position < kv_len)[:, None, None], v.astype(jnp.float32), 0.0)
            score = _scores(jnp.einsum("rkgd,skd->kgrs", q, k.astype(jnp.float32)), options)
            score = jnp.where(visible, score, _MASKED)
            new_top = jnp.maximum(top, score.max(-1))
            weight = jnp.where(visible, jnp.exp(score - new_top[..., None]), 0.0)
            shrink = jnp.exp(top - new_top)
            mixed = mixed * shrink[..., None] + jnp.einsum("kgrs,skd->kgrd", weight, v)
            return new_top, total * shrink + weight.sum(-1), mixed

        top = jnp.broadcast_to(start_max[..., None], (kv_heads, group, rows))
        total = jnp.full((kv_heads, group, rows), 0.0 if sinks is None else 1.0)
        mixed = jnp.zeros((kv_heads, group, rows, dim))
        _, total, mixed = lax.fori_loop(
            from_block, (seen + block - 1) // block, add_block, (top, total, mixed)
        )
        result = (mixed / jnp.maximum(total, 1e-30)[..., None]).transpose(2, 0, 1, 3)
        before = lax.dynamic_slice(out, (first_token, 0, 0, 0), result.shape)
        kept = jnp.where((jnp.arange(rows) < queries_left)[:, None, None, None], result, before)
        return lax.dynamic_update_slice(out, kept, (first_token, 0, 0, 0))

    def prefill(sequence: Array, out: Array) -> Array:
        queries_of = batch.cu_q_lens[sequence + 1] - batch.cu_q_lens[sequence]
        return lax.fori_loop(
            0,
            (queries_of + PREFILL_ROWS - 1) // PREFILL_ROWS,
            lambda index, out: rows_of(sequence, index * PREFILL_ROWS, PREFILL_ROWS, out),
            out,
        )

    decoding, _, count = batch.distribution
    out = jnp.zeros_like(padded)
    out = lax.fori_loop(0, decoding, lambda sequence, out: rows_of(sequence, jnp.int32(0), 1, out), out)
    out = lax.fori_loop(decoding, count, prefill, out)[:tokens]
    if options.v_scale is not None:
        out = out * options.v_scale
    return out.reshape(tokens, heads, dim).astype(queries.dtype), kv_cache


def _write(kv_cache: Array, new_kv: Array, batch: _Batch) -> Array:
    """New KV into its pages, one update of one slot a token: a scatter would copy the whole cache, twice."""
    page_size = kv_cache.shape[1]
    sequence, position, _ = batch.positions(new_kv.shape[0])
    page = batch.pages[sequence, jnp.clip(position // page_size, 0, batch.pages.shape[1] - 1)]
    rows = new_kv.astype(kv_cache.dtype)[:, None, None]

    def write_token(token: Array, cache: Array) -> Array:
        return lax.dynamic_update_slice(
            cache, rows[token], (page[token], position[token] % page_size, 0, 0, 0)
        )

    return lax.fori_loop(0, batch.cu_q_lens[batch.distribution[2]], write_token, kv_cache)


def _visible(position: Array, kv_position: Array, kv_len: Array, options: _Options) -> Array:
    visible = kv_position < kv_len
    if options.causal:
        visible &= kv_position <= position
    if options.window is not None:
        visible &= position < kv_position + options.window
    return visible


def _scores(raw: Array, options: _Options) -> Array:
    score = raw * options.scale
    for factor in (options.k_scale, options.q_scale):
        if factor is not None:
            score = score * factor
    if options.soft_cap is not None:
        score = options.soft_cap * jnp.tanh(score / options.soft_cap)
    return score


def install() -> None:
    """Replace the Pallas kernels; call it before tpu_inference's attention layers are imported."""
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel, kernel_hd64  # noqa: PLC0415

    kernel.ragged_paged_attention = ragged_paged_attention
    kernel_hd64.ragged_paged_attention_hd64 = ragged_paged_attention_hd64
