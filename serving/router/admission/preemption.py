"""Which requests under way make room for those that wait. Pure: a decision over numbers that are given.

A request makes room only for one of higher priority, and only where it can go on later with nothing lost. The lowest priority
makes room first and, within it, the request with the least to do again. No request makes room more than `most` times, nor once
it has been paused for `longest_s` in all.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from serving.config import PreemptionSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Running(Generic[T]):
    """One request under way. `times`: how often it has made room; `paused_s`: for how long it has been paused in all."""

    item: T
    priority: int
    work: float
    movable: bool = True
    times: int = 0
    paused_s: float = 0.0


def victims(waiting: Sequence[int], running: Iterable[Running[T]], limits: PreemptionSpec) -> list[T]:
    """Who makes room, at most one for each that waits. `waiting`: their priorities, the highest first."""
    able = (
        request
        for request in running
        if request.movable and request.times < limits.most and request.paused_s < limits.longest_s
    )
    cheapest = heapq.nsmallest(len(waiting), able, key=lambda request: (request.priority, request.work))
    pairs = zip(waiting, cheapest, strict=False)
    return [request.item for priority, request in pairs if request.priority < priority]
