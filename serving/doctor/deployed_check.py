"""The check of what Kubernetes runs: RayService and RayCluster against the manifest of the YAML."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serving.doctor.drift import Difference, of_clusters, of_pod, of_services
from serving.doctor.facts import Deployed, Facts
from serving.doctor.findings import Finding, failed, not_looked_at, not_yet, ok, warning
from serving.slices.tpu_hosts import counted, listed

_APPLY = "`serving manifest FILE | kubectl apply -f -`, unless an overlay of yours is meant to differ"
# Of a RayService that KubeRay has given up.
_REFUSED = ("ValidationFailed", "InitializingTimeout")


def manifest(facts: Facts) -> list[Finding]:
    """Whether the YAML has been applied, and whether KubeRay has taken it."""
    deployed = facts.deployed
    if isinstance(deployed, str) or deployed.unseen:
        return [not_looked_at(deployed if isinstance(deployed, str) else deployed.unseen)]
    if not deployed.kuberay:
        return [failed("Kubernetes knows no RayServices", "install KubeRay (docs/guides/gke.md, step 2)")]
    if deployed.service is None:
        return [not_yet(f"no RayService {deployed.label} in the namespace {deployed.namespace}")]
    findings = _problems(deployed)
    if differences := of_services(deployed.wanted, deployed.service):
        problem = f"the RayService {deployed.label} is not what the YAML renders: {listed(differences)}"
        findings.append(warning(problem, _APPLY))
    clusters = _live(deployed)
    if suspended := _suspended(deployed, clusters):
        return [*findings, *suspended]
    if len(clusters) == 1:
        findings += _of_cluster(deployed, clusters[0]) + _of_pods(deployed, clusters[0])
    if not findings and not clusters:
        return [
            not_yet(f"KubeRay has made no RayCluster of {deployed.label}: see `kubectl describe rayservice`")
        ]
    return findings or [ok(f"the RayService {deployed.label} and its RayCluster are what the YAML renders")]


def _problems(deployed: Deployed) -> list[Finding]:
    """What KubeRay itself says is wrong."""
    remedy = f"see `kubectl describe rayservice {deployed.label} -n {deployed.namespace}` and its RayCluster"
    refused = [
        condition["message"]
        for condition in _conditions(deployed.service or {})
        if condition["type"] == "Ready" and condition.get("reason") in _REFUSED
    ]
    without_pods = [
        condition["message"]
        for cluster in _live(deployed)
        for condition in _conditions(cluster)
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True"
    ]
    findings = [failed(f"KubeRay refuses the RayService: {message}", remedy) for message in refused]
    findings += [failed(f"KubeRay can't make pods: {message}", remedy) for message in without_pods]
    if len(clusters := _live(deployed)) > 1:
        names = [cluster["metadata"]["name"] for cluster in clusters]
        problem = (
            f"KubeRay has {len(names)} RayClusters of it ({listed(names)}), and each wants all its slices"
        )
        findings.append(
            warning(problem, "right with upgradeStrategy NewCluster while it changes over, and else never")
        )
    return findings


def _suspended(deployed: Deployed, clusters: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What Kueue has not admitted, and what stays suspended after it has: KubeRay 1.7 reads that word when it makes a RayCluster, never again."""
    if _cluster_of(deployed).get("suspend"):
        problem = f"Kueue has not admitted the RayService {deployed.label}: see `kubectl get workloads -n {deployed.namespace}`"
        return [not_yet(problem)]
    names = [cluster["metadata"]["name"] for cluster in clusters if cluster["spec"].get("suspend")]
    return [
        failed(
            f"Kueue has admitted the RayService {deployed.label}, and KubeRay leaves its RayCluster {name} suspended",
            f"`kubectl delete raycluster {name} -n {deployed.namespace}`: KubeRay makes one that is not",
        )
        for name in names
    ]


def _cluster_of(deployed: Deployed) -> Mapping[str, Any]:
    """The RayCluster that the RayService describes; of somebody's own it may describe none."""
    return (deployed.service or {})["spec"].get("rayClusterConfig") or {}


