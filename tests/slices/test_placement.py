import dataclasses
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
from support.memory_store import MemoryStore, MemoryTable

from serving.errors import ClusterError, ExtensionPointError
from serving.slices import placement
from serving.state.records import Release, SliceFailures, SliceRecord, SliceState, Snapshot
from serving.tpu import POD_TYPE_LABEL, POOL_LABEL, SLICE_LABEL, resolve

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("generation", "topology", "hosts"), [("v6e", "1x1", 1), ("v6e", "2x4", 2), ("v7x", "2x2x2", 2)]
)
def test_the_bundles_of_a_slice_are_known_as_such(generation: str, topology: str, hosts: int) -> None:
    assert placement.is_slice(resolve(generation, topology, hosts).bundles())


@pytest.mark.parametrize(
    "bundles", [[], [{"CPU": 1}], [{"TPU": 4}, {"TPU": 4}], [{"TPU": 4}, {"TPU-v6e-8-head": 1, "TPU": 4}]]
)
def test_other_bundles_are_left_to_serve(bundles: list[dict[str, float]]) -> None:
    assert not placement.is_slice(bundles)


def test_a_slice_of_new_hosts_is_not_left_out_for_what_happened_on_those_it_replaces() -> None:
    failures = SliceFailures(
        slice="llama-0",
        host="10.0.0.2",
        pod_type="v6e-8",
        failures=8,
        at=1000.0,
        reason="wrong tokens",
        version="",
        replica="one",
    )

    def left_out(*addresses: str) -> frozenset[str]:
        labels = {SLICE_LABEL: "llama-0", POD_TYPE_LABEL: "v6e-8"}
        nodes = [
            {"Alive": alive, "Labels": labels, "NodeManagerAddress": address}
            for alive, address in [(False, "10.0.0.2"), *((True, address) for address in addresses)]
        ]
        return placement.slices_left_out(
            Snapshot(slice_failures=(failures,)), "v6e-8", "1", 1001.0, nodes=nodes
        )

    assert left_out("10.0.0.1", "10.0.0.2") == {"llama-0"}
    assert left_out("10.0.0.3", "10.0.0.4") == frozenset()


def labelled(name: str, pool: str, pod_type: str = "v6e-8", *, alive: bool = True) -> dict[str, Any]:
    """A host as `ray.nodes()` has it."""
    labels = {SLICE_LABEL: name, POD_TYPE_LABEL: pod_type} | ({POOL_LABEL: pool} if pool else {})
    return {"Alive": alive, "Labels": labels, "NodeManagerAddress": name}


SPOT, ON_DEMAND, RESERVED = (f"v6e-2x4-2h-{way}" for way in ("spot", "on-demand", "reserved-mine"))


def test_a_replica_is_kept_off_hosts_that_are_bought_for_other_pools() -> None:
    nodes = [
        labelled("a", SPOT),
        labelled("b", ON_DEMAND),
        labelled("c", ""),
        labelled("d", "v6e-2x4-2h-of-a-yaml-before"),
        labelled("e", "v6e-2x4-2h-gone", alive=False),
        labelled("f", "v6e-4x4-4h-spot", "v6e-16"),
    ]
    release = Release("v1", SPOT, (ON_DEMAND, RESERVED))
    without = placement.left_out(Snapshot(), nodes, "v6e-8", release, 0.0)
    assert without.pools == {ON_DEMAND, RESERVED, "v6e-2x4-2h-of-a-yaml-before"}
    assert (
        placement.left_out(Snapshot(), [labelled("c", "")], "v6e-8", Release("v1", SPOT), 1001.0).pools
        == frozenset()
    )
    assert placement.left_out(Snapshot(), nodes, "v6e-8", None, 0.0).pools == frozenset()


def test_a_suspected_slice_is_tried_though_another_pool_has_a_free_one() -> None:
    """The engine may be at fault, and no other slice of the pool is there to be tried."""
    failures = SliceFailures("a", "a", "v6e-8", 2, 1000.0, "why", "v1", "one")
    nodes = [labelled("a", SPOT), labelled("b", ON_DEMAND)]
    snapshot = Snapshot(slice_failures=(failures,))
    assert placement.left_out(snapshot, nodes, "v6e-8", Release("v1", SPOT), 1001.0).slices == frozenset()
    assert placement.left_out(
        snapshot, [*nodes, labelled("c", "")], "v6e-8", Release("v1", SPOT), 1001.0
    ).slices == {"a"}


