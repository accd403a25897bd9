from typing import Any

import pytest

from serving.errors import PlacementError
from serving.slices.held_slice import HeldSlice, SliceHost, held_slice, read_group

pytestmark = pytest.mark.unit

RESTART = "run `serve shutdown -y`, then `serve run` the YAML again with controller_options.runtime_env"


def node(name: str, worker: int) -> dict[str, Any]:
    labels = {"ray.io/tpu-slice-name": name, "ray.io/tpu-worker-id": str(worker)}
    return {"NodeManagerAddress": f"10.0.0.{worker}", "Labels": labels}


def nodes(*names: str) -> dict[str, dict[str, Any]]:
    """Slices of four hosts: node s0 is worker 0 of slice s."""
    return {f"{name}{worker}": node(name, worker) for name in names for worker in range(4)}


def refusal(bundles: dict[int, str], known: dict[str, dict[str, Any]]) -> str:
    with pytest.raises(PlacementError) as error:
        read_group(bundles, known)
    return error.value.message


def test_a_whole_slice_is_read_in_worker_order() -> None:
    """Ray puts bundle 0 on worker 0, where its head resource is, and the others where it likes."""
    held = read_group({0: "s0", 1: "s3", 2: "s1", 3: "s2"}, nodes("s"))
    assert held == HeldSlice(
        "s",
        (
            SliceHost(0, 0, "s0", "10.0.0.0"),
            SliceHost(1, 2, "s1", "10.0.0.1"),
            SliceHost(2, 3, "s2", "10.0.0.2"),
            SliceHost(3, 1, "s3", "10.0.0.3"),
        ),
    )
    assert held.bundle_order == "0,2,3,1"


def test_workers_are_ordered_as_numbers() -> None:
    known = {f"n{worker}": node("s", worker) for worker in range(16)}
    held = read_group({bundle: f"n{bundle}" for bundle in range(16)}, known)
    assert [host.worker_id for host in held.hosts] == list(range(16))


def test_two_slices_under_one_replica_are_refused() -> None:
    said = refusal({0: "s0", 1: "t1"}, nodes("s", "t"))
    assert "the replica's 2 bundles straddle 2 slices (s, t); it needs one whole slice" in said
    assert "the Serve controller runs without the placement hook" in said
    assert RESTART in said


@pytest.mark.parametrize(
    ("bundles", "workers"), [({0: "s0", 1: "s2"}, "[0, 2]"), ({0: "s0", 1: "s0"}, "[0, 0]")]
)
def test_a_worker_left_out_or_used_twice_is_refused(bundles: dict[int, str], workers: str) -> None:
    said = refusal(bundles, nodes("s"))
    assert f"bundles are on workers {workers} of slice s, not on each of its 2 hosts once" in said
    assert RESTART in said


def test_a_replica_away_from_worker_0_is_refused() -> None:
    said = refusal({0: "s1", 1: "s0"}, nodes("s"))
    assert said.startswith("bundle 0 is not on worker 0 of slice s. ")
    assert RESTART in said


def test_a_host_that_has_left_is_named() -> None:
    assert refusal({0: "s0", 1: "gone"}, nodes("s")) == (
        "bundle 1 is on node gone, which has left the cluster"
    )


@pytest.mark.parametrize("label", ["ray.io/tpu-slice-name", "ray.io/tpu-worker-id"])
def test_a_host_without_tpu_labels_is_told_what_its_environment_lacks(label: str) -> None:
    known = nodes("s")
    del known["s1"]["Labels"][label]
    said = refusal({0: "s0", 1: "s1"}, known)
    assert said.startswith("host 10.0.0.1 carries no ray.io/tpu-slice-name label")
    assert "TPU_NAME, TPU_WORKER_ID, TPU_ACCELERATOR_TYPE and TPU_TOPOLOGY" in said


def test_a_replica_without_a_group_holds_no_slice() -> None:
    with pytest.raises(PlacementError, match="no placement group, so it holds no TPU slice"):
        held_slice(None)
