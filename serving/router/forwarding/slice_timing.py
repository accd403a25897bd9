"""How fast slices answer, and from when on their silence is a stall. Pure; times are given.

A few hundred of the latest times are kept of each slice, whatever happens, and what is normal there is worked out once a
beat. A slice has stalled by its own normal, never by a fixed time: when none of its streams has said anything for
TIMES_NORMAL times a long gap of its own. One stream that waits while others go on has been preempted. A prompt that is
being read holds up every stream, so while there is one the slice may also be as silent as its slow first tokens take.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from serving.timings import TIMINGS, Timings

KEPT = 256
TIMES_NORMAL = 20
LEAST_KNOWN = 20  # gaps, below which nobody knows what is normal on a slice


class _Slice:
    def __init__(self, unknown_s: float) -> None:
        self.firsts: deque[float] = deque(maxlen=KEPT)
        self.gaps: deque[float] = deque(maxlen=KEPT)
        self.silence_s = unknown_s
        self.first_s = unknown_s


class SliceTiming:
    """What one router has measured of its slices."""

    def __init__(self, timings: Timings = TIMINGS) -> None:
        self._timings = timings
        self._slices: dict[str, _Slice] = {}

    def first(self, replica: str, seconds: float) -> None:
        """From asking a slice to the first tokens of its answer."""
        self._of(replica).firsts.append(seconds)

    def gap(self, replica: str, seconds: float) -> None:
        """Between two pieces of one stream."""
        self._of(replica).gaps.append(seconds)

    def settle(self, replicas: Iterable[str]) -> None:
        """Work out what is normal; forget slices that are not among these."""
        known = set(replicas)
        self._slices = {name: one for name, one in self._slices.items() if name in known}
        for one in self._slices.values():
            if len(one.gaps) >= LEAST_KNOWN:
                one.silence_s = max(self._timings.shortest_stall_s, TIMES_NORMAL * quantile(one.gaps, 0.99))
            if one.firsts:
                one.first_s = max(self._timings.shortest_stall_s, 3 * quantile(one.firsts, 0.99))

    def silence_s(self, replica: str, *, reading: bool) -> float:
        """How long all of a slice's streams may say nothing; `reading`: it may be at a prompt."""
        one = self._of(replica)
        return (
            max(one.silence_s, one.first_s, self._timings.shortest_prefill_stall_s)
            if reading
            else one.silence_s
        )

    def first_s(self, replica: str) -> float:
        """How long a slice that has failed may take for the first token of the request that tries it again."""
        return self._of(replica).first_s

    def _of(self, replica: str) -> _Slice:
        found = self._slices.get(replica)
        if found is None:
            found = self._slices[replica] = _Slice(self._timings.unknown_stall_s)
        return found


def quantile(values: Sequence[float], share: float) -> float:
    """Of some values; there is at least one."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
