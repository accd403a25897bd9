"""Whether a model fits: the HBM of one device, item by item, and what is left for the cache.

The order is the engine's (tpu_inference/worker/tpu_worker.py, determine_available_memory): weights are loaded, the
cache takes what `gpu_memory_utilization` allows beyond them, programs and activations live in the rest.
"""

import math
from dataclasses import dataclass, replace

from serving.planning.cache import separate_batches, sequence_bytes, state_bytes
from serving.planning.engine_sizes import EngineSizes
from serving.planning.layout import Layout
from serving.planning.shapes import ModelShape
from serving.planning.weights import TensorGroup, device_bytes, tensor_groups
from serving.tpu import Slice
from serving.tpu.generations import GIB

# In HBM beside the weights when the cache is sized. Gemma 4 E2B, whose loaded weights are 8.93 GiB, used 8.95 GiB of a v6e
# and 8.97 GiB of a v5e chip; Qwen3.5-397B-FP8 used 0.7% more than its weights.
RESIDENT_BYTES = GIB // 8
# Compiled programs and their constants. The published v6e recipes run at a utilisation of 0.98, which leaves 0.6 GiB for
# programs and activations.
PROGRAM_BYTES = GIB // 4
# Rows a token that activations hold at once: residual stream, its norm and the two sides of an addition.
_STREAMS = 4
_BLOCK_TOKENS = 128  # advice rounds lengths to this


@dataclass(frozen=True)
class Fit:
    """One device's HBM. `problems` is empty where the model fits; token counts are of the whole slice."""

    groups: tuple[TensorGroup, ...]
    usable_bytes: int
    utilization: float
    weight_bytes: int
    state_bytes: int
    workspace_bytes: int
    cache_bytes: int
    max_model_len: int
    longest: int
    cache_tokens: int
    sequences: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def withheld_bytes(self) -> int:
        """What `gpu_memory_utilization` keeps from weights and cache."""
        return round(self.usable_bytes * (1 - self.utilization))


def measure(shape: ModelShape, sizes: EngineSizes, slice_: Slice, layout: Layout) -> Fit:
    """The HBM budget of a layout on a slice; `problems` say why it does not fit."""
    groups = tensor_groups(shape, sizes, layout)
    usable = slice_.hardware.usable_hbm_bytes // slice_.hardware.devices_per_chip
    weights = device_bytes(groups, shape, layout)
    state = state_bytes(shape, sizes, layout)
    workspace = _workspace(shape, sizes, layout)
    cache = max(0, int(usable * sizes.utilization) - weights - RESIDENT_BYTES - state)
    longest = _longest(shape, sizes, layout, cache)
    length = sizes.max_model_len or max(longest, 1)
    batches = separate_batches(layout)
    per_sequence = sequence_bytes(shape, sizes, layout, length)
    fit = Fit(
        groups=groups,
        usable_bytes=usable,
        utilization=sizes.utilization,
        weight_bytes=weights,
        state_bytes=state,
        workspace_bytes=workspace,
        cache_bytes=cache,
        max_model_len=length,
        longest=longest,
        cache_tokens=int(cache / per_sequence * length) * batches if per_sequence else 0,
        sequences=int(cache / per_sequence) * batches if per_sequence else sizes.sequences,
        problems=(),
        notes=(),
    )
    problems = (
        *_shortfalls(fit, per_sequence),
        *_loading(shape, sizes, layout, fit),
        *_reports(shape, slice_),
    )
    notes = () if problems else (*_warnings(fit), *_slow_formats(sizes, slice_))
    return replace(fit, problems=problems, notes=notes)


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size < 10 * GIB else f"{size / GIB:.1f} GiB"


def _shortfalls(fit: Fit, per_sequence: float) -> list[str]:
    needed = fit.weight_bytes + RESIDENT_BYTES + fit.state_bytes + fit.workspace_bytes
    if needed > fit.usable_bytes:
        return [
            (
                f"weights of {gib(fit.weight_bytes)} and {gib(needed - fit.weight_bytes)} to run them are "
                f"{gib(needed - fit.usable_bytes)} more than the {gib(fit.usable_bytes)} of a device"
            )
        ]
    if per_sequence > fit.cache_bytes:
        return [
            (
                f"one sequence of {fit.max_model_len} tokens takes {gib(per_sequence)} of a device's cache, "
                f"{gib(per_sequence - fit.cache_bytes)} more than the {gib(fit.cache_bytes)} that "
                f"{gib(fit.weight_bytes)} of weights leave at gpu_memory_utilization {fit.utilization:g}"
            )
        ]
    return []


