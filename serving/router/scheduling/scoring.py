"""Which of several slices takes a request: a decision over numbers that are given.

A slice with a prompt's beginning in its cache saves that prefill; a slice with less to do answers sooner. All is counted in
UNIT_TOKENS tokens of prefill, whole ones: those saved, those just sent to a slice, and REQUEST of them per request of a slice,
for its decoding. The brake comes first: no cache makes up for many more requests than the least loaded slice has, or for a
longer queue.

Numbers of slices stand in columns (bit_columns), so that a choice among 1,000 slices costs hardly more than one among ten.
`tests/support/exhaustive_choice.py` has the same rule as a loop over all slices; tests hold the two equal.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.router.scheduling.bit_columns import BitColumn

UNIT_TOKENS = 16
REQUEST = 8  # 128 tokens
SPARE_QUEUE = 2
_SPARE_REQUESTS = 8  # a slice may have this many more than the least loaded, or twice as many
_SPARE_SHARE = 1.0
_FULL_KV = 0.9  # vLLM preempts requests when the cache runs out
# A slice counts as slow where its requests get tokens at less than this share of the usual pace.
_SLOW = 0.67
_SLOWEST = 0.25
_PACE_WEIGHT = 0.2


@dataclass(frozen=True)
class Loads:
    """What slices have to do, in units. `load`: their requests, weighed by how slow each slice is; `cost`: `load`, and the
    prompts sent lately that are perhaps still to be read. `waiting`: requests in the engine's queue.
    """

    load: BitColumn = field(default_factory=BitColumn)
    cost: BitColumn = field(default_factory=BitColumn)
    waiting: BitColumn = field(default_factory=BitColumn)


class Saved(NamedTuple):
    """What slices are thought to have of a request, in units. `matches`: how much of its prompt, and the slices that have so
    much, each slice once, the most first. `marks`: what its session or its adapter is worth, and the slices with it.

    `home` finds the slice thought to have as much as `at_home`; of equals it is chosen.
    """

    matches: Iterable[tuple[int, int]] = ()
    marks: tuple[tuple[int, int], ...] = ()
    home: Callable[[], int | None] = lambda: None
    at_home: int = 0


class Choice(NamedTuple):
    """Slices that serve a request equally well (a set), and how many units each of them saves."""

    slices: int
    saved: int


def choose(able: int, loads: Loads, saved: Saved) -> Choice:
    """The best of a set of slices that is not empty."""
    within = _within(able, loads)
    best, choice = _cheapest(within, loads.cost, saved)
    if not saved.at_home and choice.slices.bit_count() == 1:
        return choice  # wherever its home is
    home = saved.home()
    if home is not None and within >> home & 1:
        if saved.at_home and loads.cost[home] - saved.at_home <= best:
            return Choice(1 << home, saved.at_home)
        if choice.slices >> home & 1:
            return Choice(1 << home, choice.saved)
    return choice


def most_load(least: int) -> int:
    """The load, in units, below which a slice may be chosen for its cache, given the least load of all."""
    return least + max(_SPARE_REQUESTS * REQUEST, int(_SPARE_SHARE * least))


def is_full(waiting: float, kv_usage: float) -> bool:
    """Whether a slice has no room for another request at once."""
    return waiting > 0 or kv_usage >= _FULL_KV


def _within(able: int, loads: Loads) -> int:
    """The slices that the brake lets a request go to."""
    least, idlest = loads.load.least(able)
    queue, _ = loads.waiting.least(able)
    able = loads.load.below(most_load(least), able)
    return loads.waiting.below(queue + SPARE_QUEUE + 1, able) | idlest


def _cheapest(within: int, cost: BitColumn, saved: Saved) -> tuple[int, Choice]:
    """The least cost after what is saved, and the slices that have it."""
    least, slices = cost.least(within)
    best, choice = least, Choice(slices, 0)
    worths = _worths(saved.marks, within)
    for matched, holders in itertools.chain(saved.matches, ((0, within),)):
        if least - matched - worths[0][0] >= best:
            break  # nor can any that saves less
        for worth, marked in worths:
            units = matched + worth
            if least - units < best and (having := holders & marked):
                value, slices = cost.least(having)
                if value - units < best:
                    best, choice = value - units, Choice(slices, units)
    return best, choice


def _worths(marks: Sequence[tuple[int, int]], within: int) -> list[tuple[int, int]]:
    """What having some of the marks is worth, and the slices that have at least those; the most first, nothing last."""
    worths = [(0, within)]
    if not marks:
        return worths
    for worth, marked in marks:
        worths += [(worth + other, marked & slices) for other, slices in worths if marked & slices]
    return sorted(worths, key=lambda pair: -pair[0])


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
        replica: 1 / max(pace / usual, _SLOWEST)
        for replica, pace in paces.items()
        if math.isfinite(pace) and pace < _SLOW * usual
    }
