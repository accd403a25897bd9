"""Slices beyond the roofline's need, because a target is missed: a step, a measurement, and what it taught. Pure.

A target may be missed for want of slices, or for long prompts, which no slice makes shorter. So a step is an experiment: if it
does not bring the target nearer, its slices go at once and the next try waits, twice as long after each. A step that helped
stays until the target has been kept for a while, twice as long each time it proves to be needed again.
"""

import math
from dataclasses import dataclass, replace

# Routers report the last minute's percentiles; a measurement looks at a minute that began after the step.
_MEASURE_S = 90.0
# A step has helped if the target is missed by a tenth less.
_HELPED = 0.9
# Slices of a step, as a share of the need: one slice more of a hundred would not show in a percentile.
_STEP = 0.1
_LONGEST_S = 86400.0


@dataclass(frozen=True)
class Boost:
    """`slices` beyond the need, and what is known of them. All times are by the policy's clock."""

    slices: int = 0
    missed: float = 0.0  # measured over wanted, before the last step
    missed_s: float = -math.inf  # when a target was last missed
    settled_s: float | None = None  # since when all ordered slices serve and nothing queues
    hold_s: float = 0.0  # how long slices that helped stay after the last miss
    dropped_s: float = -math.inf
    rest_s: float = 0.0  # pause after slices that did not help
    rest_until_s: float = -math.inf

    def moved(self, by_s: float) -> "Boost":
        """The same with a clock that was put on by so many seconds."""
        return replace(
            self,
            missed_s=self.missed_s + by_s,
            settled_s=None,
            dropped_s=self.dropped_s + by_s,
            rest_until_s=self.rest_until_s + by_s,
        )


def most_boost(need: float, room: float) -> int:
    """Half of a need given in slices, and no more than limits leave; none for a small part of one slice."""
    return max(0, min(math.ceil(need / 2 - 0.25), math.floor(room)))


def next_boost(
    before: Boost, missed: float, need: float, most: int, now_s: float, cool_down_s: float, *, settled: bool
) -> Boost:
    """The boost after another report; `missed` is the worst target, measured over wanted, and above 1 where it is missed."""
    boost = replace(
        before, slices=min(before.slices, most), settled_s=_since(before.settled_s, now_s, settled)
    )
    if missed > 1:
        boost = replace(boost, missed_s=now_s)
    elif boost.slices and now_s - boost.missed_s >= max(boost.hold_s, cool_down_s):
        return Boost(hold_s=boost.hold_s, dropped_s=now_s)
    if boost.settled_s is None or now_s - boost.settled_s < _MEASURE_S:
        return boost
    if missed <= 1:
        return replace(boost, rest_s=0.0) if boost.slices else boost
    if boost.slices and missed > _HELPED * boost.missed:
        rest_s = min(max(2 * boost.rest_s, cool_down_s, _MEASURE_S), _LONGEST_S)
        return Boost(rest_s=rest_s, rest_until_s=now_s + rest_s)
    if now_s < boost.rest_until_s or boost.slices >= most:
        return boost
    hold_s = boost.hold_s
    if not boost.slices:
        again = now_s - boost.dropped_s < 2 * boost.hold_s
        hold_s = min(2 * boost.hold_s, _LONGEST_S) if again else max(cool_down_s, _MEASURE_S)
    slices = min(most, boost.slices + max(1, math.ceil(_STEP * need)))
    return replace(boost, slices=slices, missed=missed, settled_s=None, hold_s=hold_s)


def _since(before_s: float | None, now_s: float, settled: bool) -> float | None:
    if not settled:
        return None
    return now_s if before_s is None else before_s