def _loading(shape: ModelShape, sizes: EngineSizes, layout: Layout, fit: Fit) -> list[str]:
    """Problems of loading, which for a while holds more than the loaded weights."""
    if sizes.loads_full_size:
        full_size = device_bytes(
            tensor_groups(shape, replace(sizes, quantization=None), layout), shape, layout
        )
        if full_size > fit.usable_bytes:
            return [
                (
                    f"qwix quantises weights once they are loaded, and at full size they take {gib(full_size)} of the "
                    f"{gib(fit.usable_bytes)} of a device: set use_abstract_model beside its rules"
                )
            ]
    # The loader unpacks 4-bit float experts to float32 one layer at a time, on one device, and reorders them there, beside
    # the other weights (tpu_inference/layers/vllm/quantization/mxfp4.py, process_weights_after_loading).
    if shape.experts and sizes.quantization and sizes.quantization.format in ("mxfp4", "nvfp4"):
        unpacked = 2 * 4 * 3 * shape.hidden_size * shape.experts.width * shape.experts.count
        if (missing := unpacked + fit.weight_bytes - fit.usable_bytes) > 0:
            return [
                (
                    f"loading unpacks a layer of {shape.experts.count} experts to {gib(unpacked)} on one device: "
                    f"{gib(missing)} more than its {gib(fit.usable_bytes)} with the weights beside it"
                )
            ]
    return []


def _reports(shape: ModelShape, slice_: Slice) -> list[str]:
    """Reported failures of models that the arithmetic allows."""
    if (
        shape.architecture == "Gemma4ForConditionalGeneration"
        and shape.experts
        and slice_.generation == "v6e"
        and slice_.chips <= 8
    ):
        return [
            (
                "tpu-inference's own tests skip Gemma 4 with experts on v6e-8 as 'not enough HBM' "
                "(.buildkite/models/google_gemma-4-26B-A4B-it.yml, issue 2333), though its weights would fit"
            )
        ]
    return []


def _warnings(fit: Fit) -> list[str]:
    if fit.workspace_bytes <= fit.withheld_bytes:
        return []
    return [
        (
            f"gpu_memory_utilization {fit.utilization:g} leaves {gib(fit.withheld_bytes)} for programs and activations, "
            f"about {gib(fit.workspace_bytes)} are expected: start-up may run out of HBM"
        )
    ]


def _slow_formats(sizes: EngineSizes, slice_: Slice) -> list[str]:
    row = slice_.hardware
    if sizes.quantization and sizes.quantization.format == "fp8" and (row.fp8_flops or 0) <= row.bf16_flops:
        return [
            f"fp8 weights save memory on {row.name}, not time: it multiplies them at the bf16 rate at best"
        ]
    return []


def _workspace(shape: ModelShape, sizes: EngineSizes, layout: Layout) -> int:
    tokens, item = sizes.batched_tokens, 4 if sizes.weight_format == "float32" else 2
    stream = _STREAMS * tokens * shape.hidden_size * item
    widest = max((width for _, width in shape.mlp_widths), default=0)
    if experts := shape.experts:
        widest = max(widest, experts.per_token * experts.width + experts.shared_width)
    heads = 3 * shape.num_attention_heads * shape.head_dim / layout.attention_tensor
    logits = 2 * 4 * sizes.sequences * shape.vocab_size / layout.tensor
    return math.ceil(PROGRAM_BYTES + stream + tokens * item * (2 * widest / layout.tensor + heads) + logits)


def _longest(shape: ModelShape, sizes: EngineSizes, layout: Layout, cache: int) -> int:
    """Tokens of the longest sequence the cache holds, by bisection: bytes grow unevenly with length."""
    low, high = 0, shape.max_position_embeddings // _BLOCK_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_bytes(shape, sizes, layout, middle * _BLOCK_TOKENS) <= cache:
            low = middle
        else:
            high = middle - 1
    return low * _BLOCK_TOKENS
