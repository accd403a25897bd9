import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving import config
from serving.config import GkeSpec, ModelSpec
from serving.gke import nodepools
from serving.gke.application import Pool, application
from serving.gke.manifest import render
from serving.gke.storage import storage_of
from serving.planning import Plan, plan

pytestmark = pytest.mark.unit

GKE = GkeSpec(zone="us-east5-b", image="image")
CLAIMING = GkeSpec(zone="us-east5-b", dranet=True)


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


def pool(of: Plan, gke: GkeSpec = GKE) -> Pool:
    return Pool("pool", of, storage_of([of], gke), "app-pool")


def test_each_multi_host_slice_is_a_node_pool_of_its_own() -> None:
    lines = nodepools.gcloud_lines(pool(planned("v6e", "4x4", {"min": 1, "max": 2})), GKE)
    assert [line.split()[4] for line in lines] == ["app-pool-0", "app-pool-1"]
    assert all("--tpu-topology=4x4" in line and "--machine-type=ct6e-standard-4t" in line for line in lines)
    assert lines[0].endswith("--num-nodes=4")
    assert lines[1].endswith("--num-nodes=0 --enable-autoscaling --min-nodes=0 --max-nodes=4")


def test_slices_of_one_host_share_a_node_pool_that_names_no_topology() -> None:
    (line,) = nodepools.gcloud_lines(pool(planned("v6e", "2x2", {"min": 0, "max": 3})), GKE)
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
    assert all(flag in line for line in nodepools.gcloud_lines(pool(bought), GKE))
    assert label in nodepools.node_selector(pool(bought)).items()
    taint = f" --node-taints=tpu-serving/capacity={slice_['capacity']}:NoSchedule"
    assert all(taint in line for line in nodepools.gcloud_lines(pool(bought), GKE))
    (tolerated,) = nodepools.tolerations(pool(bought))
    assert (tolerated["key"], tolerated["value"]) == ("tpu-serving/capacity", slice_["capacity"])


def test_pods_that_are_to_run_on_demand_keep_off_nodes_that_go() -> None:
    several = planned("v6e", "4x4", capacity=["spot", "on-demand"])
    for plain in (planned("v6e", "4x4"), several):
        assert nodepools.tolerations(pool(plain)) == []
        assert not any("taints" in line for line in nodepools.gcloud_lines(pool(plain), GKE))


@pytest.mark.parametrize("topology", ["2x2", "4x4"])
def test_flex_start_nodes_come_when_they_are_asked_for(topology: str) -> None:
    (line,) = nodepools.gcloud_lines(pool(planned("v6e", topology, capacity="flex-start")), GKE)
    assert "--num-nodes=0 --enable-autoscaling --min-nodes=0 --max-nodes=" in line


def test_a_slice_goes_on_its_own_machines_where_a_topology_is_sold_on_two() -> None:
    machines = [
        nodepools.node_selector(pool(planned("v6e", "2x4", hosts=hosts)))["node.kubernetes.io/instance-type"]
        for hosts in (1, 2)
    ]
    assert machines == ["ct6e-standard-8t", "ct6e-standard-4t"]


def test_a_reservation_of_another_project_is_found_by_two_labels() -> None:
    """A path is no value of a label."""
    path = "projects/owner-1/reservations/ours"
    bought = planned("v6e", "4x4", capacity="reserved", reservation=path)
    (line,) = nodepools.gcloud_lines(pool(bought), GKE)
    assert f"--reservation={path}" in line
    selector = nodepools.node_selector(pool(bought))
    assert selector["cloud.google.com/reservation-name"] == "ours"
    assert selector["cloud.google.com/reservation-project"] == "owner-1"
    several = planned("v6e", "4x4", capacity=["reserved", "spot"], reservation=path)
    (made, _) = nodepools.compute_class(pool(several), GKE)["spec"]["priorities"]
    assert made["reservations"]["specific"] == [{"name": "ours", "project": "owner-1"}]


@pytest.mark.parametrize("name", ["ours/reservationBlocks/b", "Ours", "projects/owner/ours"])
def test_a_reservation_that_no_label_holds_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="the name of a reservation is needed"):
        planned("v6e", "4x4", capacity="reserved", reservation=name)


def test_a_fallback_keeps_the_topology_and_the_order() -> None:
    ways = ["reserved", "flex-start", "spot", "on-demand"]
    several = planned("v6e", "4x4", capacity=ways, reservation="ours")
    priorities = nodepools.compute_class(pool(several), GKE)["spec"]["priorities"]
    assert [way["tpu"] for way in priorities] == [
        {"type": "tpu-v6e-slice", "count": 4, "topology": "4x4"}
    ] * 4
    assert priorities[0]["reservations"] == {"specific": [{"name": "ours"}], "affinity": "Specific"}
    assert [way.get("spot") for way in priorities] == [None, None, True, False]
    assert priorities[1]["flexStart"] == {"enabled": True}
    assert nodepools.gcloud_lines(pool(several), GKE) == []
    assert nodepools.node_selector(pool(several))["cloud.google.com/compute-class"] == "app-pool"


