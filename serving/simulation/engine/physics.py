"""How long a step of the engine takes on a slice: the plan's roofline, times calibrated factors.

Tokens are padded to the buckets that tpu-inference compiles for, so a step costs as much as its bucket. The roofline of
a step has three parts, each with a factor of its own: tokens that decode, the tokens a prefill chunk adds, and the cache
that both read. The roofline is for decoding, so a fourth part is added: the products of a chunk's tokens with every token
before them, which grow with the square of a prompt's length.
"""

from dataclasses import dataclass
from functools import lru_cache

from serving.planning import ModelShape, Plan
from serving.planning.speed import COSTS, Engine, step

_SMALLEST_BUCKET = 16  # tpu-inference's MIN_TOKEN_BUCKET; from there on buckets double
_CONTEXT_STEP = 64  # contexts are rounded to this, so that few predictions are computed


@dataclass(frozen=True)
class Factors:
    """Multiples of the roofline's parts, calibrated to measurements."""

    decode: float = 1.0
    prefill: float = 1.0
    cache: float = 1.0
    attention: float = 1.0


@dataclass(frozen=True)
class Batch:
    """What one step computes: sequences that decode a token each, tokens of prefill chunks, cached tokens read.

    `pairs` counts, for all tokens of chunks, the tokens that each looks back at.
    """

    decodes: int
    prefill_tokens: int
    sequences: int
    context_tokens: int
    pairs: int = 0


@dataclass(frozen=True)
class Parts:
    """The roofline's seconds of a step, part by part."""

    decode_s: float
    prefill_s: float
    cache_s: float
    attention_s: float

    def seconds(self, factors: Factors) -> float:
        return (
            factors.decode * self.decode_s
            + factors.prefill * self.prefill_s
            + factors.cache * self.cache_s
            + factors.attention * self.attention_s
        )


class Physics:
    """The time of steps on the slice of a plan."""

    def __init__(self, plan: Plan, factors: Factors) -> None:
        self._plan = plan
        self._factors = factors
        self._engine = Engine(plan.shape, plan.sizes, plan.slice, plan.layout)
        peak = plan.slice.hardware.bf16_flops * plan.slice.chips
        self._pair_s = COSTS.attention_s * _pair_flops(plan.shape) / peak
        self._tokens_s = lru_cache(maxsize=None)(self._read_tokens_s)
        self._cache_s = lru_cache(maxsize=None)(self._read_cache_s)

    def seconds(self, batch: Batch) -> float:
        return self.parts(batch).seconds(self._factors)

    def parts(self, batch: Batch) -> Parts:
        """Raises ValueError for a batch without a token: the engine takes no such step."""
        if batch.decodes + batch.prefill_tokens < 1:
            raise ValueError("an empty batch takes no step")
        decodes = _bucket(batch.decodes) if batch.decodes else 0
        decode_s = self._tokens_s(decodes, 0) if decodes else 0.0
        all_s = self._tokens_s(decodes, max(0, _bucket(batch.decodes + batch.prefill_tokens) - decodes))
        context = batch.context_tokens / batch.sequences
        return Parts(
            decode_s=decode_s,
            prefill_s=all_s - decode_s,
            cache_s=batch.sequences * self._cache_s(round(context / _CONTEXT_STEP)),
            attention_s=batch.pairs * self._pair_s,
        )

    def _read_tokens_s(self, decodes: int, prompt_tokens: int) -> float:
        """Seconds of weights, products and exchanges of tokens that look back at nothing; copies share them."""
        copies = self._plan.layout.data
        parts = step(self._engine, decodes=decodes / copies, prompt_tokens=prompt_tokens / copies)
        return parts.seconds(COSTS)

    def _read_cache_s(self, context_steps: int) -> float:
        """Seconds to read one sequence's cache; copies of the model read at the same time."""
        context = context_steps * _CONTEXT_STEP
        there, nothing = (step(self._engine, decodes=1, context=tokens) for tokens in (context, 0))
        return (there.seconds(COSTS) - nothing.seconds(COSTS)) / self._plan.layout.data


def _bucket(tokens: int) -> int:
    return max(_SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


def _pair_flops(shape: ModelShape) -> int:
    """Operations of one token looking back at one other: a product with its key and one with its value."""
    return shape.rounds * sum(4 * kind.count * kind.heads * kind.head_dim for kind in shape.attention)
