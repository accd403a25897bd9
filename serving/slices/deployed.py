"""What Serve's own state of a deployment of slices says of it. By private names, as `serving.slices.controller`."""

# ruff: noqa: SLF001  Serve has no public names for what is asked here

from typing import Any

from serving.slices.rollout import Pace, Roll
from serving.state.records import Rollout, deployment

_ERROR_CHARACTERS = 500  # of Serve's message, whose end names the error


def settings(state: Any) -> dict[str, Any]:
    """The deployment's user_config, as serving.app writes it."""
    settings: dict[str, Any] = state._deployed_info.deployment_config.user_config
    return settings


def pace(state: Any) -> Pace:
    arguments = settings(state)
    return Pace.of(
        arguments["rollout"]["at_once"],
        arguments["rollout"]["spare"],
        arguments["rollout"]["surge_s"],
        state._target_state.target_num_replicas,
    )


def held(state: Any) -> tuple[int, float]:
    """Slices of a deployment that are there, leave or are on order, and their dollars an hour."""
    slices = state._replicas.count()
    return slices, slices * price(state)


def recovering(state: Any) -> int:
    """Slices that a controller which came back has found, and has no answer from yet."""
    from ray.serve._private.common import ReplicaState  # noqa: PLC0415  only the controller needs it, and has it loaded

    return int(state._replicas.count(states=[ReplicaState.RECOVERING]))


def price(state: Any) -> float:
    """Dollars an hour of one slice."""
    return float(settings(state).get("dollars_per_hour") or 0.0)


def version(state: Any) -> Any:
    """The version of the engine that Serve is to run; None where it is to run none."""
    return state._target_state.version and state._target_state.version.code_version


def forget_failures(state: Any) -> None:
    """Let Serve try again what it gave up."""
    state._replica_failure_count = 0
    state._target_state.rolling_update = state._surge_rollout_in_progress()
    state._target_state.rolling_update_failed = False
    state._target_state_changed = True  # Serve keeps it in its checkpoint


def bundles(state: Any) -> Any:
    return state._deployed_info.replica_config.placement_group_bundles


def rollout(state: Any, roll: Roll, *, stopped: bool) -> Rollout:
    arguments = settings(state)
    return Rollout(
        application=state._id.app_name,
        deployment=deployment(state._id.app_name, state._id.name),
        model=arguments["name"],
        pool=arguments["pool"],
        version=arguments["version"],
        slices=roll.wanted,
        changed=roll.serving,
        failed=roll.failed,
        stopped=stopped,
        reason=(state._replica_failure_message or "")[-_ERROR_CHARACTERS:] if roll.failed else "",
    )