def test_a_fallback_stays_in_the_zone_of_the_yaml() -> None:
    """GKE makes its node pools, and takes any zone of a regional cluster otherwise."""
    several = pool(planned("v6e", "4x4", capacity=["spot", "on-demand"]))
    spec = nodepools.compute_class(several, GKE)["spec"]
    assert spec["priorityDefaults"] == {"location": {"zones": ["us-east5-b"]}}
    assert "priorityDefaults" not in nodepools.compute_class(several, GkeSpec())["spec"]


def test_the_head_s_node_is_made_first() -> None:
    lines = render(application("app", GKE, [planned("v6e", "4x4")]), {}).splitlines()
    assert lines[1] == "# Nodes first:"
    assert (
        "node-pools create app-head --cluster=$CLUSTER --location=us-east5-b --machine-type=n2-standard-8"
        in lines[2]
    )


def test_nodes_of_a_regional_cluster_are_in_one_zone() -> None:
    regional = GkeSpec(region="us-east5", zone="us-east5-b", image="image", cluster="c")
    text = render(application("app", regional, [planned("v7x", "2x2x2")]), {})
    lines = [line for line in text.splitlines() if "node-pools create" in line]
    assert len(lines) == 2
    assert all("--cluster=c --location=us-east5 --node-locations=us-east5-b " in line for line in lines)
    assert "--region=us-east5" in text
    with pytest.raises(ValueError, match="zone us-west1-c is not in region us-east5"):
        GkeSpec(region="us-east5", zone="us-west1-c")


def test_pools_of_one_shape_have_names_of_their_own() -> None:
    text = render(application("app", GKE, [planned("v6e", "4x4")] * 3), {})
    names = [line.split()[-1] for line in text.splitlines() if "groupName: " in line]
    first = "meta-llama-llama-3-1-8b-in-v6e-4x4"
    assert names == [first, f"{first}-p2", f"{first}-p3"]


def test_no_two_node_pools_have_one_name() -> None:
    """Slices of two hosts have a node pool each, numbered; a slice of one host of the same shape is not one of these numbers."""
    twice = [planned("v6e", "2x4", {"min": 1, "max": 3}, hosts=hosts) for hosts in (2, 1)]
    text = render(application("app", GKE, twice), {})
    names = [line.split()[5] for line in text.splitlines() if "node-pools create" in line]
    assert len(names) == 5
    assert len(set(names)) == len(names)


def names_in_the_cluster(name: str, **gke: Any) -> set[str]:
    """What applications of one GKE cluster share, or one namespace of it, by name."""
    ways = planned("v6e", "2x4", {"min": 1, "max": 3}, hosts=2, capacity=["spot", "on-demand"])
    app = application(
        name,
        GKE.model_copy(update=gke | {"dranet": True}),
        [ways, planned("v6e", "4x4"), planned("v6e", "1x1")],
    )
    text = render(app, {})
    made = {f"{entry['kind']} {entry['metadata']['name']}" for entry in yaml.safe_load_all(text)}
    pools = {line.split()[5] for line in text.splitlines() if "node-pools create" in line}
    assert all(re.fullmatch(r"[a-z][a-z0-9-]{,39}", pool) for pool in pools)
    assert len(made) == text.count("\nkind: ")
    return made | pools


def test_two_applications_of_one_model_share_no_name() -> None:
    """Nor does one in two namespaces, in what has none."""
    names = ["app", "app-2", f"{'a' * 32}-1", f"{'a' * 32}-2"]
    found = [names_in_the_cluster(name) for name in names]
    whole = ("ComputeClass", "PriorityClass")
    for namespace in ("7th", "2", "2--1", "2-1"):
        elsewhere = names_in_the_cluster("app", namespace=namespace)
        found.append({kept for kept in elsewhere if " " not in kept or kept.startswith(whole)})
    elsewhere = names_in_the_cluster("app-2", namespace="1")
    found.append({kept for kept in elsewhere if " " not in kept or kept.startswith(whole)})
    assert sum(map(len, found)) == len(set().union(*found))


@pytest.mark.parametrize(
    "names", [("app", "app-redis", "app-ray", "app-head", "app-slice"), (f"{'a' * 45}bb", f"{'a' * 45}cc")]
)
def test_no_name_of_an_application_is_that_of_another_one_s_object(names: tuple[str, ...]) -> None:
    """Services, pods and scrapes by the name of the application itself, and by it with a suffix or cut at a limit."""
    one_host = planned("v6e", "2x2")
    found: list[set[str]] = []
    for name in names:
        made = list(yaml.safe_load_all(render(application(name, GKE, [one_host]), {})))
        pods = [
            entry["spec"]["template"]["metadata"]["labels"]["app"]
            for entry in made
            if "template" in entry.get("spec", {})
        ]
        found.append({*(f"{entry['kind']} {entry['metadata']['name']}" for entry in made), *pods, name})
    assert sum(map(len, found)) == len(set().union(*found))


