"""Whether a model fits: the HBM of one device, item by item, and what is left for the cache.

The order is the engine's (tpu_inference/worker/tpu_worker.py, determine_available_memory): weights are loaded, the
cache takes what `gpu_memory_utilization` allows beyond them, programs and activations live in the rest.
"""

import math
from dataclasses import dataclass, replace

from serving.planning.cache import page_tokens, separate_batches, sequence_bytes, state_bytes, whole_pages
from serving.planning.engine_sizes import EngineSizes
from serving.planning.layout import Layout
from serving.planning.shapes import ModelShape
from serving.planning.weights import TensorGroup, device_bytes, tensor_groups
from serving.tpu import Slice
from serving.tpu.generations import GIB

# In HBM beside the weights when the cache is sized. Gemma 4 E2B, whose loaded weights are 8.93 GiB, used 8.95 GiB of a v6e
# and 8.97 GiB of a v5e chip; Qwen3.5-397B-FP8 used 0.7% more than its weights.
RESIDENT_BYTES = GIB // 8
# What programs that have run leave in HBM at start. The runtime gives them up for buffers, not for another program.
# tpu-inference's own left about 0.2 GiB with Gemma 4 E2B on a v5e chip, and leave no more than this at the 0.98 of published v6e
# recipes: of 0.62 GiB grammars take 0.44 with Qwen3 32B. vLLM's, which run through torchax, are as large by the compiler: all of
# Qwen2.5 32B's on v6e-4 have 1.90 GiB of code, all of Qwen3 32B's 1.95 (compiled.json). Those of Gemma 4 with its encoder compiled for
# every token budget leave about 6 GiB (tpu-inference PR 3408).
_PROGRAM_BYTES = GIB // 8
_ENCODER_PROGRAM_BYTES = 6 * GIB
# Rows a token that activations hold at once: residual stream, its norm and the two sides of an addition.
_STREAMS = 4
# Rows that one expert's token holds at once: permuted inputs and outputs of both grouped products, and their gathered
# copies (layers/common/fused_moe_gmm.py). Published runs of Qwen3.5-397B leave more: 9 rows at 32,768 tokens, and at 65,536
# tokens 47 GiB were too few (PR 2512, PR 2582).
_EXPERT_ROWS = 4
# Sampling gathers float32 logits of the whole vocabulary on every device (layers/jax/sample/sampling.py). Beside what comes, cut as the
# head is, and what goes out it holds them as many times as libtpu's compiler says, which differs by generation: for 256 and 512
# requests on v6e, 1,024 and 2,048 on v7x, 256 and 512 on v5e.
_SAMPLING_COPIES = {"v6e": 1, "v7x": 2}
_SAMPLING_COPIES_ELSEWHERE = 3
# At start the program of grammars runs for every bucket of requests beside the cache, and bf16 logits and masks of all buckets, which
# are together twice those of the largest, lie there until the last has run (_precompile_structured_decoding). In float32 logits of the
# largest that is 1.06 with what goes out at 0.5 and temporaries of 1.5: 384 MiB of them "reserved" for 256 requests of Gemma 4 E2B.
_GRAMMAR_COPIES = 3.06
# Logprobs of a prompt take float32 logits of every token of a step, cut over the devices as the head is, as many times as
# libtpu's compiler says (runner/tpu_runner.py, compute_and_gather_prompt_logprobs).
_PROMPT_LOGPROBS_COPIES = 3
# A program wants its bytes in one piece: of 6.63 GiB withheld, 6.14 were not to be had at 64% of starts (tpu-recipes issue 151).
_FRAGMENTED = 1.08
# Experts that take this many times what is withheld are refused; less is a warning, as a step's bytes are estimated.
_HOPELESS = 2
_MUCH_PADDING = 1.25
_BLOCK_TOKENS = 128  # advice rounds lengths to this


