"""How fast slices answer, and from when on their silence is a stall. Pure; times are given.

The router keeps the latest KEPT times of each slice and works out once a beat what is normal there. A slice has stalled when all
its streams are silent for TIMES_NORMAL times the slice's own long gap; no fixed time decides. One stream that waits while others go on has been preempted. A prompt being read holds up every stream; meanwhile the slice may also be silent for
as long as its slow first tokens take.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from serving.timings import TIMINGS, Timings

KEPT = 256
TIMES_NORMAL = 20
LEAST_KNOWN = 20  # fewer gaps do not tell what is normal on a slice


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
        """Note the time from asking a slice to the first tokens of its answer."""
        self._of(replica).firsts.append(seconds)

    def gap(self, replica: str, seconds: float) -> None:
        """Note the time between two pieces of one stream."""
        self._of(replica).gaps.append(seconds)

    def settle(self, replicas: Iterable[str]) -> None:
        """Work out what is normal; forget slices that are not among these."""
        known = set(replicas)
        self._slices = {name: slice_ for name, slice_ in self._slices.items() if name in known}
        for slice_ in self._slices.values():
            if len(slice_.gaps) >= LEAST_KNOWN:
                silence_s = TIMES_NORMAL * quantile(slice_.gaps, 0.99)
                slice_.silence_s = max(self._timings.shortest_stall_s, silence_s)
            if slice_.firsts:
                slice_.first_s = max(self._timings.shortest_stall_s, 3 * quantile(slice_.firsts, 0.99))

    def silence_s(self, replica: str, *, reading: bool) -> float:
        """How long all of a slice's streams may be silent; `reading`: the slice may be reading a prompt."""
        slice_ = self._of(replica)
        if not reading:
            return slice_.silence_s
        return max(slice_.silence_s, slice_.first_s, self._timings.shortest_prefill_stall_s)

    def first_s(self, replica: str) -> float:
        """How long a slice that has failed may take for the first token of the request that tries it again."""
        return self._of(replica).first_s

    def _of(self, replica: str) -> _Slice:
        slice_ = self._slices.get(replica)
        if slice_ is None:
            slice_ = self._slices[replica] = _Slice(self._timings.unknown_stall_s)
        return slice_


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile of at least one value."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
