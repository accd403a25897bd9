"""`serving doctor` as it is typed, on simulated hosts: a healthy cluster, and one with several faults."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.leases import Leases
from support.servers import until
from support.service import LLAMA, ROOT, service

from serving.environment import CHIPS
from serving.simulation.cluster import SimulatedCluster
from serving.tpu import resolve

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BORROWS = "two slices"
SHAPE = resolve("v6e", "2x4", hosts=2)
_COMMAND = "import sys; from serving.cli.main import main; sys.exit(main(sys.argv[1:]))"


def doctor(cluster: SimulatedCluster, path: Path = LLAMA) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The status of `serving doctor FILE --json`, and its findings by check."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, "doctor", str(path), "--json"],
        env=cluster.environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout, done.stderr
    by_check: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.stdout):
        by_check.setdefault(finding["check"], []).append(finding)
    assert looks(cluster) == []
    return done.returncode, by_check


def looks(cluster: SimulatedCluster) -> list[str]:
    """The doctor's actors that are still there."""
    found = []
    for process in cluster.processes():
        try:
            found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return [line for line in found if "HostLook" in line]


def not_ok(findings: dict[str, list[dict[str, Any]]]) -> dict[str, list[str]]:
    """What warnings and failures say, by check."""
    wrong = {
        check: [entry["said"] for entry in entries if entry["verdict"] in ("warning", "failed")]
        for check, entries in findings.items()
    }
    return {check: said for check, said in wrong.items() if said}


@contextmanager
def held_chips(cluster: SimulatedCluster, host: str) -> Iterator[int]:
    """A process that keeps the chips of a host open."""
    holds = "from serving.simulation import chips; chips.hold(); print(flush=True); input()"
    environment = cluster.environment | {
        CHIPS: str(cluster.directory / "chips" / host),
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen(
        [sys.executable, "-c", holds], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        yield holder.pid
        holder.kill()


def test_the_doctor_finds_what_is_wrong_on_simulated_hosts(leases: Leases) -> None:
    with leases.lend([SHAPE, SHAPE]) as lent:
        cluster = lent.cluster
        status, findings = doctor(cluster)
        assert not_ok(findings) == {}
        assert status == 0
        assert findings["service"][0]["verdict"] == "not yet"
        assert findings["hosts"][0]["said"] == "4 hosts answered"

        names = [entry.name for entry in cluster.status()]
        nameless = cluster.add_slice(resolve("v6e", "1x1"), without=("TPU_NAME",))
        cluster.kill_host(names[1], 1)
        (cluster.directory / "chips" / f"{names[0]}-1" / "3").unlink()
        with held_chips(cluster, f"{names[0]}-0") as pid:
            until(lambda: "slices" in not_ok(doctor(cluster)[1]), "Ray to call the host dead")
            status, findings = doctor(cluster)
        cluster.kill_slice(nameless)
        leases.spoilt = True
    assert status == 1
    wrong = not_ok(findings)
    assert wrong.keys() == {"webhook", "slices", "chips", "TPU resource"}
    assert wrong["slices"] == [f"1 of 2 hosts of slice {names[1]} are there; worker 1 is missing"]
    assert wrong["webhook"][0].startswith("1 host without TPU_NAME (")
    held, lost = sorted(wrong["chips"], key=lambda said: "to be seen" in said)
    assert f"by pid {pid} (" in held
    assert "3 chips to be seen, of 4" in lost
    assert "Ray counts 4 chips, and 3 are to be seen" in wrong["TPU resource"][0]
    assert all(
        entry["remedy"] for entries in findings.values() for entry in entries if entry["verdict"] == "failed"
    )


def test_a_head_that_stands_still_or_ends_at_any_step_costs_no_finding_that_was_made(leases: Leases) -> None:
    with leases.lend([SHAPE]) as lent:
        leases.spoilt = True
        cluster = lent.cluster
        for step in ("reading", "joining", "waiting", "asking Serve", "leaving"):
            status, findings = doctor_while(cluster, step, signal.SIGSTOP)
            wrong = not_ok(findings)
            assert wrong.keys() <= {"ray", "hosts"}  # hosts of a busy machine may take longer than the limit
            assert status == (1 if wrong else 0)
            until(lambda: looks(cluster) == [], "the doctor's actors to end with it")
        status, findings = doctor_while(cluster, "joining", signal.SIGKILL)
        wrong = not_ok(findings)
        assert wrong.keys() <= {"ray", "hosts"}
        assert status == (1 if wrong else 0)
        assert findings["serve"]


def doctor_while(
    cluster: SimulatedCluster, step: str, head_gets: signal.Signals
) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The doctor's status and findings where the head gets a signal at a step of it; a head that was stopped goes on then."""
    command = [sys.executable, "-c", _COMMAND, "doctor", str(LLAMA), "--json", "--limit", "1"]
    environment = cluster.environment | {"PYTHONPATH": str(ROOT)}
    heads = [process for process in cluster.processes() if process.name() == "gcs_server"]
    with subprocess.Popen(
        [*command, "--address", cluster.address],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr
        for line in process.stderr:
            if line.startswith(step):
                break
        for head in heads:
            head.send_signal(head_gets)
        try:
            printed, _ = process.communicate(timeout=240)
        finally:
            process.kill()
            if head_gets is signal.SIGSTOP:
                for head in heads:
                    head.send_signal(signal.SIGCONT)
    by_check: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(printed):
        by_check.setdefault(finding["check"], []).append(finding)
    return process.returncode, by_check


def test_status_says_which_hosts_a_model_waits_for_and_the_doctor_follows_the_start(
    leases: Leases, tmp_path: Path
) -> None:
    def nameless(cluster: SimulatedCluster) -> None:
        cluster.add_slice(SHAPE, name="nameless", without=("TPU_NAME",))

    with service(leases, slices=0, engine="simulated", wait=False, before=nameless) as running:
        (wanted,) = running.until(
            lambda: [entry for entry in running.records().wanted if entry.why], "a reason to wait"
        )
        assert wanted.why.startswith("2 hosts without TPU_NAME (")
        _, findings = doctor(running.cluster, running.deployment)
        assert wanted.why in findings["service"][0]["said"]
        running.cluster.kill_slice("nameless")
        running.cluster.add_slice(SHAPE)
        running.until_serving(1)
        assert not running.records().wanted[0].why
        until(
            lambda: not_ok(doctor(running.cluster, running.deployment)[1]) == {},
            "Ray to call the killed hosts dead",
        )
        status, findings = doctor(running.cluster, running.deployment)
        assert status == 0
        assert findings["service"][0]["said"].endswith("1 of 1 slice serve")
        assert findings["serve"][0]["said"] == f"Serve calls {running.application} RUNNING"

        served = tmp_path / "served.yaml"
        served.write_text(running.deployment.read_text())
        running.deploy(slcie={})
        running.until(lambda: running.status() == "DEPLOY_FAILED", "Serve to refuse a key that there is not")
        status, findings = doctor(running.cluster, served)
        assert status == 1
        assert findings["service"][0]["said"].endswith("1 of 1 slice serve")
        assert "slcie: unknown key" in findings["serve"][0]["said"]
        (refused,) = running.records().refused_deploys
        assert "slcie: unknown key" in refused.reason
        running.deployment.write_text(served.read_text())
        running.deploy()
        running.until(lambda: not running.records().refused_deploys, "the store to hear of a sound YAML")
