"""Policies to compare: ours, and those that a deployment would have instead. Each is asked with the same view of a fleet."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serving.scaling.policy import PolicyState, Report, Settings, decide, start


@dataclass(frozen=True)
class View:
    """A fleet at one moment; `report` is what the board would say of it, `ongoing` counts queued requests too."""

    now_s: float
    report: Report
    serving: int
    ongoing: float
    queued: float


class Policy(Protocol):
    """Slices wanted, by pool."""

    name: str

    def wanted(self, view: View) -> Sequence[int]: ...


@dataclass
class Ours:
    """The policy that the service runs."""

    settings: Settings
    opening: Sequence[int] | None = None
    name: str = "ours"
    state: PolicyState | None = None
    reason: str = ""

    def wanted(self, view: View) -> Sequence[int]:
        opening = dict(zip((pool.key for pool in self.settings.pools), self.opening or (), strict=False))
        state = self.state or start(self.settings, opening)
        decision = decide(self.settings, state, view.report, view.now_s)
        self.state, self.reason = decision.state, decision.reason
        return decision.wanted


@dataclass
class ServeDefault:
    """Ray Serve's own: ongoing requests over a target, averaged over 30 s, 30 s before it grows and 600 s before it shrinks."""

    least: int
    most: int
    target: float
    name: str = "Serve's default"
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_s: float = 30.0
    current: int = -1
    _seen: deque[tuple[float, float]] = field(default_factory=deque)
    _since: tuple[int, float] = (0, 0.0)

    def wanted(self, view: View) -> Sequence[int]:
        self._seen.append((view.now_s, view.ongoing))
        while view.now_s - self._seen[0][0] > self.look_back_s:
            self._seen.popleft()
        ongoing = sum(value for _, value in self._seen) / len(self._seen)
        current = self.least if self.current < 0 else self.current
        # desired = running * (ongoing / (target * running)), as in _core_replica_queue_length_policy
        desired = math.ceil(ongoing / self.target) if view.serving else current
        desired = min(self.most, max(self.least, desired))
        direction = (desired > current) - (desired < current)
        if direction != self._since[0]:
            self._since = (direction, view.now_s)
        delay_s = self.upscale_delay_s if direction > 0 else self.downscale_delay_s
        if direction and view.now_s - self._since[1] >= delay_s:
            current = desired
            self._since = (0, view.now_s)
        self.current = current
        return (current,)


@dataclass
class QueueLength:
    """As the Horizontal Pod Autoscaler does on waiting requests a slice: tolerance of a tenth, the most of 300 s stays."""

    least: int
    most: int
    target: float
    name: str = "HPA on queue length"
    stabilisation_s: float = 300.0
    current: int = -1
    _recommended: deque[tuple[float, int]] = field(default_factory=deque)

    def wanted(self, view: View) -> Sequence[int]:
        current = self.least if self.current < 0 else self.current
        ratio = view.queued / max(1, view.serving) / self.target
        desired = current if abs(ratio - 1) <= 0.1 else math.ceil(max(1, view.serving) * ratio)
        desired = min(desired, max(4, 2 * current))  # its default policy: at most double, or four more
        self._recommended.append((view.now_s, desired))
        while view.now_s - self._recommended[0][0] > self.stabilisation_s:
            self._recommended.popleft()
        desired = max(value for _, value in self._recommended)
        self.current = min(self.most, max(self.least, desired))
        return (self.current,)


@dataclass
class Fixed:
    """As many as the peak needs, always."""

    count: int
    name: str = "fixed for the peak"

    def wanted(self, view: View) -> Sequence[int]:
        del view
        return (self.count,)
