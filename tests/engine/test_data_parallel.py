"""A real engine with data parallelism on one simulated host: its schedulers are forks that hold the chips too."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.leases import Leases
from support.service import Service, service

from serving.simulation.processes import called
from serving.slices.preflight import chip_holders

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def running(leases: Leases) -> Iterator[Service]:
    with service(
        leases,
        slices=1,
        slice={"generation": "v6e", "topology": "2x2"},
        parallel={"data": 2, "tensor": 2},
    ) as started:
        yield started


def chips(running: Service) -> list[str]:
    return [str(path) for path in Path(running.cluster.directory).glob("chips/*/*") if path.is_file()]


def test_a_killed_replica_lets_the_chips_go_and_the_slice_serves_again(running: Service) -> None:
    (entry,) = running.until_serving(1)
    before = running.post("/v1/completions", prompt="one two", max_tokens=8, temperature=0)
    assert before.is_success, before.text
    processes = called("EngineCore", running.cluster.processes())
    (core,) = [process for process in processes if process.parent() not in processes]
    assert len(processes) == 3, "EngineCore and two schedulers"
    assert chip_holders(chips(running)), "no chip is held while an engine runs"
    replica = core.parent()
    assert replica
    os.kill(replica.pid, signal.SIGKILL)
    running.until(lambda: not chip_holders(chips(running)), "the chips are let go")
    running.until(
        lambda: [new for new in running.serving() if new.replica != entry.replica], "a new engine serves"
    )
    after = running.post("/v1/completions", prompt="one two", max_tokens=8, temperature=0)
    assert after.json()["choices"][0]["text"] == before.json()["choices"][0]["text"]


def test_a_grammar_is_refused_and_ends_no_engine(running: Service) -> None:
    """Its schedulers' processes take no request whose grammar is being compiled."""
    running.until_serving(1)
    refused = running.post("/v1/completions", prompt="one", structured_outputs={"choice": ["a", "b"]})
    assert refused.status_code == 400
    assert "parallel.data" in refused.json()["error"]["message"]
    assert running.post("/v1/completions", prompt="one", max_tokens=2).is_success
