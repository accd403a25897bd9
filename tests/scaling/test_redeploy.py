"""What Serve makes of a changed YAML: Ray's own autoscaling state, given the deployments that `build` makes."""

from typing import Any

import pytest
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID
from ray.serve._private.config import ReplicaConfig
from ray.serve._private.deployment_info import DeploymentInfo

from serving.app import build

pytestmark = pytest.mark.unit


def deployed(least: int, **changes: Any) -> DeploymentInfo:
    slice_ = {"generation": "v6e", "topology": "2x4", "hosts": 1}
    model = {
        "name": "llama",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "slice": slice_,
        "replicas": {"min": least, "max": 100},
        **changes,
    }
    (bound,) = build({"models": [model]})._bound_deployment.init_args[1:]
    deployment = bound._bound_deployment
    return DeploymentInfo(
        deployment_config=deployment._deployment_config,
        replica_config=ReplicaConfig.create(lambda: None),
        start_time_ms=0,
        deployer_job_id="",
    )


@pytest.mark.parametrize("least", [0, 1, 3])
def test_a_fleet_of_fifty_keeps_its_slices_when_a_setting_changes(least: int) -> None:
    state = DeploymentAutoscalingState(DeploymentID("llama", "app"))
    assert state.register(deployed(least), least) == least
    assert state.register(deployed(least), 50) == 50
    assert state.register(deployed(least, drain_s=10), 50) == 50
    assert state.register(deployed(least, slo={"ttft_s": 5}), 50) == 50


def test_bounds_that_change_are_kept() -> None:
    state = DeploymentAutoscalingState(DeploymentID("llama", "app"))
    state.register(deployed(1), 1)
    assert state.register(deployed(60), 50) == 60


@pytest.mark.parametrize("least", [0, 1, 3])
def test_the_first_deployment_starts_with_the_least(least: int) -> None:
    state = DeploymentAutoscalingState(DeploymentID("llama", "app"))
    nothing_yet = -1  # ray.serve._private.deployment_state.DeploymentTargetState.default
    assert state.register(deployed(least), nothing_yet) == least
