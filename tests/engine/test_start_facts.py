"""What the workers of a real engine tell of its start: two simulated hosts of four devices, and the doctor on it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.leases import Leases
from support.service import called, service

from serving.doctor.facts import Facts
from serving.doctor.findings import Verdict
from serving.doctor.start_checks import START
from serving.state.records import FIRST_REQUESTS

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_workers_tell_what_they_found_and_what_the_first_hundred_requests_compiled(leases: Leases) -> None:
    with service(leases, slices=1, engine_env={"NUM_PRECOMPILE_WORKERS": "3"}) as running:
        (entry,) = running.until_serving(1)
        workers = called("RayWorkerProc", running.cluster.processes())
        assert [worker.environ()["NUM_PRECOMPILE_WORKERS"] for worker in workers] == ["3", "3"]
        record = running.store.start(entry.replica)
        assert record
        plan = running.plan()
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
        assert "checking the devices" in dict(entry.phases)
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(
                lambda at: running.post(
                    "/v1/completions", prompt="x " * (1 + at % 20), max_tokens=1 + at % 3
                ),
                range(FIRST_REQUESTS),
            )
            assert all(answer.is_success for answer in answers)

        def told() -> bool:
            found = running.store.start(entry.replica)
            return found is not None and found.late_programs is not None

        running.until(told, "what the first requests compiled")
        found = running.store.start(entry.replica)
        assert found
        assert found.requests >= FIRST_REQUESTS
        facts = Facts(
            [plan],
            {},
            snapshot=running.records(),
            starts={entry.replica: found},
            models={running.application: [plan.model.name]},
        )
        findings = {check.name: check.decide(facts) for check in START}
        for name, of_check in findings.items():
            print(name, *(f"{finding.verdict}: {finding.said}" for finding in of_check), sep="\n  ")
        assert {finding.verdict for of_check in findings.values() for finding in of_check} <= {
            Verdict.OK,
            Verdict.NOT_LOOKED_AT,
        }
