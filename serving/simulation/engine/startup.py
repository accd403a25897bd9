"""How long a simulated engine takes to start: the phases of a real start, each with its seconds, 0 by default."""

import math
from dataclasses import dataclass, fields
from typing import Self

from serving.errors import SimulationError


@dataclass(frozen=True)
class Startup:
    """Seconds of each phase, in order."""

    download: float = 0.0
    load: float = 0.0
    compile: float = 0.0
    warmup: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `download=20,compile=90`; raises SimulationError."""
        known = [phase.name for phase in fields(cls)]
        phases = {}
        for part in filter(None, text.split(",")):
            name, _, seconds = part.partition("=")
            if name not in known:
                raise SimulationError(
                    f"{text!r}: no phase of a start is named {name!r}; there are {', '.join(known)}"
                )
            try:
                phases[name] = float(seconds)
            except ValueError:
                raise SimulationError(f"{text!r}: {name} takes seconds, as in {name}=20") from None
            if not 0 <= phases[name] < math.inf:
                raise SimulationError(f"{text!r}: {name} takes at least 0 seconds")
        return cls(**phases)

    def phases(self) -> list[tuple[str, float]]:
        """The phases that take time, by the names of a real start."""
        named = (
            ("downloading weights", self.download),
            ("loading weights", self.load),
            ("compiling", self.compile),
            ("warming up", self.warmup),
        )
        return [(name, seconds) for name, seconds in named if seconds]
