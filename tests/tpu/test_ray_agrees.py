"""Our table against the one in Ray, which places the slices. The differences are these and no others."""

import pytest
from ray._private.accelerators import tpu as ray_tpu
from ray._private.label_utils import validate_label_selector, validate_node_label_syntax
from ray.autoscaler._private.kuberay.utils import gke_tpu_accelerator_to_generation
from ray.util.accelerators import accelerators as ray_names
from ray.util.tpu import get_tpu_version_from_type, get_tpu_worker_resources

from serving.tpu import GENERATIONS, POOL_LABEL, pool_label, resolve, serves_pool

pytestmark = pytest.mark.unit

NOT_IN_RAY = {"v7x": {"1x1x1"}}
ONLY_IN_RAY = {"v5e": {"2x8"}, "v6e": {"2x8"}}
# Google's shapes have their axes in ascending order; Ray takes any order.
ANY_ORDER_IN_RAY = {"v4", "v5p"}
# Ray stops below the largest slice sold, and lists only the doublings of v7x.
RAY_STOPS_AT_CHIPS = {"v4": 2304, "v5p": 6144, "v7x": 2048}
RAY_GUESSES_ONE_HOST = {("v5e", "2x4", 2), ("v6e", "2x4", 2)}


def ray_topologies(generation: str) -> set[str]:
    return set(ray_tpu.VALID_TPU_TOPOLOGY[GENERATIONS[generation].pod_prefix])


@pytest.mark.parametrize("generation", ["v5e", "v6e"])
def test_flat_topologies_are_rays_but_for_the_one_nobody_sells(generation: str) -> None:
    assert ray_topologies(generation) - set(GENERATIONS[generation].topologies) == ONLY_IN_RAY[generation]
    assert set(GENERATIONS[generation].topologies) <= ray_topologies(generation)


@pytest.mark.parametrize("generation", ["v4", "v5p", "v7x"])
def test_rays_boxes_are_sold_but_for_the_order_of_the_axes(generation: str) -> None:
    def out_of_order(topology: str) -> bool:
        axes = [int(axis) for axis in topology.split("x")]
        return axes != sorted(axes) and topology != "2x2x1"

    refused = ray_topologies(generation) - set(GENERATIONS[generation].topologies)
    assert refused == {
        topology
        for topology in ray_topologies(generation)
        if generation in ANY_ORDER_IN_RAY and out_of_order(topology)
    }
    largest = max(map(ray_tpu.get_num_chips_from_topology, ray_topologies(generation)))
    assert largest == RAY_STOPS_AT_CHIPS[generation]


def test_the_single_v7x_chip_is_missing_from_ray() -> None:
    for generation, topologies in NOT_IN_RAY.items():
        assert not topologies & ray_topologies(generation)
        assert topologies <= set(GENERATIONS[generation].topologies)


@pytest.mark.parametrize(
    ("generation", "topology", "hosts"),
    [
        (row.name, topology, hosts)
        for row in GENERATIONS.values()
        for topology in row.topologies[:14]
        for hosts in ([1, 2] if topology == "2x4" else [None])
    ],
)
def test_names_and_hosts_are_rays(generation: str, topology: str, hosts: int | None) -> None:
    found = resolve(generation, topology, hosts)
    version = get_tpu_version_from_type(found.ray_accelerator_type)
    assert found.pod_type == ray_tpu.infer_tpu_pod_type_from_topology(topology, found.ray_accelerator_type)
    assert ray_tpu.get_total_chips_from_accelerator_type(found.pod_type) == found.chips
    assert found.chips_per_host in ray_tpu.TPU_VALID_CHIP_OPTIONS
    hosts_in_ray, resources = get_tpu_worker_resources(
        topology, found.ray_accelerator_type, chips_per_vm=found.chips_per_host
    )
    assert (hosts_in_ray, resources["TPU"]) == (found.hosts, found.chips_per_host)
    guessed = ray_tpu.get_chips_per_host(topology, version)
    differs = (generation, topology, hosts) in RAY_GUESSES_ONE_HOST or topology in NOT_IN_RAY.get(
        generation, ()
    )
    assert (guessed != found.chips_per_host) == differs


def test_accelerator_names_are_rays() -> None:
    of_ray = {value for name, value in vars(ray_names).items() if name.startswith("GOOGLE_TPU_")}
    for row in GENERATIONS.values():
        assert row.ray_accelerator_type in of_ray
        assert gke_tpu_accelerator_to_generation[row.gke_accelerator] == row.pod_prefix
        assert ray_tpu.get_tpu_cores_per_chip(row.pod_prefix) == row.cores_per_chip


POOLS = [
    "v6e-4x4-4h-on-demand",
    "v6e-2x4-2h-flex-start-spot",
    "v5e-4x4-4h-reserved-projects/other/reservations/mine",
    "v5e-4x4-4h-reserved-projects/other/reservations-mine",
    f"v5e-4x4-4h-reserved-{'a' * 63}",
    f"v5e-4x4-4h-reserved-{'a' * 62}",
    "v5e-4x4-4h-reserved-mine-",
]


def test_the_label_of_a_pool_is_one_that_ray_takes_and_no_other_pool_s() -> None:
    labels = [pool_label(pool) for pool in POOLS]
    assert labels[:2] == POOLS[:2]
    assert len(set(labels)) == len(POOLS)
    for label in labels:
        validate_node_label_syntax({POOL_LABEL: label})
    assert validate_label_selector({POOL_LABEL: f"!in({','.join(labels)})"}) is None


def test_hosts_without_a_label_serve_every_pool() -> None:
    spot, on_demand = "v6e-4x4-4h-spot", "v6e-4x4-4h-on-demand"
    assert serves_pool("", spot)
    assert serves_pool(pool_label(spot), spot)
    assert not serves_pool(pool_label(on_demand), spot)
