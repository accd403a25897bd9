from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from serving.slices.tpu_hosts import WEBHOOK, TpuHost, by_slice, lacks, nameless, tpu_hosts, why_waiting
from serving.tpu import resolve

pytestmark = pytest.mark.unit
SHAPE = resolve("v6e", "4x4")
SMALL = resolve("v6e", "2x4", hosts=2)
POOL = "v6e-4x4-4h-spot"


def node(worker: int | None, name: str | None = "a", **changes: Any) -> dict[str, Any]:
    """A host of a v6e 4x4 slice as `ray.nodes()` has it."""
    labels = {"ray.io/tpu-pod-type": "v6e-16", "ray.io/tpu-topology": "4x4"}
    labels |= {"ray.io/tpu-slice-name": name} if name else {}
    labels |= {"ray.io/tpu-worker-id": str(worker)} if worker is not None else {}
    resources = {"TPU": 4.0, "CPU": 180.0} | ({"TPU-v6e-16-head": 1.0} if worker == 0 and name else {})
    return {
        "NodeID": f"{name}-{worker}",
        "NodeManagerAddress": f"10.0.0.{worker if worker is not None else 9}",
        "NodeManagerPort": 700,
        "Alive": True,
        "Labels": labels,
        "Resources": resources,
    } | changes


def whole(name: str = "a") -> list[TpuHost]:
    return tpu_hosts([node(worker, name) for worker in range(4)])


def said_of(nodes: Sequence[dict[str, Any]]) -> str:
    ((name, hosts),) = by_slice(tpu_hosts(nodes)).items()
    return lacks(name, hosts, SHAPE)


def test_a_whole_slice_lacks_nothing_and_a_head_without_tpus_is_no_host() -> None:
    head = node(None, None, Labels={}, Resources={"CPU": 8.0, "node:__internal_head__": 1.0})
    gone = node(7, "b", Alive=False)
    assert tpu_hosts([head, gone]) == []
    assert said_of([head, *(node(worker) for worker in (3, 1, 0, 2)), gone]) == ""


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (
            [node(0), node(1), node(3)],
            "3 of 4 hosts of slice a are there; worker 2 is missing",
        ),
        ([node(1), node(2)], "2 of 4 hosts of slice a are there; workers 0, 3 are missing"),
        (
            [node(worker) for worker in (0, 1, 1, 2, 3)],
            "slice a has worker 1 2 times (10.0.0.1, 10.0.0.1): two slices have one TPU_NAME",
        ),
        (
            [node(worker) for worker in range(5)],
            "slice a has a worker 4, and v6e 4x4 (4 hosts x 4 chips) has 4 hosts",
        ),
        (
            [node(0), node(1, Resources={"TPU": 1.0}), node(2), node(3)],
            "host 1 (10.0.0.1) of slice a has 1 chip in Ray, and v6e 4x4 (4 hosts x 4 chips) has 4 a host",
        ),
        (
            [node(0, Resources={"TPU": 4.0}), node(1), node(2), node(3)],
            "worker 0 of slice a (10.0.0.0) lacks the resource TPU-v6e-16-head",
        ),
    ],
)
def test_what_a_slice_lacks_is_said_in_words(nodes: list[dict[str, Any]], said: str) -> None:
    assert said_of(nodes) == said


def test_hosts_without_the_webhooks_variables_are_named() -> None:
    assert nameless(whole()) == ""
    assert (
        nameless(tpu_hosts([node(1, None), node(2, None)])) == "2 hosts without TPU_NAME (10.0.0.1, 10.0.0.2)"
    )
    assert nameless(tpu_hosts([node(None)])) == "1 host without TPU_WORKER_ID (10.0.0.9)"


@pytest.mark.parametrize(
    ("hosts", "taken", "left_out", "said"),
    [
        (whole(), [], [], ""),
        ([], [], [], "no host of v6e 4x4 (4 hosts x 4 chips) (v6e-16) has joined"),
        (whole(), ["a"], [], "1 slice of v6e 4x4 (4 hosts x 4 chips) is in use"),
        (whole(), [], ["a"], "slice a is in quarantine"),
        ([*whole(), *whole("b")], ["a"], ["a"], ""),
        (
            tpu_hosts([node(0), node(1), node(3)]),
            [],
            [],
            "3 of 4 hosts of slice a are there; worker 2 is missing",
        ),
        (
            tpu_hosts([node(worker, None) for worker in range(4)]),
            [],
            [],
            f"4 hosts without TPU_NAME (10.0.0.0, 10.0.0.1, 10.0.0.2, 10.0.0.3); {WEBHOOK}",
        ),
    ],
)
def test_why_a_model_waits_is_said_in_words(
    hosts: list[TpuHost], taken: list[str], left_out: list[str], said: str
) -> None:
    assert why_waiting([(SHAPE, POOL)], hosts, taken, left_out) == said


def test_a_slice_of_another_shape_does_not_help() -> None:
    small = SMALL, "v6e-2x4-2h-spot"
    assert why_waiting([small], whole(), []) == "no host of v6e 2x4 (2 hosts x 4 chips) (v6e-8) has joined"
    assert why_waiting([small, (SHAPE, POOL)], whole(), []) == ""


def test_a_slice_of_another_pool_does_not_help_and_one_of_none_does() -> None:
    labelled = [replace(host, pool="v6e-4x4-4h-on-demand") for host in whole("b")]
    said = f"1 slice of {SHAPE} is of another pool (v6e-4x4-4h-on-demand), and none of v6e-4x4-4h-spot"
    assert why_waiting([(SHAPE, POOL)], labelled, []) == said
    assert why_waiting([(SHAPE, POOL)], [*whole(), *labelled], []) == ""
    assert why_waiting([(SHAPE, POOL)], [*whole(), *labelled], ["a"]) == f"1 slice of {SHAPE} is in use"
