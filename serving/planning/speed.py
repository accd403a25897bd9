"""The speed of a slice: what one step takes, part by part, and the rate of a steady load made of such steps.

A part is counted at the hardware's peak, from bytes moved, operations done and tokens exchanged, or counts how often the
engine pays a fixed time. `COSTS` has the price of each part: it is fitted to published rates (`python -m benchmarks.plans
--fit`), each price held near what physics and microbenchmarks say of it. Nothing overlaps and nothing queues. A rate comes
with a range: how far rates of families that the fit had not seen were off.
"""

import math
from dataclasses import astuple, dataclass, fields
from functools import cache

from serving.planning.cache import read_bytes, state_bytes
from serving.planning.engine_sizes import EngineSizes
from serving.planning.layout import Layout
from serving.planning.published import PUBLISHED, Published
from serving.planning.shapes import AttentionLayers, ModelShape, shape_of
from serving.planning.weights import TensorGroup, tensor_groups
from serving.tpu import Slice

_ALL_REDUCES_A_LAYER = 2
_LINEAR_KERNELS = (
    2  # a linear-attention layer starts convolution, recurrence and gates beside what a layer starts
)
_SMALLEST_BUCKET = 16  # tpu-inference pads the tokens of a step to powers of two from here
# A grouped product waits for its expert's weights, and takes this long if they come sooner.
_EXPERT_FLOOR_S = 4e-6
_ROW_COPIES = 4  # times that a row of experts is moved: gathered, through both products, combined
# Sampling looks for the bounds of top_k and top_p bit by bit, each bit a sum over all float32 logits, on every device
# (layers/common/binary_search.py). Sequences are lanes there: libtpu's compiler pads arrays that don't stay on the chip to 128,
# and reads and writes the logits some 28 times beside. Gemma 4 26B on v6e took 6.08 ms for 32 sequences and 0.55 ms for 16
# (tpu-inference PR 3452); this is 6.0 and 0.5 ms at peak, where arrays on the chip are read twice as fast.
_SEARCH_PASSES, _OTHER_PASSES = 66, 28
_ON_CHIP_RATE = 2
_LANES = 128
_ON_CHIP_BYTES = 1 << 24
_EVEN = 100  # units of prompts in a step from which chance matters no more
_RARE = 1e-5  # share of steps that is left out
_FEWEST_SAMPLED = 8  # tpu-inference pads the sequences of a step to powers of two from here
_WIDEST_TUNED_HEAD = 256
_NARROW_HEAD = 64  # has a kernel of its own, with block sizes of its own


