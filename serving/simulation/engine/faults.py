"""Failures of a slice on request, for tests.

Over HTTP, on the slice's own port: GET /simulator/faults shows the faults, POST sets the fields of its body, DELETE ends all.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from serving.errors import SimulationError


@dataclass(frozen=True)
class Faults:
    """Failures that are on.

    die         the engine ends: requests in flight end with an error, the slice is given up
    hang        the engine computes no step and answers no probe, until hang is off again
    stall_s     the next step takes this much longer, once
    compile_s   the next step takes this much longer, once, for the engine compiles; it says so, and answers no probe
    slow        every step takes this many times as long
    error_rate  share of requests that are answered with an error 500
    refuse      every new request is answered 503
    corrupt     every answer is another one than on other slices
    die_on      the engine ends when a prompt comes that holds this text
    """

    die: bool = False
    hang: bool = False
    stall_s: float = 0.0
    compile_s: float = 0.0
    slow: float = 1.0
    error_rate: float = 0.0
    refuse: bool = False
    corrupt: bool = False
    die_on: str = ""

    def changed(self, fields: Mapping[str, Any]) -> Self:
        """These faults with some fields set; raises SimulationError naming a wrong field."""
        known = {field.name: field for field in dataclasses.fields(self)}
        for name, value in fields.items():
            if name not in known:
                raise SimulationError(f"no fault is named {name!r}; there are {', '.join(known)}")
            if known[name].type is bool and not isinstance(value, bool):
                raise SimulationError(f"{name}: true or false (got {value!r})")
            if known[name].type is str and not isinstance(value, str):
                raise SimulationError(f"{name}: a text (got {value!r})")
            if known[name].type is float and not _is_amount(value):
                raise SimulationError(f"{name}: a number of at least 0 (got {value!r})")
        changed = dataclasses.replace(self, **fields)
        if not changed.error_rate <= 1 or not changed.slow > 0:
            raise SimulationError(
                f"error_rate is at most 1 (got {changed.error_rate:g}), slow above 0 (got {changed.slow:g})"
            )
        return changed

    def step_s(self, seconds: float) -> float:
        """Seconds of a step that takes `seconds` without faults."""
        return seconds * self.slow + self.stall_s + self.compile_s

    def after_step(self) -> Self:
        """The faults after a step: a stall or a compilation happens once."""
        return dataclasses.replace(self, stall_s=0.0, compile_s=0.0)


def _is_amount(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    )
