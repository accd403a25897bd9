"""Batches on real Serve: the owner of the database, a router and the slice are killed in turn, and no result is lost or doubled."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.batches import line
from support.leases import Leases
from support.service import MODEL, Service, service

from serving.simulation.processes import called

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BORROWS = "one chip, 2"
LINES = 1500


@pytest.fixture
def running(leases: Leases, tmp_path: Path) -> Iterator[Service]:
    with service(
        leases,
        slices=2,
        engine="simulated",
        slice={"generation": "v6e", "topology": "1x1"},
        replicas=1,
        router={"replicas": 2},
        store=str(tmp_path / "store"),
    ) as started:
        yield started


def test_a_batch_outlives_the_store_a_router_and_a_slice(running: Service) -> None:
    api = openai.OpenAI(base_url=f"{running.address}/v1", api_key="none", max_retries=8)
    text = "\n".join(line(f"r{at}", model=MODEL, max_tokens=64) for at in range(LINES))
    file = api.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    made = api.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="1h")

    def done(name: str = made.id) -> int:
        counts = api.batches.retrieve(name).request_counts
        return counts.completed if counts else 0

    running.until(lambda: done() > 20, "the first results")
    (store,) = called("ServeReplica:" + running.application + ":store", running.cluster.processes())
    store.kill()
    before = done_after_a_restart(api, made.id)
    running.until(lambda: done() > before, "results after the store was killed")
    called("ServeReplica:" + running.application + ":router", running.cluster.processes())[0].kill()
    before = done_after_a_restart(api, made.id)
    running.until(lambda: done() > before, "results after a router was killed")
    assert done() < LINES
    victim = running.serving()[0]
    running.cluster.kill_slice(victim.slice)
    running.until(lambda: api.batches.retrieve(made.id).status == "completed", "the end")
    batch = api.batches.retrieve(made.id)
    assert batch.request_counts
    assert (batch.request_counts.completed, batch.request_counts.failed) == (LINES, 0)
    # Each router says once a second what it has used; the one that was killed took its last second with it.
    running.until(
        lambda: sum(used.requests for used in running.records().usage) > LINES / 2,
        "usage of today is told",
    )
    assert batch.output_file_id
    rows = [json.loads(row) for row in api.files.content(batch.output_file_id).text.splitlines()]
    assert [row["custom_id"] for row in rows] == [f"r{at}" for at in range(LINES)]


def done_after_a_restart(api: openai.OpenAI, name: str, timeout_s: float = 60) -> int:
    """How many lines are done, once there is somebody to say it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            counts = api.batches.retrieve(name).request_counts
        except openai.APIError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return counts.completed if counts else 0
