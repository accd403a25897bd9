"""What the Serve controller does otherwise with a deployment of slices: it rolls in waves, never gives up, hands pools over.

`serving.slices.placement.install` calls `install` before the controller makes its first deployment. Serve asks for each
deployment, several times a second, what to start and what to stop. The answers are decided in `serving.slices.rollout`; the
functions here count Serve's replicas for it. Beside `placement`, only this module uses private names of Ray Serve:

- `ray.serve._private.deployment_state.DeploymentState`: `_surge_replicas_to_start`, `_surge_replicas_to_stop`,
  `_get_upscale_replicas`, `_failed_to_start_threshold` and `scale_deployment_replicas`, which are replaced; its `_id`,
  `_replicas`, `_target_state`, `_deployed_info`, `_replica_failure_count`, `_replica_failure_message`, `_replica_has_started`,
  `_in_transition`, `_target_state_changed`, `_terminally_failed`, `_surge_rollout_in_progress`, `_rescale_to`
- `ray.serve._private.deployment_state.DeploymentReplica`: `version`, `actor_details`, `actor_node_id`, `_start_time`
- `ray.serve._private.application_state.ApplicationState._delete_deployment`, which is replaced, and `_name`,
  `_target_state`, `target_deployments`, `_deployment_state_manager._deployment_states`
"""

# ruff: noqa: SLF001  Serve has no public names for what is asked here

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from serving.slices.rollout import (
    FIRST_STARTS,
    Pace,
    Retry,
    Roll,
    cost_to_drain,
    to_start,
    to_stop,
)
from serving.state.records import Rollout, SliceRecord, SliceState, deployment

logger = logging.getLogger("ray.serve")

STATE_POINTS = (
    "_surge_replicas_to_start",
    "_surge_replicas_to_stop",
    "_get_upscale_replicas",
    "_failed_to_start_threshold",
    "scale_deployment_replicas",
)
DELETE_POINT = "_delete_deployment"
_ERROR_CHARACTERS = 500  # of Serve's message, whose end names the error
_PROCESS_S = 2.0  # after which Ray is asked whether a replica without a process waits for hardware, or only for its process


# Deployments, by application and name, for which scaling has decided. The policies run in this process too.
_DECIDED: set[tuple[str, str]] = set()


def tell_decided(application: str, name: str, *, decided: bool) -> None:
    """Scaling says of a deployment whether its number of slices is a decision."""
    (_DECIDED.add if decided else _DECIDED.discard)((application, name))


class RolloutStore(Protocol):
    """What the controller reads and writes: the store, or a test's."""

    def slices(self) -> list[SliceRecord]: ...

    def put_rollout(self, rollout: Rollout) -> None: ...

    def delete_rollout(self, rollout: Rollout) -> None: ...

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


