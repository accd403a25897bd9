"""When the next line of a batch may start: once slices have read the prompts of those before it. Pure.

A free seat is no free step: the prompts of many lines that start at once fill an engine's steps for seconds, and the next
request's prompt waits behind them. While there are requests, half of a model's slices at most read lines, so that requests find
others (`serving.router.scheduling.unread_prompts`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from serving.router.scheduling.unread_prompts import read_s

_LATE, _IN_TIME = 0.5, 2 ** (1 / 200)
# At the slowest a slice reads lines for a five-hundredth of the time, and as many requests meet one.
_SLOWEST, _FIRST = 0.002, 0.1


@dataclass(frozen=True)
class Reading:
    """How many prompt tokens one slice reads a second for this router, and how long a prompt may be."""

    tokens_per_s: float
    longest: int


class _Serving(NamedTuple):
    """How many slices may read lines, which share of prompts they have to read, and whether requests come too."""

    slices: int
    unread: float
    asked: bool


@dataclass
class _Share:
    """Of the pace without a target; `since_s`: when a request was late."""

    share: float = _FIRST
    since_s: float = -math.inf


class PromptPace:
    """By model. One that is not named has no pace. `first_s`: seconds to the first token that 99 of 100 requests are to see."""

    def __init__(self, readings: Mapping[str, Reading], first_s: float | None = None) -> None:
        self._readings = readings
        self._first_s = first_s
        self._shares = {model: _Share() for model in readings}
        self._serving: dict[str, _Serving] = {}
        self._read_s: dict[str, float] = {}

    def serve(self, model: str, slices: int, unread: float, *, asked: bool = False) -> None:
        """Note how many slices serve, which share of prompts their caches lack, and whether there are requests beside lines."""
        self._serving[model] = _Serving(slices - slices // 2 if asked else slices, unread, asked)

    def wait_s(self, model: str, now_s: float) -> float:
        """Seconds until the next line of the model may start."""
        return max(0.0, self._read_s.get(model, now_s) - now_s)

    def answered(self, model: str, arrived_s: float, first_s: float, now_s: float) -> None:
        """Note that a request, which is over, came at a time and had its first token so many seconds later."""
        paced = self._shares.get(model)
        if paced is None or self._first_s is None or arrived_s < paced.since_s:
            return  # it came while lines were read at the pace before
        if first_s > self._first_s:
            paced.since_s = now_s
            paced.share = max(_SLOWEST, paced.share * _LATE)
        else:
            paced.share = min(1.0, paced.share * _IN_TIME)

    def started(self, model: str, tokens: float, now_s: float) -> None:
        """Note a line of so many tokens."""
        reading, serving = self._readings.get(model), self._serving.get(model)
        if reading and serving and serving.slices:
            unread = min(tokens, reading.longest) * serving.unread
            took_s = unread / reading.tokens_per_s
            if serving.asked:
                # No two lines share a step of a slice, which would be the longer.
                took_s = read_s(unread, reading.tokens_per_s)
                if self._first_s is not None:
                    took_s /= self._shares[model].share
            self._read_s[model] = max(now_s, self._read_s.get(model, now_s)) + took_s / serving.slices
