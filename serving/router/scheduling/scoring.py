"""Which of several slices takes a request: a decision over numbers that are given.

A slice that has a prompt's beginning in its cache saves its prefill; one that has less to do answers sooner. All of it is
counted in tokens of prefill: those saved, those that a slice was just sent, and REQUEST_TOKENS for each request it has,
for the decoding. The brake comes first: a slice that has many more requests than the least loaded, or a longer queue, is no choice for
anything it may have cached. Pools are asked in order: the next one where every slice of those before it is full.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REQUEST_TOKENS = 128
_SPARE_REQUESTS = 8  # a slice may have so many more than the least loaded, or twice as many
_SPARE_SHARE = 1.0
_SPARE_QUEUE = 2
_FULL_KV = 0.9  # vLLM preempts where the cache runs out
# A slice counts as slow where its requests get tokens at less than this share of the usual pace.
_SLOW = 0.67
_SLOWEST = 0.25
_PACE_WEIGHT = 0.2
_NUMBERS = ("load", "prefill_tokens", "waiting", "kv_usage", "saved_tokens")


@dataclass(frozen=True)
class Candidate:
    """A slice that could take the request. `load` is requests it has, weighed by how slow it is; `prefill_tokens` it was
    sent lately and may still have before it.

    `saved_tokens` is what of the request is thought to be in its cache; of equals the highest `draw` wins.
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
    """The slice for a request, of one or more; `at_home_tokens` are thought to be where the draw is highest."""
    able = _preferred([_known(each) for each in candidates])
    if at_home_tokens:
        home = max(able, key=lambda each: (each.draw, each.replica))
        saved = max(home.saved_tokens, at_home_tokens)
        able = [dataclasses.replace(each, saved_tokens=saved) if each is home else each for each in able]
    least = min(each.load for each in able)
    queue = min(each.waiting for each in able)
    within = [each for each in able if _within(each, least, queue)] or able
    return min(within, key=lambda each: (_cost(each), -each.draw, each.replica))


def most_load(least: float) -> float:
    """The most that a slice may have to be chosen for what it has cached, where the least loaded has so much."""
    return least + max(_SPARE_REQUESTS, _SPARE_SHARE * least)


def _cost(candidate: Candidate) -> float:
    return REQUEST_TOKENS * candidate.load + candidate.prefill_tokens - candidate.saved_tokens


def _within(candidate: Candidate, least: float, queue: float) -> bool:
    if candidate.load == least:
        return True
    return candidate.load < most_load(least) and candidate.waiting <= queue + _SPARE_QUEUE


def _preferred(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    for pool in sorted({each.pool for each in candidates}):
        members = [each for each in candidates if each.pool == pool]
        if not all(each.full for each in members):
            return members
    return candidates


def _known(candidate: Candidate) -> Candidate:
    """Numbers that are no numbers say nothing, neither good nor bad."""
    numbers = {name: getattr(candidate, name) for name in _NUMBERS}
    wrong: dict[str, Any] = {
        name: 0.0 for name, value in numbers.items() if not (math.isfinite(value) and value >= 0)
    }
    return dataclasses.replace(candidate, **wrong) if wrong else candidate


def draw(home: int, replica: int) -> int:
    """Rendezvous: every router ranks slices alike for one conversation, and a slice more or less moves only its share."""
    mixed = (home ^ replica) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 31) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    return mixed ^ mixed >> 29


def paced(before: float | None, tokens: int, running: float, seconds: float) -> float | None:
    """Tokens a second that each running request of a slice gets, over its last reports."""
    if running < 1 or seconds <= 0 or tokens < 0:
        return before
    now = tokens / running / seconds
    return now if before is None else before + _PACE_WEIGHT * (now - before)


def weights(paces: Mapping[str, float]) -> dict[str, float]:
    """How much a request weighs on each slice: more on one that is much slower than the others like it."""
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
