"""What Kubernetes has, against the manifest, with a kubectl that tells what was recorded."""

import copy
import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.doctor_facts import LLAMA, healthy
from support.manifests import defaulted

from serving import config
from serving.config import DeploymentFile
from serving.doctor.deployed_check import manifest
from serving.doctor.drift import of_services
from serving.doctor.facts import Deployed
from serving.doctor.findings import Finding, Verdict
from serving.doctor.kubernetes import deployed, kubernetes
from serving.gke.application import application
from serving.gke.manifest import ray_service
from serving.planning import Plan
from serving.planning.service import plan_service

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
GOLDENS = sorted((ROOT / "tests" / "gke" / "goldens").glob("*.yaml"))
REDIS = {
    "metadata": {"name": "llama--redis-0", "labels": {"app": "llama--redis"}},
    "spec": {"containers": []},
}
GROUP = "llama-3-1-8b-instruct-v6e-2x4"


def rendered(path: Path) -> dict[str, Any]:
    return next(
        entry for entry in yaml.load_all(path.read_text(), yaml.CSafeLoader) if entry["kind"] == "RayService"
    )


def of_kuberay(service: dict[str, Any]) -> dict[str, Any]:
    """The service as Kubernetes keeps it when KubeRay has written to it once."""
    kept = defaulted(copy.deepcopy(service))
    kept["metadata"] |= {"finalizers": ["ray.io/rayservice-finalizer"], "uid": "1", "creationTimestamp": None}
    for group in groups(kept):
        group["scaleStrategy"] = {}
        group["template"]["metadata"]["creationTimestamp"] = None
    return kept


def cluster_of(service: dict[str, Any], name: str = "llama-abcde") -> dict[str, Any]:
    """The RayCluster that KubeRay makes of the service, with an autoscaler that has ordered slices."""
    spec = copy.deepcopy(service["spec"]["rayClusterConfig"])
    for group in spec["workerGroupSpecs"]:
        group["replicas"] = 7
        group["scaleStrategy"] = {"workersToDelete": ["pod"]}
    return {"metadata": {"name": name, "labels": {"app": "llama"}}, "spec": spec, "status": {}}


