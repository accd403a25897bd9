"""What a simulation refuses, and what of it stays, before any process is started."""

from pathlib import Path

import pytest

from serving.errors import SimulationError
from serving.simulation.cluster import SimulatedCluster
from serving.simulation.network import Loopback, free_subnet
from serving.tpu import resolve

pytestmark = pytest.mark.unit
TWO_HOSTS = resolve("v6e", "2x4", 2)


@pytest.fixture
def cluster(tmp_path: Path) -> SimulatedCluster:
    return SimulatedCluster(tmp_path, "0123456789ab", cluster_secret="secret")


def test_a_host_that_a_slice_does_not_have_is_refused(cluster: SimulatedCluster) -> None:
    cluster._added(TWO_HOSTS)
    for act in (cluster.restart_host, cluster.kill_host, cluster.cut_cable, cluster.corrupt):
        with pytest.raises(SimulationError, match="slice-0 has hosts 0 to 1, not 7"):
            act("slice-0", 7)


def test_hosts_can_lack_only_a_variable_that_they_would_have(cluster: SimulatedCluster) -> None:
    with pytest.raises(
        SimulationError, match=r"no variable 'TPUNAME' to lack; they have TPU_NAME, TPU_WORKER"
    ):
        cluster.add_slice(TWO_HOSTS, without=["TPUNAME"])
    assert cluster.status() == []


def test_of_a_slice_whose_start_fails_nothing_stays(cluster: SimulatedCluster) -> None:
    (cluster.directory / "chips").touch()  # a file in the place of the folder: no host can have chips
    with pytest.raises(OSError, match="chips"):
        cluster.add_slice(TWO_HOSTS)
    assert SimulatedCluster.attach(cluster.directory).status() == []


@pytest.mark.parametrize("kept", ["", "[]", "{}", '{"id": "0123456789ab", "engine": "vllm"}'])
def test_a_state_that_this_version_does_not_know_is_told_with_the_way_out(tmp_path: Path, kept: str) -> None:
    (tmp_path / "cluster.json").write_text(kept)
    with pytest.raises(SimulationError, match=f"RAY_TMPDIR={tmp_path} in their environment, and delete"):
        SimulatedCluster.attach(tmp_path)


def test_a_slice_of_more_hosts_than_a_subnet_has_shares_no_address_with_the_next() -> None:
    assert free_subnet([], 256) == 1
    assert free_subnet([(1, 256)], 2) == 3
    assert free_subnet([(1, 2), (3, 2)], 256) == 4
    addresses = [
        Loopback().ip(subnet, host) for subnet, hosts in ((1, 256), (3, 250)) for host in range(hosts)
    ]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize(("slices", "hosts"), [(254, 1), (253, 251)])
def test_more_slices_than_there_are_subnets_are_refused(slices: int, hosts: int) -> None:
    with pytest.raises(SimulationError, match="room for 254 slices, of 250 hosts each"):
        free_subnet([(number, 1) for number in range(1, slices + 1)], hosts)
