"""The speed of a slice: a roofline of one step, from bytes moved, operations done and tokens exchanged.

Assumptions, each a constant below: HBM and matrix units reach the share of their peak that was measured on a real chip;
a step reads every weight once (of the experts, those the batch reaches) and the cache of all its sequences; two
all-reduces a layer run over the links at full rate, each after a fixed delay; the host adds a fixed time a step. Nothing
overlaps and nothing queues. A plan shows published measurements (`MEASURED`) and the roofline's error.
"""

from dataclasses import dataclass

from serving.planning.cache import sequence_bytes
from serving.planning.engine_sizes import EngineSizes
from serving.planning.layout import Layout
from serving.planning.shapes import ModelShape
from serving.planning.weights import TensorGroup, tensor_groups
from serving.tpu import Slice

# Share of peak reached: v6e 1185 of 1638 GB/s and 805 of 918 TFLOP/s (ct6e-standard-1t, 2026-10); v7x 6420 of 7380 GB/s
# and 2 x 956 of 2307 TFLOP/s (tpu-recipes microbenchmarks/ironwood). The others are assumed to reach v6e's shares.
_HBM_SHARE = {"v7x": 0.87}
_MXU_SHARE = {"v7x": 0.83}
_HBM_SHARE_V6E = 0.72
_MXU_SHARE_V6E = 0.88
_ALL_REDUCE_S = 5e-6  # not measured: a few microseconds a hop
_ALL_REDUCES_A_LAYER = 2
# A step's time beside the chips' work: scheduling, sampling, input and output. It is the one fitted figure, to Llama
# 3.3 70B on v6e-8 at 64 sequences (25 ms a step where the roofline has 21); the other measurements test it.
_HOST_S = 4e-3


@dataclass(frozen=True)
class Speed:
    """Tokens a second of a whole slice at a batch size and context, and the step they come from."""

    sequences: int
    context: int
    step_s: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float


@dataclass(frozen=True)
class Measured:
    """Published output rates of one model on one slice: (prompt, answer, sequences in flight) -> tokens a second."""

    architecture: str
    layers: int
    quantized: bool
    slice: str
    source: str
    tokens_per_s: dict[tuple[int, int, int], float]


