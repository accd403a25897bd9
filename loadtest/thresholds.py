"""What a run has to hold, from a YAML file:

    slo: {ttft_ms: 1000, itl_ms: 50}   # of one request: what counts into goodput
    thresholds:
      ttft_p99_ms: 2000
      failures: 0.001

Times, delays and shares of bad requests may be at most that; goodput, rates and throughput must be at least that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from bad_input import BadInputError
from figures import AT_MOST, STATISTICS, Figures, Slo

HELD_RATE = "held_rate_per_s"


@dataclass(frozen=True)
class Judgement:
    """A threshold beside what was measured."""

    statistic: str
    limit: float
    measured: float | None

    @property
    def broken(self) -> bool:
        """What was not measured did not hold."""
        if self.measured is None:
            return True
        over = self.measured > self.limit
        return over if STATISTICS[self.statistic][0] == AT_MOST else self.measured < self.limit

    def __str__(self) -> str:
        side = STATISTICS[self.statistic][0]
        measured = "not measured" if self.measured is None else f"{self.measured:.4g}"
        return f"{self.statistic} {measured}, {side} {self.limit:g}"


@dataclass(frozen=True)
class Thresholds:
    """The limits of a run and the SLO of a request."""

    limits: Mapping[str, float]
    slo: Slo

    def judge(self, figures: Figures) -> list[Judgement]:
        """The whole run: all but a ramp's rate."""
        return self._judge(figures, [name for name in self.limits if name != HELD_RATE])

    def judge_step(self, figures: Figures) -> list[Judgement]:
        """A step of a ramp: its rate is given, so that what the rate decides says nothing."""
        return self._judge(figures, [name for name in self.limits if not name.endswith("_per_s")])

    def judge_ramp(self, held_per_s: float, first_per_s: float) -> list[Judgement]:
        """A ramp is meant to break, and passes by how far it came: past its first step where nothing is asked."""
        return [Judgement(HELD_RATE, self.limits.get(HELD_RATE, first_per_s), held_per_s)]

    def _judge(self, figures: Figures, statistics: list[str]) -> list[Judgement]:
        return [Judgement(name, self.limits[name], figures.get(name)) for name in statistics]


NONE = Thresholds({}, Slo())


def load(path: Path) -> Thresholds:
    """Raises BadInputError; a statistic that does not exist is told with those that do."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"thresholds {path}: {error}") from None
    if not isinstance(content, dict) or content.keys() - {"slo", "thresholds"}:
        raise BadInputError(f"thresholds {path}: wanted are the keys slo and thresholds")
    limits = _numbers(path, "thresholds", content.get("thresholds"), tuple(STATISTICS))
    targets = _numbers(path, "slo", content.get("slo"), tuple(one.name for one in fields(Slo)))
    return Thresholds(limits, Slo(**targets))


def _numbers(path: Path, key: str, content: Any, known: tuple[str, ...]) -> dict[str, float]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise BadInputError(f"thresholds {path}: {key} is not a mapping of names to numbers")
    for name, value in content.items():
        if name not in known:
            raise BadInputError(
                f"thresholds {path}: {key} names {name}, which nothing measures; known are {', '.join(known)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise BadInputError(f"thresholds {path}: {key} {name} is {value!r}, not a number of 0 or more")
    return {name: float(value) for name, value in content.items()}
