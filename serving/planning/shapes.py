"""What a checkpoint's `config.json` says about its size, read without loading anything.

One reader serves all architectures, by the keys they share. It refuses an architecture outside `architectures.py`: a key
it did not read would be memory it did not count.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serving.errors import ConfigError, PlanError
from serving.planning.architectures import (
    ARCHITECTURES,
    DENSE_DRAFTS,
    DRAFTS,
    ENCODERS,
    FOUR_TIMES_AS_WIDE,
    LEARNED_POSITIONS,
    NO_ALIBI,
    OWN_NAMES,
    PARTS,
    WHOLE_CACHE,
    WITHOUT_GATES,
    counted,
    drafts_in_jax,
)
from serving.planning.blocks import Block, blocks, widths
from serving.planning.checked_config import MOST, Keys, missing
from serving.planning.checkpoints import Hub, config_of, no_hub
from serving.planning.quantization import Quantization, read_quantization

_TOWERS = ("vision_config", "audio_config")
_MOST_LAYERS = 10_000
_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}  # of layer_types
_QWEN_VL = ("Qwen2_5_VL", "Qwen3VL", "Qwen3_5")
_GEMMA4_ENCODER_HEADS = 12  # unless vision_config says otherwise
_GEMMA4_POSITIONS = 10240  # of each axis of a picture, unless vision_config says otherwise


@dataclass(frozen=True)
class AttentionLayers:
    """Layers that attend alike; `cached` of them keep keys and values, the rest read another layer's.

    They look `window` tokens back, None for all; `chunked` layers look back to a multiple of the window.
    `keys_are_values`: one projection serves both.
    """

    count: int
    cached: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    chunked: bool = False
    keys_are_values: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA): keys and values are one compressed vector a token."""

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class LinearAttention:
    """Layers with a state of fixed size a sequence instead of a cache (gated delta net)."""

    count: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class Experts:
    """The routed experts of `layers` layers, and the width of the experts that every token passes."""

    count: int
    per_token: int
    width: int
    layers: int
    shared_width: int
    groups: int = 1  # the best of which a token's experts are chosen from


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a checkpoint that decide its bytes and how it can be cut up.

    `scores`: the model rates texts and writes none. `drafts` are layers beside these that draft tokens (multi-token
    prediction), with embedding and head of their own where `drafts_have_tables`; the engine loads them if it drafts by them.
    """

    architecture: str
    hidden_size: int
    layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int  # rope scaling included
    attention: tuple[AttentionLayers, ...]
    mlp_widths: tuple[tuple[int, int], ...]  # (layers, width) of the dense MLPs
    tied_embeddings: bool
    dtype: str
    position_rows: int = 0  # of tables beside the embedding: learned positions and kinds of tokens
    low_rank: LatentAttention | None = None  # keys and values are projected by way of one vector
    query_rank: int = 0  # width that queries are projected to first; 0: they are not
    rotary_columns: int = 0  # of all tables that have a row of sines and cosines for each position
    rounds: int = 1  # times that a token passes all layers
    linear: LinearAttention | None = None
    experts: Experts | None = None
    gated_attention: bool = False
    per_layer_embedding: int = 0  # width each layer adds to the embedding (Gemma 3n, Gemma 4 E models)
    tower_params: int = 0
    audio_params: int = 0  # of them, the audio tower's
    encoder_sizes: tuple[tuple[str, int], ...] = ()  # by key of vision_config: what devices share evenly
    quantization: Quantization | None = None
    scores: bool = False
    drafts: int = 0
    drafts_have_tables: bool = False
    default_length: int = 0  # the engine's where the YAML gives none; 0: all positions
    longest_allowed: int = 0  # `model_max_length`, where the checkpoint allows more than its positions

    @property
    def mlp_matrices(self) -> int:
        """Of a dense MLP: up and down, and a gate."""
        return 2 if self.architecture in WITHOUT_GATES else 3

    @property
    def latent(self) -> LatentAttention | None:
        """The vector that a token's keys and values are cached as; None where they are cached in full."""
        return None if self.architecture in WHOLE_CACHE else self.low_rank

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Numbers of attention heads, the model's own first; some families give their layers several."""
        return tuple(dict.fromkeys((self.num_attention_heads, *(kind.heads for kind in self.attention))))

    @property
    def encodes(self) -> bool:
        """Whether tokens attend to all others of their text, and nothing is cached."""
        return bool(self.attention) and not any(kind.cached for kind in self.attention)


