"""What the Serve controller does otherwise with a deployment of slices: it rolls in waves, never gives up, hands pools over.

`serving.slices.placement.install` calls `install` before the controller makes its first deployment. Serve asks for each
deployment, several times a second, what to start and what to stop. The answers are decided in `serving.slices.rollout`; the
functions here count Serve's replicas for it. Beside `placement` and `recovery`, only this module and `deployed` use private names of
Ray Serve:

- `ray.serve._private.deployment_state.DeploymentState`: `_surge_replicas_to_start`, `_surge_replicas_to_stop`,
  `_get_upscale_replicas`, `_failed_to_start_threshold`, `scale_deployment_replicas` and `__init__`, which are replaced; its `_id`,
  `_replicas`, `_target_state`, `_deployed_info`, `_replica_failure_count`, `_replica_failure_message`, `_replica_has_started`,
  `_in_transition`, `_target_state_changed`, `_terminally_failed`, `_surge_rollout_in_progress`, `_rescale_to`
- `ray.serve._private.deployment_state.DeploymentReplica`: `version`, `actor_details`, `actor_node_id`
- `ray.serve._private.application_state.ApplicationState._delete_deployment`, which is replaced, and `_name`,
  `_target_state`, `target_deployments`, `_deployment_state_manager._deployment_states`
"""

# ruff: noqa: SLF001  Serve has no public names for what is asked here

import logging
import math
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from serving.slices import deployed
from serving.slices.rollout import (
    FIRST_STARTS,
    Budget,
    Retry,
    Roll,
    cost_to_drain,
    to_make_room,
    to_start,
    to_stop,
)
from serving.state.records import Rollout, SliceRecord, SliceState

logger = logging.getLogger("ray.serve")

STATE_POINTS = (
    "_surge_replicas_to_start",
    "_surge_replicas_to_stop",
    "_get_upscale_replicas",
    "_failed_to_start_threshold",
    "scale_deployment_replicas",
)
DELETE_POINT = "_delete_deployment"
_ASKED_S = 2.0  # how often the store is asked whether somebody wants a roll that stopped to be tried again
_PROCESS_S = 2.0  # after which Ray is asked whether a replica without a process waits for hardware, or only for its process


# By application and deployment, how many slices it is to have by scaling's decision, and the keys of the pools that the decision counted
# on. The policies run in this process too.
_WANTED: dict[tuple[str, str], tuple[int, Collection[str]]] = {}
_INSTALLED: "list[SliceDeployments]" = []


def tell_wanted(application: str, name: str, slices: int | None, pools: Collection[str] = ()) -> None:
    """Scaling says how many slices a deployment is to have once there is room for them, beside these pools; None before it has decided."""
    if slices is None:
        _WANTED.pop((application, name), None)
    else:
        _WANTED[application, name] = slices, pools


def told_wanted(application: str, name: str, without: str) -> int | None:
    """What scaling said of a deployment, unless it counted on the pool of the key `without`."""
    slices, pools = _WANTED.get((application, name), (None, ()))
    return None if without in pools else slices


def leaving(application: str) -> tuple[float, float]:
    """Slices of pools that the application's YAML no longer has and that wait for their successors, and their dollars an hour."""
    counts = [deployments.leaving(application) for deployments in _INSTALLED]
    return sum(slices for slices, _ in counts), sum(dollars for _, dollars in counts)


class RolloutStore(Protocol):
    """What the controller reads and writes: the store, or a test's."""

    def slices(self) -> list[SliceRecord]: ...

    def rollout(self, rollout: Rollout) -> Rollout | None: ...

    def put_rollout(self, rollout: Rollout) -> None: ...

    def delete_rollout(self, rollout: Rollout) -> None: ...

    def take_retry(self, rollout: Rollout) -> bool: ...

    def put_stop(self, replica: str) -> None: ...


def tell_stopped(store: Callable[[], RolloutStore], tags: Collection[str]) -> None:
    """Keep of the replicas of these tags that still start that Serve stops them: their end is no failure of their slices.

    Such a replica can't say so itself: its event loop is blocked until the engine is up, and Serve kills it.
    """
    if not tags:
        return
    try:
        for entry in store().slices():
            if entry.tag in tags and entry.state is SliceState.STARTING:
                store().put_stop(entry.replica)
    except Exception:
        logger.exception("the store can't be read: slices that are stopped while they start count as failed")


