"""What would fit instead: slices by price, a shorter context, smaller formats."""

from contextlib import suppress
from dataclasses import dataclass, replace

from serving.config import AUTO, ParallelSpec
from serving.errors import PlanError
from serving.planning import parallelism
from serving.planning.engine_sizes import DEFAULT_BATCHED_TOKENS, EngineSizes
from serving.planning.fit import Fit, measure
from serving.planning.layout import Layout
from serving.planning.prices import Prices, chip_hour
from serving.planning.quantization import Quantization
from serving.planning.shapes import ModelShape
from serving.tpu import Slice, every_slice

_MOST_CHIPS = 256  # larger slices are not offered: no known model needs one


@dataclass(frozen=True)
class Candidate:
    """A slice the model fits, and its price an hour on demand."""

    slice: Slice
    layout: Layout
    fit: Fit
    per_hour: float


def slices_that_fit(
    shape: ModelShape,
    sizes: EngineSizes,
    prices: Prices | None = None,
    *,
    shares_attention: bool = False,
) -> list[Candidate]:
    """Every slice up to 256 chips that the model fits, cheapest first.

    `shares_attention`: with as much attention data parallelism as the heads allow.
    """
    fitted = (
        _fitted(shape, sizes, slice_, per_hour, shares_attention=shares_attention)
        for slice_, per_hour in _offered(prices)
    )
    return [candidate for candidate in fitted if candidate]


def _cheapest_by_generation(
    shape: ModelShape, sizes: EngineSizes, prices: Prices | None, *, shares_attention: bool
) -> list[Candidate]:
    """As `slices_that_fit`, the first of each generation."""
    found: dict[str, Candidate] = {}
    for slice_, per_hour in _offered(prices):
        if slice_.generation not in found and (
            candidate := _fitted(shape, sizes, slice_, per_hour, shares_attention=shares_attention)
        ):
            found[slice_.generation] = candidate
    return list(found.values())


def _offered(prices: Prices | None) -> list[tuple[Slice, float]]:
    """Slices up to 256 chips with their prices an hour on demand, cheapest first."""
    offered = [
        (slice_, slice_.chips * chip_hour(slice_.generation, prices)["on-demand"])
        for slice_ in every_slice()
        if slice_.chips <= _MOST_CHIPS
    ]
    return sorted(offered, key=lambda one: (one[1], one[0].hosts))


def _fitted(
    shape: ModelShape, sizes: EngineSizes, slice_: Slice, per_hour: float, *, shares_attention: bool
) -> Candidate | None:
    layout = _layout(shape, sizes, slice_, AUTO if shares_attention else None)
    if layout is None:
        return None
    fit = measure(shape, sizes, slice_, layout)
    return None if fit.problems else Candidate(slice_, layout, fit, per_hour)


def _layout(
    shape: ModelShape, sizes: EngineSizes, slice_: Slice, attention_data: str | None
) -> Layout | None:
    """The whole slice for one copy of the model, or the fewest copies that its heads allow; None where nothing works."""
    copies = () if slice_.hosts > 1 or sizes.lora_rank else parallelism.COPIES
    for data in (None, *copies):
        with suppress(PlanError):
            return parallelism.derive(
                shape, sizes, slice_, ParallelSpec(data=data, attention_data=attention_data)
            )[0]
    return None


def advice(
    shape: ModelShape,
    sizes: EngineSizes,
    slice_: Slice,
    layout: Layout,
    fit: Fit,
    prices: Prices | None = None,
) -> str:
    """One clause for each way out: a shorter context, fewer requests or smaller formats here, other slices."""
    ways = []
    shorter = replace(sizes, max_model_len=fit.longest)
    if 0 < fit.longest < fit.max_model_len and not measure(shape, shorter, slice_, layout).problems:
        ways.append(f"engine.max_model_len up to {fit.longest} fits here")
    if batch := _smaller_batch(shape, sizes, slice_, layout):
        ways.append(f"engine.max_num_batched_tokens up to {batch} fits here")
    elif sequences := _fewer_sequences(shape, sizes, slice_, layout):
        ways.append(f"engine.max_num_seqs up to {sequences} fits here")
    if smaller := _smaller_format(shape, sizes, slice_, layout):
        ways.append(f"it fits here with {smaller}")
    shares = layout.attention_groups > 1
    if others := _cheapest_by_generation(shape, sizes, prices, shares_attention=shares):
        listed = ", ".join(f"{candidate.slice} at ${candidate.per_hour:.2f}/h" for candidate in others)
        ways.append(f"as it is it fits {listed}")
    return "; ".join(ways) or f"it fits no slice of up to {_MOST_CHIPS} chips"


def _smaller_batch(shape: ModelShape, sizes: EngineSizes, slice_: Slice, layout: Layout) -> int | None:
    """The largest half, quarter and so on of the batch with which it fits."""
    batch = sizes.batched_tokens // 2
    while batch >= max(sizes.sequences, 1):
        if not measure(shape, replace(sizes, batched_tokens=batch), slice_, layout).problems:
            return batch
        batch //= 2
    return None


def _fewer_sequences(shape: ModelShape, sizes: EngineSizes, slice_: Slice, layout: Layout) -> int | None:
    """The largest half, quarter and so on of the requests at once with which it fits.

    Tokens of a step that are as many as requests were raised for them, and fall with them.
    """
    follows = sizes.batched_tokens == sizes.sequences
    sequences = sizes.sequences // 2
    while sequences:
        tokens = max(sequences, DEFAULT_BATCHED_TOKENS) if follows else sizes.batched_tokens
        fewer = replace(sizes, sequences=sequences, batched_tokens=tokens)
        if not measure(shape, fewer, slice_, layout).problems:
            return sequences
        sequences //= 2
    return None


def _smaller_format(shape: ModelShape, sizes: EngineSizes, slice_: Slice, layout: Layout) -> str | None:
    fp8_weights = replace(
        sizes, quantization=sizes.quantization or Quantization("fp8"), loads_full_size=False
    )
    apart = shape.experts is not None and shape.experts.count % layout.width == 0
    smaller_sizes = {
        "engine.enable_expert_parallel: true": replace(sizes, expert_parallel=True) if apart else sizes,
        "engine.kv_cache_dtype: fp8": replace(sizes, cache_itemsize=1),
        "an fp8 checkpoint of it": fp8_weights,
        "an fp8 checkpoint of it and engine.kv_cache_dtype: fp8": replace(fp8_weights, cache_itemsize=1),
    }
    return next(
        (
            name
            for name, smaller in smaller_sizes.items()
            if smaller != sizes and not measure(shape, smaller, slice_, layout).problems
        ),
        None,
    )
