"""What one slice can take within the targets: from the plan's speed, the traffic's lengths and measurements. Pure.

A slice with B sequences takes `step(B)` seconds a token and, in between, the prefill of B / answer requests a token. The
slice is full at the largest B that keeps the inter-token target and fits the cache and the engine's limit. Its capacity
is the requests it answers a second at that B. Counts of slices leave room for chance (square-root staffing): a mean load of N
sequences has moments of N + 2 sqrt(N). That is much on one slice and nothing on a hundred.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from serving.planning import Plan

# Two standard deviations: in 1 of 40 moments there are more requests than slices take within the target.
_CHANCE = 2.0
# Beyond this share of the cache, vLLM preempts sequences and computes them anew.
_CACHE_SHARE = 0.95
# A need of this share of a slice is not worth one more slice.
NOT_WORTH = 0.02
# Measured over planned speed; outside these bounds something else is wrong, and the bound is taken.
SLOWEST, FASTEST = 0.5, 2.0


@dataclass(frozen=True)
class Pool:
    """Slices of one shape, bought in one way: bounds, price, and the plan's speeds.

    `key` tells the pool from others, `name` is for people. `hardware` is what Ray places its slices on where no label says for which
    pool hosts were bought. `steps` are (sequences, seconds a step), ascending.
    """

    key: str
    name: str
    min: int
    max: int
    steps: tuple[tuple[float, float], ...]
    prefill_tokens_per_s: float
    cache_tokens: float
    patience_s: float = 600.0
    dollars_per_hour: float = 0.0
    hardware: str = ""

    @property
    def most_sequences(self) -> float:
        return self.steps[-1][0]

    def seats(self, kv_per_sequence: float) -> float:
        """Sequences that a slice runs at once, each with this share of its cache."""
        fit = _CACHE_SHARE / kv_per_sequence if kv_per_sequence > 0 else math.inf
        return max(1.0, min(self.most_sequences, fit))

    def step_s(self, sequences: float) -> float:
        """Seconds of a step with so many sequences, interpolated between the plan's points."""
        index = bisect_right(self.steps, (sequences, math.inf))
        if index == 0:
            return self.steps[0][1]
        if index == len(self.steps):
            return self.steps[-1][1]
        (low, low_s), (high, high_s) = self.steps[index - 1], self.steps[index]
        return low_s + (high_s - low_s) * (sequences - low) / (high - low)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a mean request: the prompt's without those found in a cache, and all of the answer's."""

    prompt: float = 512.0
    answer: float = 256.0


@dataclass(frozen=True)
class Capacity:
    """One slice of a pool at its fullest."""

    sequences: float
    requests_per_s: float


def itl_s(pool: Pool, lengths: Lengths, sequences: float, speed: float = 1.0) -> float:
    """Seconds between two tokens of an answer, prefill of the others included."""
    prefill_s = lengths.prompt / pool.prefill_tokens_per_s
    return (pool.step_s(sequences) + sequences * prefill_s / max(1.0, lengths.answer)) / speed


def capacity(
    pool: Pool,
    lengths: Lengths,
    target_itl_s: float | None = None,
    speed: float = 1.0,
    kv_per_sequence: float = 0.0,
) -> Capacity:
    """The most one slice takes. `speed` is measured over planned, `kv_per_sequence` a sequence's measured share of the cache."""
    most = min(pool.most_sequences, pool.cache_tokens * _CACHE_SHARE / (lengths.prompt + lengths.answer / 2))
    if kv_per_sequence > 0:
        most = min(most, _CACHE_SHARE / kv_per_sequence)
    most = max(1.0, most)
    if target_itl_s is not None and itl_s(pool, lengths, most, speed) > target_itl_s:
        most = _largest_within(pool, lengths, target_itl_s, speed, most)
    return Capacity(most, most / (max(1.0, lengths.answer) * itl_s(pool, lengths, most, speed)))


def _largest_within(pool: Pool, lengths: Lengths, target_s: float, speed: float, most: float) -> float:
    """The largest number of sequences within the target; 1 where none is. Piecewise linear, so solved piece by piece."""
    edges = [1.0, *(sequences for sequences, _ in pool.steps if 1 < sequences < most), most]
    if itl_s(pool, lengths, 1.0, speed) > target_s:
        return 1.0
    for low, high in pairwise(edges):
        low_s, high_s = itl_s(pool, lengths, low, speed), itl_s(pool, lengths, high, speed)
        if high_s > target_s:
            return low + (high - low) * (target_s - low_s) / (high_s - low_s)
    return most


def with_room(requests_per_s: float, slice_capacity: Capacity) -> float:
    """The rate to buy slices for, with room for chance."""
    if requests_per_s <= 0:
        return 0.0
    sequences = requests_per_s / slice_capacity.requests_per_s * slice_capacity.sequences
    return requests_per_s * (1 + _CHANCE / math.sqrt(max(1.0, sequences)))


def whole_slices(requests_per_s: float, slice_requests_per_s: float) -> int:
    """Slices for a rate; what is missing may be a share of a slice that is not worth one more."""
    if requests_per_s <= 0:
        return 0
    return max(0, math.ceil(min(requests_per_s / slice_requests_per_s, 1e9) - NOT_WORTH))


def pool_of(plan: Plan, dollars_per_hour: float, context: int | None = None) -> Pool:
    """The pool of a plan: its steps for powers of two up to the engine's limit, at a context or half the longest."""
    most = plan.most_sequences
    context = plan.fit.max_model_len // 2 if context is None else context
    batches = sorted({min(most, 1 << power) for power in range(most.bit_length() + 1)})
    speeds = [plan.speed(sequences=sequences, context=context) for sequences in batches]
    counts = plan.model.replicas
    return Pool(
        key=plan.pool,
        name=str(plan.slice),
        min=counts.min,
        max=counts.max,
        steps=tuple(
            (float(sequences), speed.step_s) for sequences, speed in zip(batches, speeds, strict=True)
        ),
        prefill_tokens_per_s=speeds[-1].prefill_tokens_per_s,
        cache_tokens=float(plan.fit.cache_tokens),
        patience_s=counts.patience_s,
        dollars_per_hour=dollars_per_hour,
        hardware=plan.slice.key,
    )
