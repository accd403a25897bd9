"""Which slices and routers no longer beat, by one reader's own clock: hosts' clocks need not agree. Pure; time is given.

A record stands still where its writer is gone, and also where the control store is slow or away. Only the slice itself can
tell which: a reader that can ask slices gets from `silent` those to ask, and calls none of them lost that has answered.

A record that is missing where the last look found it stands still too: the store may have answered in part. A slice that goes by
plan says so before it takes its record away.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from typing import Protocol

from serving.state.records import Demand, SliceRecord, SliceState
from serving.timings import TIMINGS, Timings

# Looks after which what has not beaten is gone, where they take longer than beats.
_LOOKS = 3
_STAYS = (SliceState.STARTING, SliceState.SERVING)


class _Beating(Protocol):
    @property
    def beat(self) -> int: ...


class Liveness:
    """The records as one reader sees them: a record that no longer beats is lost, then forgotten."""

    def __init__(self, timings: Timings = TIMINGS, *, asks: bool = False) -> None:
        """`asks`: this reader asks the slices of `silent` for an answer and tells what came: `answered` or `unanswered`."""
        self._timings = timings
        self._asks = asks
        self._slices = _Beats(timings.stale_s)
        self._routers = _Beats(timings.stale_s)
        self._asked: set[str] = set()
        self._mute: set[str] = set()
        self._ended: dict[str, int | None] = {}  # the last beat of replicas that nobody listens for any more
        self._known: dict[str, SliceRecord] = {}  # what the last look had
        self._missing: dict[str, float] = {}  # since when records are missing
        self._told: dict[Hashable, Demand] = {}  # and of routers
        self.silent: list[SliceRecord] = []

    def slices(
        self, records: Iterable[SliceRecord], now_s: float
    ) -> tuple[list[SliceRecord], list[SliceRecord]]:
        """Records with lost ones marked, and those to delete from the store. `silent` then has the slices to ask."""
        by_replica = {record.replica: record for record in records}
        missed = self._missed(by_replica, now_s)
        records = [*by_replica.values(), *missed]
        marked, forgotten, silent = [], [], []
        still = self._slices.still(((record.replica, record) for record in records), now_s)
        for record, still_s in zip(records, still, strict=True):
            ended = record.serves and self._has_ended(record)
            if still_s <= self._timings.silent_s:
                self._mute.discard(record.replica)
            elif self._asks and record.address and record.state is not SliceState.LOST and not ended:
                if record.replica not in self._asked:
                    silent.append(record)
                if record.replica not in self._mute:
                    marked.append(record)
                    continue
            if still_s > max(self._timings.forgotten_s, _LOOKS * self._slices.period_s):
                forgotten.append(record)
            elif reason := self._loss(record, still_s, ended=ended):
                marked.append(dataclasses.replace(record, state=SliceState.LOST, reason=reason))
            else:
                marked.append(record)
        self._asked.update(record.replica for record in silent)
        there = {record.replica: record for record in records} if missed else by_replica
        self._known = there.copy() if forgotten else there
        for record in forgotten:
            del self._known[record.replica]
        self._mute &= there.keys()
        self._ended = {replica: beat for replica, beat in self._ended.items() if replica in there}
        self.silent = silent
        return marked, forgotten

    def _missed(self, by_replica: Mapping[str, SliceRecord], now_s: float) -> list[SliceRecord]:
        """The last look's records that this one lacks; Serve has stopped a start that stays away."""
        missing = [
            name for name in self._known.keys() - by_replica.keys() if self._known[name].state in _STAYS
        ]
        self._missing = {name: self._missing.get(name, now_s) for name in missing}
        return [
            self._known[name]
            for name, since_s in self._missing.items()
            if self._known[name].serves or now_s - since_s <= self._timings.stale_s
        ]

    def _loss(self, record: SliceRecord, still_s: float, *, ended: bool) -> str:
        """Why a slice that has stood still is lost; empty where it is not, or says so itself."""
        if ended:
            return "nobody listens at its address"
        stopped = record.state is SliceState.STARTING and record.replica in self._missing
        if still_s <= self._timings.stale_s or record.state is SliceState.LOST or stopped:
            return ""
        return f"no sign of life for {still_s:.0f} s"

    def answered(self, replica: str, now_s: float) -> None:
        """A slice that was asked has answered: a sign of life, as a beat is."""
        self._asked.discard(replica)
        self._mute.discard(replica)
        self._slices.heard(replica, now_s)

    def unanswered(self, replica: str) -> None:
        """A slice that was asked has not answered."""
        self._asked.discard(replica)
        self._mute.add(replica)

    def ended(self, replicas: Iterable[str]) -> None:
        """Nobody listens where these replicas did: their processes have ended, whatever their last beats say."""
        for replica in replicas:
            self._ended.setdefault(replica, None)

    def _has_ended(self, record: SliceRecord) -> bool:
        """Unless it beats on after the first look since it was said: then only its door is closed."""
        if record.replica not in self._ended:
            return False
        last = self._ended[record.replica]
        if last is None:
            self._ended[record.replica] = record.beat
        elif record.beat != last:
            del self._ended[record.replica]
            return False
        return True

    def routers(self, demands: Iterable[Demand], now_s: float) -> tuple[list[Demand], list[Demand]]:
        """Demands of routers that beat, and those to delete from the store.

        Nobody can ask a router. Where a look takes seconds, so does a beat, and one that stands still for two looks is no sign:
        routers that took each other for gone would each take all of what they share.
        """
        named: dict[Hashable, Demand] = {
            **self._told,
            **{(demand.router, demand.application, demand.model): demand for demand in demands},
        }
        alive, forgotten = [], []
        still = self._routers.still(named.items(), now_s)
        patience_s = _LOOKS * self._routers.period_s
        for name, still_s in zip(list(named), still, strict=True):
            if still_s <= max(self._timings.stale_s, patience_s):
                alive.append(named[name])
            elif still_s > max(self._timings.forgotten_s, patience_s):
                forgotten.append(named.pop(name))
        self._told = named
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
        self.period_s = 0.0  # between the last two looks

    def still(self, named: Iterable[tuple[Hashable, _Beating]], now_s: float) -> list[float]:
        """The seconds for which each record's beat has not moved."""
        seen, still_s = {}, []
        period_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        blind_s = period_s - self.period_s if period_s - self.period_s > self._stale_s else 0.0
        self._looked_s, self.period_s = now_s, period_s
        for name, record in named:
            beat, since_s = self._seen.get(name, (None, now_s))
            since_s = since_s + blind_s if beat == record.beat else now_s
            seen[name] = record.beat, since_s
            still_s.append(now_s - since_s)
        self._seen = seen
        return still_s

    def heard(self, name: Hashable, now_s: float) -> None:
        """A sign of life that is no beat."""
        if name in self._seen:
            self._seen[name] = self._seen[name][0], now_s
