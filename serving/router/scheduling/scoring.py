"""Which of several slices takes a request: a decision over numbers that are given.

A slice with a prompt's beginning in its cache saves that prefill; a slice with less to do answers sooner. The unit is a token
of prefill: tokens saved, tokens just sent to a slice, and REQUEST_TOKENS per request of a slice, for its decoding. The
brake comes first: no cache makes up for many more requests than the least loaded slice has, or for a longer queue. Pools
come in order: the next one where every slice of those before it is full.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REQUEST_TOKENS = 128
_SPARE_REQUESTS = 8  # a slice may have this many more than the least loaded, or twice as many
_SPARE_SHARE = 1.0
_SPARE_QUEUE = 2
_FULL_KV = 0.9  # vLLM preempts requests when the cache runs out
# A slice counts as slow where its requests get tokens at less than this share of the usual pace.
_SLOW = 0.67
_SLOWEST = 0.25
_PACE_WEIGHT = 0.2
_NUMBERS = ("load", "prefill_tokens", "waiting", "kv_usage", "saved_tokens")


@dataclass(frozen=True)
class Candidate:
    """A slice that could take the request. `load`: its requests, weighed by how slow it is; `prefill_tokens`: sent lately,
    and perhaps still to be read.

    `saved_tokens`: those of the request that its cache is thought to hold; of equals the highest `draw` wins.
    """

    replica: str
    load: float = 0.0
    prefill_tokens: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    pool: int = 0
    saved_tokens: float = 0.0
    draw: int = 0

    @property
    def full(self) -> bool:
        return self.waiting > 0 or self.kv_usage >= _FULL_KV


def choose(candidates: Iterable[Candidate], at_home_tokens: float = 0.0) -> Candidate:
    """The slice for a request, of one or more; the highest draw is thought to have `at_home_tokens` cached."""
    able = _preferred([_sane(candidate) for candidate in candidates])
    if at_home_tokens:
        home = max(able, key=lambda candidate: (candidate.draw, candidate.replica))
        saved = max(home.saved_tokens, at_home_tokens)
        able = [
            dataclasses.replace(candidate, saved_tokens=saved) if candidate is home else candidate
            for candidate in able
        ]
    least = min(candidate.load for candidate in able)
    queue = min(candidate.waiting for candidate in able)
    within = [candidate for candidate in able if _within(candidate, least, queue)] or able
    return min(within, key=lambda candidate: (_cost(candidate), -candidate.draw, candidate.replica))


def most_load(least: float) -> float:
    """The load below which a slice may be chosen for its cache, given the least load of all."""
    return least + max(_SPARE_REQUESTS, _SPARE_SHARE * least)


def _cost(candidate: Candidate) -> float:
    return REQUEST_TOKENS * candidate.load + candidate.prefill_tokens - candidate.saved_tokens


def _within(candidate: Candidate, least: float, queue: float) -> bool:
    if candidate.load == least:
        return True
    return candidate.load < most_load(least) and candidate.waiting <= queue + _SPARE_QUEUE


def _preferred(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    for pool in sorted({candidate.pool for candidate in candidates}):
        members = [candidate for candidate in candidates if candidate.pool == pool]
        if not all(candidate.full for candidate in members):
            return members
    return candidates


def _sane(candidate: Candidate) -> Candidate:
    """The candidate with 0 for each number that is negative or not finite."""
    numbers = {name: getattr(candidate, name) for name in _NUMBERS}
    wrong: dict[str, Any] = {
        name: 0.0 for name, value in numbers.items() if not (math.isfinite(value) and value >= 0)
    }
    return dataclasses.replace(candidate, **wrong) if wrong else candidate


def draw(home: int, replica: int) -> int:
    """Rendezvous hashing: every router ranks slices alike for a conversation; one slice more or less moves only its share."""
    mixed = (home ^ replica) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 31) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    return mixed ^ mixed >> 29


def paced(before: float | None, tokens: int, running: float, seconds: float) -> float | None:
    """Tokens a second per running request of a slice, averaged over its last reports."""
    if running < 1 or seconds <= 0 or tokens < 0:
        return before
    now = tokens / running / seconds
    return now if before is None else before + _PACE_WEIGHT * (now - before)


def weights(paces: Mapping[str, float]) -> dict[str, float]:
    """How much a request weighs on each slice: more on a slice that is much slower than its pool."""
    if not paces:
        return {}
    usual = statistics.median_high(paces.values())
    if not math.isfinite(usual) or usual <= 0:
        return {}
    return {
        replica: usual / max(pace, _SLOWEST * usual)
        for replica, pace in paces.items()
        if math.isfinite(pace) and pace < _SLOW * usual
    }