@dataclass(frozen=True)
class _Counted:
    """Serve's replicas of a deployment of slices, as a roll counts them."""

    roll: Roll
    serving_old: list[Any]
    starting_old: list[Any]


@dataclass(frozen=True)
class _Handover:
    """A pool that the application's YAML no longer has, and the slices of its model at the first look."""

    application: Any
    slices: int


class SliceDeployments:
    """Serve's questions about deployments of slices, answered; all other deployments get Serve's own answers."""

    def __init__(
        self,
        default: Mapping[str, Any],
        is_slice: Callable[[Any], bool],
        store: Callable[[], RolloutStore],
        clock: Callable[[], float],
        placed: Callable[[str], bool],
        wanted: Callable[[str, str, str], int | None],
    ) -> None:
        """`default` has what is replaced, by name; `clock` does not jump, as the one by which Serve notes starts does.

        `placed`: whether the replica of this name has its hardware, though no process yet. `wanted`: as `told_wanted` says of
        an application's deployment.
        """
        self._default = default
        self._is_slice = is_slice
        self._store = store
        self._clock = clock
        self._placed = placed
        self._wanted = wanted
        # What is kept of a deployment goes with Serve's state of it.
        self._states: weakref.WeakSet[Any] = weakref.WeakSet()
        # Of one version of its engine.
        self._retries: weakref.WeakKeyDictionary[Any, tuple[Any, Retry]] = weakref.WeakKeyDictionary()
        # Of pools that the YAML no longer has.
        self._handovers: weakref.WeakKeyDictionary[Any, _Handover] = weakref.WeakKeyDictionary()
        self._published: weakref.WeakKeyDictionary[Any, Rollout] = weakref.WeakKeyDictionary()
        # Those of which the store has nothing from a controller before this one.
        self._looked: weakref.WeakSet[Any] = weakref.WeakSet()
        # When the store was asked for retries.
        self._asked_s: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        # When replicas that start were first seen.
        self._seen_s: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        # When a slice of each deployment was last seen to leave.
        self._left_s: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def made(self, state: Any) -> None:
        """Serve has made a deployment's state."""
        self._states.add(state)

    def leaving(self, application: str) -> tuple[int, float]:
        """Slices of pools that are handed over, and their dollars an hour."""
        held = [
            deployed.held(state)
            for state in self._states
            if state._id.app_name == application
            and state in self._handovers
            and state._id.name not in self._handovers[state].application.target_deployments
        ]
        return sum(slices for slices, _ in held), sum(dollars for _, dollars in held)

    def _room(self, state: Any, without: Any = None) -> float:
        """How many slices more of a deployment its application's budget has room for; `without` counts as gone."""
        held = [
            deployed.held(other)
            for other in self._states
            if other is not without and other._id.app_name == state._id.app_name and self._ours(other)
        ]
        return Budget(**deployed.settings(state).get("budget", {})).room(deployed.price(state), held)

    def surge_to_start(self, state: Any) -> Any:
        if not self._ours(state):
            return self._default["_surge_replicas_to_start"](state)
        roll = self._count(state).roll
        missing = max(0, roll.wanted - roll.old - roll.new)
        if missing:
            self._try_again(state)
        if state._terminally_failed():
            return self._default["_surge_replicas_to_start"](state)
        return (
            missing
            if self._is_tried_again(state)
            else to_start(roll, deployed.pace(state).within(roll, self._room(state)))
        )

    def surge_to_stop(self, state: Any) -> Any:
        from ray.serve._private.common import ReplicaState  # noqa: PLC0415  as in `_count`

        if not self._ours(state):
            return self._default["_surge_replicas_to_stop"](state)
        chosen = self._to_stop(state)
        starting = [replica for replica in chosen if replica.actor_details.state is ReplicaState.STARTING]
        tell_stopped(self._store, {replica.replica_id.unique_id for replica in starting})
        return chosen

    def _to_stop(self, state: Any) -> Any:
        if state._terminally_failed():
            return self._default["_surge_replicas_to_stop"](state)
        counted = self._count(state)
        if self._is_tried_again(state):
            return counted.starting_old
        roll = self._quiet(state, counted.roll)
        most = to_stop(roll, deployed.pace(state).within(roll, self._room(state)))
        return [*counted.starting_old, *self._cheapest(counted.serving_old, most)]

    def upscale(self, state: Any, to_add: int, **kwargs: Any) -> Any:
        """Whatever wants a slice, none is started beyond the budget."""
        if self._ours(state):
            self._try_again(state)
            to_add = int(min(to_add, self._room(state)))
        return self._default["_get_upscale_replicas"](state, to_add=to_add, **kwargs)

    def threshold(self, state: Any) -> int:
        """How many starts may fail before Serve gives the version up."""
        most = int(self._default["_failed_to_start_threshold"].fget(state))
        unproven = state._target_state.rolling_update and not state._replica_has_started
        return min(most, FIRST_STARTS) if unproven and self._ours(state) else most

    def scale(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        if state in self._retries and not self._retry(state):
            del self._retries[state]  # a version that comes back later begins anew
        if self._is_asked_again(state):
            self._retries.pop(state, None)
            deployed.forget_failures(state)
            logger.warning("%s rolls again, as somebody asked", state._id)
        requests = self._default["scale_deployment_replicas"](state, *args, **kwargs)
        published = state in self._looked and state not in self._published
        if (state._in_transition or not published) and self._ours(state):
            self._publish(state)
        return requests

    def delete(self, application: Any, name: str) -> Any:
        """A pool that the YAML no longer has goes as the other pools of its model come up."""
        states = application._deployment_state_manager._deployment_states
        known = {id_.name: state for id_, state in states.items() if id_.app_name == application._name}
        old = known.get(name)
        if old is not None and not application._target_state.deleting and self._may_wait(old):
            model = deployed.settings(old)["name"]
            targets = [known[other] for other in application.target_deployments if other in known]
            for other in targets:  # one that is back in the YAML is handed over anew when it goes again
                self._handovers.pop(other, None)
            others = [
                other for other in targets if self._ours(other) and deployed.settings(other)["name"] == model
            ]
            keep = self._handed_over(application, old, others) if others else 0
            if keep > 0:
                wanted = min(keep, old._target_state.target_num_replicas)
                changed = wanted < old._target_state.target_num_replicas
                old._rescale_to(wanted)
                return changed
        if old is not None:
            self._handovers.pop(old, None)
        # A deployment of this name that comes later is decided for anew.
        tell_wanted(application._name, name, None)
        return self._default[DELETE_POINT](application, name)

    def _ours(self, state: Any) -> bool:
        info = state._target_state.info
        return info is not None and self._is_slice(info.replica_config.placement_group_bundles or ())

    def _may_wait(self, state: Any) -> bool:
        return self._ours(state) and not state._target_state.deleting

    def _try_again(self, state: Any) -> None:
        """Let a deployment that Serve gave up start slices once more, after a pause, where slices are missing.

        After a roll that stopped, only the new version can take the place of an old slice that is lost. Other old slices stay as
        long as no slice of the new version serves.
        """
        if not state._terminally_failed():
            if state._replica_has_started:
                self._retries.pop(state, None)
            return
        before = self._retry(state) or Retry()
        retry = before.given_up(self._clock())
        self._retries[state] = deployed.version(state), retry
        if retry.failed_s is None:
            deployed.forget_failures(state)
            logger.warning("%s tries again to start slices", state._id)
        elif retry != before:
            logger.error("%s: no slice has started; tries again in %.0f s", state._id, retry.pause_s)

    def _is_asked_again(self, state: Any) -> bool:
        """Whether somebody asks that the deployment's roll, which has stopped, is tried again."""
        rollout, now_s = self._published.get(state), self._clock()
        if not (rollout and rollout.stopped) or now_s - self._asked_s.get(state, -math.inf) < _ASKED_S:
            return False
        self._asked_s[state] = now_s
        try:
            return self._store().take_retry(rollout)
        except Exception:
            logger.exception(
                "the store can't be read; the next look tells whether %s is tried again", state._id
            )
            return False

    def _retry(self, state: Any) -> Retry | None:
        """What is known of starts of the deployment's version that failed."""
        version, retry = self._retries.get(state, (None, None))
        return retry if version == deployed.version(state) else None

    def _is_tried_again(self, state: Any) -> bool:
        """Whether the deployment's version has failed before and none of its slices has served yet."""
        return self._retry(state) is not None and not state._replica_has_started

    def _cheapest(self, replicas: list[Any], most: int) -> list[Any]:
        """The replicas that cost least to drain; one that the store does not tell of may have the most to do."""
        if most <= 0:
            return []
        try:
            costs = {entry.tag: cost_to_drain(entry) for entry in self._store().slices()}
        except Exception:
            logger.exception("the store can't be read: any old slices make room")
            costs = {}
        return sorted(replicas, key=lambda replica: costs.get(replica.replica_id.unique_id, (math.inf,)))[
            :most
        ]

    def _handed_over(self, application: Any, old: Any, others: Sequence[Any]) -> int:
        """How many slices a pool keeps that the YAML no longer has, while its model's other pools come up."""
        gone = self._count(old).roll
        rolls = [self._count(other).roll for other in others]
        serving = sum(roll.serving + roll.old for roll in rolls)
        # A controller that comes back does not know yet which of them serve.
        present = gone.serving + gone.old + deployed.recovering(old)
        scaling = [bool(other._deployed_info.deployment_config.autoscaling_config) for other in others]
        unsure = sum(deployed.recovering(other) for other in others)
        at_first = _Handover(application, present + serving + unsure if any(scaling) else 0)
        first = self._handovers.setdefault(old, at_first).slices
        gone_pool = deployed.settings(old)["pool"]
        counts = [
            self._wanted(other._id.app_name, other._id.name, gone_pool) if scales else 0
            for other, scales in zip(others, scaling, strict=True)
        ]
        # A pool's target is its least until scaling has decided, and then what the budget has room for.
        wanted = [max(roll.wanted, slices or 0) for roll, slices in zip(rolls, counts, strict=True)]
        decided = None not in counts
        roll = Roll(
            wanted=sum(wanted) if decided else max(sum(wanted), first),
            old=present,
            leaving=gone.leaving,
            serving=serving,
            loading=sum(roll.loading for roll in rolls),
            waited_s=tuple(waited_s for roll in rolls for waited_s in roll.waited_s),
            failed=sum(roll.failed for roll in rolls),
        )
        missing = [
            other
            for other, roll, count in zip(others, rolls, wanted, strict=True)
            if count > roll.old + roll.new
        ]
        room = max((self._room(other) for other in missing), default=math.inf)
        pace = deployed.pace(old).within(roll, room)
        stops = to_stop(
            roll, pace, room=any(deployed.bundles(old) == deployed.bundles(other) for other in others)
        )
        if decided and room < 1 and any(self._room(other, without=old) for other in missing):
            leaving = gone.leaving + sum(roll.leaving for roll in rolls)
            stops = max(stops, to_make_room(replace(roll, leaving=leaving), pace))
        return roll.old - stops

    def _count(self, state: Any) -> _Counted:
        from ray.serve._private.common import ReplicaState  # noqa: PLC0415  only the controller needs it, and has it loaded

        now_s, target = self._clock(), state._target_state.version
        leaving = serving = loading = 0
        waited_s: list[float] = []
        serving_old: list[Any] = []
        starting_old: list[Any] = []
        states = [
            ReplicaState.STARTING,
            ReplicaState.UPDATING,
            ReplicaState.RUNNING,
            ReplicaState.RECOVERING,
            ReplicaState.STOPPING,
        ]
        for replica in state._replicas.get(states=states):
            at = replica.actor_details.state
            if at is ReplicaState.STOPPING:
                leaving += 1
            elif replica.version != target and replica.version.requires_actor_restart(target):
                (starting_old if at is ReplicaState.STARTING else serving_old).append(replica)
            elif at in (ReplicaState.RUNNING, ReplicaState.UPDATING):
                serving += 1
            elif at is ReplicaState.STARTING and self._waits(replica, now_s):
                waited_s.append(now_s - self._seen_s[replica])
            else:
                loading += 1  # a replica that recovers shows its version later, and counts as new until then
        roll = Roll(
            wanted=state._target_state.target_num_replicas,
            old=len(serving_old),
            leaving=leaving,
            serving=serving,
            loading=loading,
            waited_s=tuple(waited_s),
            failed=state._replica_failure_count,
        )
        return _Counted(roll, serving_old, starting_old)

    def _has_old(self, state: Any) -> bool:
        counted = self._count(state)
        return bool(counted.serving_old or counted.starting_old)

    def _waits(self, replica: Any, now_s: float) -> bool:
        """Whether a replica that starts still lacks hardware."""
        if replica.actor_node_id is not None:
            return False
        young = now_s - self._seen_s.setdefault(replica, now_s) < _PROCESS_S
        return young or not self._placed(replica.replica_id.to_full_id_str())

    def _quiet(self, state: Any, roll: Roll) -> Roll:
        now_s = self._clock()
        if roll.leaving:
            self._left_s[state] = now_s
        return replace(roll, quiet_s=now_s - self._left_s.get(state, -math.inf))

    def _with_reason(self, state: Any, rollout: Rollout | None) -> Rollout | None:
        """Serve forgets why a roll stopped once its controller ends, or the roll is tried again: the record before says it."""
        if not rollout or not rollout.stopped or rollout.failed:
            return rollout
        before = self._published.get(state) or self._store().rollout(rollout)
        if before is None or before.version != rollout.version:
            return rollout
        return replace(rollout, failed=before.failed, reason=before.reason)

    def _publish(self, state: Any) -> None:
        """Keep the deployment's record of its roll while there is one, for the status document."""
        rollout = None
        # Serve takes a replica that recovers for one of a roll.
        if state._surge_rollout_in_progress() and self._has_old(state):
            stopped = state._terminally_failed() or self._is_tried_again(state)
            rollout = deployed.rollout(state, self._count(state).roll, stopped=stopped)
        elif deployed.recovering(state):
            return  # and nobody knows yet which version it has
        try:
            rollout = self._with_reason(state, rollout)
            if state in self._looked and rollout == self._published.get(state):
                return
            if rollout is not None:
                self._store().put_rollout(rollout)
                self._published[state] = rollout
            else:
                self._store().delete_rollout(deployed.rollout(state, self._count(state).roll, stopped=False))
                self._published.pop(state, None)
            self._looked.add(state)
        except Exception:
            logger.exception("the store can't be written; the next look tells how far %s is", state._id)


def install(
    state_class: Any,
    application_class: Any,
    is_slice: Callable[[Any], bool],
    store: Callable[[], RolloutStore],
    placed: Callable[[str], bool],
    clock: Callable[[], float] = time.monotonic,
    wanted: Callable[[str, str, str], int | None] = told_wanted,
) -> None:
    """Replace what Serve decides for deployments whose bundles `is_slice` knows; the others are SliceDeployments'."""
    default = {name: getattr(state_class, name) for name in STATE_POINTS}
    default[DELETE_POINT] = getattr(application_class, DELETE_POINT)
    deployments = SliceDeployments(default, is_slice, store, clock, placed, wanted)
    _INSTALLED.append(deployments)
    make = state_class.__init__

    def made(state: Any, *args: Any, **kwargs: Any) -> None:
        make(state, *args, **kwargs)
        deployments.made(state)

    state_class.__init__ = made
    state_class._surge_replicas_to_start = _method(deployments.surge_to_start)
    state_class._surge_replicas_to_stop = _method(deployments.surge_to_stop)
    state_class._get_upscale_replicas = _method(deployments.upscale)
    state_class._failed_to_start_threshold = property(_method(deployments.threshold))
    state_class.scale_deployment_replicas = _method(deployments.scale)
    application_class._delete_deployment = _method(deployments.delete)


def _method(answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a class hands its instance to, as it does not to a bound method."""

    def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return answer(instance, *args, **kwargs)

    return method