@dataclass(frozen=True)
class Workspace:
    """HBM of a device beside weights and cache: programs, and the largest of a step, of grammars and of sampling, which take turns.

    A start runs steps and grammars for as many requests as there may be; it samples before there is a cache. `expert_bytes` of a step
    are the tokens of its experts. `prompt_logprobs_bytes` are taken by requests that ask for logprobs of their prompt, and by no others.
    """

    program_bytes: int
    step_bytes: int
    expert_bytes: int
    grammar_bytes: int
    sampling_bytes: int
    prompt_logprobs_bytes: int

    @property
    def start_bytes(self) -> int:
        return self.program_bytes + max(self.step_bytes, self.grammar_bytes)

    @property
    def bytes(self) -> int:
        return max(self.start_bytes, self.sampling_bytes)


@dataclass(frozen=True)
class Fit:
    """One device's HBM. `problems` is empty where the model fits; token counts are of the whole slice."""

    groups: tuple[TensorGroup, ...]
    usable_bytes: int
    utilization: float
    weight_bytes: int
    state_bytes: int
    workspace: "Workspace"
    cache_bytes: int
    max_model_len: int
    longest: int
    page_tokens: int
    cache_tokens: int
    sequences: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def workspace_bytes(self) -> int:
        return self.workspace.bytes

    @property
    def withheld_bytes(self) -> int:
        """What `gpu_memory_utilization` keeps from weights and cache."""
        return round(self.usable_bytes * (1 - self.utilization))

    @property
    def prompt_logprobs_fit(self) -> bool:
        """Whether a step of prompts whose logprobs were asked for fits into what is withheld, beside the programs."""
        space = self.workspace
        return space.program_bytes + space.prompt_logprobs_bytes <= self.withheld_bytes


def measure(
    shape: ModelShape,
    sizes: EngineSizes,
    slice_: Slice,
    layout: Layout,
    compiled: Workspace | None = None,
) -> Fit:
    """The HBM budget of a layout on a slice; `problems` say why it does not fit.

    `compiled` is what the TPU's compiler said of programs and steps, in place of estimates.
    """
    groups = tensor_groups(shape, sizes, layout)
    usable = slice_.hardware.usable_hbm_bytes // slice_.hardware.devices_per_chip
    weights = device_bytes(groups, shape, layout)
    state = state_bytes(shape, sizes, layout)
    workspace = compiled or _workspace(shape, sizes, slice_, layout)
    cache = 0 if shape.encodes else max(0, int(usable * sizes.utilization) - weights - RESIDENT_BYTES - state)
    longest = _longest(shape, sizes, layout, cache)
    length = sizes.max_model_len or max(longest, 1)
    batches = separate_batches(layout)
    page = sizes.block_tokens or page_tokens(length, sizes.sequences, latent=shape.latent is not None)
    in_pages = whole_pages(length, page)
    per_sequence = sequence_bytes(shape, sizes, layout, in_pages)
    room = cache
    if sizes.blocks:
        cache = min(cache, int(per_sequence * sizes.blocks * page / in_pages))
    fit = Fit(
        groups=groups,
        usable_bytes=usable,
        utilization=sizes.utilization,
        weight_bytes=weights,
        state_bytes=state,
        workspace=workspace,
        cache_bytes=cache,
        max_model_len=length,
        longest=longest,
        page_tokens=page,
        cache_tokens=int(cache / per_sequence * in_pages if per_sequence else sizes.sequences * length)
        * batches,
        sequences=int(cache / per_sequence if per_sequence else sizes.sequences) * batches,
        problems=(),
        notes=(),
    )
    problems = (
        *_shortfalls(fit, per_sequence, sizes.blocks),
        *_loading(shape, sizes, layout, fit),
        *_step_too_large(sizes, fit),
        *_too_many_blocks(sizes, per_sequence / in_pages * page, page, room),
    )
    notes = (
        ()
        if problems
        else (
            *_warnings(shape, sizes, layout, fit),
            *_padding(shape, sizes, layout, fit),
            *_slow_formats(sizes, slice_),
        )
    )
    return replace(fit, problems=problems, notes=notes)


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size < 10 * GIB else f"{size / GIB:.1f} GiB"


