"""What `serving sim run` says where its `serve run` ends and nobody pressed Ctrl-C there."""

import os
import subprocess
import uuid
from pathlib import Path

import pytest

from serving import environment
from serving.cli.simulated_service import why_ended
from serving.simulation.cluster import SimulatedCluster

pytestmark = pytest.mark.http
LOG = "the last words of `serve run`\n"


@pytest.fixture
def cluster(tmp_path: Path) -> SimulatedCluster:
    (tmp_path / "serve.log").write_text(LOG)
    return SimulatedCluster(tmp_path, uuid.uuid4().hex[:12], cluster_secret="secret")


def test_a_simulation_that_was_ended_elsewhere_is_told_without_the_log(cluster: SimulatedCluster) -> None:
    why = why_ended(cluster, cluster.directory / "serve.log")
    assert why == "the simulation was ended from elsewhere, as `serving sim down` does"


def test_a_service_that_ends_while_hosts_run_on_is_told_with_its_log(cluster: SimulatedCluster) -> None:
    with subprocess.Popen(["sleep", "600"], env=os.environ | {environment.SIMULATION: cluster.id}) as host:
        try:
            why = why_ended(cluster, cluster.directory / "serve.log", patience_s=0)
        finally:
            host.kill()
    assert why == f"`serve run` ended by itself\n{LOG.rstrip()}"
