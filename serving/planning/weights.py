"""Bytes of a model by tensor group, and how many of them each device holds.

Norms and biases are left out: under 0.05% of every known model.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from serving.planning.architectures import DENSE_DRAFTS, EMBEDDINGS_AS_HEADS, JAX_MODELS
from serving.planning.engine_sizes import EngineSizes, engine_sizes
from serving.planning.layout import Layout
from serving.planning.quantization import bytes_per_weight
from serving.planning.shapes import LatentAttention, ModelShape

# Of tpu-inference 0.26's own models these make the output head without saying how to cut it, which leaves it whole on every
# device (models/jax/qwen2.py, qwen3.py, qwen2_5_vl.py, gemma4.py: JaxLmHead without a partition).
_WHOLE_HEADS = (
    "Gemma4ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
)
# And these cut the embedding over the mesh's axis `model` alone; the others cut it over every device.
_EMBEDDINGS_BY_MODEL_AXIS = (*_WHOLE_HEADS, "Gemma4ForConditionalGeneration")
# Of vLLM's models these have encoders that torchax leaves whole on every device, all or this share: transformers' own (gemma4_mm.py),
# or linear layers without a quant_config (mllama4.py; siglip.py for MLPs of 4,304; what follows the first one of gemma4_unified.py).
_WHOLE_TOWERS_BY_VLLM = {
    "Gemma4ForConditionalGeneration": 1.0,
    "Llama4ForConditionalGeneration": 1.0,
    "Gemma3ForConditionalGeneration": 0.65,
    "Gemma4UnifiedForConditionalGeneration": 0.5,
}
# And these pad the vocabulary to whole parts for every device, as vLLM's do.
_PADDED_VOCABULARIES = ("Qwen3ForCausalLM",)
# Lanes that the first product of experts is padded to on every device (layers/common/process_weights/moe_weights.py), and the
# blocks that both sides of mxfp4 experts are padded to, with a float32 scale each (layers/vllm/quantization/mxfp4.py).
_EXPERT_LANES = 128
MXFP4_BLOCK = 512
_PRECISE_ROTARY_TABLES = ("GptOssForCausalLM",)  # vLLM's gpt_oss.py asks for float32
_LAST_STAGE = ("output head", "draft")
# Norms, biases, tokenizer and configs beside the weights that a plan counts.
_BESIDE_WEIGHTS = 1.05


@dataclass(frozen=True)
class TensorGroup:
    """Weights of one kind. `active` of the `params` work on one token; the slice holds `copies` of all of them.

    `layered` groups are cut over the pipeline's stages; the others lie whole on the first or last stage.
    """

    name: str
    params: int
    active: int
    format: str
    copies: float = 1  # a mean where some of these weights are copied and others are cut
    layered: bool = True
    padding: float = 1.0  # bytes that lie on devices for each that is counted
    made: bool = False  # in no checkpoint: the engine makes it at start, or has it of another one

    @property
    def held_bytes(self) -> float:
        """Bytes of all devices together."""
        return self.bytes * self.copies * self.padding

    @property
    def bytes(self) -> int:
        return round(self.params * bytes_per_weight(self.format))

    @property
    def active_bytes(self) -> int:
        return round(self.active * bytes_per_weight(self.format))


def tensor_groups(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> tuple[TensorGroup, ...]:
    """Every weight once, in groups that are stored and cut alike; empty groups are left out."""
    return tuple(_in_rounds(group, shape) for group in _groups(shape, sizes, layout) if group.params)


def device_bytes(groups: tuple[TensorGroup, ...], shape: ModelShape, layout: Layout) -> int:
    """Bytes of weights on the fullest device: a stage's layers, and what lies on the first stage or on the last one."""
    stage_layers = math.ceil(shape.layers / layout.pipeline)
    layered = sum(group.held_bytes for group in groups if group.layered) * stage_layers / shape.layers
    ends = [group for group in groups if not group.layered]
    last = sum(group.held_bytes for group in ends if group.name.startswith(_LAST_STAGE))
    first = sum(group.held_bytes for group in ends) - last
    return math.ceil((layered + (first + last if layout.pipeline == 1 else max(first, last))) / layout.width)


