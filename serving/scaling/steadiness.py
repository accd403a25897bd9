"""How far a need has to fall before a slice goes: further at a load at which one went and was needed again. Pure.

How fast slices are is measured anew at each number of them. At a load near a whole number of slices that alone would have one
come and go for ever.
"""

import math
from dataclasses import dataclass, replace

# Slices needed again sooner than this, or than a cool-down, went too early.
_AGAIN_S = 300.0
# In slices: what is added each time one went too early, and the most.
_STEP, _MOST = 0.1, 0.3
# What was learned holds for loads no further than this from where it was, in slices.
_NEAR = 1.0


@dataclass(frozen=True)
class Steadiness:
    """`kept`: slices to hold, the need and above it by `band` at most where it fell. Times are by the policy's clock."""

    asked: int = 0  # whole slices, at the last decision
    kept: float = 0.0
    band: float = 0.0
    learned_at: float = 0.0  # the need at which the band was last widened
    fewer_s: float = -math.inf  # when slices last became fewer

    def moved(self, by_s: float) -> "Steadiness":
        """The same with a clock that was put on by so many seconds."""
        return replace(self, fewer_s=self.fewer_s + by_s)

    def needing(self, slices: float) -> "Steadiness":
        """After a report by which so many slices are needed."""
        band = self.band if abs(slices - self.learned_at) <= _NEAR else 0.0
        return replace(self, kept=min(max(self.kept, slices), slices + band), band=band)

    def decided(self, asked: int, now_s: float, cool_down_s: float) -> "Steadiness":
        """After a decision for so many whole slices."""
        if asked < self.asked:
            return replace(self, asked=asked, fewer_s=now_s)
        if asked > self.asked and now_s - self.fewer_s <= max(_AGAIN_S, cool_down_s):
            band = min(_MOST, self.band + _STEP)
            return replace(self, asked=asked, band=band, learned_at=self.kept, fewer_s=-math.inf)
        return replace(self, asked=asked)
