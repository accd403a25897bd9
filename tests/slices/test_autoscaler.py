"""Ray's own autoscaler asks for whole slices, given what we make: the pending groups and the manifest."""

import copy
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf.json_format import ParseDict
from ray.autoscaler._private.kuberay.autoscaling_config import _generate_available_node_types_from_ray_cr_spec
from ray.core.generated.autoscaler_pb2 import GangResourceRequest
from support.kuberay import Autoscaled
from support.recorded_demand import POOL, nameless, recorded

from serving.config import GkeSpec, ModelSpec
from serving.gke.application import application
from serving.gke.manifest import render
from serving.planning import plan
from serving.tpu import POOL_LABEL, Slice, resolve

pytestmark = pytest.mark.unit
GOLDENS = sorted((Path(__file__).parents[1] / "gke" / "goldens").glob("*.yaml"))

SHAPES = [
    resolve("v6e", "2x2"),
    TWO := resolve("v6e", "2x4", hosts=2),
    FOUR := resolve("v6e", "4x4"),
    resolve("v6e", "4x8"),
    SIXTEEN := resolve("v6e", "8x8"),
]


def cluster(
    *pools: Slice,
    least: int = 0,
    most: int = 4,
    bought: tuple[str, ...] = (),
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Autoscaled:
    """A cluster of the manifest of one model on these pools, with no slice yet unless there is a least."""
    spec = copy.deepcopy(rendered(pools, least, most, bought or ("on-demand",) * len(pools)))
    if change:
        change(spec)
    names = [group["groupName"] for group in spec["workerGroupSpecs"]]
    return Autoscaled(spec, dict(zip(names, pools, strict=True)))


@functools.cache
def rendered(pools: tuple[Slice, ...], least: int, most: int, bought: tuple[str, ...]) -> dict[str, Any]:
    plans = [
        plan(
            ModelSpec.model_validate(
                {
                    "model": "meta-llama/Llama-3.1-8B-Instruct",
                    "slice": {
                        "generation": pool.generation,
                        "topology": pool.topology,
                        "hosts": pool.hosts,
                        "capacity": capacity,
                    },
                    "replicas": {"min": least, "max": most},
                    "engine": {"max_model_len": 4096},
                }
            )
        )
        for pool, capacity in zip(pools, bought, strict=True)
    ]
    return ray_cluster(render(application("llama", GkeSpec(image="image"), plans), {}))


def ray_cluster(manifest: str) -> dict[str, Any]:
    documents = yaml.load_all(manifest, yaml.CSafeLoader)
    (service,) = (document for document in documents if document["kind"] == "RayService")
    found: dict[str, Any] = service["spec"]["rayClusterConfig"]
    return found


def served(shape: Slice, slices: int = 1, **more: Any) -> Autoscaled:
    """A cluster of which a service holds that many slices."""
    running = cluster(shape, **more)
    running.pending = [demand(shape, number) for number in range(slices)]
    running.rounds(2)
    running.deliver()
    running.hold(*running.replicas)
    running.pending = []
    running.rounds()
    return running


def ordered(running: Autoscaled) -> tuple[int, int]:
    """Slices of the one pool and pods, there or on order."""
    (slices,) = running.slices().values()
    return slices, len(running.kubernetes.pods)


def without_limits(spec: dict[str, Any]) -> None:
    del spec["autoscalerOptions"]["env"]


def pass_hours(monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    later_ns = time.time_ns() + round(hours * 3600e9)
    monkeypatch.setattr(time, "time_ns", lambda: later_ns)


def without_pools(spec: dict[str, Any]) -> None:
    for group in spec["workerGroupSpecs"]:
        del group["labels"][POOL_LABEL]


def demand(shape: Slice, number: int = 0, without: str = "") -> Any:
    """The pending group of a slice, as Ray's control store reports it to the autoscaler; `without` is a pool that it leaves out."""
    group = {"antiAffinity": {"labelName": f"_PG_{number}"}}
    pod_type = {
        "labelKey": "ray.io/tpu-pod-type",
        "operator": "LABEL_OPERATOR_IN",
        "labelValues": [shape.pod_type],
    }
    left_out = {"labelKey": POOL_LABEL, "operator": "LABEL_OPERATOR_NOT_IN", "labelValues": [without]}
    constraints = [pod_type, left_out] if without else [pod_type]
    requests = [{"resourcesBundle": bundle, "placementConstraints": [group]} for bundle in shape.bundles()]
    selected = [{**request, "labelSelectors": [{"labelConstraints": constraints}]} for request in requests]
    one_slice = {
        "localityConstraint": {"labelName": "ray.io/tpu-slice-name", "placementStrategy": "STRICT_PACK"}
    }
    selectors = [{"resourceRequests": selected, "localityRequirement": one_slice}]
    return ParseDict({"requests": requests, "bundleSelectors": selectors}, GangResourceRequest())


def test_the_demand_is_what_a_control_store_reported() -> None:
    """Of groups that `create_slice_group` made; the cluster tier has them reported again."""
    groups = nameless(recorded()["groups"])
    assert [len(group["requests"]) for group in groups] == [1, 1, 2, 4, 16]
    wanted = [demand(SHAPES[0], without=POOL), demand(SHAPES[0]), demand(TWO), demand(FOUR), demand(SIXTEEN)]
    assert [ParseDict({**group, "details": ""}, GangResourceRequest()) for group in groups] == wanted


def test_a_host_that_a_group_holds_is_not_idle_though_nothing_runs_on_it() -> None:
    free, held = (recorded()["host"][key] for key in ("free", "held"))
    assert (free["status"], held["status"]) == ("IDLE", "RUNNING")
    assert int(free["idleDurationMs"]) > 0
    assert "idleDurationMs" not in held


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_from_zero_a_pending_group_orders_one_whole_slice_and_once(shape: Slice) -> None:
    running = cluster(shape)
    running.pending = [demand(shape)]
    report = running.rounds(3)
    assert not report.infeasible_gang_resource_requests
    assert ordered(running) == (1, shape.hosts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_beside_a_slice_that_is_taken_as_many_are_ordered_as_are_pending(shape: Slice) -> None:
    running = served(shape)
    running.pending = [demand(shape, 1), demand(shape, 2)]
    running.rounds(3)
    assert ordered(running) == (3, 3 * shape.hosts)


def test_a_slice_whose_hosts_come_up_one_by_one_is_not_ordered_again() -> None:
    running = cluster(FOUR)
    running.pending = [demand(FOUR)]
    running.rounds(2)
    for pod in list(running.kubernetes.pods.values())[::-1]:
        pod.running = True
        running.rounds()
        assert ordered(running) == (1, 4)


def test_no_more_slices_are_ordered_than_the_manifest_allows() -> None:
    running = served(FOUR, most=2)
    running.pending = [demand(FOUR, number) for number in range(3)]
    report = running.rounds(3)
    assert ordered(running) == (2, 8)
    assert len(report.infeasible_gang_resource_requests) == 2


def test_free_slices_of_another_pool_do_not_stand_in_for_a_slice() -> None:
    """Two pools whose hosts are alike; the bundles without a head resource would fit on either's."""
    running = cluster(FOUR, TWO)
    running.pending = [demand(TWO)]
    running.rounds(2)
    running.deliver()
    running.pending = [demand(FOUR)]
    running.rounds(3)
    assert list(running.slices().values()) == [1, 1]


def test_without_its_pod_type_they_would_and_nothing_be_ordered() -> None:
    running = cluster(FOUR, TWO)
    running.pending = [demand(TWO)]
    running.rounds(2)
    running.deliver()
    blind = demand(FOUR)
    for request in blind.bundle_selectors[0].resource_requests:
        request.ClearField("label_selectors")
    running.pending = [blind]
    running.rounds(3)
    assert list(running.slices().values()) == [0, 1]


def test_a_pool_is_ordered_from_though_another_has_hosts_of_the_kind_to_offer() -> None:
    running = cluster(TWO, FOUR, resolve("v5e", "4x4"))
    running.pending = [demand(FOUR), demand(TWO, 1)]
    running.rounds(3)
    assert list(running.slices().values()) == [1, 1, 0]


@pytest.mark.parametrize("pending", [1, 2, 3])
def test_of_pools_of_one_shape_the_first_is_ordered_from_until_it_is_full(pending: int) -> None:
    running = cluster(FOUR, FOUR, most=2)
    running.pending = [demand(FOUR, number) for number in range(pending)]
    running.rounds(3)
    assert list(running.slices().values()) == [min(pending, 2), max(pending - 2, 0)]


def test_a_slice_is_ordered_from_the_pool_that_it_is_bought_for() -> None:
    running = cluster(FOUR, FOUR, bought=("spot", "on-demand"))
    running.pending = [demand(FOUR, without="v6e-4x4-4h-spot")]
    report = running.rounds(3)
    assert not report.infeasible_gang_resource_requests
    assert list(running.slices().values()) == [0, 1]


@pytest.mark.parametrize(("change", "ordered"), [(None, [1, 1]), (without_pools, [1, 0])])
def test_a_free_slice_of_another_pool_stands_in_only_where_no_label_says_whose_it_is(
    change: Callable[[dict[str, Any]], None] | None, ordered: list[int]
) -> None:
    running = cluster(FOUR, FOUR, bought=("spot", "on-demand"), change=change)
    running.pending = [demand(FOUR)]
    running.rounds(2)
    running.deliver()
    running.pending = [demand(FOUR, 1, without="v6e-4x4-4h-spot")]
    running.rounds(3)
    assert list(running.slices().values()) == ordered


def test_without_a_priority_half_a_slice_of_each_would_be_asked_for_and_none_ordered() -> None:
    def equal(spec: dict[str, Any]) -> None:
        for group in spec["workerGroupSpecs"]:
            group.pop("priority", None)

    running = cluster(FOUR, FOUR, change=equal)
    running.pending = [demand(FOUR)]
    running.rounds(3)
    assert list(running.slices().values()) == [0, 0]


def test_the_same_chips_on_other_machines_are_ordered_as_the_machines_that_were_meant() -> None:
    whole, halves = resolve("v6e", "2x4", hosts=1), TWO
    for meant, expected in ((whole, [1, 0]), (halves, [0, 1])):
        running = cluster(whole, halves)
        running.pending = [demand(meant)]
        running.rounds(3)
        assert list(running.slices().values()) == expected


def test_with_rays_own_limit_a_slice_of_more_than_ten_hosts_is_never_ordered() -> None:
    running = cluster(SIXTEEN, change=without_limits)
    running.pending = [demand(SIXTEEN)]
    running.rounds(4)
    assert ordered(running) == (0, 0)


def test_hosts_that_have_waited_for_hours_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    running = cluster(FOUR)
    running.pending = [demand(FOUR)]
    running.rounds(2)
    before = running.replicas
    for hours in (2, 48):
        pass_hours(monkeypatch, hours)
        running.rounds(3)
        assert (ordered(running), running.replicas) == ((1, 4), before)


def test_with_rays_own_limit_they_would_be_given_up_and_ordered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    running = cluster(FOUR, change=without_limits)
    running.pending = [demand(FOUR)]
    running.rounds(2)
    before = running.replicas
    pass_hours(monkeypatch, 2)
    running.rounds(6)
    assert set(running.replicas).isdisjoint(before)


def test_a_broken_slice_is_made_whole_again_and_no_second_ordered() -> None:
    running = served(FOUR)
    (broken,) = running.replicas
    running.free(broken, lambda _: 0)
    del running.kubernetes.pods[f"{broken}-2"]
    running.pending = [demand(FOUR)]
    running.rounds(4)
    assert ordered(running) == (1, 4)
    assert running.replicas != [broken]


def test_hosts_that_somebody_else_took_keep_a_slice_from_being_ordered() -> None:
    """Ray's arithmetic, which nothing of ours can mend: two free hosts and two more are no slice, but no order either."""
    running = served(FOUR)
    (taken,) = running.replicas
    running.held -= {f"{taken}-0", f"{taken}-1"}
    running.pending = [demand(FOUR)]
    running.rounds(3)
    assert ordered(running) == (1, 4)


def test_a_slice_seen_half_free_while_it_is_let_go_delays_the_next_by_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = served(FOUR)
    (leaving,) = running.replicas
    running.held -= {f"{leaving}-0", f"{leaving}-1"}
    running.pending = [demand(FOUR)]
    running.rounds()
    running.hold(leaving)
    running.rounds(2)
    assert ordered(running) == (1, 4)
    pass_hours(monkeypatch, 0.2)
    running.rounds(3)
    assert ordered(running) == (2, 8)


def test_an_idle_slice_goes_whole_and_a_held_one_stays() -> None:
    running = served(FOUR, slices=2)
    kept, idle = running.replicas
    running.free(idle, lambda _: 601)
    running.rounds(5)
    assert (ordered(running), running.replicas) == ((1, 4), [kept])


def test_a_slice_is_kept_until_it_was_idle_for_its_time() -> None:
    running = served(FOUR)
    running.free(*running.replicas, lambda _: 599)
    running.rounds(5)
    assert ordered(running) == (1, 4)


@pytest.mark.parametrize("early", range(1, 4))
def test_the_hosts_whose_idle_time_is_not_up_go_with_those_whose_is(early: int) -> None:
    running = served(FOUR, slices=2)
    kept, idle = running.replicas
    running.free(idle, lambda pod: 601 if pod.host < early else 599)
    running.rounds(5)
    assert (ordered(running), running.replicas) == ((1, 4), [kept])


def test_an_idle_slice_that_is_asked_for_stays() -> None:
    running = served(FOUR)
    running.free(*running.replicas, lambda _: 6000)
    running.pending = [demand(FOUR)]
    running.rounds(5)
    assert ordered(running) == (1, 4)


def test_a_service_that_is_gone_leaves_no_half_slice() -> None:
    running = served(FOUR, slices=2, least=1)
    for number, replica in enumerate(running.replicas):
        running.free(replica, lambda pod, number=number: 601 + (2 * pod.host + number) % 4)
    running.rounds(6)
    assert ordered(running) == (0, 0)


def test_a_minimum_in_the_worker_group_would_break_one_up_to_keep_half_of_each() -> None:
    """Both idle, a minimum of one: Ray lets the four hosts go that have been idle longest, KubeRay then both slices."""

    def minimum(spec: dict[str, Any]) -> None:
        spec["workerGroupSpecs"][0]["minReplicas"] = 1

    running = served(FOUR, slices=2, change=minimum)
    before = running.replicas
    for number, replica in enumerate(before):
        running.free(replica, lambda pod, number=number: 601 + (2 * pod.host + number) % 4)
    running.rounds(6)
    assert set(running.replicas).isdisjoint(before)


def test_a_smaller_maximum_in_the_worker_group_ends_slices_that_serve() -> None:
    """Ray's arithmetic: lower what Serve may have first, and the worker group when the slices are gone."""
    running = served(FOUR, slices=2)
    before = running.replicas
    running.kubernetes.groups[0]["maxReplicas"] = 1
    running.rounds(5)
    assert ordered(running) == (1, 4)
    assert set(running.replicas).isdisjoint(before)


def test_slices_let_go_at_once_leave_no_half_slice_though_one_may_be_ordered_for_nothing() -> None:
    """Ray's arithmetic: a host less of each of two slices, rounded down, is one slice less; KubeRay removes both."""
    running = served(FOUR, slices=3)
    kept, *idle = running.replicas
    for replica in idle:
        running.free(replica, lambda pod: 601 if pod.host == 0 else 599)
    running.rounds(5)
    assert running.replicas[0] == kept
    assert set(running.replicas).isdisjoint(idle)
    assert ordered(running) == (2, 8)


@pytest.mark.parametrize("path", GOLDENS, ids=[path.stem for path in GOLDENS])
def test_ray_reads_from_every_manifest_what_its_slices_are_asked_for_by(path: Path) -> None:
    spec = ray_cluster(path.read_text())
    types = _generate_available_node_types_from_ray_cr_spec(spec)
    for group in spec["workerGroupSpecs"]:
        host = types[group["groupName"]]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert host["resources"][f"TPU-{host['labels']['ray.io/tpu-pod-type']}-head"] == 1
        assert host["resources"]["TPU"] == int(limits["google.com/tpu"])