_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes inference"
MEASURED = (
    Measured(
        architecture="LlamaForCausalLM",
        layers=80,
        quantized=False,
        slice="v6e 2x4",
        source=f"{_RECIPES}/trillium/vLLM/Llama3.x",
        tokens_per_s={(1000, 1000, 64): 2495, (1000, 1000, 128): 3544},
    ),
    Measured(
        architecture="Gemma4ForConditionalGeneration",
        layers=35,
        quantized=False,
        slice="v6e 1x1",
        source="a run on ct6e-standard-1t, 2026-07, not by Google",
        tokens_per_s={(1024, 128, 64): 2140},
    ),
    Measured(
        architecture="Qwen3ForCausalLM",
        layers=64,
        quantized=True,
        slice="v7x 1x1x1",
        source=f"{_RECIPES}/ironwood/vLLM/Qwen3-32B",
        tokens_per_s={(1024, 1024, 320): 6557, (1024, 8192, 320): 3960, (8192, 1024, 320): 1382},
    ),
    Measured(
        architecture="Qwen3MoeForCausalLM",
        layers=62,
        quantized=True,
        slice="v7x 2x2x1",
        source=f"{_RECIPES}/ironwood/vLLM/Qwen3-Coder-480B-A35B",
        tokens_per_s={(1024, 1024, 64): 1996, (1024, 8192, 64): 2075, (8192, 1024, 64): 1053},
    ),
    Measured(
        architecture="Qwen3_5MoeForConditionalGeneration",
        layers=60,
        quantized=True,
        slice="v7x 2x2x1",
        source=f"{_RECIPES}/ironwood/vLLM/Qwen3.5-397B",
        tokens_per_s={(1024, 8192, 128): 5172, (8192, 1024, 128): 2281},
    ),
)


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
    rates = _Rates(slice_)
    groups = tensor_groups(shape, sizes, layout)
    per_copy = max(1, sequences // layout.data)
    cache = sequence_bytes(shape, sizes, layout, context) * layout.tensor * layout.pipeline * per_copy
    cache /= layout.attention_data
    read = (_weights_read(groups, shape, per_copy) + cache) / (layout.tensor * layout.pipeline)
    step = (
        read / rates.hbm
        + _compute_s(groups, rates, layout, per_copy)
        + _attend_s(shape, rates, layout, per_copy, context)
        + _exchange_s(shape, rates, layout, per_copy)
        + _HOST_S
    )
    batch = sizes.batched_tokens
    prefill = (
        max(
            _weights_read(groups, shape, batch) / (layout.tensor * layout.pipeline) / rates.hbm,
            _compute_s(groups, rates, layout, batch),
        )
        + _attend_s(shape, rates, layout, batch, context // 2)
        + _exchange_s(shape, rates, layout, batch)
        + _HOST_S
    )
    return Speed(
        sequences=sequences,
        context=context,
        step_s=step,
        decode_tokens_per_s=per_copy * layout.data / step,
        prefill_tokens_per_s=batch * layout.data / prefill,
    )


def measured_for(shape: ModelShape, sizes: EngineSizes, slice_: Slice) -> tuple[Measured, ...]:
    """The published measurements of this model on this slice."""
    same = (shape.architecture, shape.layers, sizes.quantization is not None)
    return tuple(
        row
        for row in MEASURED
        if (row.architecture, row.layers, row.quantized) == same
        and row.slice == f"{slice_.generation} {slice_.topology}"
    )


def output_rate(speed: Speed, prompt: int, answer: int) -> float:
    """Output tokens a second when every answer needs its prompt prefilled by the same slice."""
    return answer / (answer / speed.decode_tokens_per_s + prompt / speed.prefill_tokens_per_s)


class _Rates:
    """Rates a device of a slice reaches: the measured shares of its peak."""

    def __init__(self, slice_: Slice) -> None:
        row = slice_.hardware
        devices = row.devices_per_chip
        self.hbm = row.hbm_bytes_per_s / devices * _HBM_SHARE.get(row.name, _HBM_SHARE_V6E)
        self.mxu_share = _MXU_SHARE.get(row.name, _MXU_SHARE_V6E)
        self.bf16 = row.bf16_flops / devices * self.mxu_share
        self.fp8 = (row.fp8_flops or row.bf16_flops) / devices * self.mxu_share
        self.int8 = (row.int8_flops or row.bf16_flops) / devices * self.mxu_share
        self.ici = row.ici_bytes_per_s / devices

    def flops(self, weight_format: str) -> float:
        """Rate of products with weights of this format; 4-bit weights are widened to bf16 first."""
        return {"fp8": self.fp8, "int8": self.int8}.get(weight_format, self.bf16)


def _weights_read(groups: tuple[TensorGroup, ...], shape: ModelShape, tokens: int) -> float:
    read = 0.0
    for group in groups:
        if group.name == "experts" and shape.experts:
            missed = (1 - shape.experts.per_token / shape.experts.count) ** tokens
            read += group.bytes * (1 - missed)
        elif group.name == "embedding" or group.active == 0:
            read += group.active_bytes
        else:
            read += group.bytes * group.copies
    return read


def _compute_s(groups: tuple[TensorGroup, ...], rates: _Rates, layout: Layout, tokens: int) -> float:
    devices = layout.tensor * layout.pipeline
    return sum(2 * group.active * tokens / rates.flops(group.format) for group in groups) / devices


def _attend_s(shape: ModelShape, rates: _Rates, layout: Layout, tokens: int, context: int) -> float:
    """Scores and weighted sums of attention over the context."""
    attended = sum(
        kind.count * kind.head_dim * min(context, kind.window or context) for kind in shape.attention
    )
    return 4 * tokens * attended * shape.num_attention_heads / rates.bf16 / (layout.tensor * layout.pipeline)


def _exchange_s(shape: ModelShape, rates: _Rates, layout: Layout, tokens: int) -> float:
    if layout.tensor == 1:
        return 0.0
    moved = 2 * (layout.tensor - 1) / layout.tensor * tokens * shape.hidden_size * 2
    return shape.layers * _ALL_REDUCES_A_LAYER * (moved / rates.ici + _ALL_REDUCE_S)
