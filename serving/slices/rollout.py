"""Which slice goes first: where there are too many, and where one makes room for a changed YAML. Decisions only.

Serve rolls a changed deployment slice by slice and starts each new slice first. Without a spare slice the new one waits for
hardware that old slices hold. Then one old slice at a time drains and ends, and its hardware goes to the new version.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from serving.state.records import Release, SliceRecord, SliceState


def cost_to_drain(entry: SliceRecord) -> tuple[float, ...]:
    """The slice with the least cost goes first: requests to finish or hand over, the cache they fill, its time in this state."""
    return (entry.serves, entry.running + entry.waiting, entry.kv_usage, -entry.since)


@dataclass(frozen=True)
class Yielding:
    """What one replica has seen of a roll: for how long it has waited, and whether the new version failed to start."""

    release: Release | None = None
    waits_since_s: float | None = None
    failed: bool = False

    def next(
        self,
        own: SliceRecord,
        entries: Iterable[SliceRecord],
        release: Release | None,
        now_s: float,
        *,
        waiting: bool,
    ) -> "Yielding":
        """What the replica knows after another look; `waiting`: a slice of this deployment has no hardware yet."""
        before = self if release == self.release else Yielding(release)
        if release is None or release.version == own.version or release.pool != own.pool:
            return Yielding(release)
        beside = [entry for entry in entries if entry.deployment == own.deployment]
        changed = [entry for entry in beside if entry.version == release.version]
        # A version that can't start must not take one serving slice after the other.
        failed = before.failed or any(
            entry.state is SliceState.LOST and not entry.address for entry in changed
        )
        under_way = any(entry.state in (SliceState.STARTING, SliceState.DRAINING) for entry in beside)
        old = [entry for entry in beside if entry.serves and entry.version != release.version]
        first = min(old, key=lambda entry: (*cost_to_drain(entry), entry.replica), default=None)
        if failed or under_way or not waiting or first is None or first.replica != own.replica:
            return dataclasses.replace(before, waits_since_s=None, failed=failed)
        return dataclasses.replace(
            before, waits_since_s=now_s if before.waits_since_s is None else before.waits_since_s
        )

    def due(self, now_s: float, patience_s: float) -> bool:
        """Whether this replica is to make room, and the new version has waited for `patience_s`."""
        return self.waits_since_s is not None and now_s - self.waits_since_s >= patience_s
