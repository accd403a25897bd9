from typing import Any

import pytest

from serving.config import GkeSpec, ModelSpec
from serving.gke import nodepools
from serving.gke.manifest import render
from serving.planning import Plan, plan

pytestmark = pytest.mark.unit

GKE = GkeSpec(zone="us-east5-b")


def planned(generation: str, topology: str, replicas: Any = 1, **slice_: Any) -> Plan:
    return plan(
        ModelSpec.model_validate(
            {
                "model": "meta-llama/Llama-3.1-8B-Instruct",
                "slice": {"generation": generation, "topology": topology, **slice_},
                "replicas": replicas,
                "engine": {"max_model_len": 4096},
            }
        )
    )


def test_each_multi_host_slice_is_a_node_pool_of_its_own() -> None:
    lines = nodepools.gcloud_lines(planned("v6e", "4x4", {"min": 1, "max": 2}), "pool", GKE)
    assert [line.split()[4] for line in lines] == ["pool-0", "pool-1"]
    assert all("--tpu-topology=4x4" in line and "--machine-type=ct6e-standard-4t" in line for line in lines)
    assert lines[0].endswith("--num-nodes=4")
    assert lines[1].endswith("--num-nodes=0 --enable-autoscaling --min-nodes=0 --max-nodes=4")


def test_slices_of_one_host_share_a_node_pool_that_names_no_topology() -> None:
    (line,) = nodepools.gcloud_lines(planned("v6e", "2x2", {"min": 0, "max": 3}), "pool", GKE)
    assert "--tpu-topology" not in line
    assert line.endswith("--num-nodes=0 --enable-autoscaling --min-nodes=0 --max-nodes=3")


@pytest.mark.parametrize(
    ("slice_", "flag", "label"),
    [
        ({"capacity": "spot"}, "--spot", ("cloud.google.com/gke-spot", "true")),
        ({"capacity": "flex-start"}, "--flex-start", ("cloud.google.com/gke-flex-start", "true")),
        (
            {"capacity": "reserved", "reservation": "ours"},
            "--reservation-affinity=specific --reservation=ours",
            ("cloud.google.com/reservation-name", "ours"),
        ),
    ],
)
def test_nodes_are_bought_and_found_in_one_way(
    slice_: dict[str, str], flag: str, label: tuple[str, str]
) -> None:
    bought = planned("v6e", "4x4", **slice_)
    assert all(flag in line for line in nodepools.gcloud_lines(bought, "pool", GKE))
    assert label in nodepools.node_selector(bought, "pool").items()


def test_flex_start_nodes_come_when_they_are_asked_for() -> None:
    (line,) = nodepools.gcloud_lines(planned("v6e", "4x4", capacity="flex-start"), "pool", GKE)
    assert "--num-nodes=0 --enable-autoscaling" in line


def test_a_fallback_keeps_the_topology_and_the_order() -> None:
    ways = ["reserved", "flex-start", "spot", "on-demand"]
    several = planned("v6e", "4x4", capacity=ways, reservation="ours")
    priorities = nodepools.compute_class(several, "pool")["spec"]["priorities"]
    assert [way["tpu"] for way in priorities] == [
        {"type": "tpu-v6e-slice", "count": 4, "topology": "4x4"}
    ] * 4
    assert priorities[0]["reservations"] == {"specific": [{"name": "ours"}], "affinity": "Specific"}
    assert [way.get("spot") for way in priorities] == [None, None, True, False]
    assert priorities[1]["flexStart"] == {"enabled": True}
    assert nodepools.gcloud_lines(several, "pool", GKE) == []
    assert nodepools.node_selector(several, "pool")["cloud.google.com/compute-class"] == "pool"


def test_a_manifest_without_nodes_to_make_says_nothing_of_them() -> None:
    several = planned("v6e", "4x4", capacity=["spot", "on-demand"])
    assert "Nodes first" not in render("app", GKE, {}, [several])


def test_pools_of_one_shape_have_names_of_their_own() -> None:
    text = render("app", GKE, {}, [planned("v6e", "4x4")] * 3)
    names = [line.split()[-1] for line in text.splitlines() if "groupName: " in line]
    first = "meta-llama-llama-3-1-8b-instru-v6e-4x4"
    assert names == [first, f"{first}-1", f"{first}-2"]


def test_v7x_over_hosts_takes_a_workload_policy_instead_of_a_topology() -> None:
    one_way = planned("v7x", "2x2x2")
    policy, pool = nodepools.gcloud_lines(one_way, "pool", GKE)
    assert (
        "workload-policy pool --type=HIGH_THROUGHPUT --accelerator-topology=2x2x2 --region=us-east5" in policy
    )
    assert "--placement-policy=pool" in pool
    several = planned("v7x", "2x2x2", capacity=["spot", "on-demand"])
    assert len(nodepools.gcloud_lines(several, "pool", GKE)) == 1
    priorities = nodepools.compute_class(several, "pool")["spec"]["priorities"]
    assert all(way["placement"] == {"policyName": "pool"} for way in priorities)


@pytest.mark.parametrize(
    ("generation", "topology", "replicas", "claims"),
    [("v6e", "4x4", 2, True), ("v6e", "4x4", 1, False), ("v5e", "4x4", 2, False), ("v7x", "2x2x1", 2, True)],
)
def test_extra_network_cards_are_claimed_where_slices_are_several(
    generation: str, topology: str, replicas: int, claims: bool
) -> None:
    found = planned(generation, topology, replicas)
    assert nodepools.needs_network_claims(found) == claims
    lines = nodepools.gcloud_lines(found, "pool", GKE)
    for flag in (
        "--accelerator-network-profile=auto",
        "--node-labels=cloud.google.com/gke-networking-dra-driver=true",
    ):
        assert all((flag in line) == claims for line in lines)
    made = nodepools.compute_class(found, "pool")["spec"]
    assert ("nodePoolConfig" in made) == ("acceleratorNetworkProfile" in made["priorities"][0]) == claims