def _live(deployed: Deployed) -> list[Mapping[str, Any]]:
    return [cluster for cluster in deployed.clusters if not cluster["metadata"].get("deletionTimestamp")]


def _conditions(resource: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return (resource.get("status") or {}).get("conditions") or ()


def _of_cluster(deployed: Deployed, cluster: Mapping[str, Any]) -> list[Finding]:
    """What KubeRay has not taken over from the RayService: limits are lost with their own words, and pods by a new cluster alone."""
    name, spec = cluster["metadata"]["name"], cluster["spec"]
    wanted = _cluster_of(deployed)
    differences = of_clusters(wanted, spec)
    if _grows(wanted, spec, differences):
        return [not_yet(f"KubeRay has not made all pools yet: {listed(differences)}")]
    limits = [difference for difference in differences if difference.path.endswith(".maxReplicas")]
    others = [difference for difference in differences if difference not in limits]
    findings = []
    if limits:
        problem = f"KubeRay does not take over how many slices a pool may have: {listed(limits)}"
        findings.append(failed(problem, _patch(deployed.namespace, name, spec, limits)))
    if others:
        problem = f"the RayCluster {name} is older than the RayService: {listed(others)}"
        remedy = f"`kubectl delete raycluster {name} -n {deployed.namespace}`, with a break in service: KubeRay takes only new pools at the end"
        findings.append(failed(problem, remedy))
    return findings


def _of_pods(deployed: Deployed, cluster: Mapping[str, Any]) -> list[Finding]:
    """Pods that were made before the RayCluster was changed, as a newer KubeRay does with all that it had not taken over."""
    name, spec = cluster["metadata"]["name"], cluster["spec"]
    templates = {group["groupName"]: group["template"] for group in _groups(spec)}
    older: dict[tuple[str, str], int] = {}
    for pod in deployed.pods:
        labels = pod["metadata"]["labels"]
        if labels.get("ray.io/cluster") != name or pod["metadata"].get("deletionTimestamp"):
            continue
        head = labels.get("ray.io/node-type") == "head"
        group = "head" if head else labels.get("ray.io/group", "")
        template = spec["headGroupSpec"]["template"] if head else templates.get(group)
        if template and (differences := of_pod(template, pod)):
            key = group, listed(differences)
            older[key] = older.get(key, 0) + 1
    remedy = f"`kubectl delete raycluster {name} -n {deployed.namespace}` for all of them, or delete the pods of one slice after the other"
    return [
        warning(f"{counted(pods, 'pod')} of {group}: older than the RayCluster: {unlike}", remedy)
        for (group, unlike), pods in older.items()
    ]


def _grows(wanted: Mapping[str, Any], spec: Mapping[str, Any], differences: Sequence[Difference]) -> bool:
    """Whether all that changed are pools behind those that are there: then KubeRay takes the whole RayService, limits too."""
    before, after = ([group["groupName"] for group in _groups(of)] for of in (spec, wanted))
    new = {f"workerGroupSpecs[{name}]" for name in after[len(before) :]}
    changed = {difference.path for difference in differences if not difference.path.endswith(".maxReplicas")}
    return bool(new) and after[: len(before)] == before and changed <= new


def _groups(spec: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """A cluster may be a head alone: somebody's own, of the application's name."""
    return spec.get("workerGroupSpecs") or ()


def _patch(namespace: str, name: str, spec: Mapping[str, Any], limits: Sequence[Difference]) -> str:
    groups = [group["groupName"] for group in _groups(spec)]
    operations = [
        {
            "op": "replace",
            "path": f"/spec/workerGroupSpecs/{groups.index(limit.path.split('[')[1].split(']')[0])}/maxReplicas",
            "value": limit.wanted,
        }
        for limit in limits
    ]
    return f"`kubectl patch raycluster {name} -n {namespace} --type=json -p '{json.dumps(operations)}'`"
