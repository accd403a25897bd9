"""The time that all processes of a cluster share, though their hosts' clocks may be hours apart. Pure; time is given.

One process tells the store its time, the Serve controller. A reader counts on from what it read, by a clock of its own that does
not jump.
"""

# A controller that tells less than the one before by more than this has another clock, and is not only late.
_ANOTHER_S = 60.0


class SharedClock:
    """The cluster's time as one process knows it. `now_s` is by its own clock, which does not jump."""

    def __init__(self) -> None:
        self._told: float | None = None
        self._ahead_s: float | None = None  # of the process's own clock

    def heard(self, time_s: float, now_s: float) -> None:
        """Take over what the store says: seconds since 1970, as old as the last one's who told it."""
        if time_s == self._told:
            return
        self._told, ahead_s = time_s, time_s - now_s
        if self._ahead_s is None or not 0 < self._ahead_s - ahead_s < _ANOTHER_S:
            self._ahead_s = (
                ahead_s  # what was told is late by more or less: the largest difference is the truest
            )

    def now(self, now_s: float, otherwise: float) -> float:
        """Seconds since 1970; `otherwise` before anybody has told any."""
        return otherwise if self._ahead_s is None else now_s + self._ahead_s