def shape_of(model: str, overrides: Any = None, hub: Hub = no_hub) -> ModelShape:
    """The shape of a checkpoint; overrides are vLLM's `hf_overrides`, `hub` gives a config that is not known here."""
    if not isinstance(overrides or {}, Mapping):
        raise ConfigError(f"engine.hf_overrides: a mapping of config.json keys (got {overrides!r})")
    return read_config(_merged(config_of(model, hub), overrides or {}), where=model)


def draft_shape_of(model: str, method: str, hub: Hub = no_hub) -> tuple[ModelShape, bool]:
    """The shape of a draft model, and whether tpu-inference has it in JAX.

    Embedding and head are counted though some drafts share the target's.
    """
    config = config_of(model, hub)
    in_jax = False
    match config.get("architectures"):
        case [str(name), *_]:
            in_jax = drafts_in_jax(method, name)
            config = {**config, "architectures": [DRAFTS.get(name, name)]}
    return read_config(config, where=model), in_jax


def read_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape a config describes. Multimodal wrappers keep the decoder under `text_config`."""
    architecture, scores = _architecture(config, where)
    wrapper = Keys(config, where)
    given = {**ARCHITECTURES[architecture], **config, **_text(wrapper)}
    own_names = OWN_NAMES.get(architecture, {})
    for part in PARTS.get(architecture, ()):
        given |= {key: value for key, value in _mapping(wrapper, part).items() if key in own_names.values()}
    for name, own in own_names.items():
        if given.get(name) is None:
            given[name] = given.get(own)
        match given[name]:
            case [value, *others] if all(other == value for other in others):  # one a layer, all the same
                given[name] = value
    text = Keys(given, where)
    if text.get("alibi"):
        raise PlanError(f"{where} is a {architecture} with ALiBi, which is not served on TPUs: {NO_ALIBI}")
    heads = text.number("num_attention_heads")
    hidden = text.number("hidden_size")
    layers = text.number("num_hidden_layers", most=_MOST_LAYERS)
    kv_heads = _kv_heads(text, heads)
    if heads % kv_heads and not text.get("kv_lora_rank"):
        raise PlanError(
            f"config.json of {where}: num_attention_heads, {heads}, is no multiple of num_key_value_heads, {kv_heads}"
        )
    head_dim = text.number("head_dim", max(hidden // heads, 1))
    low_rank = _low_rank(text, hidden // heads)
    if low_rank and architecture in WHOLE_CACHE:
        head_dim = low_rank.nope_dim + low_rank.rope_dim
    listed = blocks(text, layers, heads)
    if listed:
        kv_heads = max(block.kv_heads for block in listed) or kv_heads
    kinds = _kinds(text, layers, where)
    towers = {
        name: _tower(tower, name, hidden, architecture)
        for name in _TOWERS
        if (tower := wrapper.within(name))
        and not architecture.endswith("ForCausalLM")  # a decoder alone, whatever else the checkpoint has
    }
    experts = _experts(text, layers)
    attention = _attention(
        text,
        kinds,
        _heads(text, listed, layers, heads, kv_heads),
        head_dim,
        caches=not _is_encoder(text, architecture),
    )
    return ModelShape(
        architecture=architecture,
        hidden_size=hidden,
        layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=text.number("vocab_size"),
        max_position_embeddings=_positions(text, architecture),
        attention=attention,
        mlp_widths=widths(listed) if listed else _mlp_widths(text, architecture, layers, experts),
        tied_embeddings=bool(text.get("tie_word_embeddings")),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"),
        position_rows=_position_rows(text, architecture),
        low_rank=low_rank,
        query_rank=text.number("share_q_dim", 0, least=0),
        rotary_columns=low_rank.rope_dim if low_rank else _rotary_columns(text, attention, architecture),
        rounds=text.number("total_ut_steps", 1),
        linear=_linear(text, kinds),
        experts=experts,
        gated_attention=bool(text.get("attn_output_gate")) or text.get("gating") == "per-element",
        per_layer_embedding=text.number("hidden_size_per_layer_input", 0, least=0),
        tower_params=sum(towers.values()),
        audio_params=towers.get("audio_config", 0),
        encoder_sizes=_encoder_sizes(wrapper.within("vision_config"), architecture),
        quantization=read_quantization(
            text.get("quantization_config", text.get("compression_config")), where
        ),
        scores=scores,
        drafts_have_tables=bool(text.get("num_nextn_predict_layers")) and architecture not in DENSE_DRAFTS,
        drafts=text.number("num_nextn_predict_layers", text.get("mtp_num_hidden_layers", 0), least=0),
        default_length=_default_length(text),
        longest_allowed=text.number("model_max_length", 0, least=0),
    )


def _kv_heads(text: Keys, heads: int) -> int:
    # Falcon's: num_kv_heads is not read then.
    if (
        text.get("multi_query")
        and not text.get("new_decoder_architecture")
        and text.get("n_head_kv") is None  # of an older Falcon with several, which has no other key for it
    ):
        return 1
    return text.number("num_key_value_heads", heads)


def _is_encoder(text: Keys, architecture: str) -> bool:
    return architecture in ENCODERS and text.get("use_bidirectional_attention", True) is not False


def _position_rows(text: Keys, architecture: str) -> int:
    if (more := LEARNED_POSITIONS.get(architecture)) is None:
        return 0
    return text.number("max_position_embeddings") + more + text.number("type_vocab_size", 0, least=0)


def _positions(text: Keys, architecture: str) -> int:
    """As vLLM 0.26 derives them (config/model.py, _get_and_verify_max_len)."""
    positions: Any = text.number("max_position_embeddings")
    factor: Any = 1.0
    if architecture.startswith("Gemma3"):  # its positions are scaled already
        return int(positions)
    if architecture.endswith("RobertaModel"):  # the table's first rows are not for tokens (vLLM's roberta.py)
        return int(positions) - text.number("pad_token_id", 1, least=0) - 1
    for rope in _ropes(text):
        kind = _kind(rope)
        if kind in ("su", "longrope", "llama3"):
            continue
        factor = rope.get("factor") or factor
        if kind == "yarn":
            positions = rope.get("original_max_position_embeddings") or positions
    if not (
        isinstance(factor, int | float) and isinstance(positions, int) and 0 < factor * positions <= MOST
    ):
        raise PlanError(
            f"config.json of {text.where}: factor and original_max_position_embeddings of rope_parameters are "
            f"{factor!r} and {positions!r}, not numbers above 0 that make at most {MOST} positions"
        )
    return int(positions * factor)


def _default_length(text: Keys) -> int:
    """LongRoPE's is what it was trained at, for short requests' sake."""
    if any(_kind(rope) == "longrope" for rope in _ropes(text)):
        return text.number("original_max_position_embeddings", 0, least=0)
    return 0


def _ropes(text: Keys) -> list[Mapping[str, Any]]:
    """The ways positions are encoded: one for all layers, or one a kind of layer."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return []
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def _rotary_columns(text: Keys, attention: Iterable[AttentionLayers], architecture: str) -> int:
    """As vLLM 0.26 makes its tables (get_rope and its config.py): one for each width of a head, or for each kind of layer."""
    ropes = _ropes(text)
    widths = {kind.head_dim for kind in attention}
    apart = len(ropes) > 1 or architecture.startswith("Gemma3")
    tables = 2 if apart and len(widths) == 1 else 1
    given = [rope.get("partial_rotary_factor") for rope in ropes]
    given += [text.get(key) for key in ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")]
    if (turning := text.number("rotary_dim", 0, least=0)) and widths:  # MiniMax's
        given.append(turning / max(widths))
    share: float = max((part for part in given if isinstance(part, float) and 0 < part < 1), default=1.0)
    if any(_kind(rope) == "proportional" for rope in ropes):  # of columns that turn by nothing, too
        share = 1.0
    return round(tables * sum(widths) * share)


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _kinds(text: Keys, layers: int, where: str) -> list[str]:
    """The kind of each layer, from `layer_types` or from the older keys that say the same."""
    if layer_types := text.entries("layer_types"):
        if len(layer_types) != layers:
            raise PlanError(
                f"config.json of {where}: layer_types names {len(layer_types)} layers, num_hidden_layers is {layers}"
            )
        if unknown := sorted({str(kind) for kind in layer_types} - _KINDS):
            raise PlanError(
                f"config.json of {where}: layer_types has {', '.join(map(repr, unknown))}, whose bytes this plan can't count; it "
                f"counts {', '.join(sorted(_KINDS))}"
            )
        return [str(kind) for kind in layer_types]
    if text.get("linear_num_value_heads"):
        return _every(layers, text.number("full_attention_interval"), "linear_attention")
    if text.get("attention_chunk_size"):
        return _every(layers, text.number("no_rope_layer_interval"), "chunked_attention")
    if text.get("sliding_window") and text.get("sliding_window_pattern"):
        return _every(layers, text.number("sliding_window_pattern"), "sliding_attention")
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        return ["sliding_attention"] * layers
    return ["full_attention"] * layers


def _every(layers: int, interval: int, kind: str) -> list[str]:
    return ["full_attention" if (layer + 1) % interval == 0 else kind for layer in range(layers)]


def _attention(
    text: Keys, kinds: list[str], heads: list[tuple[int, int]], head_dim: int, *, caches: bool
) -> tuple[AttentionLayers, ...]:
    """`heads`: of each layer, its attention heads and KV heads."""
    layers = list(zip(kinds, heads, strict=True))
    owners = Counter(
        layers[: len(layers) - text.number("num_kv_shared_layers", 0, least=0)] if caches else ()
    )
    groups = []
    for (kind, (queries, kv_heads)), count in Counter(layers).items():
        if kind == "linear_attention" or not kv_heads:
            continue
        full = kind == "full_attention"
        window = (
            None
            if full
            else text.number("attention_chunk_size" if kind == "chunked_attention" else "sliding_window")
        )
        groups.append(
            AttentionLayers(
                count=count,
                cached=owners[kind, (queries, kv_heads)],
                heads=queries,
                kv_heads=text.number("num_global_key_value_heads", kv_heads) if full else kv_heads,
                head_dim=text.number("global_head_dim", head_dim) if full else head_dim,
                window=window,
                chunked=kind == "chunked_attention",
                keys_are_values=full and bool(text.get("attention_k_eq_v")),
            )
        )
    return tuple(groups)


def _heads(text: Keys, listed: list[Block], layers: int, heads: int, kv_heads: int) -> list[tuple[int, int]]:
    """Attention heads and KV heads of each layer."""
    if listed:
        return [(heads, block.kv_heads) for block in listed]
    of_layers = text.numbers("num_attention_heads_per_layer", layers) or [heads] * layers
    return [(own, kv_heads) for own in of_layers]


def _low_rank(text: Keys, value_dim: int) -> LatentAttention | None:
    if not text.get("kv_lora_rank"):
        return None
    return LatentAttention(
        query_rank=text.number("q_lora_rank", 0, least=0),
        kv_rank=text.number("kv_lora_rank"),
        nope_dim=text.number("qk_nope_head_dim"),
        rope_dim=text.number("qk_rope_head_dim"),
        value_dim=text.number("v_head_dim", value_dim),
    )


def _linear(text: Keys, kinds: list[str]) -> LinearAttention | None:
    count = kinds.count("linear_attention")
    if not count:
        return None
    return LinearAttention(
        count=count,
        key_heads=text.number("linear_num_key_heads"),
        value_heads=text.number("linear_num_value_heads"),
        key_dim=text.number("linear_key_head_dim"),
        value_dim=text.number("linear_value_head_dim"),
        kernel=text.number("linear_conv_kernel_dim"),
    )


def _experts(text: Keys, layers: int) -> Experts | None:
    key = next(
        (key for key in ("num_local_experts", "num_experts", "n_routed_experts") if text.get(key)), None
    )
    if key is None:
        return None
    width = text.number("moe_intermediate_size", text.get("intermediate_size"))
    shared = text.number("n_shared_experts", 0, least=0) * width
    if text.get("intermediate_size_mlp"):  # Llama 4 passes every token through one more expert
        shared = width
    step = text.number("interleave_moe_layer_step", text.get("decoder_sparse_step", 1))
    dense = _layers_without_experts(text)
    if not 0 <= dense <= layers // step:
        raise PlanError(
            f"config.json of {text.where}: {dense} layers without experts (first_k_dense_replace, mlp_only_layers, mlp_layer_types, "
            f"is_moe_layer or moe_layers_enum), where {layers // step} could have them"
        )
    count = text.number(key)
    return Experts(
        count=count,
        per_token=text.number("num_experts_per_tok", text.get("top_k_experts"), most=count),
        width=width,
        layers=layers // step - dense,
        shared_width=text.number("shared_expert_intermediate_size", shared, least=0),
        groups=text.number("n_group", 1, least=0) or 1,
    )


def _layers_without_experts(text: Keys) -> int:
    if kinds := text.entries("mlp_layer_types"):
        return kinds.count("dense")
    if have_experts := text.entries("is_moe_layer"):
        return have_experts.count(False)
    if isinstance(with_experts := text.get("moe_layers_enum"), str):  # their numbers, with commas between
        return text.number("num_hidden_layers") - len(with_experts.split(","))
    return text.number("first_k_dense_replace", 0, least=0) + len(text.entries("mlp_only_layers"))


def _mlp_widths(
    text: Keys, architecture: str, layers: int, experts: Experts | None
) -> tuple[tuple[int, int], ...]:
    dense = layers - experts.layers if experts else layers
    if architecture.startswith("Gemma4"):  # the experts stand beside the MLP, not in its place
        dense = layers
    if not dense:
        return ()
    wide = 4 * text.number("hidden_size") if architecture in FOUR_TIMES_AS_WIDE else None
    key = "intermediate_size_mlp" if text.get("intermediate_size_mlp") else "intermediate_size"
    width = text.number(key, wide)
    if text.get("use_double_wide_mlp"):
        doubled = text.number("num_kv_shared_layers", 0, least=0)
        return ((dense - doubled, width), (doubled, 2 * width))
    return ((dense, width),)


def _tower(tower: Keys, name: str, hidden: int, architecture: str) -> int:
    """Parameters of an encoder beside the decoder and of its projection, to within a tenth."""
    if (
        architecture == "Gemma4UnifiedForConditionalGeneration"
    ):  # pictures and sound are projected as they are
        return _projections(tower, name, hidden)
    qwen2 = architecture == "Qwen2VLForConditionalGeneration"  # its hidden_size is the decoder's
    width = tower.number("embed_dim" if qwen2 else "hidden_size")
    layers = tower.number("num_hidden_layers", tower.get("depth"))
    if name == "audio_config":
        # a conformer layer: attention 4, two MLPs 16, convolution 4
        return layers * 24 * width**2 + width * hidden
    gemma4 = architecture == "Gemma4ForConditionalGeneration"
    gated = gemma4 or tower.get("model_type") == "pixtral" or tower.get("hidden_act") == "silu"
    inner = width * tower.number("mlp_ratio", 4) if qwen2 else tower.number("intermediate_size")
    if architecture.startswith("Glm4v"):
        # Its layers' MLPs are as wide as the decoder; the one that merges patches is wider.
        merger = hidden + 3 * inner + width * tower.number("spatial_merge_size") ** 2
        return layers * (4 * width**2 + 3 * width * hidden) + hidden * merger
    encoder = layers * (4 * width**2 + (3 if gated else 2) * width * inner)
    if architecture.startswith("InternVL"):  # four patches are projected together, in two steps
        return encoder + hidden * (4 * width + hidden)
    if merge := tower.number(
        "spatial_merge_size", 0, least=0
    ):  # Qwen's: patches are merged by an MLP of their own
        merged = width * merge**2
        mergers = 1 + len(tower.entries("deepstack_visual_indexes"))
        positions = tower.number("num_position_embeddings", 0, least=0)
        return encoder + mergers * merged * (merged + hidden) + positions * width
    positions = 2 * tower.number("position_embedding_size", _GEMMA4_POSITIONS) if gemma4 else 0
    return encoder + width * (hidden + positions)


def _encoder_sizes(tower: Keys | None, architecture: str) -> tuple[tuple[str, int], ...]:
    """What the engine cuts of encoders whose sizes do not all divide by every number of devices that plans have."""
    gemma4 = architecture == "Gemma4ForConditionalGeneration"
    if tower is None or not (gemma4 or architecture.startswith(_QWEN_VL)):
        return ()
    sizes = {key: tower.number(key) for key in ("hidden_size", "intermediate_size")}
    if gemma4:
        sizes["num_attention_heads"] = tower.number("num_attention_heads", _GEMMA4_ENCODER_HEADS)
    return tuple(sizes.items())


def _projections(embedder: Keys, name: str, hidden: int) -> int:
    """Parameters that take patches of pictures, or samples of sound, into the decoder (vLLM's gemma4_unified.py)."""
    if name == "audio_config":
        return embedder.number("audio_embed_dim", 640) * hidden
    width = embedder.number("mm_embed_dim", 3840)
    pixels = 3 * (embedder.number("patch_size", 16) * embedder.number("pooling_kernel_size", 3)) ** 2
    return width * (pixels + 2 * embedder.number("mm_posemb_size", 1120) + hidden)


def _text(wrapper: Keys) -> Mapping[str, Any]:
    return _mapping(wrapper, "llm_config" if wrapper.get("text_config") is None else "text_config")


def _mapping(wrapper: Keys, key: str) -> Mapping[str, Any]:
    value = wrapper.get(key, {})
    if not isinstance(value, Mapping):
        raise PlanError(f"config.json of {wrapper.where}: {key} is {value!r}, not a mapping")
    return value


def _architecture(config: Mapping[str, Any], where: str) -> tuple[str, bool]:
    match config.get("architectures"):
        case [str(name), *_]:
            return counted(name, where)
        case _:
            raise PlanError(missing("architectures", where))


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        key: {**config[key], **value}
        for key, value in overrides.items()
        if isinstance(value, Mapping) and isinstance(config.get(key), Mapping)
    }
    return {**config, **overrides, **nested}
