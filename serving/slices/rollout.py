"""How a changed engine goes through the slices of a deployment, and when starts that failed are tried again. Decisions only.

One place decides for all slices of a deployment: the Serve controller, at each of its looks. The first slice of a new version
goes alone. Once more of them serve than failed to start, a wave replaces `at_once` slices at a time. `spare` of these are
ordered beyond the number wanted, the others take the place of old slices. A new slice that has waited `surge_s` for hardware
shows that there is no spare: then an old slice makes room for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from serving.state.records import SliceRecord

# Starts of a new version that may fail before one of its slices serves. Serve's own bound is three for each slice.
FIRST_STARTS = 3
# Pauses before starts that failed are tried again: engines take minutes, and a broken checkpoint stays broken.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0


def cost_to_drain(entry: SliceRecord) -> tuple[float, ...]:
    """The slice with the least cost goes first: requests to finish or hand over, the cache they fill, its time in this state."""
    return (entry.serves, entry.running + entry.waiting, entry.kv_usage, -entry.since)


@dataclass(frozen=True)
class Pace:
    """The YAML's `rollout` for a number of slices: the most replaced at a time, those beyond the wanted, seconds to wait."""

    at_once: int
    spare: int
    surge_s: float

    @classmethod
    def of(cls, at_once: int | str, spare: int, surge_s: float, slices: int) -> "Pace":
        """`at_once` is a count, or a share of the slices as in "10%", rounded up."""
        if isinstance(at_once, str):
            at_once = math.ceil(float(at_once.removesuffix("%")) / 100 * slices)
        return cls(max(1, at_once), spare, surge_s)

    def within(self, roll: "Roll", room: float) -> "Pace":
        """The pace where the budget has room for so many slices more: spare slices that are there already have theirs."""
        return replace(self, spare=int(min(self.spare, room + max(0, roll.old + roll.new - roll.wanted))))


@dataclass(frozen=True)
class Roll:
    """A deployment between two versions, counted in slices: `wanted`, old ones, and those of the new version."""

    wanted: int
    old: int  # serve the old version
    leaving: int  # of either version, are being stopped
    serving: int  # serve the new version
    loading: int  # of the new version, have hardware and do not serve yet
    waited_s: tuple[float, ...] = ()  # of the new version, for how long each has waited for hardware
    failed: int = 0  # starts of the new version
    quiet_s: float = math.inf  # since a slice was last seen to leave

    @property
    def new(self) -> int:
        return self.serving + self.loading + len(self.waited_s)


def to_start(roll: Roll, pace: Pace) -> int:
    """Slices of the new version to order now."""
    beyond = min(pace.spare, _at_once(roll, pace))
    return max(0, min(roll.wanted - roll.new, roll.wanted - roll.old - roll.new + beyond))


def to_stop(roll: Roll, pace: Pace, *, room: bool = True) -> int:
    """Old slices to stop now. `room`: their hardware is what the new version waits for."""
    surplus = max(0, roll.old + roll.serving - roll.wanted)
    if not room:
        return min(roll.old, surplus)
    # The hardware of a slice that has just left is on its way to one that waits.
    without = sum(min(waited_s, roll.quiet_s) >= pace.surge_s for waited_s in roll.waited_s)
    at_once = _at_once(roll, pace)
    under_way = roll.loading + max(roll.leaving, len(roll.waited_s) - without + to_start(roll, pace))
    ordered_beyond = 0 if without else min(pace.spare, at_once)
    return min(roll.old, max(surplus, at_once - max(under_way, ordered_beyond)))


def to_make_room(roll: Roll, pace: Pace) -> int:
    """Old slices to stop because the budget has no room beside them. A new one that waits for hardware shows that none is free."""
    under_way = roll.leaving + roll.loading + len(roll.waited_s)
    return min(roll.old, max(0, _at_once(roll, pace) - under_way))


def _at_once(roll: Roll, pace: Pace) -> int:
    return pace.at_once if roll.serving > roll.failed else 1


@dataclass(frozen=True)
class Budget:
    """The YAML's `budget`: the most slices of all models together, and the most they may cost; None is no limit."""

    slices: int | None = None
    dollars_per_hour: float | None = None

    def room(self, price: float, held: Sequence[tuple[int, float]]) -> float:
        """Slices at a price for which there is room beside others: `held` has slices and dollars of each deployment."""
        room = math.inf
        if self.slices is not None:
            room = self.slices - sum(slices for slices, _ in held)
        if self.dollars_per_hour is not None and price > 0:
            left = self.dollars_per_hour - sum(dollars for _, dollars in held)
            room = min(room, math.floor(left / price + 1e-9))
        return max(0.0, room)


@dataclass(frozen=True)
class Retry:
    """Rounds of starts that failed, after each of which Serve gives a deployment up; `failed_s` is None while one is under way."""

    rounds: int = 0
    failed_s: float | None = None

    @property
    def pause_s(self) -> float:
        """Seconds from the last round to the next, twice as long after each."""
        return min(_FIRST_PAUSE_S * 2.0 ** min(self.rounds - 1, 10), _LONGEST_PAUSE_S)

    def given_up(self, now_s: float) -> "Retry":
        """The state while Serve has given up; once the pause is over, the next round is under way."""
        if self.failed_s is None:
            return Retry(self.rounds + 1, now_s)
        return Retry(self.rounds) if now_s - self.failed_s >= self.pause_s else self
