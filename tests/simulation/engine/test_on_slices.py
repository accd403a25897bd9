"""The whole service on simulated slices with the simulated engine, and what becomes of it when a slice dies."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from ray._raylet import GcsClient
from support.leases import Leases
from support.service import MODEL, Service, service

from serving.simulation import processes
from serving.state.gcs import show_token
from serving.state.records import SliceRecord, SliceState

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BORROWS = "one chip, 3"

SLICES = 3
MOST_MEMORY = 180e6  # its own: how many pages of shared libraries count is the kernel's choice


@pytest.fixture(scope="module")
def running(leases: Leases) -> Iterator[Service]:
    one_chip = {"generation": "v6e", "topology": "1x1"}
    with service(
        leases,
        slices=SLICES,
        engine="simulated",
        startup="load=3",  # a slice says twice a second what it is at
        slice=one_chip,
        replicas=SLICES,
        stall_s=3,
    ) as found:
        yield found


def test_every_slice_serves_and_says_that_it_is_simulated(running: Service) -> None:
    entries = running.serving()
    assert len({entry.slice for entry in entries}) == SLICES
    for entry in entries:
        assert entry.simulated
        phases = dict(entry.phases)
        assert "loading weights" in phases
        print(f"{entry.slice}: {phases}")
    card = httpx.get(f"{running.address}/v1/models").json()["data"][0]
    assert card["simulated"]


def test_a_replica_is_small_and_holds_no_other_engine(running: Service) -> None:
    for entry in running.serving():
        (process,) = (
            one for one in running.cluster.processes(entry.slice, 0) if _listens(one, entry.address)
        )
        used = process.memory_full_info().uss
        print(f"{entry.slice}: {used / 1e6:.0f} MB")
        assert used < MOST_MEMORY
        loaded = {Path(each.path).name for each in process.memory_maps()}
        assert not any(name.startswith(("libtorch", "libjax", "xla_")) for name in loaded)


def _listens(process: psutil.Process, address: str) -> bool:
    port = int(address.rpartition(":")[2])
    return port in {listened for _, listened in processes.listening(process)}


def test_who_has_neither_the_token_nor_the_secret_gets_into_no_slice_and_not_into_ray(
    running: Service,
) -> None:
    """As a pod beside the cluster would try: Ray's control store, and every slice's own port."""
    try:
        show_token({"RAY_AUTH_MODE": "disabled"})
        with pytest.raises(ray.exceptions.AuthenticationError):
            GcsClient(address=running.cluster.address).internal_kv_keys(b"", b"tpu-serving")
    finally:
        show_token(running.cluster.environment)
    for entry in running.serving():
        assert httpx.get(f"{entry.address}/metrics").status_code == 401
        assert httpx.post(f"{entry.address}/simulator/faults", json={"die": True}).status_code == 401
        assert httpx.get(f"{entry.address}/health").is_success
    page = httpx.get(f"{running.address}/metrics", timeout=10).text
    assert f'tpu_serving_scrape_sources_unreachable{{application="{running.application}"}} 0\n' in page
    for path in running.cluster.directory.rglob("*.log"):
        assert running.cluster.secret.encode() not in path.read_bytes()


def die(running: Service, victim: SliceRecord) -> None:
    running.fault(victim, die=True)


def lose_its_host(running: Service, victim: SliceRecord) -> None:
    running.cluster.kill_host(victim.slice, 0)
    running.cluster.restart_host(victim.slice, 0)


def load(running: Service) -> tuple[list[httpx.Response], list[threading.Thread]]:
    """Nine clients that each ask six times, and what they are answered; every slice has some of it."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        asked = {"prompt": "x", "max_tokens": 40, "ignore_eos": True}
        answers.extend(running.post("/v1/completions", **asked) for _ in range(6))

    askers = [threading.Thread(target=ask) for _ in range(9)]
    for asker in askers:
        asker.start()
    running.until(lambda: any(entry.running for entry in running.serving()), "load")
    return answers, askers


@pytest.mark.parametrize("end", [die, lose_its_host])
def test_a_slice_that_ends_under_load_takes_only_its_own_requests(
    running: Service, end: Callable[[Service, SliceRecord], None]
) -> None:
    answers, askers = load(running)
    victim = running.serving()[0]
    end(running, victim)
    for asker in askers:
        asker.join()
    good = [answer for answer in answers if answer.is_success]
    print(f"{len(good)} of {len(answers)} answered")
    assert all(answer.json()["usage"]["completion_tokens"] == 40 for answer in good)
    assert all(answer.status_code in (500, 503) for answer in answers if not answer.is_success)
    assert len(good) >= len(answers) - 9
    running.until(lambda: replaced(running, victim), "another replica in the place of the one that ended")
    assert running.post("/v1/completions", prompt="x", max_tokens=1).json()["model"] == MODEL


def replaced(running: Service, victim: SliceRecord) -> bool:
    found = running.until_serving(SLICES)
    return victim.replica not in {entry.replica for entry in found}


def test_a_slice_that_hangs_is_given_up_after_stall_s_and_says_where_it_hung(running: Service) -> None:
    victim = running.serving()[0]
    running.fault(victim, hang=True)
    (reason,) = running.until(
        lambda: [
            entry.reason
            for entry in running.entries()
            if entry.replica == victim.replica and entry.state is SliceState.LOST
        ],
        "the hang",
    )
    told = re.fullmatch(
        r"the engine or one of its workers has not answered for \d+ s; stacks and last log lines in (\S+) on (\S+)",
        reason,
    )
    assert told is not None
    assert told[2] == victim.hosts[0]
    report = Path(told[1]).read_text()
    assert "Engine._while_hanging" in report  # what its tasks wait for
    assert "== replica (pid " in report
    assert "Current thread" in report
    assert report.count("=== host ") == len(victim.hosts)
    running.until(lambda: replaced(running, victim), "another replica in the place of the one that hangs")
    assert running.post("/v1/completions", prompt="x", max_tokens=1).is_success


def test_what_a_slice_on_a_stopped_host_has_goes_elsewhere(running: Service) -> None:
    """Its kernel keeps every connection up."""
    answers, askers = load(running)
    victim = next(entry for entry in running.serving() if entry.running)
    for process in running.cluster.processes(victim.slice, 0):
        process.suspend()
    try:
        for asker in askers:
            asker.join(timeout=30)
        assert [asker for asker in askers if asker.is_alive()] == []
        assert {answer.status_code for answer in answers} == {200}
    finally:
        lose_its_host(running, victim)
    running.until(lambda: replaced(running, victim), "another replica in the place of the stopped one")
