"""A changed engine on its way through a fleet, in simulated time: how long it takes, and how many slices serve meanwhile.

Decided by serving.slices.rollout, as in the Serve controller. Hardware that an old slice leaves is free after its drain; a new
slice takes free hardware in the order in which it was ordered, and serves or fails `start_s` later.
"""

import math
from dataclasses import dataclass, field

from serving.slices.rollout import FIRST_STARTS, Pace, Roll, to_start, to_stop

# Serve's own bound on failed starts in a roll, of a fleet that is not small.
_MOST_FAILED = 20


@dataclass(frozen=True)
class Rolled:
    """How a roll went: seconds until the last slice was replaced or the roll stopped, and the fewest that served."""

    seconds: float
    lowest: int
    changed: int
    failed: int
    stopped: bool


@dataclass
class Roller:
    """A fleet of so many slices between two versions; `spare` slices of hardware beside it are free."""

    slices: int
    pace: Pace
    spare: int = 1
    start_s: float = 360.0
    drain_s: float = 60.0
    fails: bool = False
    now_s: float = 0.0
    left_s: float = -math.inf
    old: int = field(init=False)
    changed: int = 0
    failed: int = 0
    leaving: list[float] = field(default_factory=list)  # when each has left
    loading: list[float] = field(default_factory=list)  # when each will serve
    waiting: list[float] = field(default_factory=list)  # since when

    def __post_init__(self) -> None:
        self.old = self.slices

    def roll(self) -> Roll:
        waited_s = tuple(self.now_s - since_s for since_s in self.waiting)
        if self.leaving:
            self.left_s = self.now_s
        return Roll(
            self.slices,
            self.old,
            len(self.leaving),
            self.changed,
            len(self.loading),
            waited_s,
            self.failed,
            self.now_s - self.left_s,
        )

    @property
    def stopped(self) -> bool:
        return self.failed >= (FIRST_STARTS if not self.changed else _MOST_FAILED)

    def look(self) -> None:
        """A second, and what Serve does at its end."""
        self.now_s += 1
        self.spare += sum(left_s <= self.now_s for left_s in self.leaving)
        self.leaving = [left_s for left_s in self.leaving if left_s > self.now_s]
        ready = sum(ready_s <= self.now_s for ready_s in self.loading)
        self.loading = [ready_s for ready_s in self.loading if ready_s > self.now_s]
        if self.fails:
            self.failed += ready
            self.leaving += [self.now_s + 1] * ready
        else:
            self.changed += ready
        if self.stopped:
            self.waiting = []
            return
        roll = self.roll()
        start, stop = to_start(roll, self.pace), to_stop(roll, self.pace)
        self.old -= stop
        self.leaving += [self.now_s + self.drain_s] * stop
        self.waiting += [self.now_s] * start
        taken = min(self.spare, len(self.waiting))
        self.spare -= taken
        self.waiting = self.waiting[taken:]
        self.loading += [self.now_s + self.start_s] * taken

    def run(self, longest_s: float = 30 * 86400.0) -> Rolled:
        lowest = self.slices
        while self.changed < self.slices and not self.stopped and self.now_s < longest_s:
            self.look()
            lowest = min(lowest, self.old + self.changed)
        return Rolled(self.now_s, lowest, self.changed, self.failed, self.stopped)

    def undo(self) -> None:
        """The old version is deployed again: what is still old counts as changed, and what changed is old."""
        self.old, self.changed, self.failed = self.changed, self.old, 0
        self.spare += len(self.loading)
        self.loading, self.waiting, self.fails = [], [], False


def table(slices: int = 1000) -> str:
    """Markdown."""
    lines = [
        "| `at_once` | `spare` | free hardware | replaced in | fewest that served |",
        "|---|---|---|---|---|",
    ]
    for at_once, spare, free in (
        (1, 1, 1),
        (10, 1, 1),
        ("10%", 1, 1),
        ("10%", 1, 0),
        ("10%", 100, 100),
        ("25%", 1, 1),
    ):
        rolled = Roller(slices, Pace.of(at_once, spare, 30, slices), free).run()
        lines.append(
            f"| {at_once} | {spare} | {free} | {rolled.seconds / 3600:.1f} h | {rolled.lowest} of {slices} |"
        )
    return "\n".join(lines)


def failure(slices: int = 1000) -> str:
    """A version that can't start, and a good one that is undone half-way."""
    bad = Roller(slices, Pace.of("10%", 1, 30, slices), fails=True).run()
    undone = Roller(slices, Pace.of("10%", 1, 30, slices))
    while undone.changed < slices // 2:
        undone.look()
    began_s, kept = undone.now_s, undone.old
    undone.undo()
    back = undone.run()
    return (
        f"a version that can't start: stopped after {bad.seconds / 60:.0f} min and {bad.failed} starts, "
        f"{slices - bad.lowest} of {slices} slices fewer meanwhile\n"
        f"undone half-way: {slices} slices of the old version after {(back.seconds - began_s) / 3600:.1f} h, "
        f"{kept} of them never touched, at least {back.lowest} serving"
    )
