"""Nodes for a pool: `gcloud` lines where it is bought in one way, a ComputeClass where it falls back to others.

GKE makes a multi-host slice of one node pool, so each takes a node pool of its own; one-host slices share a node pool.
"""

from typing import Any

from serving.config import CapacityType, GkeSpec
from serving.gke.application import Pool
from serving.planning.plan import Plan

_HEAD_MACHINE = "n2-standard-8"  # 8 vCPUs, 32 GB
_HEAD_DISK_GB = 100
# What `gcloud container node-pools create` adds for each way to buy.
_PURCHASE_FLAGS = {
    CapacityType.ON_DEMAND: "",
    CapacityType.SPOT: " --spot",
    CapacityType.FLEX_START: " --flex-start --reservation-affinity=none",
    CapacityType.RESERVED: " --reservation-affinity=specific --reservation={reservation}",
}
# The label that starts GKE's network driver for claims (DRANET) on a node.
_DRANET = "cloud.google.com/gke-networking-dra-driver"
# Keeps pods that are to run on demand, as other applications', off nodes that are cheaper and go, or that are reserved.
_TAINT = "tpu-serving/capacity"
_CAPACITY_LABELS = {
    CapacityType.SPOT: ("cloud.google.com/gke-spot", "true"),
    CapacityType.FLEX_START: ("cloud.google.com/gke-flex-start", "true"),
}


def falls_back(plan: Plan) -> bool:
    """Whether GKE picks among several ways to buy the slice, which takes a ComputeClass."""
    return len(plan.model.slice.capacity) > 1


def needs_policy(plan: Plan) -> bool:
    """Whether a workload policy shapes the slice, in place of --tpu-topology: it does for multi-host v7x."""
    return plan.slice.generation == "v7x" and plan.slice.hosts > 1


def needs_network_claims(plan: Plan, gke: GkeSpec) -> bool:
    """Whether pods claim the machine's extra network cards, which the YAML asks for and not every machine has."""
    machine = plan.slice.hardware.machine(plan.slice.machine_type)
    return gke.dranet and machine is not None and machine.extra_nics


def head_line(name: str, gke: GkeSpec) -> str:
    """The command that makes the head's node, which has to be there before slices are."""
    return (
        f"gcloud container node-pools create {name} {_place(gke)} --machine-type={_HEAD_MACHINE} "
        f"--disk-size={_HEAD_DISK_GB} --num-nodes=1"
    )


def gcloud_lines(pool: Pool, gke: GkeSpec) -> list[str]:
    """Commands that make the nodes of slices, to run before the manifest is applied."""
    plan, lines = pool.plan, []
    if needs_policy(plan):
        region = gke.region or (gke.zone.rpartition("-")[0] if gke.zone else "$REGION")
        lines.append(
            f"gcloud compute resource-policies create workload-policy {pool.name} --type=HIGH_THROUGHPUT "
            f"--accelerator-topology={plan.slice.topology} --region={region}"
        )
    if not falls_back(plan):
        lines.extend(_node_pools(pool, gke))
    return lines


def compute_class(pool: Pool, gke: GkeSpec) -> dict[str, Any]:
    """Ways to buy one topology, tried in order; GKE makes the node pools."""
    claims = needs_network_claims(pool.plan, gke)
    networks = {"nodePoolConfig": {"dra": {"networking": {"enabled": True}}}} if claims else {}
    # On a regional cluster GKE would take any zone of the region.
    zone = {"priorityDefaults": {"location": {"zones": [gke.zone]}}} if gke.zone else {}
    return {
        "apiVersion": "cloud.google.com/v1",
        "kind": "ComputeClass",
        "metadata": {"name": pool.compute_class},
        "spec": {
            "nodePoolAutoCreation": {"enabled": True},
            **networks,
            **zone,
            "priorities": [_priority(pool, capacity, gke) for capacity in pool.plan.model.slice.capacity],
        },
    }


