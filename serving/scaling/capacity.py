"""What one slice can take within the targets: from the plan's roofline, the traffic's lengths and what was measured. Pure.

A slice with B sequences takes `step(B)` seconds a token and, in between, the prefill of B / answer requests a token. The
largest B that keeps the inter-token target, fits the cache and the engine's limit is where a slice is full; what it
answers a second there is its capacity. Slices are counted with room for chance: load that averages N sequences has
moments of N + 2 sqrt(N) (square-root staffing), which is much on one slice and nothing on a hundred.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from serving.planning import Plan
from serving.planning.speed import predict

# Two standard deviations: in 1 of 40 moments more requests are there than slices take within the target.
_CHANCE = 2.0
# Beyond this share of the cache, vLLM preempts sequences and computes them anew.
_CACHE_SHARE = 0.95
# A correction by measurement outside of this says that something else is wrong.
SLOWEST, FASTEST = 0.5, 2.0


@dataclass(frozen=True)
class Pool:
    """Slices of one shape, bought in one way: bounds, price, and the plan's speeds.

    `key` tells the pool from others, `name` is for people. `steps` are (sequences, seconds a step), ascending.
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

    @property
    def most_sequences(self) -> float:
        return self.steps[-1][0]

    def step_s(self, sequences: float) -> float:
        """Seconds of a step with so many sequences, between the plan's points along straight lines."""
        at = bisect_right(self.steps, (sequences, math.inf))
        if at == 0:
            return self.steps[0][1]
        if at == len(self.steps):
            return self.steps[-1][1]
        (low, low_s), (high, high_s) = self.steps[at - 1], self.steps[at]
        return low_s + (high_s - low_s) * (sequences - low) / (high - low)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a mean request: of its prompt those that are computed, of its answer all."""

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
    """The most one slice takes. `speed` is measured over planned, `kv_per_sequence` the cache share one was seen to take."""
    most = min(pool.most_sequences, pool.cache_tokens * _CACHE_SHARE / (lengths.prompt + lengths.answer / 2))
    if kv_per_sequence > 0:
        most = min(most, _CACHE_SHARE / kv_per_sequence)
    most = max(1.0, most)
    if target_itl_s is not None and itl_s(pool, lengths, most, speed) > target_itl_s:
        most = _largest_within(pool, lengths, target_itl_s, speed, most)
    return Capacity(most, most / (max(1.0, lengths.answer) * itl_s(pool, lengths, most, speed)))


def _largest_within(pool: Pool, lengths: Lengths, target_s: float, speed: float, most: float) -> float:
    """The largest number of sequences within the target; 1 where none is. Piecewise linear, so solved piece by piece."""
    edges = [1.0, *(at for at, _ in pool.steps if 1 < at < most), most]
    if itl_s(pool, lengths, 1.0, speed) > target_s:
        return 1.0
    for low, high in pairwise(edges):
        low_s, high_s = itl_s(pool, lengths, low, speed), itl_s(pool, lengths, high, speed)
        if high_s > target_s:
            return low + (high - low) * (target_s - low_s) / (high_s - low_s)
    return most


def with_room(requests_per_s: float, one: Capacity) -> float:
    """The rate to buy slices for, so that chance finds room."""
    if requests_per_s <= 0:
        return 0.0
    sequences = requests_per_s / one.requests_per_s * one.sequences
    return requests_per_s * (1 + _CHANCE / math.sqrt(max(1.0, sequences)))


def pool_of(plan: Plan, dollars_per_hour: float) -> Pool:
    """The pool of a plan: its steps at half the longest context, at powers of two up to the engine's limit."""
    most = plan.most_sequences
    context = plan.fit.max_model_len // 2
    at = sorted({min(most, 1 << power) for power in range(most.bit_length() + 1)})
    speeds = [
        predict(plan.shape, plan.sizes, plan.slice, plan.layout, sequences=each, context=context)
        for each in at
    ]
    counts = plan.model.replicas
    return Pool(
        key=plan.pool,
        name=str(plan.slice),
        min=counts.min,
        max=counts.max,
        steps=tuple((float(each), speed.step_s) for each, speed in zip(at, speeds, strict=True)),
        prefill_tokens_per_s=speeds[-1].prefill_tokens_per_s,
        cache_tokens=float(plan.fit.cache_tokens),
        patience_s=counts.patience_s,
        dollars_per_hour=dollars_per_hour,
    )