def _shortfalls(fit: Fit, per_sequence: float, blocks: int | None) -> list[str]:
    needed = fit.weight_bytes + RESIDENT_BYTES + fit.state_bytes + fit.workspace_bytes
    if needed > fit.usable_bytes:
        return [
            (
                f"weights of {gib(fit.weight_bytes)} and {gib(needed - fit.weight_bytes)} to run them are "
                f"{gib(needed - fit.usable_bytes)} more than the {gib(fit.usable_bytes)} of a device"
            )
        ]
    if blocks and per_sequence > fit.cache_bytes:
        return [
            (
                f"one sequence of {fit.max_model_len} tokens takes {gib(per_sequence)} of a device's cache, and "
                f"engine.num_gpu_blocks_override leaves {gib(fit.cache_bytes)}, {blocks} blocks of {fit.page_tokens} tokens: raise it, "
                "or remove it"
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
        # One program has both: that of Gemma 4 E2B in int8 wanted 16.23 GiB of a v5e chip's 15.75.
        if (both := full_size + fit.weight_bytes) > fit.usable_bytes:
            return [
                (
                    f"qwix quantises weights in a program that holds them at full size and quantised, {gib(both)} of the "
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


def _step_too_large(sizes: EngineSizes, fit: Fit) -> list[str]:
    if fit.workspace.expert_bytes <= _HOPELESS * fit.withheld_bytes:
        return []
    return [
        (
            f"a step of {sizes.batched_tokens} tokens takes about {gib(fit.workspace.step_bytes)} of a device, "
            f"{gib(fit.workspace.expert_bytes)} of it for experts, and gpu_memory_utilization {fit.utilization:g} leaves "
            f"{gib(fit.withheld_bytes)}: lower max_num_batched_tokens, or gpu_memory_utilization{_utilization_for(fit)}"
        )
    ]


def _warnings(shape: ModelShape, sizes: EngineSizes, layout: Layout, fit: Fit) -> list[str]:
    space = fit.workspace
    leaves = f"gpu_memory_utilization {fit.utilization:g} leaves {gib(fit.withheld_bytes)}"
    if space.start_bytes * _FRAGMENTED > fit.withheld_bytes:
        larger = (
            f"a step {gib(space.step_bytes)}"
            if space.step_bytes > space.grammar_bytes
            else f"grammars {gib(space.grammar_bytes)}"
        )
        return [
            (
                f"start-up may run out of HBM: {leaves}, programs may take {gib(space.program_bytes)} and {larger}; "
                f"lower it{_utilization_for(fit)}"
            )
        ]
    if space.sampling_bytes > fit.withheld_bytes:
        return [
            (
                f"{sizes.sequences} requests that sample at once may run out of HBM: {leaves}, sampling takes "
                f"{gib(space.sampling_bytes)}; lower max_num_seqs, or it{_utilization_for(fit)}"
            )
        ]
    return _older_engines(shape, sizes, layout, fit, leaves)


def _older_engines(shape: ModelShape, sizes: EngineSizes, layout: Layout, fit: Fit, leaves: str) -> list[str]:
    """What tpu-recipes issue 151 ran out of: logits of all copies, laid on one device beside the cache."""
    whole = 0 if sizes.pools else 4 * sizes.sequences * layout.data * shape.vocab_size
    wanted = (fit.workspace.program_bytes + whole) * _FRAGMENTED
    if layout.data == 1 or wanted <= fit.withheld_bytes:
        return []
    return [
        (
            f"start-up may run out of HBM with tpu-inference before 0.13, which lays logits of all {layout.data} copies on one device "
            f"beside the cache: {leaves}, they take {gib(whole)}; 0.26 does so before there is a cache"
        )
    ]


def _utilization_for(fit: Fit) -> str:
    """The utilisation that leaves enough, as advice; nothing where weights would not fit then."""
    space = fit.workspace
    wanted = max(space.start_bytes * _FRAGMENTED, space.sampling_bytes)
    share = math.floor(100 * (1 - wanted / fit.usable_bytes)) / 100
    needed = fit.weight_bytes + RESIDENT_BYTES + fit.state_bytes
    return f" to {share:.2f}" if share * fit.usable_bytes > needed else ""


def _padding(shape: ModelShape, sizes: EngineSizes, layout: Layout, fit: Fit) -> list[str]:
    """Experts that are cut into parts much smaller than the lanes that each part is padded to."""
    padding = next((group.padding for group in fit.groups if group.name == "experts"), 1.0)
    if shape.experts is None or padding < _MUCH_PADDING or shape.experts.count % layout.width:
        return []
    whole = device_bytes(tensor_groups(shape, replace(sizes, expert_parallel=True), layout), shape, layout)
    if fit.weight_bytes - whole < GIB // 4:
        return []
    return [
        f"experts are padded to {padding:.1f} times their bytes; engine.enable_expert_parallel: true saves {gib(fit.weight_bytes - whole)} a device"
    ]


def _slow_formats(sizes: EngineSizes, slice_: Slice) -> list[str]:
    row = slice_.hardware
    if sizes.quantization and sizes.quantization.format == "fp8" and (row.fp8_flops or 0) <= row.bf16_flops:
        return [
            f"fp8 weights save memory on {row.name}, not time: it multiplies them at the bf16 rate at best"
        ]
    return []


def _workspace(shape: ModelShape, sizes: EngineSizes, slice_: Slice, layout: Layout) -> Workspace:
    tokens, item = sizes.batched_tokens, 4 if sizes.weight_format == "float32" else 2
    stream = _STREAMS * tokens * shape.hidden_size * item
    widest = max((width for _, width in shape.mlp_widths), default=0)
    heads = 3 * max(shape.head_counts) * shape.head_dim / layout.head_shards
    rows = 0.0
    if experts := shape.experts:
        widest = max(widest, experts.shared_width)
        width = experts.width if sizes.expert_parallel else experts.width / layout.width
        # experts see the tokens of all devices that share attention by requests
        routed = tokens * layout.attention_groups * experts.per_token
        rows = routed * item * (_EXPERT_ROWS * shape.hidden_size + width)
    logits = 0 if sizes.pools else 4 * sizes.sequences * shape.vocab_size
    batches = separate_batches(layout)
    copies = _SAMPLING_COPIES.get(slice_.generation, _SAMPLING_COPIES_ELSEWHERE)
    return Workspace(
        program_bytes=_ENCODER_PROGRAM_BYTES if sizes.encoder_programs else _PROGRAM_BYTES,
        step_bytes=math.ceil(stream + tokens * item * (2 * widest / layout.head_shards + heads) + rows),
        expert_bytes=math.ceil(rows),
        grammar_bytes=math.ceil(_GRAMMAR_COPIES * logits) if batches == 1 else 0,
        sampling_bytes=math.ceil((copies + 1 + batches / (layout.width * layout.data)) * logits),
        prompt_logprobs_bytes=0
        if sizes.pools
        else _PROMPT_LOGPROBS_COPIES * 4 * tokens * shape.vocab_size // layout.width,
    )


def _too_many_blocks(sizes: EngineSizes, block_bytes: float, tokens: int, room: int) -> list[str]:
    if not sizes.blocks or (asked := block_bytes * sizes.blocks) <= room:
        return []
    problem = (
        f"engine.num_gpu_blocks_override: {sizes.blocks} blocks of {tokens} tokens are {gib(asked)} of a device, "
        f"{gib(room)} are left for the cache; lower it, or remove it"
    )
    return [problem]


def _longest(shape: ModelShape, sizes: EngineSizes, layout: Layout, cache: int) -> int:
    """Tokens of the longest sequence the cache holds, by bisection: bytes grow unevenly with length."""
    latent = shape.latent is not None
    low, high = 0, shape.max_position_embeddings // _BLOCK_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        length = middle * _BLOCK_TOKENS
        page = sizes.block_tokens or page_tokens(length, sizes.sequences, latent=latent)
        in_pages = whole_pages(length, page)
        in_blocks = sizes.blocks is None or in_pages <= sizes.blocks * page
        if in_blocks and sequence_bytes(shape, sizes, layout, in_pages) <= cache:
            low = middle
        else:
            high = middle - 1
    return low * _BLOCK_TOKENS
