"""When requests start: a rate over time, and a seeded Poisson process that follows it.

Nothing here knows whether an answer came: load from many independent people does not wait for the service.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from bad_input import BadInputError

SHAPES = ("constant", "ramp", "diurnal", "burst", "replay")
_WINDOW_S = 1.0


class Rate(Protocol):
    """Arrivals a second, over time."""

    def at(self, second: float) -> float: ...

    def most(self, start_s: float, end_s: float) -> float:
        """No less than the rate anywhere in between."""
        ...


@dataclass(frozen=True)
class Constant:
    per_s: float

    def at(self, second: float) -> float:  # noqa: ARG002  the same at any time
        return self.per_s

    def most(self, start_s: float, end_s: float) -> float:  # noqa: ARG002
        return self.per_s


@dataclass(frozen=True)
class Ramp:
    """Steps of equal length, each so much higher than the one before."""

    first_per_s: float
    step_per_s: float
    step_s: float

    def at(self, second: float) -> float:
        return self.first_per_s + self.step_per_s * self.step(second)

    def most(self, start_s: float, end_s: float) -> float:  # noqa: ARG002  it only rises
        return self.at(end_s)

    def step(self, second: float) -> int:
        return int(second / self.step_s)


@dataclass(frozen=True)
class Diurnal:
    """A day, however short: a cosine from the quietest moment to the busiest and back."""

    low_per_s: float
    high_per_s: float
    period_s: float

    def at(self, second: float) -> float:
        share = (1 - math.cos(2 * math.pi * second / self.period_s)) / 2
        return self.low_per_s + (self.high_per_s - self.low_per_s) * share

    def most(self, start_s: float, end_s: float) -> float:  # noqa: ARG002
        return max(self.low_per_s, self.high_per_s)


@dataclass(frozen=True)
class Burst:
    """A steady rate, and at the end of every period a burst."""

    per_s: float
    burst_per_s: float
    period_s: float
    burst_s: float

    def at(self, second: float) -> float:
        return self.burst_per_s if second % self.period_s >= self.period_s - self.burst_s else self.per_s

    def most(self, start_s: float, end_s: float) -> float:  # noqa: ARG002
        return max(self.per_s, self.burst_per_s)


def rate(
    shape: str,
    *,
    per_s: float,
    peak_per_s: float,
    period_s: float,
    burst_s: float,
    step_per_s: float,
    step_s: float,
) -> Rate:
    """The rate that options describe; raises BadInputError where they describe none."""
    for option, value in (("--rate", per_s), ("--peak-rate", peak_per_s), ("--period-s", period_s)):
        if not value > 0:
            raise BadInputError(f"{option} {value:g} is not above 0")
    if not (step_per_s > 0 and step_s > 0):
        raise BadInputError(f"--step-rate {step_per_s:g} and --step-s {step_s:g} must be above 0")
    match shape:
        case "constant":
            return Constant(per_s)
        case "ramp":
            return Ramp(per_s, step_per_s, step_s)
        case "diurnal":
            return Diurnal(per_s, peak_per_s, period_s)
        case "burst" if not 0 < burst_s < period_s:
            raise BadInputError(
                f"a burst of {burst_s:g} s (--burst-s) is not in a period of {period_s:g} s (--period-s)"
            )
        case "burst":
            return Burst(per_s, peak_per_s, period_s, burst_s)
    raise BadInputError(f"--arrivals {shape} has no rate")


def poisson(rate: Rate, seed: int) -> Iterator[float]:
    """Seconds at which requests arrive; the same ones for the same seed.

    Thinning, window by window: arrivals at the window's highest rate, of which those stay that the rate there asks for.
    """
    random = Random(seed)
    start = 0.0
    while True:
        end = start + _WINDOW_S
        most = rate.most(start, end)
        second = start + (random.expovariate(most) if most > 0 else _WINDOW_S)
        while second < end:
            if random.random() * most < rate.at(second):
                yield second
            second += random.expovariate(most)
        start = end