def checkpoint_bytes(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> int:
    """Bytes of the checkpoint's files, in their own format: the engine may quantise as it loads."""
    stored = replace(sizes, quantization=shape.quantization, expert_format=None, by_vllm=False)
    groups = tensor_groups(shape, stored, layout)
    return math.ceil(sum(group.bytes for group in groups if not group.made) * _BESIDE_WEIGHTS)


def checkpoint_params(shape: ModelShape) -> int:
    """All parameters of a checkpoint: the model's, its encoders', and the layers that only draft tokens."""
    sizes = engine_sizes({}, shape)
    tables = 2 * shape.vocab_size * shape.hidden_size if shape.drafts_have_tables else 0
    groups = tensor_groups(shape, sizes, Layout(1))
    loaded = sum(group.params for group in groups if not group.made)
    return loaded + shape.drafts * (_draft_layer(shape) + tables)


def _in_rounds(group: TensorGroup, shape: ModelShape) -> TensorGroup:
    """Weights that work on a token once each time it passes the layers."""
    return replace(group, active=group.active * shape.rounds) if group.layered else group


def _groups(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> Iterator[TensorGroup]:
    full_size = sizes.weight_format

    def stored(module: str) -> str:
        name = f"model.layers.{shape.layers // 2}.{module}"
        return (
            sizes.quantization.format
            if sizes.quantization and sizes.quantization.applies_to(name)
            else full_size
        )

    table = shape.vocab_size * shape.hidden_size
    yield TensorGroup(
        "embedding",
        table + shape.position_rows * shape.hidden_size,
        table if shape.tied_embeddings and not sizes.pools else shape.hidden_size,
        full_size,
        _embedding_copies(shape, sizes, layout),
        layered=False,
    )
    head = 0 if sizes.pools else table
    yield TensorGroup(
        "output head",
        0 if shape.tied_embeddings else head,
        head,
        full_size,
        _head_copies(shape, sizes, layout),
        layered=False,
    )
    cut, whole = _attention(shape)
    copies = layout.attention_copies
    # Of latent attention vLLM's keeps the way out of the latent vector in the cache's format (custom_ops/mla_attention.py).
    apart = _expansions(shape, shape.latent) if shape.latent and sizes.by_vllm else 0
    yield TensorGroup("attention", cut - apart, cut - apart, stored("self_attn.q_proj"), copies)
    kept = "fp8" if sizes.cache_itemsize == 1 else "float32"
    yield TensorGroup("latent expansions", apart, apart, kept, copies)
    yield TensorGroup(
        "key/value projections", whole, whole, stored("self_attn.k_proj"), _kv_copies(shape, layout)
    )
    linear = _linear(shape)
    yield TensorGroup("linear attention", linear, linear, stored("linear_attn.in_proj_qkv"), copies)
    matrices = shape.mlp_matrices
    dense = sum(matrices * shape.hidden_size * width * layers for layers, width in shape.mlp_widths)
    cut_by_heads = 1 if _cuts_mlp_over_all(shape, sizes) else copies
    yield TensorGroup("MLP", dense, dense, stored("mlp.gate_proj"), cut_by_heads)
    if experts := shape.experts:
        expert = 3 * shape.hidden_size * experts.width * experts.layers
        shared = 3 * shape.hidden_size * experts.shared_width * experts.layers
        router = shape.hidden_size * experts.count * experts.layers
        yield TensorGroup(
            "experts",
            expert * experts.count,
            expert * experts.per_token,
            sizes.expert_format or stored("mlp.experts.0.gate_proj"),
            padding=_expert_padding(shape, experts.width, sizes, layout),
        )
        yield TensorGroup(
            "shared experts", shared, shared, stored("mlp.shared_experts.gate_proj"), cut_by_heads
        )
        yield TensorGroup("routers", router, router, full_size, layout.width)
    if shape.per_layer_embedding:
        yield from _per_layer(shape, sizes, layout)
    if sizes.by_vllm and not shape.position_rows:
        turns = shape.max_position_embeddings * shape.rotary_columns
        precise = "float32" if shape.architecture in _PRECISE_ROTARY_TABLES else full_size
        yield TensorGroup("rotary tables", turns, 0, precise, layout.width, layered=False, made=True)
    if sizes.towers:
        yield from _towers(shape, sizes, layout)
    if sizes.draft:
        plain = replace(sizes, quantization=sizes.draft.quantization, draft=None, lora_rank=0)
        for group in _groups(sizes.draft, plain, layout):
            yield replace(group, name=f"draft {group.name}", layered=False)
    if sizes.draft_layers:
        drafting = sizes.draft_layers * _draft_layer(shape)
        yield TensorGroup("draft layers", drafting, drafting, stored("mlp.gate_proj"), layered=False)
    cut, whole = _adapters(shape, sizes.lora_rank)
    yield TensorGroup("LoRA adapters", cut, cut, full_size, made=True)
    yield TensorGroup("LoRA adapters held whole", whole, whole, full_size, layout.width, made=True)


def _per_layer(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> Iterator[TensorGroup]:
    row = shape.per_layer_embedding * shape.layers
    mixed = shape.hidden_size * row
    lookups = 1 if sizes.by_vllm else _embedding_copies(shape, sizes, layout)
    projections = layout.width if sizes.by_vllm else lookups
    full_size = sizes.weight_format
    yield TensorGroup("per-layer embeddings", shape.vocab_size * row + mixed, row + mixed, full_size, lookups)
    yield TensorGroup("per-layer projections", 2 * mixed, 2 * mixed, full_size, projections)


def _towers(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> Iterator[TensorGroup]:
    others, audio = shape.tower_params - shape.audio_params, shape.audio_params
    copies = _tower_copies(shape, sizes, layout)
    yield TensorGroup("multimodal towers", others, 0, sizes.weight_format, copies, layered=False)
    # tpu-inference 0.26's own Gemma 4 leaves it in the checkpoint (models/jax/gemma4_mm.py, load_weights).
    held = 0.0 if shape.architecture in JAX_MODELS and not sizes.by_vllm else 1.0
    yield TensorGroup("audio tower", audio, 0, sizes.weight_format, copies, layered=False, padding=held)


def _draft_layer(shape: ModelShape) -> int:
    """Parameters of a layer for multi-token prediction: one of the model's, and two squares that join its inputs."""
    hidden = shape.hidden_size
    cut, whole = _attention(shape)
    attending = shape.layers if shape.low_rank else sum(kind.count for kind in shape.attention)
    width = shape.mlp_widths[-1][1] if shape.mlp_widths else 0
    if (experts := shape.experts) and shape.architecture not in DENSE_DRAFTS:
        width = experts.width * experts.count + experts.shared_width
    return (cut + whole) // max(attending, 1) + 3 * hidden * width + 2 * hidden**2


def _attention(shape: ModelShape) -> tuple[int, int]:
    """Parameters cut by heads, and those of keys and values, copied where heads are too few."""
    if compressed := shape.low_rank:
        return _latent(shape, compressed)
    hidden = shape.hidden_size
    queries = (2 if shape.gated_attention else 1) * (shape.query_rank or hidden)
    cut = sum(kind.count * (queries + hidden) * kind.heads * kind.head_dim for kind in shape.attention)
    whole = sum(hidden * columns for _, columns in _kv_columns(shape))
    return cut, whole + hidden * shape.query_rank * shape.layers


def _kv_columns(shape: ModelShape) -> list[tuple[int, int]]:
    """(KV heads, columns of all projections to them) of layers that attend alike."""
    return [
        (
            kind.kv_heads,
            kind.count * (1 if kind.keys_are_values else 2) * kind.kv_heads * kind.head_dim,
        )
        for kind in shape.attention
    ]


def _latent(shape: ModelShape, latent: LatentAttention) -> tuple[int, int]:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    query_dim = heads * (latent.nope_dim + latent.rope_dim)
    query_in = latent.query_rank or hidden
    cut = query_in * query_dim + heads * latent.value_dim * hidden
    whole = hidden * (latent.query_rank + latent.kv_rank + latent.rope_dim)
    return cut * shape.layers + _expansions(shape, latent), whole * shape.layers


def _expansions(shape: ModelShape, latent: LatentAttention) -> int:
    """Parameters of the way from the latent vector to every head's keys and values."""
    return shape.layers * latent.kv_rank * shape.num_attention_heads * (latent.nope_dim + latent.value_dim)


def _linear(shape: ModelShape) -> int:
    if not (linear := shape.linear):
        return 0
    values = linear.value_heads * linear.value_dim
    projections = shape.hidden_size * (linear.channels + 2 * values + 2 * linear.value_heads)
    return linear.count * (projections + linear.channels * linear.kernel)


def _kv_copies(shape: ModelShape, layout: Layout) -> float:
    """Latent projections lie on every device; KV heads are copied until every device has one."""
    if shape.low_rank:
        return layout.width
    projections = _kv_columns(shape)
    held = sum(columns * max(1, layout.head_shards // heads) for heads, columns in projections)
    return layout.attention_copies * held / max(1, sum(columns for _, columns in projections))


def _embedding_copies(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> int:
    if sizes.by_vllm:
        held_once = sizes.pools or not shape.tied_embeddings or shape.architecture in EMBEDDINGS_AS_HEADS
        return 1 if held_once else 2
    by_axis = shape.architecture in _EMBEDDINGS_BY_MODEL_AXIS
    return layout.width // layout.mesh["model"] if by_axis else 1


def _tower_copies(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> float:
    """Encoders are cut as heads are, over the axis `model` (gemma4_mm.py and qwen2_5_vl.py) or as vLLM's linear layers."""
    if sizes.by_vllm:
        whole = _WHOLE_TOWERS_BY_VLLM.get(shape.architecture, 0.0)
        return whole * layout.width + (1 - whole) * layout.attention_copies
    return layout.width if sizes.whole_towers else layout.width // layout.mesh["model"]


def _head_copies(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> int:
    return layout.width if shape.architecture in _WHOLE_HEADS and not sizes.by_vllm else 1


def _expert_padding(shape: ModelShape, width: int, sizes: EngineSizes, layout: Layout) -> float:
    """Two of an expert's three matrices are padded to whole lanes, by each device where they are cut over all."""
    shards = 1 if experts_lie_whole(shape, sizes, layout) else layout.width
    in_blocks = not sizes.expert_format and sizes.quantization and sizes.quantization.format == "mxfp4"
    second = _aligned(width, MXFP4_BLOCK) if in_blocks else width
    first = 2 * _aligned(second, _EXPERT_LANES * shards)
    if not in_blocks:
        return (first + second) / (3 * width)
    per_weight = (0.5 + 4 / MXFP4_BLOCK) / bytes_per_weight("mxfp4")
    rows = _aligned(shape.hidden_size, MXFP4_BLOCK)
    return per_weight * (first + second) / (3 * width) * rows / shape.hidden_size


def experts_lie_whole(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> bool:
    """Whether a device has some of the experts, each of them whole, not a part of each.

    tpu-inference's own DeepSeek reads that from the mesh, all other models from vLLM's option (JaxRoutedExperts._compute_use_ep).
    """
    if shape.architecture == "DeepseekV3ForCausalLM" and not sizes.by_vllm:
        return layout.expert > 1
    return sizes.expert_parallel


def uneven(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> list[str]:
    """What the engine would cut over devices that it does not divide by, which ends its start while it loads (JAX's IndivisibleError)."""
    over_all = _cuts_mlp_over_all(shape, sizes)
    gemma4 = shape.architecture == "Gemma4ForConditionalGeneration"
    remedy = (
        "; engine.additional_config: {mm-encoder-tp-mode: data} leaves the encoder whole" if gemma4 else ""
    )
    cuts = [
        ("intermediate_size", width, layout.width if over_all else layout.head_shards, "")
        for _, width in shape.mlp_widths
    ]
    if not sizes.by_vllm and shape.architecture not in _PADDED_VOCABULARIES:
        shards = layout.width // _embedding_copies(shape, sizes, layout)
        cuts.append(("vocab_size", shape.vocab_size, shards, ""))
    if sizes.towers:
        shards = int(layout.width / _tower_copies(shape, sizes, layout))
        cuts += [(f"vision_config.{key}", size, shards, remedy) for key, size in shape.encoder_sizes]
    return [
        f"its {key}, {size}, does not divide by {devices} devices{mended}"
        for key, size, devices, mended in cuts
        if size % devices
    ]


def _aligned(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _cuts_mlp_over_all(shape: ModelShape, sizes: EngineSizes) -> bool:
    """Whether devices that share attention by requests cut the MLP as one; else each group holds it whole.

    Of tpu-inference 0.26's models only its own Llama does (models/jax/llama3.py: MLP_TENSOR, not ATTN_HEAD or model).
    """
    return shape.architecture == "LlamaForCausalLM" and not sizes.by_vllm


def _adapters(shape: ModelShape, rank: int) -> tuple[int, int]:
    """Low-rank pairs beside every projection but those of experts: what is cut over devices, and what all hold whole.

    tpu-inference 0.26 cuts the outer halves of query, key, value, gate and up, and nothing else
    (layers/vllm/process_weights/cleanup_sharding.py).
    """
    hidden = shape.hidden_size
    matrices = shape.mlp_matrices
    cut = sum(
        kind.count * (kind.heads + 2 * kind.kv_heads) * kind.head_dim for kind in shape.attention
    ) + sum(layers * (matrices - 1) * width for layers, width in shape.mlp_widths)
    whole = sum(kind.count * (4 * hidden + kind.heads * kind.head_dim) for kind in shape.attention) + sum(
        layers * (matrices * hidden + width) for layers, width in shape.mlp_widths
    )
    return rank * cut, rank * whole
