"""The head ends and comes back on its disk: real Ray, Serve and HAProxy, simulated slices and engines."""

import httpx
import psutil
import pytest
from support.leases import Leases
from support.service import Service, service

from serving.simulation.processes import called

pytestmark = pytest.mark.cluster
BORROWS = "two hosts, 2"


def answers(running: Service) -> bool:
    return running.post("/v1/completions", timeout_s=5, prompt="hello", max_tokens=4).is_success


@pytest.mark.slow
def test_slices_outlive_the_head_and_all_works_under_the_new_one(leases: Leases) -> None:
    with service(
        leases, slices=2, engine="simulated", replicas={"min": 1, "max": 2}, cool_down_s=600
    ) as running:
        before = {one.replica: one.since for one in running.serving()}
        decided = running.records().decisions

        def replicas() -> list[
            psutil.Process
        ]:  # by a title that Ray gives them once Serve's own call is over
            return called("ServeReplica", [p for name in used for p in running.cluster.processes(name, 0)])

        used = [one.slice for one in running.serving()]
        workers = running.until(replicas, "the replicas' processes")
        assert len(workers) >= len(before)
        running.cluster.restart_head()
        with pytest.raises(httpx.TransportError):  # the front door stood there too
            answers(running)
        running.until(lambda: answers(running), "an answer")
        running.until_serving(1)
        assert {one.replica: one.since for one in running.serving()} == before
        assert all(process.is_running() for process in workers)
        assert running.records().decisions[: len(decided)] == decided

        lost = running.serving()[0]
        running.cluster.kill_host(lost.slice, 1)
        running.until(
            lambda: (
                len(running.serving()) == 1 and lost.replica not in {one.replica for one in running.serving()}
            ),
            "the spare in place of a lost slice",
        )
        running.until(lambda: answers(running), "an answer")
