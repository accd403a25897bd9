"""Simulated hosts as Ray sees them, and Serve on them where it should refuse; no engine is started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import recorded_demand
from support.leases import Leases
from support.service import LLAMA, Service, leftovers, service

from serving.errors import SimulationError
from serving.simulation.cluster import SimulatedCluster
from serving.tpu import resolve

pytestmark = pytest.mark.cluster
SHAPE = resolve("v6e", "2x4", hosts=2)


@pytest.mark.slow
def test_hosts_are_killed_restarted_and_added_one_by_one(short_directory: Path) -> None:
    cluster = SimulatedCluster.up(
        [SHAPE], directory=short_directory, engine="simulated", network_kind="loopback"
    )
    try:
        with pytest.raises(SimulationError, match="already runs"):
            SimulatedCluster.up([SHAPE], directory=short_directory)
        assert cluster.kill_host("slice-0", 1) > 0
        assert cluster.status()[0].alive == (True, False)
        assert cluster.processes("slice-0", 1) == []
        cluster.restart_host("slice-0", 1)
        assert cluster.status()[0].alive == (True, True)
        with pytest.raises(SimulationError, match="is alive; kill it first"):
            cluster.restart_host("slice-0", 1)
        with pytest.raises(SimulationError, match="hosts 0 to 1, not 2"):
            cluster.kill_host("slice-0", 2)
        with pytest.raises(SimulationError, match="have no cable to cut"):
            cluster.cut_cable("slice-0", 1)
        single = cluster.add_slice(resolve("v6e", "1x1"))
        again = SimulatedCluster.attach(short_directory)
        assert again.engine == "simulated"
        assert [one.name for one in again.status()] == ["slice-0", single]
        again.kill_slice(single)
        assert [one.name for one in again.status()] == ["slice-0"]
    finally:
        cluster.down()
    assert leftovers(cluster.id) == []
    assert not short_directory.exists()


@pytest.mark.slow
def test_rays_control_store_tells_its_autoscaler_what_was_recorded() -> None:
    """What the autoscaler's tests in the unit tier rest on."""
    command = [sys.executable, recorded_demand.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    now, then = json.loads(done.stdout), recorded_demand.recorded()
    assert recorded_demand.nameless(now["groups"]) == recorded_demand.nameless(then["groups"])
    assert [now["host"][key]["status"] for key in ("free", "held")] == ["IDLE", "RUNNING"]


@pytest.mark.slow
def test_a_controller_without_the_hook_is_noticed_and_the_remedy_named(
    leases: Leases, tmp_path: Path
) -> None:
    """Half of each of two slices is left, so that a group that may straddle them has to."""
    raw = yaml.safe_load(LLAMA.read_text())
    del raw["controller_options"]["runtime_env"]["env_vars"]["RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"]
    unhooked = tmp_path / "unhooked.yaml"
    unhooked.write_text(yaml.safe_dump(raw))

    def halve(cluster: SimulatedCluster) -> None:
        cluster.kill_host("slice-0", 1)
        cluster.kill_host("slice-1", 0)

    leases.down()  # its Serve controller, if there is one, has the hook
    with service(leases, slices=2, source=unhooked, wait=False, before=halve) as running:
        reason = running.until(lambda: reasons(running), "the replica's refusal")[0]
    leases.down()
    assert "straddle 2 slices (slice-0, slice-1)" in reason
    assert "serve shutdown -y" in reason


def reasons(running: Service) -> list[str]:
    return [entry.reason for entry in running.entries() if entry.reason]
