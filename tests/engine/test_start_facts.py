"""What the workers of a real engine tell of its start: two simulated hosts of four devices, and the doctor on it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.leases import Leases
from support.service import PRECOMPILE_WORKERS, two_replicas

from serving.doctor.facts import Facts
from serving.doctor.findings import Verdict
from serving.doctor.start_checks import START
from serving.simulation.processes import called
from serving.state.records import FIRST_REQUESTS, StartRecord

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BORROWS = "two hosts, 3"


def test_workers_tell_what_they_found_and_what_the_first_hundred_requests_compiled(leases: Leases) -> None:
    running = two_replicas(leases)
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(
            lambda at: running.post("/v1/completions", prompt="x " * (1 + at % 20), max_tokens=1 + at % 3),
            range(2 * FIRST_REQUESTS),  # one of the two slices has its first hundred
        )
        assert all(answer.is_success for answer in answers)

    def started() -> dict[str, StartRecord]:
        records = {entry.replica: running.store.start(entry.replica) for entry in running.serving()}
        return {replica: record for replica, record in records.items() if record}

    starts = running.until(
        lambda: any(record.late_programs is not None for record in started().values()) and started(),
        "what the first requests compiled",
    )
    plan = running.plan()
    for entry in running.serving():
        workers = [
            worker
            for host in (0, 1)
            for worker in called("RayWorkerProc", running.cluster.processes(entry.slice, host))
        ]
        assert [worker.environ()["NUM_PRECOMPILE_WORKERS"] for worker in workers] == [PRECOMPILE_WORKERS] * 2
        record = starts[entry.replica]
        assert [worker.worker_id for worker in record.workers] == [0, 1]
        assert [worker.process_index for worker in record.workers] == [0, 1]
        for worker in record.workers:
            assert (worker.local_devices, worker.devices, worker.summed) == (4, 8, 8)
            assert dict(worker.mesh) == plan.layout.mesh
            assert worker.implementation == "flax_nnx"
            assert worker.programs > worker.cache_hits >= 0
            assert worker.compile_s > 0
            assert worker.cache_tokens >= plan.fit.max_model_len
            assert not worker.precompiles
        assert record.late_programs is None or record.requests >= FIRST_REQUESTS
        assert "checking the devices" in dict(entry.phases)
    facts = Facts(
        [plan],
        {},
        snapshot=running.records(),
        starts=starts,
        models={running.application: [plan.model.name]},
    )
    findings = {check.name: check.decide(facts) for check in START}
    for name, of_check in findings.items():
        print(name, *(f"{finding.verdict}: {finding.said}" for finding in of_check), sep="\n  ")
    assert {finding.verdict for of_check in findings.values() for finding in of_check} <= {
        Verdict.OK,
        Verdict.NOT_LOOKED_AT,
    }
