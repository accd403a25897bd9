"""A controller that comes back lets slices go on that it finds in the middle of their start.

Serve ends a replica that has not been initialized when its controller comes back, and one that then does not answer within 30 s.
An engine's start takes minutes, and its end would count as a failure of the slice. Two more ends are no failures: that of a
replica that waits for hardware while another is placed elsewhere, and that of a start on a slice with a host that is to go.

`serving.slices.placement.install` calls `install`. Only this module uses these private names of Ray Serve:

- `ray.serve._private.deployment_state.ActorReplicaWrapper.check_ready`, which is replaced, and its `_was_initialized_obj_ref`,
  `_actor_handle`, `_replica_id` and `_unrecoverable`
- `ray.serve._private.deployment_state.DeploymentState._check_startup_replicas`, which is replaced, and its `_replicas` and
  `_stop_replica`
"""

# ruff: noqa: SLF001  Serve has no public names for what is asked here

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray

from serving.state.records import SliceRecord, SliceState
from serving.timings import TIMINGS

logger = logging.getLogger("ray.serve")

READY_POINT = "check_ready"
STARTUP_POINT = "_check_startup_replicas"
_LOOK_EVERY_S = 1.0


class Starting:
    """Which replicas say that their engine starts, or has just begun to serve; by one read for all of them in a while."""

    def __init__(self, entries: Callable[[], Iterable[SliceRecord]], clock: Callable[[], float]) -> None:
        self._entries = entries
        self._clock = clock
        self._states: dict[str, SliceState] | None = None
        self._looked_s: float | None = None
        self._missing_s: dict[str, float] = {}  # since when a replica has had no record

    def state(self, tag: str) -> SliceState | None:
        """The state of a replica's record; while the store can't be read, of one that is not known: STARTING.

        So it is where the record has just gone, for the store may have answered in part.
        """
        now_s = self._clock()
        if self._looked_s is None or now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            try:
                self._states = {entry.tag: entry.state for entry in self._entries()}
            except Exception:
                self._states = None
                logger.exception("the store can't be read: slices that start are left alone")
        if self._states is None:
            return SliceState.STARTING
        if tag in self._states:
            self._missing_s.pop(tag, None)
            return self._states[tag]
        missing_s = now_s - self._missing_s.setdefault(tag, now_s)
        return SliceState.STARTING if missing_s < TIMINGS.forgotten_s else None

    def left(self, tag: str) -> bool:
        """Whether a replica that has just ended said that it leaves; false while the store can't be read."""
        try:
            return any(entry.tag == tag and entry.state is SliceState.DRAINING for entry in self._entries())
        except Exception:
            logger.exception("the store can't be read: the end of replica %s counts as a failed start", tag)
            return False


def install(
    wrapper_class: Any,
    state_class: Any,
    entries: Callable[[], Iterable[SliceRecord]],
    clock: Callable[[], float] = time.monotonic,
    placed_anew: Callable[[str], bool] = lambda _: False,
) -> None:
    """Replace how Serve takes over replicas that it finds.

    `placed_anew`: whether the replica of this full name was ended so that another one is placed elsewhere.
    """
    check_startup = getattr(state_class, STARTUP_POINT)
    starting = Starting(entries, clock)
    is_ready = _without_blame(getattr(wrapper_class, READY_POINT), placed_anew, starting.left)

    def check_ready(wrapper: Any) -> Any:
        probe = wrapper._was_initialized_obj_ref
        if probe is None or starting.state(wrapper._replica_id.unique_id) not in (
            SliceState.STARTING,
            SliceState.SERVING,
        ):
            return is_ready(wrapper)
        if (initialized := _answer(probe)) is not None:
            if initialized:
                return is_ready(wrapper)
            wrapper._was_initialized_obj_ref = wrapper._actor_handle.was_initialized.remote()
        return _pending(), None

    def check_startup_replicas(state: Any, original_state: Any, stop_on_slow: bool = False) -> Any:
        slow = check_startup(state, original_state)
        if stop_on_slow:
            for replica, _ in slow:
                if starting.state(replica.replica_id.unique_id) is not SliceState.STARTING:
                    state._replicas.remove({replica.replica_id})
                    state._stop_replica(replica, graceful_stop=False)
        return slow

    setattr(wrapper_class, READY_POINT, check_ready)
    setattr(state_class, STARTUP_POINT, check_startup_replicas)


def _without_blame(
    is_ready: Callable[[Any], Any], placed_anew: Callable[[str], bool], left: Callable[[str], bool]
) -> Callable[[Any], Any]:
    """The end of a replica that is placed anew, or left, is no failure of its version: Serve starts another, and counts none."""

    def answer(wrapper: Any) -> Any:
        status, failure = is_ready(wrapper)
        if failure is not None:
            replica = wrapper._replica_id
            if placed_anew(replica.to_full_id_str()) or left(replica.unique_id):
                wrapper._unrecoverable = True
        return status, failure

    return answer


def _answer(probe: Any) -> bool | None:
    """Whether a replica says that it has been initialized; None before it has answered, true where it is gone: Serve knows what to do."""
    if not ray.wait([probe], timeout=0)[0]:
        return None
    try:
        return bool(ray.get(probe))
    except Exception:  # noqa: BLE001  it is gone, or its actor is
        return True


def _pending() -> Any:
    from ray.serve._private.deployment_state import ReplicaStartupStatus  # noqa: PLC0415  only the controller has it loaded

    return ReplicaStartupStatus.PENDING_INITIALIZATION
