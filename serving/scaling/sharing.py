"""What the models of one budget, or of one cluster, leave to one another, so that none starves. Pure.

A model in use that has no slice gets its first one from the model that has most slices beyond its `min`. Orders that a pool did
not deliver within its patience make room for what another model lacks, unless that model's pools do not deliver either.

The hardware alone, without a budget, may keep a model without a slice, or below its `min`, until its patience is over. Then one model
with slices on the same hardware gives one back, and another once that one has come. A model that gives keeps its `min`, and one slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from serving.scaling.capacity import Pool
from serving.scaling.policy import Room

_Cost = tuple[float, float]  # slices, dollars an hour
_NOTHING: _Cost = (0.0, 0.0)


class Given(NamedTuple):
    """Which model makes room on its hardware for one that waits, and the slices that it does with meanwhile, by pool.

    `had`: slices of the one that waits when this was given.
    """

    model: str
    kept: Mapping[str, int]
    had: int = 0


@dataclass(frozen=True)
class Share:
    """One model's part of the budget, in slices by pool: those it asks for, those of them that `room` allows, and late orders.

    `present`: those that are there. `out`: whether the pool's patience has run out. `failing`: starts have failed. `apart`: hosts
    carry the pool that they were bought for, so that no slice of another pool is placed on them.
    """

    pools: Sequence[Pool]
    room: Room
    asked: Sequence[int]
    wanted: Sequence[int]
    late: Sequence[int]
    present: Sequence[int] = ()
    out: Sequence[bool] = ()
    failing: bool = False
    apart: bool = False

    @property
    def has_none(self) -> bool:
        return not sum(self.wanted)

    @property
    def lacks(self) -> _Cost:
        """What the room lacks for all that it asks for; of a model that has no slice, for the first one."""
        asked = list(self.asked)
        if self.has_none and any(asked):
            first = next(at for at, count in enumerate(asked) if count)
            asked = [0] * len(asked)
            asked[first] = 1
        else:  # an order more where hardware does not come would be late too
            out = self.out or [False] * len(asked)
            counts = zip(asked, self.wanted, out, strict=True)
            asked = [min(count, have) if late else count for count, have, late in counts]
        slices, dollars = _cost(self.pools, asked)
        return (
            0.0 if self.room.slices is None else max(0.0, slices - self.room.slices),
            0.0 if self.room.dollars_per_hour is None else max(0.0, dollars - self.room.dollars_per_hour),
        )

    @property
    def waits_for(self) -> list[Pool]:
        """Pools whose hardware it waits for: without a slice all that it asks, else those below their `min`; none within the patience."""
        if self.failing:
            return []
        pools = list(zip(self.pools, self.wanted, self.present, self.late, strict=True))
        if not any(self.present):
            asked = [(pool, late) for pool, wanted, _, late in pools if wanted]
            return [pool for pool, _ in asked] if all(late for _, late in asked) else []
        return [pool for pool, _, present, late in pools if late and present < pool.min]

    def without_one_for(self, waiting: "Share", kept: Mapping[str, int]) -> dict[str, int]:
        """Slices that are left in its pools on the hardware that orders wait for, without one of the least preferred pool.

        Nothing where none can go. Pools of that hardware have no orders then: they would take what is given. `kept`: slices by pool that
        it has been told to do with already, though others may still be leaving.
        """
        hardware = attrgetter("key" if self.apart else "hardware")
        wanted = {hardware(pool) for pool in waiting.waits_for}
        there = [
            (pool, min(count, kept.get(pool.key, count)))
            for pool, count in zip(self.pools, self.present, strict=True)
            if hardware(pool) in wanted
        ]
        beyond = [pool.key for pool, count in there if count > pool.min]
        if not beyond or sum(self.present) < 2:
            return {}
        return {pool.key: max(pool.min, count - (pool.key == beyond[-1])) for pool, count in there}

    def spare(self, *, late: bool) -> _Cost:
        """What it can give: all that it can do without, or of that its late orders alone."""
        beyond = [max(0, count - pool.min) for count, pool in zip(self.wanted, self.pools, strict=True)]
        if not self.has_none and sum(beyond) == sum(self.wanted):
            beyond[beyond.index(max(beyond))] -= 1  # the one that it keeps
        return _cost(
            self.pools, [min(of_each) for of_each in zip(beyond, self.late, strict=True)] if late else beyond
        )


def given(shares: Mapping[str, Share]) -> dict[str, _Cost]:
    """How many slices, and dollars an hour, each model that gives leaves to others."""
    gives: dict[str, _Cost] = {}
    for name, share in shares.items():
        lacks = share.lacks
        if lacks == _NOTHING:
            continue
        spare = {
            other: _less(known.spare(late=not share.has_none), gives.get(other, _NOTHING))
            for other, known in shares.items()
            if other != name
        }
        giver = max(spare, key=lambda other: spare[other], default=name)
        most = spare.get(giver, _NOTHING)
        part = min(lacks[0], most[0]), min(lacks[1], most[1])
        if part != _NOTHING and (part == lacks or not share.has_none):  # no slice stops unless that is enough
            before = gives.get(giver, _NOTHING)
            gives[giver] = before[0] + part[0], before[1] + part[1]
    return gives


def hardware_given(shares: Mapping[str, Share], before: Mapping[str, Given]) -> dict[str, Given]:
    """By model that waits for hardware, what another model gives it.

    `before`: what was given already. A model gives one slice each time, so that little is lost where that was not what lacked.
    """
    waiting = {name: share for name, share in shares.items() if share.waits_for}
    gives = {
        name: part
        for name, part in before.items()
        if name in waiting and part.model in shares and sum(waiting[name].present) <= part.had
    }
    kept = {part.model: part.kept for part in before.values()}
    for name in sorted(waiting.keys() - gives.keys(), key=lambda name: (any(shares[name].present), name)):
        givers = {part.model for part in gives.values()}
        able = {
            other: part
            for other, known in shares.items()
            if other not in givers | {name}
            and (part := known.without_one_for(shares[name], kept.get(other, {})))
        }
        if able:
            giver = max(able, key=lambda other: sum(shares[other].present))
            gives[name] = Given(giver, able[giver], sum(shares[name].present))
    return gives


def _cost(pools: Sequence[Pool], counts: Sequence[int]) -> _Cost:
    pairs = zip(counts, pools, strict=True)
    return float(sum(counts)), sum(count * pool.dollars_per_hour for count, pool in pairs)


def _less(cost: _Cost, part: _Cost) -> _Cost:
    return max(0.0, cost[0] - part[0]), max(0.0, cost[1] - part[1])