def test_a_group_waits_on_while_nothing_more_is_left_out() -> None:
    asked = placement.Without(frozenset({"a"}), frozenset({SPOT, RESERVED}))
    assert asked.suffices(placement.Without(frozenset({"a"}), frozenset({SPOT})))
    assert not asked.suffices(placement.Without(frozenset({"a"}), frozenset({ON_DEMAND})))
    assert not asked.suffices(placement.Without(frozenset(), frozenset({SPOT})))


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # Ray's
def test_this_version_of_ray_has_the_extension_point() -> None:
    from ray.serve._private import default_impl

    assert callable(placement._extension_point(default_impl))


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # Ray's
def test_the_slice_that_costs_least_to_drain_stops_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over Serve's own scheduler, which looks at nodes and not at what replicas do."""
    from ray.serve._private import deployment_scheduler
    from ray.serve._private.common import DeploymentID, ReplicaID

    scheduler_class = deployment_scheduler.DeploymentScheduler
    monkeypatch.setattr(
        scheduler_class, placement._STOP_POINT, getattr(scheduler_class, placement._STOP_POINT)
    )
    told: list[str] = []
    store: Any = SimpleNamespace(slices=list, put_stop=told.append)
    placement._stop_the_cheapest(lambda: store)
    nodes = SimpleNamespace(get_node_labels=lambda _: {})
    scheduler = scheduler_class(nodes, "head", lambda _: None)
    ours, other = DeploymentID(name="llama", app_name="a"), DeploymentID(name="router", app_name="a")
    for deployment in (ours, other):
        scheduler.on_deployment_created(deployment, deployment_scheduler.SpreadDeploymentSchedulingPolicy())
        for number in range(3):
            scheduler.on_replica_running(ReplicaID(str(number), deployment), f"node-{number}")
    found = [
        SliceRecord(
            str(number),
            "llama",
            SliceState.SERVING,
            "",
            "",
            tag=str(number),
            deployment="a#llama",
            running=running,
        )
        for number, running in enumerate((5, 1, 3))
    ]
    store.slices = lambda: found

    def stopped(deployment: DeploymentID, most: int) -> set[str]:
        return {one.unique_id for one in scheduler._get_replicas_to_stop(deployment, most)}

    assert stopped(ours, 1) == {"1"}
    assert stopped(ours, 2) == {"1", "2"}
    assert stopped(other, 1) == {"0"}  # Serve's choice: not on the board
    scheduler._pending_replicas[ours][ReplicaID("3", ours)] = None
    assert stopped(ours, 1) == {"3"}
    assert stopped(ours, 2) == {"3", "1"}
    assert not told  # the one that waits for hardware has no process, and so no record
    found.append(dataclasses.replace(found[0], replica="starts", state=SliceState.STARTING, tag="3"))
    assert stopped(ours, 2) == {"3", "1"}
    assert told == ["starts"]
    store.slices = lambda: 1 / 0
    assert stopped(ours, 2) == {"3", "0"}


def test_a_ray_without_the_extension_point_is_refused_by_version_and_name() -> None:
    module = ModuleType("ray.serve._private.default_impl")
    with pytest.raises(ExtensionPointError) as refusal:
        placement._extension_point(module)
    assert refusal.value.message.startswith(
        f"Ray {ray.__version__} has no ray.serve._private.default_impl._default_create_placement_group"
    )
    assert "install ray[serve]==2.60.0" in refusal.value.message


def test_the_controller_tells_all_processes_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarantine that a host wrote whose clock was an hour off was over at once, or lasted an hour more."""
    table = MemoryTable()
    controller, elsewhere = MemoryStore(table), MemoryStore(table)
    looks = iter([None])

    def sleep(_: float) -> None:
        if next(looks, "over"):
            raise KeyboardInterrupt

    monkeypatch.setattr(placement, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(KeyboardInterrupt):
        placement._Waiting(lambda: controller).run()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    elsewhere.read()
    assert elsewhere.now() == pytest.approx(controller.now(), abs=60)
    assert elsewhere.now() > 1e9


def test_a_replica_that_waits_is_left_alone_while_the_store_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was ended for one that left nothing out, and that one was placed on the slice in quarantine."""
    removed: list[object] = []
    monkeypatch.setattr(
        ray.util,
        "placement_group_table",
        lambda: {"id": {"name": "SERVE_REPLICA::app#m#1", "state": "PENDING"}},
    )
    monkeypatch.setattr(ray.util, "remove_placement_group", removed.append)

    def away() -> Any:
        raise ClusterError("the head restarts")

    waiting = placement._Waiting(away)
    without = placement.Without(frozenset({"llama-0"}))
    waiting.add("SERVE_REPLICA::app#m#1", [{"TPU-v6e-8-head": 1}], "group", without)
    with pytest.raises(ClusterError):
        waiting.look()
    assert removed == []
    assert not waiting.has_ended("SERVE_REPLICA::app#m#1")
    assert waiting.left_out_of_new("SERVE_REPLICA::app#m#2", [{"TPU-v6e-8-head": 1}]) == placement.Without()