def test_a_hyphen_in_a_name_makes_no_pool_another_application_s() -> None:
    def made(name: str, model: str) -> set[str]:
        plan_ = planned("v6e", "2x4", {"min": 1, "max": 1}, hosts=2)
        app = application(name, GKE, [replace(plan_, model=plan_.model.model_copy(update={"name": model}))])
        text = render(app, {})
        budgets = {
            entry["metadata"]["name"]
            for entry in yaml.safe_load_all(text)
            if entry["kind"] == "PodDisruptionBudget"
        }
        return budgets | {line.split()[5] for line in text.splitlines() if "node-pools create" in line}

    assert made("a", "b-c").isdisjoint(made("a-b", "c"))


def test_a_short_name_is_whole_and_a_long_one_ends_in_its_shape() -> None:
    assert "app-head" in names_in_the_cluster("app")
    assert "app--7th-head" in names_in_the_cluster("app", namespace="7th")
    marked = {name for name in names_in_the_cluster("a" * 35) if re.match(r"a+-[0-9a-f]{6}-", name)}
    ends = {re.sub(r"a+-[0-9a-f]{6}", "", name) for name in marked}
    assert ends == {"-v6e-4x4-0", "-v6e-1x1"}


def test_v7x_over_hosts_takes_a_workload_policy_instead_of_a_topology() -> None:
    one_way = planned("v7x", "2x2x2")
    policy, made = nodepools.gcloud_lines(pool(one_way), GKE)
    assert (
        "workload-policy pool --type=HIGH_THROUGHPUT --accelerator-topology=2x2x2 --region=us-east5" in policy
    )
    assert "--placement-policy=pool" in made
    several = planned("v7x", "2x2x2", capacity=["spot", "on-demand"])
    assert len(nodepools.gcloud_lines(pool(several), GKE)) == 1
    priorities = nodepools.compute_class(pool(several), GKE)["spec"]["priorities"]
    assert all(way["placement"] == {"policyName": "pool"} for way in priorities)


@pytest.mark.parametrize(
    ("generation", "topology", "claims"),
    [("v6e", "4x4", True), ("v5e", "4x4", False), ("v7x", "2x2x1", True)],
)
def test_extra_network_cards_are_claimed_where_it_is_asked_for_and_there_are_any(
    generation: str, topology: str, claims: bool
) -> None:
    found = planned(generation, topology)
    assert not nodepools.needs_network_claims(found, GKE)
    assert nodepools.needs_network_claims(found, CLAIMING) == claims
    lines = nodepools.gcloud_lines(pool(found), CLAIMING)
    for flag in (
        "--accelerator-network-profile=auto",
        "--node-labels=cloud.google.com/gke-networking-dra-driver=true",
    ):
        assert all((flag in line) == claims for line in lines)
    made = nodepools.compute_class(pool(found), CLAIMING)["spec"]
    assert ("nodePoolConfig" in made) == ("acceleratorNetworkProfile" in made["priorities"][0]) == claims


def test_the_boot_disk_leaves_the_pod_the_weights_that_it_downloads() -> None:
    (line,) = nodepools.gcloud_lines(pool(planned("v6e", "4x4")), GKE)
    assert " --disk-size=110 " in line
    several = planned("v6e", "4x4", capacity=["spot", "on-demand"])
    priorities = nodepools.compute_class(pool(several), GKE)["spec"]["priorities"]
    disk = {"bootDiskType": "hyperdisk-balanced", "bootDiskSize": 110}
    assert [way["storage"] for way in priorities] == [disk] * 2


@pytest.mark.parametrize(
    ("generation", "topology", "disk"),
    [
        ("v4", "2x2x2", "pd-balanced"),
        ("v5e", "2x4", "pd-balanced"),
        ("v5p", "2x2x1", "pd-balanced"),
        ("v6e", "2x2", "hyperdisk-balanced"),
        ("v7x", "2x2x1", "hyperdisk-balanced"),
    ],
)
def test_machines_get_the_one_kind_of_disk_that_they_take(generation: str, topology: str, disk: str) -> None:
    hosts = {"hosts": 2} if topology == "2x4" else {}
    (line,) = nodepools.gcloud_lines(pool(planned(generation, topology, **hosts)), GKE)
    assert f" --disk-type={disk} --disk-size=" in line


def test_experts_that_get_smaller_while_they_load_are_downloaded_at_full_size() -> None:
    """DeepSeek R1: 689 GB of FP8, whatever format MOE_REQUANTIZE_WEIGHT_DTYPE gives its experts."""
    path = Path(__file__).parents[2] / "deployments" / "deepseek-r1-v7x-8.yaml"
    (service,) = config.load(path).services.values()
    found = plan(service.models[0])
    assert found.sizes.expert_format
    assert storage_of([found], GKE).download_bytes > 689e9
