"""What Serve's own classes make of replicas that a controller finds; replicas and their answers are stand-ins."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import ReplicaState
from ray.serve._private.deployment_state import ActorReplicaWrapper, ReplicaStartupStatus
from support.serve_deployment import Cluster

from serving.slices import recovery
from serving.state.records import SliceRecord, SliceState

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),  # Ray's
]

PENDING = ReplicaStartupStatus.PENDING_INITIALIZATION


def record(tag: str, state: SliceState) -> SliceRecord:
    return SliceRecord(tag, "llama", state, "", "", tag=tag)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What replicas say of whether they are initialized, by the object of the question; absent before they answer."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(
        recovery,
        "ray",
        SimpleNamespace(
            wait=lambda refs, timeout: ([ref for ref in refs if ref in told], timeout), get=told.__getitem__
        ),
    )
    return told


class Wrapper:
    """A replica that a controller found. Serve itself would end it once it says that it is not initialized."""

    def __init__(self, tag: str) -> None:
        self._replica_id = SimpleNamespace(unique_id=tag)
        self._was_initialized_obj_ref: str | None = "first"
        self._actor_handle = SimpleNamespace(was_initialized=SimpleNamespace(remote=lambda: "again"))

    def check_ready(self) -> tuple[str, None]:
        return "Serve's own", None


@pytest.mark.parametrize(("why", "failures"), [("placed anew", 0), ("left", 0), ("store away", 3), ("", 3)])
def test_a_replica_that_is_ended_to_be_placed_elsewhere_or_leaves_is_no_failure_of_its_version(
    why: str, failures: int
) -> None:
    """Each quarantine that began or ended counted as a failed start of every replica that waited, and so did each notice
    to a host of a slice that started: the third stopped a roll.
    """
    there = Cluster(hardware=1)
    llama = there.deployed()
    llama.deploy("a", 3)
    there.run(2)
    waiting = llama.replicas(ReplicaState.STARTING)
    wrapper_class: Any = type("Own", (ActorReplicaWrapper,), {})
    wrapper_class.check_ready = lambda _: (ReplicaStartupStatus.FAILED, "the actor died")

    def records() -> list[SliceRecord]:
        if why == "store away":
            raise ConnectionError("the head restarts")
        state = SliceState.DRAINING if why == "left" else SliceState.STARTING
        return [record(replica.replica_id.unique_id, state) for replica in waiting]

    recovery.install(wrapper_class, there.state_class, records, placed_anew=lambda _: why == "placed anew")
    for replica in waiting:
        replica._actor.__class__ = wrapper_class
    llama.state._check_startup_replicas(ReplicaState.STARTING)
    assert llama.replicas(ReplicaState.STOPPING) == waiting
    assert llama.state._replica_failure_count == failures


class State:
    def _check_startup_replicas(self, _state: Any, *, stop_on_slow: bool = False) -> list[Any]:
        raise AssertionError(stop_on_slow)


@pytest.mark.parametrize(
    ("state", "initialized", "becomes"),
    [
        (SliceState.STARTING, None, PENDING),
        (SliceState.STARTING, False, PENDING),
        (SliceState.SERVING, False, PENDING),
        (SliceState.SERVING, True, "Serve's own"),
        (SliceState.LOST, False, "Serve's own"),
        (None, False, PENDING),
    ],
)
def test_a_replica_whose_engine_starts_is_waited_for(
    answers: dict[str, Any], state: SliceState | None, initialized: bool | None, becomes: Any
) -> None:
    wrapper_class: Any = type("Own", (Wrapper,), {})
    recovery.install(
        wrapper_class, type("OwnState", (State,), {}), lambda: [record("r", state)] if state else []
    )
    if initialized is not None:
        answers["first"] = initialized
    wrapper = wrapper_class("r")
    assert wrapper.check_ready() == (becomes, None)
    if becomes is PENDING and initialized is False:
        assert wrapper.check_ready() == (PENDING, None)  # asked again, without an answer yet
        answers["again"] = True
        assert wrapper.check_ready() == ("Serve's own", None)


def test_no_start_is_ended_while_the_store_can_t_be_read(answers: dict[str, Any]) -> None:
    def away() -> list[SliceRecord]:
        raise ConnectionError("the head restarts")

    wrapper_class: Any = type("Own", (Wrapper,), {})
    recovery.install(wrapper_class, type("OwnState", (State,), {}), away)
    answers["first"] = False
    assert wrapper_class("r").check_ready() == (PENDING, None)


def test_of_slow_replicas_that_a_controller_found_serve_ends_those_alone_whose_engine_does_not_start() -> (
    None
):
    there = Cluster(hardware=4, start_s=10)
    llama = there.deployed()
    llama.deploy("a", 2)
    there.run(20)
    found = llama.replicas(ReplicaState.RUNNING)
    loading, hung = found
    for replica in found:
        replica._start_time = 1.0  # long ago
        replica.check_started = lambda: (PENDING, None)
    llama.move(found, ReplicaState.RECOVERING)
    records = [
        record(loading.replica_id.unique_id, SliceState.STARTING),
        record(hung.replica_id.unique_id, SliceState.SERVING),
    ]
    wrapper_class: Any = type("Own", (ActorReplicaWrapper,), {})
    recovery.install(wrapper_class, there.state_class, lambda: records)
    llama.state._check_startup_replicas(ReplicaState.RECOVERING, stop_on_slow=True)
    assert llama.replicas(ReplicaState.RECOVERING) == [loading]
    assert llama.replicas(ReplicaState.STOPPING) == [hung]
