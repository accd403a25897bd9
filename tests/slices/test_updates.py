"""A changed YAML on a running service of two simulated engines, under load."""

import time
from collections.abc import Iterator

import pytest
from support.leases import Leases
from support.load import load
from support.servers import until
from support.service import FAILED, ROUTER_END_UNDER_LOAD_S, Service, service

from serving.state.records import SliceRecord

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BORROWS = "one chip, 3"

SURGE_S = 4


@pytest.fixture(scope="module")
def running(leases: Leases) -> Iterator[Service]:
    one_chip = {"generation": "v6e", "topology": "1x1"}
    changes = {"slice": one_chip, "replicas": 2, "surge_s": SURGE_S, "stall_s": 5}
    with service(
        leases, slices=3, engine="simulated", router_end_s=ROUTER_END_UNDER_LOAD_S, **changes
    ) as started:
        yield started


def replicas(running: Service) -> set[str]:
    return {entry.replica for entry in running.serving()}


def until_replaced(running: Service, before: set[str]) -> list[SliceRecord]:
    def done() -> list[SliceRecord]:
        entries = running.serving()
        return entries if len(entries) == 2 and not before & replicas(running) else []

    entries: list[SliceRecord] = running.until(done, "both slices to be replaced")
    return entries


def test_limits_and_scaling_change_without_a_restart(running: Service) -> None:
    before = replicas(running)
    with load(running) as wrong:
        running.deploy(drain_s=50, stall_s=6, replicas={"min": 2, "max": 3})
        running.until(lambda: running.records().ordered, "scaling to begin")
    assert replicas(running) == before
    assert wrong == []


def test_a_changed_engine_rolls_over_the_spare_slice_without_a_lost_request(running: Service) -> None:
    before = replicas(running)
    with load(running) as wrong:
        running.deploy(engine={"max_model_len": 8192, "max_num_seqs": 100})
        until_replaced(running, before)
    assert wrong == []


def test_without_a_spare_slice_an_old_one_makes_room(running: Service) -> None:
    used = {entry.slice for entry in running.serving()}
    (spare,) = {one.name for one in running.cluster.status()} - used
    running.cluster.kill_slice(spare)
    shape = running.cluster.status()[0].shape
    before = replicas(running)
    try:
        with load(running) as wrong:
            running.deploy(engine={"max_model_len": 8192, "max_num_seqs": 64})
            entries = until_replaced(running, before)
        assert {entry.slice for entry in entries} == used
        assert wrong == []
    finally:
        running.cluster.add_slice(shape)


def test_an_engine_that_does_not_start_stops_the_roll_and_the_old_ones_serve_on(running: Service) -> None:
    before = replicas(running)
    good = running.model()["engine"]
    with load(running) as wrong:
        running.deploy(engine={"max_model_len": 8192, "tokenizer": "/not/mounted"})
        until(lambda: FAILED in running.logged(), "the roll to fail")
        time.sleep(3 * SURGE_S)  # what is not to happen can't be awaited: an old one that makes room
    assert replicas(running) == before
    assert wrong == []
    assert "engine.tokenizer is /not/mounted, which is not on this host" in running.logged()
    running.deploy(engine=good)
