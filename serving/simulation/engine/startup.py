"""How long a simulated engine takes to start: phases of a real start, each as long as the simulation was told, or nothing."""

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
        known = [each.name for each in fields(cls)]
        found = {}
        for part in filter(None, text.split(",")):
            name, _, seconds = part.partition("=")
            if name not in known:
                raise SimulationError(
                    f"{text!r}: no phase of a start is named {name!r}; there are {', '.join(known)}"
                )
            try:
                found[name] = float(seconds)
            except ValueError:
                raise SimulationError(f"{text!r}: {name} takes seconds, as in {name}=20") from None
            if not 0 <= found[name] < math.inf:
                raise SimulationError(f"{text!r}: {name} takes at least 0 seconds")
        return cls(**found)

    def phases(self) -> list[tuple[str, float]]:
        """Those that take time, in the words of a real start."""
        named = (
            ("downloading weights", self.download),
            ("loading weights", self.load),
            ("compiling", self.compile),
            ("warming up", self.warmup),
        )
        return [(name, seconds) for name, seconds in named if seconds]