class SliceDeployments:
    """Serve's questions about deployments of slices, answered; all other deployments get Serve's own answers."""

    def __init__(
        self,
        default: Mapping[str, Any],
        is_slice: Callable[[Any], bool],
        store: Callable[[], RolloutStore],
        clock: Callable[[], float],
        placed: Callable[[str], bool],
        decided: Callable[[str, str], bool],
    ) -> None:
        """`default` has what is replaced, by name; `clock` is the one by which Serve notes when a replica was started.

        `placed`: whether the replica of this name has its hardware, though no process yet. `decided`: whether scaling has
        decided for the deployment of this application and name.
        """
        self._default = default
        self._is_slice = is_slice
        self._store = store
        self._clock = clock
        self._placed = placed
        self._retries: dict[Any, Retry] = {}
        self._decided = decided
        # Of pools that the YAML no longer has: the slices of the model at the first look.
        self._handovers: dict[Any, int] = {}
        self._published: dict[Any, Rollout] = {}
        self._left_s: dict[Any, float] = {}  # when a slice of each deployment was last seen to leave

    def surge_to_start(self, state: Any) -> Any:
        if not self._ours(state):
            return self._default["_surge_replicas_to_start"](state)
        roll = self._count(state).roll
        missing = max(0, roll.wanted - roll.old - roll.new)
        if missing:
            self._try_again(state)
        if state._terminally_failed():
            return self._default["_surge_replicas_to_start"](state)
        return missing if self._is_tried_again(state) else to_start(roll, _pace(state))

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
        most = to_stop(self._quiet(state, counted.roll), _pace(state))
        return [*counted.starting_old, *self._cheapest(counted.serving_old, most)]

    def upscale(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        if self._ours(state):
            self._try_again(state)
        return self._default["_get_upscale_replicas"](state, *args, **kwargs)

    def threshold(self, state: Any) -> int:
        """How many starts may fail before Serve gives the version up."""
        most = int(self._default["_failed_to_start_threshold"].fget(state))
        unproven = state._target_state.rolling_update and not state._replica_has_started
        return min(most, FIRST_STARTS) if unproven and self._ours(state) else most

    def scale(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        requests = self._default["scale_deployment_replicas"](state, *args, **kwargs)
        if (state._in_transition or state._id in self._published) and self._ours(state):
            self._publish(state)
        return requests

    def delete(self, application: Any, name: str) -> Any:
        """A pool that the YAML no longer has goes as the other pools of its model come up."""
        states = application._deployment_state_manager._deployment_states
        known = {id_.name: state for id_, state in states.items() if id_.app_name == application._name}
        old = known.get(name)
        if old is not None and not application._target_state.deleting and self._may_wait(old):
            model = _settings(old)["name"]
            targets = [known[other] for other in application.target_deployments if other in known]
            for other in targets:  # one that is back in the YAML is handed over anew when it goes again
                self._handovers.pop(other._id, None)
            others = [other for other in targets if self._ours(other) and _settings(other)["name"] == model]
            keep = self._handed_over(old, others) if others else 0
            if keep > 0:
                wanted = min(keep, old._target_state.target_num_replicas)
                changed = wanted < old._target_state.target_num_replicas
                old._rescale_to(wanted)
                return changed
            self._handovers.pop(old._id, None)
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
        key = _version(state)
        if not state._terminally_failed():
            if state._replica_has_started:
                self._retries.pop(key, None)
            return
        before = self._retries.get(key, Retry())
        retry = self._retries[key] = before.given_up(self._clock())
        if retry.failed_s is None:
            _forget_failures(state)
            logger.warning("%s tries again to start slices", state._id)
        elif retry != before:
            logger.error("%s: no slice has started; tries again in %.0f s", state._id, retry.pause_s)

    def _is_tried_again(self, state: Any) -> bool:
        """Whether the deployment's version has failed before and none of its slices has served yet."""
        return _version(state) in self._retries and not state._replica_has_started

    def _cheapest(self, replicas: list[Any], most: int) -> list[Any]:
        """The replicas that cost least to drain; one that the store does not know serves nobody."""
        if most <= 0:
            return []
        try:
            costs = {entry.tag: cost_to_drain(entry) for entry in self._store().slices()}
        except Exception:
            logger.exception("the store can't be read: any old slices make room")
            costs = {}
        return sorted(replicas, key=lambda replica: costs.get(replica.replica_id.unique_id, (False,)))[:most]

    def _handed_over(self, old: Any, others: Sequence[Any]) -> int:
        """How many slices a pool keeps that the YAML no longer has, while its model's other pools come up."""
        gone = self._count(old).roll
        rolls = [self._count(other).roll for other in others]
        scaling = [other for other in others if other._deployed_info.deployment_config.autoscaling_config]
        serving = sum(roll.serving + roll.old for roll in rolls)
        present = gone.serving + gone.old
        first = self._handovers.setdefault(old._id, present + serving if scaling else 0)
        wanted = sum(roll.wanted for roll in rolls)
        if not all(self._decided(other._id.app_name, other._id.name) for other in scaling):
            wanted = max(wanted, first)  # the number of a pool that is new is its least until then
        roll = Roll(
            wanted=wanted,
            old=present,
            leaving=gone.leaving,
            serving=serving,
            loading=sum(roll.loading for roll in rolls),
            waited_s=tuple(waited_s for roll in rolls for waited_s in roll.waited_s),
            failed=sum(roll.failed for roll in rolls),
        )
        return roll.old - to_stop(
            roll, _pace(old), room=any(_bundles(old) == _bundles(other) for other in others)
        )

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
                waited_s.append(max(0.0, now_s - (replica._start_time or now_s)))
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

    def _waits(self, replica: Any, now_s: float) -> bool:
        """Whether a replica that starts still lacks hardware."""
        if replica.actor_node_id is not None:
            return False
        young = now_s - (replica._start_time or now_s) < _PROCESS_S
        return young or not self._placed(replica.replica_id.to_full_id_str())

    def _quiet(self, state: Any, roll: Roll) -> Roll:
        now_s = self._clock()
        if roll.leaving:
            self._left_s[state._id] = now_s
        return replace(roll, quiet_s=now_s - self._left_s.get(state._id, -math.inf))

    def _publish(self, state: Any) -> None:
        """Keep the deployment's record of its roll while there is one, for the status document."""
        rollout = None
        if state._surge_rollout_in_progress():
            stopped = state._terminally_failed() or self._is_tried_again(state)
            rollout = _rollout(state, self._count(state).roll, stopped=stopped)
        before = self._published.get(state._id)
        if rollout == before:
            return
        try:
            if rollout is not None:
                self._store().put_rollout(rollout)
                self._published[state._id] = rollout
            elif before is not None:
                self._store().delete_rollout(before)
                del self._published[state._id]
        except Exception:
            logger.exception("the store can't be written; the next look tells how far %s is", state._id)


def install(
    state_class: Any,
    application_class: Any,
    is_slice: Callable[[Any], bool],
    store: Callable[[], RolloutStore],
    placed: Callable[[str], bool],
    clock: Callable[[], float] = time.time,
    decided: Callable[[str, str], bool] | None = None,
) -> None:
    """Replace what Serve decides for deployments whose bundles `is_slice` knows; the others are SliceDeployments'."""
    default = {name: getattr(state_class, name) for name in STATE_POINTS}
    default[DELETE_POINT] = getattr(application_class, DELETE_POINT)
    decided = decided or (lambda application, name: (application, name) in _DECIDED)
    deployments = SliceDeployments(default, is_slice, store, clock, placed, decided)
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


def _settings(state: Any) -> dict[str, Any]:
    """The deployment's user_config, as serving.app writes it."""
    settings: dict[str, Any] = state._deployed_info.deployment_config.user_config
    return settings


def _pace(state: Any) -> Pace:
    settings = _settings(state)
    return Pace.of(
        settings["rollout"]["at_once"],
        settings["rollout"]["spare"],
        settings["rollout"]["surge_s"],
        state._target_state.target_num_replicas,
    )


def _version(state: Any) -> Any:
    """What a deployment's starts are counted under: an engine deployed anew begins anew."""
    return state._id, state._target_state.version.code_version


def _forget_failures(state: Any) -> None:
    """Let Serve try again what it gave up."""
    state._replica_failure_count = 0
    state._target_state.rolling_update = state._surge_rollout_in_progress()
    state._target_state.rolling_update_failed = False
    state._target_state_changed = True  # Serve keeps it in its checkpoint


def _bundles(state: Any) -> Any:
    return state._deployed_info.replica_config.placement_group_bundles


def _rollout(state: Any, roll: Roll, *, stopped: bool) -> Rollout:
    settings = _settings(state)
    return Rollout(
        application=state._id.app_name,
        deployment=deployment(state._id.app_name, state._id.name),
        model=settings["name"],
        pool=settings["pool"],
        version=settings["version"],
        slices=roll.wanted,
        changed=roll.serving,
        failed=roll.failed,
        stopped=stopped,
        reason=(state._replica_failure_message or "")[-_ERROR_CHARACTERS:] if roll.failed else "",
    )
