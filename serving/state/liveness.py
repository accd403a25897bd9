"""Which slices and routers no longer beat, by one reader's own clock: hosts' clocks need not agree. Pure; time is given."""

import dataclasses
from collections.abc import Hashable, Iterable
from typing import TypeVar

from serving.state.records import Demand, SliceRecord, SliceState
from serving.timings import TIMINGS, Timings

_Beating = TypeVar("_Beating", SliceRecord, Demand)


class Liveness:
    """The records as one reader sees them: a record that no longer beats is lost, then forgotten."""

    def __init__(self, timings: Timings = TIMINGS) -> None:
        self._timings = timings
        self._slices = _Beats(timings.stale_s)
        self._routers = _Beats(timings.stale_s)

    def slices(
        self, records: Iterable[SliceRecord], now_s: float
    ) -> tuple[list[SliceRecord], list[SliceRecord]]:
        """Records with lost ones marked, and those to delete from the store."""
        marked, forgotten = [], []
        for record, still_s in self._slices.still([(record.replica, record) for record in records], now_s):
            if still_s > self._timings.forgotten_s:
                forgotten.append(record)
            elif still_s > self._timings.stale_s and record.state is not SliceState.LOST:
                reason = f"no sign of life for {still_s:.0f} s"
                marked.append(dataclasses.replace(record, state=SliceState.LOST, reason=reason))
            else:
                marked.append(record)
        return marked, forgotten

    def routers(self, demands: Iterable[Demand], now_s: float) -> tuple[list[Demand], list[Demand]]:
        """Demands of routers that beat, and those to delete from the store."""
        alive, forgotten = [], []
        named = [((demand.router, demand.application, demand.model), demand) for demand in demands]
        for demand, still_s in self._routers.still(named, now_s):
            if still_s <= self._timings.stale_s:
                alive.append(demand)
            elif still_s > self._timings.forgotten_s:
                forgotten.append(demand)
        return alive, forgotten


class _Beats:
    """For how long each beat has stood still while the reader looked.

    A beat counts as moving at the first look. A look that comes much later than the one before, as after a restart of the
    head, can't tell which records beat meanwhile: that time does not count.
    """

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._seen: dict[Hashable, tuple[int, float]] = {}
        self._looked_s: float | None = None
        self._period_s = 0.0

    def still(self, named: Iterable[tuple[Hashable, _Beating]], now_s: float) -> list[tuple[_Beating, float]]:
        """Each record with the seconds for which its beat has not moved."""
        seen, records = {}, []
        period_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        blind_s = period_s - self._period_s if period_s - self._period_s > self._stale_s else 0.0
        self._looked_s, self._period_s = now_s, period_s
        for name, record in named:
            beat, since_s = self._seen.get(name, (None, now_s))
            since_s = since_s + blind_s if beat == record.beat else now_s
            seen[name] = record.beat, since_s
            records.append((record, now_s - since_s))
        self._seen = seen
        return records
