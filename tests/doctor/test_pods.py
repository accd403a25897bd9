"""Why pods do not run, by what Kubernetes says of them."""

from dataclasses import replace
from typing import Any

import pytest
from support.doctor_facts import as_rendered, healthy, on_node

from serving.doctor.cluster_checks import endpoints, ray_version
from serving.doctor.deployed_check import manifest
from serving.doctor.facts import Endpoints
from serving.doctor.findings import Finding, Verdict
from serving.doctor.pods_check import nodes, pods

pytestmark = pytest.mark.unit


def pod(name: str, phase: str = "Pending", *, deleted: bool = False, **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": {}} | ({"deletionTimestamp": "now"} if deleted else {})
    return {"metadata": metadata, "status": {"phase": phase, **status}}


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "ray-worker", "state": state}]


def found(*made: dict[str, Any]) -> list[Finding]:
    return pods(replace(healthy(), deployed=replace(as_rendered(), pods=made)))


UNSCHEDULED = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
NO_SECRET = {"reason": "CreateContainerConfigError", "message": 'secret "hf-token" not found'}


@pytest.mark.parametrize(
    ("status", "verdict", "said", "remedy"),
    [
        (
            {"containerStatuses": container(waiting=NO_SECRET)},
            Verdict.FAILED,
            'ray-worker: CreateContainerConfigError: secret "hf-token" not found',
            "make the secret",
        ),
        (
            {"initContainerStatuses": container(waiting={"reason": "ImagePullBackOff"})},
            Verdict.FAILED,
            "ray-worker: ImagePullBackOff: without a message",
            "service account may read it",
        ),
        (
            {
                "phase": "Running",
                "containerStatuses": container(terminated={"exitCode": 137, "reason": "OOMKilled"}),
            },
            Verdict.FAILED,
            "ray-worker ended with status 137 (OOMKilled)",
            "kubectl logs -n default POD -c ray-worker",
        ),
        (
            {"conditions": [UNSCHEDULED | {"reason": "SchedulingGated"}]},
            Verdict.WARNING,
            "Kueue has not admitted it",
            "kubectl get workloads -n default",
        ),
        (
            {"conditions": [UNSCHEDULED]},
            Verdict.WARNING,
            "no node: 0/3 nodes are available",
            "quota and zone",
        ),
        (
            {
                "phase": "Failed",
                "reason": "Evicted",
                "message": "The node was low on resource: ephemeral-storage.",
                "containerStatuses": container(terminated={"exitCode": 137, "reason": "Error"}),
            },
            Verdict.FAILED,
            "Evicted: The node was low on resource",
            "kubectl describe pod -n default",
        ),
        (
            {"phase": "Failed"},
            Verdict.FAILED,
            "it failed: without a message",
            "kubectl describe pod -n default",
        ),
    ],
)
def test_a_pod_that_does_not_run_is_told_with_its_reason(
    status: dict[str, Any], verdict: Verdict, said: str, remedy: str
) -> None:
    well = pod("c", "Running", containerStatuses=container(running={}))
    (finding,) = found(pod("a", **status), pod("b", **status), well)
    assert finding.verdict is verdict
    assert finding.said.startswith(f"a, b: {said}")
    assert remedy in finding.remedy


def test_pods_that_come_up_are_too_early_to_tell() -> None:
    comes = container(waiting={"reason": "ContainerCreating"})
    (finding,) = found(
        pod("a", containerStatuses=comes),
        pod("b", "Running"),
        pod("c", deleted=True, conditions=[UNSCHEDULED]),
    )
    assert finding.verdict is Verdict.NOT_YET
    assert finding.said.startswith(
        "1 of 2 pods start (a); where that takes long, `kubectl describe pod -n default`"
    )
    assert [finding.verdict for finding in found()] == [Verdict.NOT_YET]


@pytest.mark.parametrize(
    ("made", "node_pools", "verdict", "said"),
    [
        ([on_node("a0"), on_node("a1"), on_node("b0", "b")], {"a0": "a", "a1": "a", "b0": "b"}, Verdict.OK, "2 slices, of one"),
        ([on_node("a0"), on_node("a1") | {"spec": {}}], {"a0": "a", "a1": "b"}, Verdict.OK, "1 slice, of one"),
        ([on_node("a0"), on_node("a1") | {"status": {"phase": "Failed"}}], {"a0": "a", "a1": "b"}, Verdict.OK, "1 slice, of one"),
        ([on_node("a0"), on_node("a1", cluster="llama-new")], {"a0": "a", "a1": "b"}, Verdict.OK, "2 slices, of one"),
        ([on_node("a0")], {}, Verdict.NOT_YET, "no pod of a slice is on a node of GKE's"),
        ([on_node("a0")], "nodes is forbidden", Verdict.NOT_LOOKED_AT, "nodes is forbidden"),
    ],
)  # fmt: skip
def test_slices_of_one_node_pool_each_are_told_apart_from_what_nobody_can_tell(
    made: list[dict[str, Any]], node_pools: dict[str, str] | str, verdict: Verdict, said: str
) -> None:
    deployed = replace(as_rendered(), pods=tuple(made), node_pools=node_pools)
    (finding,) = nodes(replace(healthy(), deployed=deployed))
    assert finding.verdict is verdict
    assert said in finding.said


def test_where_rayservices_may_not_be_seen_pods_are_looked_at() -> None:
    deployed = replace(as_rendered(), service=None, clusters=(), unseen="kubectl can't tell (forbidden)")
    facts = replace(healthy(), deployed=deployed)
    assert [(finding.verdict, finding.said) for finding in manifest(facts)] == [
        (Verdict.NOT_LOOKED_AT, "kubectl can't tell (forbidden)")
    ]
    assert [finding.verdict for finding in pods(facts)] == [Verdict.OK]


def test_a_rayservice_of_somebody_s_own_breaks_no_check() -> None:
    bare = {"metadata": {"name": "llama"}, "spec": {}}
    (other, older) = manifest(replace(healthy(), deployed=replace(as_rendered(), service=bare)))
    assert "is not what the YAML renders" in other.said
    assert "is older than the RayService" in older.said


def test_a_cluster_without_kuberay_fails_and_one_without_the_service_is_early() -> None:
    bare = replace(as_rendered(), service=None, clusters=(), pods=(), kuberay=False)
    facts = replace(healthy(), deployed=bare, endpoints=[Endpoints("llama", there=False)])
    (finding,) = manifest(facts)
    assert (finding.verdict, finding.said) == (Verdict.FAILED, "Kubernetes knows no RayServices")
    assert [finding.verdict for finding in endpoints(facts)] == [Verdict.NOT_YET]


def test_where_kubernetes_alone_is_reached_ray_is_asked_on_the_head() -> None:
    """The status of a healthy service is 0 there too."""
    (finding,) = ray_version(replace(healthy(), cluster="nobody listens"))
    assert finding.verdict is Verdict.NOT_LOOKED_AT
    assert "nobody listens; " in finding.said
    assert "kubectl exec -i HEAD -n default -c ray-head -- serving doctor" in finding.said