def network_claims(name: str, namespace: str) -> dict[str, Any]:
    """All network devices of a node, claimed by each pod through DRANET."""
    request = {"name": "nics", "exactly": {"deviceClassName": "netdev.google.com", "allocationMode": "All"}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def node_selector(pool: Pool) -> dict[str, str]:
    """Labels of the nodes a pool's pods go on."""
    plan = pool.plan
    spec = plan.model.slice
    selector = {
        "cloud.google.com/gke-tpu-accelerator": plan.slice.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": plan.slice.topology,
    }
    if falls_back(plan):
        return selector | {"cloud.google.com/compute-class": pool.compute_class}
    # A v6e 2x4 is one host of eight chips or two of four. Half of the larger machine would take the smaller one's pods.
    selector["node.kubernetes.io/instance-type"] = plan.slice.machine_type
    if spec.reservation:
        labels = {
            "name": "cloud.google.com/reservation-name",
            "project": "cloud.google.com/reservation-project",
        }
        return selector | {labels[part]: value for part, value in _reservation(spec.reservation).items()}
    return selector | dict(
        [_CAPACITY_LABELS[spec.capacity[0]]] if spec.capacity[0] in _CAPACITY_LABELS else []
    )


def tolerations(pool: Pool) -> list[dict[str, str]]:
    """What lets a pool's pods on its own nodes. GKE adds by itself what a ComputeClass takes."""
    (first, *others) = pool.plan.model.slice.capacity
    if others or first is CapacityType.ON_DEMAND:
        return []
    return [{"key": _TAINT, "operator": "Equal", "value": first.value, "effect": "NoSchedule"}]


def _reservation(reservation: str) -> dict[str, str]:
    """Its name, and the project of one that another project shares, each of which is a label of the nodes."""
    project, _, name = reservation.removeprefix("projects/").rpartition("/reservations/")
    return {"name": name, **({"project": project} if project else {})}


def _place(gke: GkeSpec) -> str:
    """TPUs of one pool are in one zone. A regional cluster would spread its nodes over three."""
    zone = gke.zone or "$ZONE"
    location = f"{gke.region} --node-locations={zone}" if gke.region else zone
    return f"--cluster={gke.cluster or '$CLUSTER'} --location={location}"


def _node_pools(pool: Pool, gke: GkeSpec) -> list[str]:
    plan = pool.plan
    spec, hosts, counts = plan.model.slice, plan.slice.hosts, plan.model.replicas
    purchase = _PURCHASE_FLAGS[spec.capacity[0]].format(reservation=spec.reservation)
    purchase += "".join(
        f" --node-taints={taint['key']}={taint['value']}:{taint['effect']}" for taint in tolerations(pool)
    )
    networks = (
        f" --accelerator-network-profile=auto --node-labels={_DRANET}=true"
        if needs_network_claims(plan, gke)
        else ""
    )
    command = f"gcloud container node-pools create {{pool}} {_place(gke)}"
    command += f" --machine-type={plan.slice.machine_type}{{shape}}"
    # Named, for machines from v6e on take no persistent disk, and GKE's own choice depends on its version.
    command += (
        f" --disk-type={plan.slice.hardware.disk} --disk-size={pool.storage.boot_disk_gb}{purchase}{networks}"
    )
    # GKE refuses a flex-start pool that begins with nodes, and orders them for pods that wait.
    least = 0 if spec.capacity[0] is CapacityType.FLEX_START else counts.min
    if hosts == 1:
        size = f" --num-nodes={least} --enable-autoscaling --min-nodes={least} --max-nodes={counts.max}"
        return [command.format(pool=pool.node_pool, shape="") + size]
    shape = (
        f" --placement-policy={pool.name}" if needs_policy(plan) else f" --tpu-topology={plan.slice.topology}"
    )
    return [
        command.format(pool=f"{pool.node_pool}-{index}", shape=shape)
        + (
            f" --num-nodes={hosts}"
            if index < least
            else f" --num-nodes=0 --enable-autoscaling --min-nodes=0 --max-nodes={hosts}"
        )
        for index in range(counts.max)
    ]


def _priority(pool: Pool, capacity: CapacityType, gke: GkeSpec) -> dict[str, Any]:
    plan = pool.plan
    tpu = {
        "type": plan.slice.gke_accelerator,
        "count": plan.slice.chips_per_host,
        "topology": plan.slice.topology,
    }
    disk = {"bootDiskType": plan.slice.hardware.disk, "bootDiskSize": pool.storage.boot_disk_gb}
    priority: dict[str, Any] = {"tpu": tpu, "storage": disk}
    match capacity:
        case CapacityType.RESERVED:
            priority["reservations"] = {
                "specific": [_reservation(plan.model.slice.reservation or "")],
                "affinity": "Specific",
            }
        case CapacityType.FLEX_START:
            priority["flexStart"] = {"enabled": True}
        case CapacityType.SPOT:
            priority["spot"] = True
        case _:
            priority["spot"] = False
    if needs_policy(plan):
        priority["placement"] = {"policyName": pool.name}
    if needs_network_claims(plan, gke):
        priority["acceleratorNetworkProfile"] = "auto"
    return priority