def pods_of(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """A head and two hosts of the first pool, with what Kubernetes, KubeRay and the TPU webhook add to a pod."""
    spec = cluster["spec"]
    group = spec["workerGroupSpecs"][0]
    pods = []
    for kind, template in (
        ("head", spec["headGroupSpec"]["template"]),
        *[("worker", group["template"])] * 2,
    ):
        pod = copy.deepcopy(template)
        labels = {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": kind}
        pod["metadata"]["labels"] |= {**labels, "ray.io/group": group["groupName"]}
        (container,) = pod["spec"]["containers"]
        for variable in container["env"]:
            variable.get("valueFrom", {}).get("fieldRef", {}).setdefault("apiVersion", "v1")
        container["env"].append({"name": "TPU_NAME", "value": "llama-0"})
        pod["spec"]["containers"].append({"name": "autoscaler", "image": "another"})
        pods.append(pod)
    return pods


def groups(service: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from service["spec"]["rayClusterConfig"]["workerGroupSpecs"]


def worker(service: dict[str, Any]) -> dict[str, Any]:
    (container,) = next(groups(service))["template"]["spec"]["containers"]
    return dict(container)


@functools.cache
def llama() -> tuple[DeploymentFile, list[Plan]]:
    deployment = config.load(LLAMA)
    (service,) = deployment.services.values()
    return deployment, [made for pools in plan_service(service) for made in pools]


def wanted() -> dict[str, Any]:
    return copy.deepcopy(_wanted())


@functools.cache
def _wanted() -> dict[str, Any]:
    deployment, plans = llama()
    ((name, service),) = deployment.services.items()
    gke = service.gke.model_copy(update={"image": "reg/serving:1"})
    app = application(name, gke, plans, port=deployment.port, router=service.router)
    return ray_service(app, deployment.document)


def found(*clusters: dict[str, Any], service: dict[str, Any] | None = None) -> list[Finding]:
    kept = of_kuberay(wanted()) if service is None else service
    facts = Deployed("llama", "default", wanted(), kept, clusters or (cluster_of(kept),))
    return manifest(replace(healthy(), deployed=facts))


@pytest.mark.parametrize("path", GOLDENS, ids=[path.stem for path in GOLDENS])
def test_what_kubernetes_and_kuberay_write_by_themselves_is_no_difference(path: Path) -> None:
    service = rendered(path)
    assert of_services(service, of_kuberay(service)) == []


def test_a_variable_that_is_set_to_nothing_is_no_difference() -> None:
    """Go leaves empty text out where KubeRay writes a RayCluster, and Kubernetes a pod."""
    service = wanted()
    worker(service)["env"].append({"name": "XLA_FLAGS", "value": ""})
    cluster = cluster_of(of_kuberay(service))
    kept = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["env"][-1]
    del kept["value"]
    facts = Deployed("llama", "default", service, of_kuberay(service), (cluster,), tuple(pods_of(cluster)))
    assert [finding.verdict for finding in manifest(replace(healthy(), deployed=facts))] == [Verdict.OK]


def test_what_is_as_the_yaml_renders_is_ok() -> None:
    assert [finding.verdict for finding in found()] == [Verdict.OK]


def test_a_yaml_that_was_not_applied_is_told_by_its_fields() -> None:
    kept = of_kuberay(wanted())
    next(groups(kept))["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] = "4x4"
    worker(kept)["resources"]["limits"]["memory"] = "700000M"
    worker(kept)["env"].append({"name": "LIBTPU_INIT_ARGS", "value": "--secret"})
    kept["spec"]["serveConfigV2"] = kept["spec"]["serveConfigV2"].replace("port: 8000", "port: 9000")
    (finding,) = found(service=kept)
    assert finding.verdict is Verdict.WARNING
    assert "serveConfigV2.http_options.port is another" in finding.said
    assert "cloud.google.com/gke-tpu-topology is 4x4, not 2x4" in finding.said
    assert "--secret" not in finding.said
    assert "serving manifest FILE | kubectl apply -f -" in finding.remedy
    every = [str(difference) for difference in of_services(wanted(), kept)]
    path = f"workerGroupSpecs[{GROUP}].template.spec.containers[ray-worker]"
    assert f"{path}.env[LIBTPU_INIT_ARGS] is there still" in every
    assert any(said.startswith(f"{path}.resources.limits.memory is 700000M, not ") for said in every)


@pytest.mark.parametrize("odd", ["a: 2026-02-30", "a: [", "[\n" * 3000], ids=["date", "list", "lists"])
def test_a_config_that_is_no_yaml_is_another(odd: str) -> None:
    kept = of_kuberay(wanted())
    kept["spec"]["serveConfigV2"] = odd
    (finding,) = found(service=kept)
    assert "serveConfigV2 is another" in finding.said


def test_a_limit_that_kuberay_does_not_take_over_is_patched() -> None:
    kept = of_kuberay(wanted())
    cluster = cluster_of(kept)
    cluster["spec"]["workerGroupSpecs"][0]["maxReplicas"] = 3
    (finding,) = found(cluster)
    assert finding.verdict is Verdict.FAILED
    assert f"workerGroupSpecs[{GROUP}].maxReplicas is 3, not 1" in finding.said
    operation = '[{"op": "replace", "path": "/spec/workerGroupSpecs/0/maxReplicas", "value": 1}]'
    assert finding.remedy == f"`kubectl patch raycluster llama-abcde -n default --type=json -p '{operation}'`"


def test_pods_of_an_older_manifest_take_a_new_cluster() -> None:
    cluster = cluster_of(of_kuberay(wanted()))
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] = "reg/serving:0"
    (finding,) = found(cluster)
    assert finding.verdict is Verdict.FAILED
    assert (
        "headGroupSpec.template.spec.containers[ray-head].image is reg/serving:0, not reg/serving:1"
        in finding.said
    )
    assert "kubectl delete raycluster llama-abcde -n default" in finding.remedy


def test_a_pool_at_the_end_is_on_its_way_and_one_before_others_never_comes() -> None:
    service = of_kuberay(wanted())
    second = copy.deepcopy(next(groups(service))) | {"groupName": "second"}
    behind, before = copy.deepcopy(service), copy.deepcopy(service)
    behind["spec"]["rayClusterConfig"]["workerGroupSpecs"].append(second)
    before["spec"]["rayClusterConfig"]["workerGroupSpecs"].insert(0, second)
    for kept, verdict in ((behind, Verdict.NOT_YET), (before, Verdict.FAILED)):
        facts = Deployed("llama", "default", kept, kept, (cluster_of(service),))
        (finding,) = manifest(replace(healthy(), deployed=facts))
        assert finding.verdict is verdict
        assert "workerGroupSpecs[second] is missing" in finding.said


def test_what_kuberay_refuses_and_can_not_make_is_told_in_its_words() -> None:
    kept = of_kuberay(wanted())
    refused = {"type": "Ready", "status": "False", "reason": "ValidationFailed", "message": "name too long"}
    kept["status"] = {"conditions": [refused]}
    cluster = cluster_of(kept)
    denied = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "x",
        "message": "webhook denied the request",
    }
    cluster["status"] = {"conditions": [denied]}
    said = [(finding.verdict, finding.said) for finding in found(cluster, service=kept)]
    assert said == [
        (Verdict.FAILED, "KubeRay refuses the RayService: name too long"),
        (Verdict.FAILED, "KubeRay can't make pods: webhook denied the request"),
    ]


def test_a_head_without_worker_groups_is_told_as_another_service() -> None:
    """A RayService of the application's name that somebody wrote for a trial of KubeRay."""
    service = of_kuberay(wanted())
    cluster = cluster_of(service)
    pods = pods_of(cluster)
    for spec in (service["spec"]["rayClusterConfig"], cluster["spec"]):
        del spec["workerGroupSpecs"]
    facts = Deployed("llama", "default", wanted(), service, (cluster,), tuple(pods))
    (finding,) = manifest(replace(healthy(), deployed=facts))
    assert finding.verdict is Verdict.WARNING
    assert "workerGroupSpecs is missing" in finding.said


def test_a_second_cluster_is_told_and_one_that_goes_is_none() -> None:
    kept = of_kuberay(wanted())
    second = cluster_of(kept, "llama-fghij")
    (finding,) = found(cluster_of(kept), second)
    assert "2 RayClusters of it (llama-abcde, llama-fghij)" in finding.said
    second["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert [finding.verdict for finding in found(cluster_of(kept), second)] == [Verdict.OK]


def test_what_kueue_holds_back_is_waited_for_and_what_kuberay_forgets_is_told() -> None:
    """KubeRay 1.7 copies the RayService's word into a new RayCluster, and leaves it there when Kueue takes it back."""
    waits = of_kuberay(wanted())
    waits["spec"]["rayClusterConfig"]["suspend"] = True
    (finding,) = found(cluster_of(waits), service=waits)
    assert finding.verdict is Verdict.NOT_YET
    assert "Kueue has not admitted" in finding.said
    admitted = of_kuberay(wanted())
    admitted["spec"]["rayClusterConfig"]["suspend"] = False
    (finding,) = found(cluster_of(waits), service=admitted)
    assert finding.verdict is Verdict.FAILED
    assert "kubectl delete raycluster llama-abcde -n default" in finding.remedy
    assert [finding.verdict for finding in found(cluster_of(admitted), service=admitted)] == [Verdict.OK]


def test_kubectl_is_asked_and_an_image_that_the_yaml_does_not_name_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, plans = llama()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert deployed(deployment, plans) == "kubectl is not here"
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho 'rayservices are forbidden' >&2\nexit 1\n")
    kubectl.chmod(0o755)
    assert deployed(deployment, plans) == "kubectl can't tell (rayservices are forbidden)"
    for printed in ("null", "[]", '{"kind": "Status"}', '{"items": null}'):
        kubectl.write_text(f"#!/bin/sh\necho '{printed}'\n")
        assert deployed(deployment, plans) == "kubectl can't tell (it printed no list)"
        assert kubernetes(deployment) == "kubectl can't tell (it printed no list)"
    kubectl.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        """*ray.io\\ -n*) echo "error: the server doesn't have a resource type \\"rayservices\\"" >&2; exit 1;;\n"""
        """*) echo '{"items": []}';;\n"""
        "esac\n"
    )
    asked = deployed(deployment, plans)
    assert isinstance(asked, Deployed)
    assert not asked.kuberay
    answers = {}
    for kind, items in {
        "rayservices": [of_kuberay(wanted())],
        "rayclusters": [cluster_of(of_kuberay(wanted()))],
        "pods": [*pods_of(cluster_of(of_kuberay(wanted()))), REDIS],
    }.items():
        answers[kind] = tmp_path / kind
        answers[kind].write_text(json.dumps({"items": items}))
    kubectl.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f'"get rayservices.ray.io -n default -l app=llama "*) /bin/cat {answers["rayservices"]};;\n'
        '"get nodes "*) echo "nodes is forbidden" >&2; exit 1;;\n'
        f'"get pods -n default -l app in (llama,llama--redis),ray.io/node-type notin (redis-cleanup) "*) /bin/cat {answers["pods"]};;\n'
        f'"get rayclusters.ray.io -n default -l ray.io/originated-from-cr-name=llama,ray.io/originated-from-crd=RayService "*) /bin/cat {answers["rayclusters"]};;\n'
        "*) echo refused >&2; exit 1;;\n"
        "esac\n"
    )
    asked = deployed(deployment, plans)
    assert isinstance(asked, Deployed)
    assert len(asked.pods) == 4
    assert asked.node_pools == "kubectl can't tell (nodes is forbidden)"
    assert [finding.verdict for finding in manifest(replace(healthy(), deployed=asked))] == [Verdict.OK]


def test_an_application_that_kubernetes_would_not_have_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray takes any name, and a kubectl may be there for other things."""
    deployment, plans = llama()
    odd = replace(deployment, services={"70b": next(iter(deployment.services.values()))})
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "kubectl").write_text("#!/bin/sh\n")
    (tmp_path / "kubectl").chmod(0o755)
    for said in (kubernetes(odd), deployed(odd, plans)):
        assert "application name '70b' starts with no letter" in str(said)


def test_pods_from_before_a_change_are_told_and_what_others_add_to_pods_is_none() -> None:
    cluster = cluster_of(of_kuberay(wanted()))
    pods = pods_of(cluster)
    facts = Deployed("llama", "default", wanted(), of_kuberay(wanted()), (cluster,), tuple(pods))
    assert [finding.verdict for finding in manifest(replace(healthy(), deployed=facts))] == [Verdict.OK]
    for pod in pods[1:]:
        pod["spec"]["containers"][0]["image"] = "reg/serving:0"
    (finding,) = manifest(replace(healthy(), deployed=facts))
    assert finding.verdict is Verdict.WARNING
    assert finding.said == (
        f"2 pods of {GROUP}: older than the RayCluster: ray-worker.image is reg/serving:0, not reg/serving:1"
    )


def test_before_anything_is_applied_it_is_too_early_to_tell() -> None:
    for facts, said in (
        (Deployed("llama", "prod", wanted(), None), "no RayService llama in the namespace prod"),
        (
            Deployed("llama", "prod", wanted(), of_kuberay(wanted())),
            "KubeRay has made no RayCluster of llama",
        ),
    ):
        (finding,) = manifest(replace(healthy(), deployed=facts))
        assert finding.verdict is Verdict.NOT_YET
        assert said in finding.said
