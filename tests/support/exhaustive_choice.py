"""The rule by which a slice is chosen, written as a loop over all slices: what serving.router.scheduling.scoring must give."""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.router.scheduling.scoring import SPARE_QUEUE, most_load


@dataclass(frozen=True)
class Candidate:
    """A slice that could take the request: what it has to do, and what of the request it is thought to have, in units."""

    load: int = 0
    prefill: int = 0
    waiting: int = 0
    matched: int = 0
    marks: int = 0


def best(candidates: Sequence[Candidate], home: int | None = None, at_home: int = 0) -> dict[int, int]:
    """The best candidates by their places, and what each saves; of equals the home alone."""
    least = min(candidate.load for candidate in candidates)
    queue = min(candidate.waiting for candidate in candidates)
    within = {
        place: candidate
        for place, candidate in enumerate(candidates)
        if candidate.load == least
        or (candidate.load < most_load(least) and candidate.waiting <= queue + SPARE_QUEUE)
    }
    saved = {place: candidate.matched + candidate.marks for place, candidate in within.items()}
    if home in saved:
        saved[home] = max(saved[home], at_home)
    costs = {place: candidate.load + candidate.prefill - saved[place] for place, candidate in within.items()}
    equals = {place: saved[place] for place, cost in costs.items() if cost == min(costs.values())}
    return {home: equals[home]} if home in equals else equals
