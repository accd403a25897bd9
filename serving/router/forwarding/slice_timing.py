"""How fast slices answer, and from when on their silence is a stall. Pure; times are given.

The router keeps the latest KEPT times of each slice, and works out now and then what is normal there. A slice has stalled when
all its streams are silent for TIMES_NORMAL times the slice's own long gap; no fixed time decides. One stream that waits while
others go on has been preempted. A prompt being read holds up every stream; meanwhile the slice may also be silent for as long
as its slow first tokens take. Streams and prompts of other routers count too: the slice's record tells of them.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence

from serving.state.records import SliceRecord
from serving.timings import TIMINGS, Timings

KEPT = 256
TIMES_NORMAL = 20
LEAST_KNOWN = 20  # fewer gaps do not tell what is normal on a slice
WORKED_S = 5.0
RENEWED = KEPT // 4  # new times after which what is normal is worked out again: sorting takes 20 µs


class _Slice:
    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._firsts: deque[float] = deque(maxlen=KEPT)
        self._gaps: deque[float] = deque(maxlen=KEPT)
        self._new_firsts = self._new_gaps = 0
        self.silence_s = self.first_s = timings.unknown_stall_s
        # What the slice's record says of all routers' requests.
        self.beat = -1
        self.output_tokens = 0
        self.reported_s = 0.0
        self.moved_s = 0.0
        # When each of the latest reports with new tokens began: as many as make WORKED_S.
        self.working: deque[float] = deque(maxlen=math.ceil(WORKED_S / timings.beat_s))
        self.reading = 0

    def gap(self, seconds: float) -> None:
        gaps = self._gaps
        gaps.append(seconds)
        self._new_gaps += 1
        if self._new_gaps >= RENEWED or len(gaps) == LEAST_KNOWN:
            self._new_gaps = 0
            self.silence_s = max(self._timings.shortest_stall_s, TIMES_NORMAL * quantile(gaps, 0.99))

    def first(self, seconds: float) -> None:
        firsts = self._firsts
        firsts.append(seconds)
        self._new_firsts += 1
        if self._new_firsts >= RENEWED or len(firsts) <= LEAST_KNOWN:
            self._new_firsts = 0
            self.first_s = max(self._timings.shortest_stall_s, 3 * quantile(firsts, 0.99))


class SliceTiming:
    """What one router has measured of its slices, and what they say of themselves."""

    def __init__(self, timings: Timings = TIMINGS) -> None:
        self._timings = timings
        self._slices: dict[str, _Slice] = {}

    def first(self, replica: str, seconds: float) -> None:
        """Note the time from asking a slice to the first tokens of its answer."""
        self._of(replica).first(seconds)

    def gap(self, replica: str, seconds: float) -> None:
        """Note the time between two pieces of one stream."""
        self._of(replica).gap(seconds)

    def settle(self, entries: Iterable[SliceRecord], now_s: float) -> None:
        """Take over the slices' own counters; forget slices that are gone."""
        slices = {}
        for entry in entries:
            slice_ = slices[entry.replica] = self._of(entry.replica)
            if entry.beat != slice_.beat:
                if entry.output_tokens != slice_.output_tokens:
                    # After the report before, that is.
                    slice_.moved_s = slice_.reported_s
                    slice_.working.append(slice_.reported_s)
                if entry.compiling_s:
                    slice_.moved_s = (
                        now_s  # it gives no token, and another slice would have to compile the same
                    )
                slice_.beat, slice_.output_tokens, slice_.reported_s = entry.beat, entry.output_tokens, now_s
                slice_.reading = entry.reading
        self._slices = slices

    def silence_s(self, replica: str, *, reading: bool) -> float:
        """How long all of a slice's streams may be silent; `reading`: the slice may be reading a prompt of this router."""
        slice_ = self._of(replica)
        if not reading and not slice_.reading:
            return slice_.silence_s
        return max(slice_.silence_s, slice_.first_s, self._timings.shortest_prefill_stall_s)

    def first_s(self, replica: str) -> float:
        """How long a slice that has failed may take for the first token of the request that tries it again."""
        return self._of(replica).first_s

    def moved_s(self, replica: str) -> float:
        """Since when, at the latest, the slice has given a token to somebody, or was seen compiling; 0 where nothing is known."""
        return self._of(replica).moved_s

    def worked_since_s(self, replica: str) -> float:
        """Who came before has been there while the slice gave tokens for WORKED_S, silences left out."""
        working = self._of(replica).working
        return working[0] if len(working) == working.maxlen else -math.inf

    def _of(self, replica: str) -> _Slice:
        slice_ = self._slices.get(replica)
        if slice_ is None:
            slice_ = self._slices[replica] = _Slice(self._timings)
        return slice_


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile of at least one value."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
