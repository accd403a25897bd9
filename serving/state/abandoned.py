"""Which applications nobody keeps records of any more, by one reader's own clock. Pure; time is given.

A router that ends deletes its records, and routers delete those of each other. Where all of an application's routers and slices
die at once and the application is deleted meanwhile, nobody is left to do so.
"""

from collections.abc import Collection, Hashable, Mapping

# Longer than a controller that restarts takes to know its applications again.
ABANDONED_S = 600.0
LOOK_S = 60.0
# Of the time between two looks, what counts: a reader that stood still has seen nothing.
_LONGEST_S = 2 * LOOK_S


class Abandoned:
    """Applications as one reader sees them, look by look."""

    def __init__(self) -> None:
        # By application, its last beats and for how long they have not moved.
        self._still: dict[str, tuple[Hashable, float]] = {}
        self._looked_s: float | None = None

    def look(self, beats: Mapping[str, Hashable], deployed: Collection[str], now_s: float) -> list[str]:
        """The applications whose records are to be deleted; `deployed` are those that Serve has.

        `beats` has, by application, the beats of all its routers and slices. An application is abandoned that Serve did not have
        and of which no beat moved, appeared or went for ABANDONED_S.
        """
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, _LONGEST_S)
        self._looked_s = now_s
        still: dict[str, tuple[Hashable, float]] = {}
        for application, moved in beats.items():
            before, still_s = self._still.get(application, (moved, -passed_s))
            if application not in deployed:
                still[application] = moved, still_s + passed_s if moved == before else 0.0
        self._still = still
        return [application for application, (_, still_s) in still.items() if still_s >= ABANDONED_S]