@dataclass(frozen=True)
class Parts:
    """Parts of steps, or their prices. Seconds at peak rates come after counts of what takes a fixed time."""

    steps: float = 0.0  # scheduling, input, output, sampling
    layers: float = 0.0  # kernels that a layer starts
    layers_by_vllm: float = 0.0  # layers whose arrays the host hands over one by one, as torchax does
    expert_layers: float = 0.0  # routing and sorting of a layer with experts
    collectives: float = 0.0  # latency of all-reduces, by the levels of a tree over the devices
    answers: float = 0.0  # tokens that the host gives to clients
    untuned: float = 0.0  # sequences that attention takes one after the other, by layers without tuned blocks
    weights_s: float = 0.0
    cache_s: float = 0.0
    products_s: float = 0.0
    attention_s: float = 0.0
    links_s: float = 0.0
    rows_s: float = 0.0  # rows of experts moved
    groups_s: float = 0.0  # grouped products of experts too small to hide their start
    sampled_s: float = 0.0  # bounds of top_k and top_p

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(*(mine + others for mine, others in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: float) -> "Parts":
        return Parts(*(count * part for part in astuple(self)))

    def seconds(self, costs: "Parts") -> float:
        return float(sum(part * cost for part, cost in zip(astuple(self), astuple(costs), strict=True)))


PARTS = tuple(part.name for part in fields(Parts))

# Seconds of what is counted, and the time of the rest over its time at peak.
COSTS = Parts(
    steps=0.00159,
    layers=1.39e-05,
    layers_by_vllm=2.04e-05,
    expert_layers=4.42e-05,
    collectives=7.94e-06,
    answers=7.41e-06,
    untuned=2.94e-06,
    weights_s=1.2,
    cache_s=1.54,
    products_s=1.76,
    attention_s=3.93,
    links_s=1.88,
    rows_s=1.22,
    groups_s=1.91,
    sampled_s=1.02,
)
# Ranges, as factors. Nine of ten published rates are within the first of what the fit to all of them says, and within the
# second of what a fit to other families says. Generations without a published rate get half as much again.
SPREAD_MEASURED = 1.4
SPREAD_FAMILY = 1.6
SPREAD_GENERATION = 1.5
# Experts that are cut over devices: tuned blocks of one kernel alone gave half as much again (tpu-inference PR 1745), and rates
# are up to 2.2 times what is planned.
SPREAD_CUT_EXPERTS = 2.2
# Architectures whose own rates are further apart: Qwen3-32B was measured with kernels that are off by default.
_WIDER = {("Qwen3ForCausalLM", "v7x"): 1.7}
# So are those of latent attention: DeepSeek R1 wrote 11% more than planned after short prompts and 38% less after long ones.
SPREAD_LATENT = 1.7


@dataclass(frozen=True)
class Speed:
    """Tokens a second of a whole slice at a batch size and context, and the step they come from."""

    sequences: int
    context: int
    step_s: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float


@dataclass(frozen=True)
class Rate:
    """Output tokens a second of a slice under a steady load, and the range that the true rate should be in.

    The rate is of greedy requests, as most that are published; the range reaches down to requests that sample.
    """

    tokens_per_s: float
    sampled_tokens_per_s: float
    low: float
    high: float
    sequences: int


@dataclass(frozen=True)
class Engine:
    """A model in an engine on a slice: all that decides how long a step takes."""

    shape: ModelShape
    sizes: EngineSizes
    slice: Slice
    layout: Layout

    @property
    def chunk(self) -> int:
        """Tokens that a step of one copy of the model can take."""
        return self.sizes.batched_tokens * self.layout.attention_groups


def predict(
    shape: ModelShape,
    sizes: EngineSizes,
    slice_: Slice,
    layout: Layout,
    *,
    sequences: int,
    context: int,
) -> Speed:
    """Decode with `sequences` of `context` tokens in flight; prefill of full batches."""
    engine = Engine(shape, sizes, slice_, layout)
    per_copy = max(1.0, sequences / layout.data)
    decode_s = step(engine, decodes=per_copy, context=context).seconds(COSTS)
    prefill_s = step(engine, prompt_tokens=engine.chunk, prompt=context).seconds(COSTS)
    return Speed(
        sequences=sequences,
        context=context,
        step_s=decode_s,
        decode_tokens_per_s=per_copy * layout.data / decode_s,
        prefill_tokens_per_s=engine.chunk * layout.data / prefill_s,
    )


def rate(engine: Engine, *, prompt: int, answer: int, sequences: int) -> Rate:
    """The rate at which `sequences` in flight are answered; as each ends, another begins."""
    greedy, sampled = (
        engine.layout.data
        / per_answer_token(
            engine, prompt=prompt, answer=answer, sequences=sequences, sampled=sampled
        ).seconds(COSTS)
        for sampled in (False, True)
    )
    off = spread(engine)
    return Rate(greedy, sampled, sampled / off, greedy * off, sequences)


def per_answer_token(
    engine: Engine, *, prompt: int, answer: int, sequences: int, sampled: bool = False
) -> Parts:
    """What one output token of one copy of the model costs, its share of the prompt included.

    Every step writes a token of all sequences, and prompts ride along as others end: by chance none, one or several in a
    step. Where prompts fill every step, there are more steps than the answers need, each with fewer of them.
    """
    per_copy = max(1.0, sequences / engine.layout.data)
    groups = engine.layout.attention_groups
    room = max(engine.chunk - per_copy, 1.0)
    unit = min(room, prompt * (groups if sequences > groups else 1))  # each group takes a prompt of its own
    prompt_tokens = prompt / answer
    steps = max(1 / per_copy, prompt_tokens / room)
    decodes, context = 1 / steps, prompt + answer // 2
    cost = Parts()
    for share, tokens in prompts_of_a_step(prompt_tokens / steps, unit, room):
        step_cost = step(
            engine,
            decodes=decodes,
            context=context,
            prompt_tokens=tokens,
            prompt=prompt,
            sampled=sampled,
        )
        cost = cost + step_cost.times(share * steps)
    return cost


def prompts_of_a_step(mean: float, unit: float, room: float) -> list[tuple[float, float]]:
    """(share of steps, tokens of prompts): units come by chance (Poisson), no step takes more than its room."""
    if mean >= room or mean > _EVEN * unit:
        return [(1.0, min(mean, room))]
    most = math.ceil(room / unit)
    shares = [math.exp(-mean / unit)]
    for count in range(1, most):
        shares.append(shares[-1] * mean / unit / count)
    shares.append(max(0.0, 1 - sum(shares)))
    tokens = [min(count * unit, room) for count in range(most + 1)]
    spare = sum(share * (room - size) for share, size in zip(shares, tokens, strict=True))
    # What a full step leaves fills the room of later ones: so many steps stay as chance has them, the others are full.
    by_chance = (room - mean) / spare
    partly = [(share * by_chance, size) for share, size in zip(shares, tokens, strict=True) if size < room]
    full = 1 - sum(share for share, _ in partly)
    return [(share, size) for share, size in (*partly, (full, room)) if share > _RARE]


def step(
    engine: Engine,
    *,
    decodes: float = 0.0,
    context: int = 0,
    prompt_tokens: float = 0.0,
    prompt: int = 0,
    sampled: bool = False,
) -> Parts:
    """A step of one copy: `decodes` sequences of `context` tokens write one each, and `prompt_tokens` of prompts are read.

    `sampled`: some request has a temperature, which makes the engine sample for all of them.
    """
    shape, sizes, layout = engine.shape, engine.sizes, engine.layout
    row, devices = engine.slice.hardware, layout.width * layout.pipeline
    hbm = row.hbm_bytes_per_s / row.devices_per_chip * devices
    padded = _padded(engine, decodes + prompt_tokens)
    groups = tensor_groups(shape, sizes, layout)
    written = max(decodes, 1.0)
    products_s = sum(_product_s(engine, group, padded, written) for group in groups) / devices
    read = sum(_read_bytes(shape, group, decodes + prompt_tokens) for group in groups)
    passed = shape.layers * shape.rounds
    links_s = collectives = 0.0
    if layout.width > 1:
        moved = 2 * (layout.width - 1) / layout.width * padded * shape.hidden_size * 2
        links_s = passed * _ALL_REDUCES_A_LAYER * moved / (row.ici_bytes_per_s / row.devices_per_chip)
        collectives = passed * _ALL_REDUCES_A_LAYER * math.log2(layout.width) / 3
    expert_layers = rows_s = groups_s = 0.0
    if experts := shape.experts:
        expert_layers = float(experts.layers)
        one_device = row.hbm_bytes_per_s / row.devices_per_chip
        rows = padded * experts.per_token * shape.hidden_size * 2
        rows_s = experts.layers * rows * _ROW_COPIES / one_device
        groups_s = _groups_s(engine, groups, decodes + prompt_tokens, one_device)
    return Parts(
        steps=1.0,
        layers=float(passed + _LINEAR_KERNELS * (shape.linear.count if shape.linear else 0)),
        layers_by_vllm=float(passed) if sizes.by_vllm else 0.0,
        expert_layers=expert_layers,
        collectives=collectives,
        answers=decodes,
        untuned=decodes / layout.attention_groups * _untuned_layers(shape),
        weights_s=read / hbm,
        cache_s=_cache_bytes(engine, decodes, context, prompt_tokens, prompt) / hbm,
        products_s=products_s,
        attention_s=_attend_s(engine, prompt_tokens, prompt if shape.encodes else prompt // 2),
        links_s=links_s,
        rows_s=rows_s,
        groups_s=groups_s,
        sampled_s=_sampled_s(engine, decodes) if sampled and decodes else 0.0,
    )


def spread(engine: Engine) -> float:
    """The factor by which a rate may be off: small where the prices were fitted to its like, large where to none of its generation."""
    here = [_published(row.model) for row in PUBLISHED if row.slice.split()[0] == engine.slice.generation]
    if not here:
        return SPREAD_FAMILY * SPREAD_GENERATION
    alike = (engine.shape.architecture, engine.shape.experts is not None)
    known = any((shape.architecture, shape.experts is not None) == alike for shape in here)
    factors = [
        SPREAD_MEASURED if known else SPREAD_FAMILY,
        _WIDER.get((engine.shape.architecture, engine.slice.generation), 1.0),
    ]
    if engine.shape.latent:
        factors.append(SPREAD_LATENT)
    if engine.shape.experts and engine.layout.width > 1 and not engine.sizes.expert_parallel:
        factors.append(SPREAD_CUT_EXPERTS)
    return max(factors)


def measured_for(shape: ModelShape, sizes: EngineSizes, slice_: Slice) -> tuple[Published, ...]:
    """The published measurements of this model on this slice; floors are none."""
    return tuple(
        row
        for row in PUBLISHED
        if not row.floor
        and row.slice.split()[:2] == [slice_.generation, slice_.topology]
        and row.quantized == (sizes.quantization is not None)
        and _same_layers(_published(row.model), shape)
    )


@cache
def _published(model: str) -> ModelShape:
    return shape_of(model)


def _same_layers(model: ModelShape, other: ModelShape) -> bool:
    sizes = [(shape.architecture, shape.layers, shape.hidden_size) for shape in (model, other)]
    return sizes[0] == sizes[1]


def _padded(engine: Engine, tokens: float) -> float:
    """Tokens that a step computes: those of each group of devices are padded to a bucket it is compiled for."""
    groups = engine.layout.attention_groups
    bucket = max(_SMALLEST_BUCKET, 1 << (math.ceil(tokens / groups) - 1).bit_length())
    return max(tokens, min(float(bucket * groups), engine.chunk))


def _product_s(engine: Engine, group: TensorGroup, tokens: float, written: float) -> float:
    """Seconds of a group's products at peak on one device; logits are computed of written tokens alone.

    Weights of 4 bits are widened to bf16 first.
    """
    row = engine.slice.hardware
    flops = {"fp8": row.fp8_flops, "int8": row.int8_flops}.get(group.format) or row.bf16_flops
    is_table = group.name == "embedding"
    if is_table and not engine.shape.tied_embeddings:
        return 0.0
    computed = written if is_table or group.name == "output head" else tokens
    return 2 * group.active * computed / (max(flops, row.bf16_flops) / row.devices_per_chip)


def _hit(shape: ModelShape, tokens: float) -> float:
    """The share of experts that some token is routed to."""
    return 1 - (1 - shape.experts.per_token / shape.experts.count) ** tokens if shape.experts else 0.0


def _read_bytes(shape: ModelShape, group: TensorGroup, tokens: float) -> float:
    if group.name == "experts":
        return group.bytes * _hit(shape, tokens)
    if group.name in ("embedding", "per-layer embeddings") or group.active == 0:
        return group.active_bytes
    return group.bytes * group.copies


def _groups_s(engine: Engine, groups: tuple[TensorGroup, ...], tokens: float, hbm: float) -> float:
    """What grouped products take beyond the reading of their weights, because each takes at least the floor."""
    experts, layout = engine.shape.experts, engine.layout
    if experts is None or not experts.layers:
        return 0.0
    here = experts.count / (layout.width if engine.sizes.expert_parallel else 1)
    weights = next(group.bytes for group in groups if group.name == "experts")
    read_s = weights / experts.layers / layout.width / layout.pipeline / here / hbm
    floor_s = max(0.0, _EXPERT_FLOOR_S - COSTS.weights_s * read_s)
    return floor_s * experts.layers * here * _hit(engine.shape, tokens)


def _cache_bytes(engine: Engine, decodes: float, context: int, prompt_tokens: float, prompt: int) -> float:
    """Bytes of the whole copy: a decode reads its sequence, a chunk of a prompt what came before, all read states."""
    shape, sizes, layout = engine.shape, engine.sizes, engine.layout
    share = layout.width * layout.pipeline / layout.attention_groups
    read = decodes * read_bytes(shape, sizes, layout, context)
    chunks = prompt_tokens / min(sizes.batched_tokens, prompt or sizes.batched_tokens)
    read += chunks * read_bytes(shape, sizes, layout, prompt // 2)
    if shape.linear:
        state = state_bytes(shape, sizes, layout) / (sizes.sequences + 1)
        read += 2 * state * (decodes + chunks)
    return read * share


def _untuned_layers(shape: ModelShape) -> int:
    """Layers whose attention takes a sequence in the kernel's default blocks, 2,048 tokens at once whatever its length.

    tpu-inference 0.26 has tuned blocks for no window and no head beyond 256 (ragged_paged_attention/v3/tuned_block_sizes.py).
    """
    return sum(
        kind.count
        for kind in shape.attention
        if kind.head_dim > _NARROW_HEAD and (kind.window or kind.head_dim > _WIDEST_TUNED_HEAD)
    )


def _sampled_s(engine: Engine, sequences: float) -> float:
    """Seconds at peak to look for top_k and top_p of a step's sequences; devices that share a sequence all do the same."""
    row, shape = engine.slice.hardware, engine.shape
    a_group = sequences / engine.layout.attention_groups
    padded = min(max(_FEWEST_SAMPLED, 1 << (math.ceil(a_group) - 1).bit_length()), engine.sizes.sequences)
    on_chip = 4 * padded * shape.vocab_size <= _ON_CHIP_BYTES
    lanes = padded if on_chip else _LANES * math.ceil(padded / _LANES)
    read = 4 * shape.vocab_size * (_SEARCH_PASSES * lanes + _OTHER_PASSES * padded)
    return read / (row.hbm_bytes_per_s / row.devices_per_chip) / (_ON_CHIP_RATE if on_chip else 1)


def _attend_s(engine: Engine, tokens: float, context: int) -> float:
    """Scores and weighted sums of a prompt's tokens over `context` others each, on one device at peak."""
    shape, layout, row = engine.shape, engine.layout, engine.slice.hardware
    attended = sum(
        kind.count * kind.heads * _attended_dim(shape, kind) * min(context, kind.window or context)
        for kind in shape.attention
    )
    flops = 4 * tokens * attended * shape.rounds
    return flops / (row.bf16_flops / row.devices_per_chip) / (layout.width * layout.pipeline)


def _attended_dim(shape: ModelShape, kind: AttentionLayers) -> float:
    """Numbers that a head compares with a token, and adds up of it, on average of both.

    With latent attention every head attends to the compressed vector itself, prompts included (flash_attn_mla.py): scores are of
    its two halves, sums of the first.
    """
    if latent := shape.latent:
        return latent.kv_rank + latent.rope_dim / 2
    return kind.head_dim
