"""How many requests arrive: rates over time in the shapes that fleets meet. Seeded, so that every policy sees the same."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True)
class Trace:
    """Requests a second at a time, and for how long."""

    name: str
    seconds: float
    rate: Callable[[float], float]

    @property
    def peak(self) -> float:
        return max(self.rate(at) for at in range(0, int(self.seconds), 30))


def steady(mean: float, hours: float = 12) -> Trace:
    return Trace("steady", hours * HOUR_S, lambda _: mean)


def diurnal(mean: float, hours: float = 24) -> Trace:
    """A day from midnight: a fifth of the mean at night, 1.8 times it in the afternoon."""
    return Trace(
        "diurnal", hours * HOUR_S, lambda at: mean * (1 - 0.8 * math.cos(2 * math.pi * at / (24 * HOUR_S)))
    )


def bursts(mean: float, hours: float = 12, seed: int = 1) -> Trace:
    """As public traces of LLM services have it: rates that wander by the minute and bursts of some minutes at twice to
    four times the mean, two an hour.
    """
    draw = random.Random(seed)
    minutes = int(hours * 60) + 2
    wander, level = [], 0.0
    for _ in range(minutes):
        level = 0.9 * level + draw.gauss(0, 0.13)
        wander.append(math.exp(level))
    peaks = [
        (draw.uniform(0, hours * HOUR_S), draw.uniform(1, 3), draw.uniform(60, 300))
        for _ in range(int(2 * hours))
    ]

    def rate(at: float) -> float:
        minute, part = divmod(at / 60, 1)
        base = wander[int(minute)] * (1 - part) + wander[int(minute) + 1] * part
        return mean * (base + sum(height for begin, height, seconds in peaks if 0 <= at - begin < seconds))

    return Trace("bursts", hours * HOUR_S, rate)


def spike(mean: float, hours: float = 8) -> Trace:
    """A link goes round: after two hours eight times as many within five minutes, and half of them gone each half hour."""

    def rate(at: float) -> float:
        since_s = at - 2 * HOUR_S
        if since_s < 0:
            return mean
        return mean * (1 + 7 * min(1.0, since_s / 300) * math.exp2(-max(0.0, since_s - 300) / 1800))

    return Trace("spike", hours * HOUR_S, rate)
