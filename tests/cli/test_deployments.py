"""Every YAML of deployments/ is read, planned and rendered. A golden is renewed by hand:
`serving manifest deployments/X.yaml --image REGISTRY/tpu-serving:0.1.0 > tests/gke/goldens/X.yaml`.
"""

import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from support.manifests import objects_of, problems

from serving.cli.plan import OK, manifest_file, plan_file

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = sorted((ROOT / "deployments").glob("*.yaml"))
DRAIN_S = 60  # of every YAML there
GOLDENS = Path(__file__).parents[1] / "gke" / "goldens"
IMAGE = "REGISTRY/tpu-serving:0.1.0"


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


@functools.cache
def manifest(path: Path) -> str:
    text = io.StringIO()
    assert manifest_file(str(path), text, Console(stderr=True), image=IMAGE) == OK
    return text.getvalue()


def kinds(text: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for document in objects_of(text):
        found.setdefault(document["kind"], []).append(document)
    return found


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=names(DEPLOYMENTS))
def test_it_fits(path: Path) -> None:
    text = io.StringIO()
    assert plan_file(str(path), Console(file=text), as_json=True) == OK
    for one in json.loads(text.getvalue()):
        assert one["fits"]
        assert one["sequences_at_max_model_len"] >= 1
        hbm = one["device_hbm"]
        parts = ("weight_bytes", "state_bytes", "resident_bytes", "cache_bytes", "withheld_bytes")
        assert sum(hbm[part] for part in parts) == pytest.approx(hbm["usable_bytes"], abs=2)


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=names(DEPLOYMENTS))
def test_its_manifest_is_the_golden_one(path: Path) -> None:
    assert manifest(path) == (GOLDENS / path.name).read_text()


def test_no_golden_is_left_over() -> None:
    assert names(sorted(GOLDENS.glob("*.yaml"))) == names(DEPLOYMENTS)


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=names(DEPLOYMENTS))
def test_its_slices_are_whole_in_the_manifest(path: Path) -> None:
    (service,) = kinds(manifest(path))["RayService"]
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        chips = 1
        for axis in spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"):
            chips *= int(axis)
        # What kuberay-tpu-webhook checks before it admits a cluster.
        assert group["numOfHosts"] == max(chips // int(container["resources"]["limits"]["google.com/tpu"]), 1)
        assert group["minReplicas"] == 0 <= group["replicas"] <= group["maxReplicas"]
        environment = {each["name"]: each.get("value") for each in container["env"]}
        told_s = int(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])  # how long Ray drains on SIGTERM
        assert DRAIN_S < told_s < spec["terminationGracePeriodSeconds"]
        longest_pod = f"{service['metadata']['name']}-12345-{group['groupName']}-worker-12345"
        assert len(f"{group['groupName']}-99-99") <= 63
        assert len(longest_pod) < 253


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=names(DEPLOYMENTS))
def test_its_manifest_is_valid(path: Path) -> None:
    assert [problem for each in objects_of(manifest(path)) for problem in problems(each)] == []


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=names(DEPLOYMENTS))
def test_serve_gets_the_file_as_it_is(path: Path) -> None:
    (service,) = kinds(manifest(path))["RayService"]
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == yaml.safe_load(path.read_text())


def test_pools_are_a_worker_group_each_bought_in_their_own_way() -> None:
    text = manifest(ROOT / "deployments" / "llama-70b-pools.yaml")
    found = kinds(text)
    (service,) = found["RayService"]
    cheap, sure = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (fallback,) = found["ComputeClass"]
    assert (
        cheap["template"]["spec"]["nodeSelector"]["cloud.google.com/compute-class"]
        == fallback["metadata"]["name"]
    )
    ways = fallback["spec"]["priorities"]
    assert [sorted(way.keys() & {"flexStart", "spot"}) for way in ways] == [["flexStart"], ["spot"]]
    assert len({str(way["tpu"]) for way in ways}) == 1
    assert sure["template"]["spec"]["nodeSelector"]["cloud.google.com/reservation-name"] == "llama-v5e"
    assert "--reservation=llama-v5e" in text
    assert sure["template"]["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"


def test_v7x_over_several_hosts_is_shaped_by_a_workload_policy() -> None:
    text = manifest(ROOT / "deployments" / "deepseek-r1-v7x-16.yaml")
    assert "resource-policies create workload-policy deepseek-r1-v7x-2x2x2" in text
    assert "--placement-policy=deepseek-r1-v7x-2x2x2" in text
    assert "--tpu-topology" not in text
