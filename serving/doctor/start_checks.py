"""Checks of a first start, on what the workers of the engines that serve have told: facts in, findings out."""

from collections.abc import Callable, Sequence

from serving.doctor.facts import Facts
from serving.doctor.findings import Check, Finding, failed, not_looked_at, not_yet, together, warning
from serving.gke.storage import GB
from serving.planning import Plan
from serving.slices.preflight import gib
from serving.slices.tpu_hosts import counted, listed
from serving.state.records import FIRST_REQUESTS, SliceRecord, StartRecord, WorkerStart

# Of the plan's figure: boot logs of three models differ from their plans by up to 15% (docs/guides/plan.md).
_CACHE_SHORT = 0.85
# Of a host's memory: beyond this a second engine's start, which overlaps with the end of the first, may not fit.
_MEMORY_FULL = 0.9

Look = Callable[[SliceRecord, Plan, StartRecord], Finding | None]


def devices(facts: Facts) -> list[Finding]:
    def look(_: SliceRecord, plan: Plan, start: StartRecord) -> Finding | None:
        # Stages of a pipeline are JAX clusters of their own.
        wanted = plan.slice.devices // (plan.pipeline if plan.slice.hosts > 1 else 1)
        for worker in start.workers:
            if worker.devices != wanted:
                return failed(
                    f"worker {worker.worker_id} sees {counted(worker.devices, 'device')}, of {wanted} of the slice",
                    "see TPU_WORKER_HOSTNAMES and TPU_TOPOLOGY of its pod, and the network between the hosts",
                )
            if worker.hbm_bytes and worker.hbm_bytes < plan.fit.usable_bytes * _HBM_SHORT:
                return failed(
                    f"worker {worker.worker_id} has {gib(worker.hbm_bytes)} of HBM a device, and the plan {gib(plan.fit.usable_bytes)}",
                    "another process holds HBM of the chip, or the machine is not the one of the YAML",
                )
        return None

    without = "; simulated devices have no HBM" if facts.simulated else ""
    return _each(facts, look, f"devices and HBM as planned{without}")


# JAX tells the bytes that a program may have; the plan has them from boot logs, to a hundredth.
_HBM_SHORT = 0.98


def order(facts: Facts) -> list[Finding]:
    def look(_: SliceRecord, plan: Plan, start: StartRecord) -> Finding | None:
        if [worker.worker_id for worker in start.workers] != list(range(len(start.workers))):
            ids = listed(worker.worker_id for worker in start.workers)
            return failed(f"ranks 0 to {len(start.workers) - 1} are on workers {ids}", _RANKS)
        if plan.pipeline == 1 and (
            wrong := [worker for worker in start.workers if worker.process_index != worker.worker_id]
        ):
            return failed(f"JAX process {wrong[0].process_index} is on worker {wrong[0].worker_id}", _RANKS)
        return None

    return _each(facts, look, "rank, JAX process and worker id agree")


_RANKS = "TPU_WORKER_ID has to follow TPU_WORKER_HOSTNAMES: see the pods' environment, then restart the slice"


def collective(facts: Facts) -> list[Finding]:
    def look(_: SliceRecord, __: Plan, start: StartRecord) -> Finding | None:
        for worker in start.workers:
            if worker.summed != _size(worker):
                return failed(
                    f"a one on each of {counted(_size(worker), 'device')} adds up to {worker.summed} on worker {worker.worker_id}",
                    "a chip or a link computes wrongly: give the slice back, and take another",
                )
        return None

    return _each(facts, look, "all devices of a mesh add up")


def implementation(facts: Facts) -> list[Finding]:
    def look(_: SliceRecord, plan: Plan, start: StartRecord) -> Finding | None:
        wanted = "vllm" if plan.sizes.by_vllm else "flax_nnx"
        implementations = {worker.implementation for worker in start.workers}
        if implementations != {wanted}:
            return warning(
                f"the engine took {listed(sorted(implementations))}, and the plan counts with {wanted}: its HBM and speed do not hold",
                "set engine.model_impl, or tell this project what the engine derives",
            )
        return None

    return _each(facts, look, "the model's implementation is the planned one")


def mesh(facts: Facts) -> list[Finding]:
    def look(_: SliceRecord, plan: Plan, start: StartRecord) -> Finding | None:
        wanted = {axis: size for axis, size in plan.layout.mesh.items() if size > 1}
        for worker in start.workers:
            sizes = {axis: size for axis, size in worker.mesh.items() if size > 1}
            if sizes != wanted:
                return failed(
                    f"the engine's mesh is {_axes(sizes)}, and the plan has {_axes(wanted)}",
                    "its HBM is not what was planned: set the sharding keys of the YAML",
                )
        return None

    return _each(facts, look, "the mesh is the planned one")


def cache(facts: Facts) -> list[Finding]:
    def look(record: SliceRecord, plan: Plan, start: StartRecord) -> Finding | None:
        if record.simulated or plan.shape.encodes:
            return None
        held_tokens = min(worker.cache_tokens for worker in start.workers)
        if held_tokens < plan.fit.cache_tokens * _CACHE_SHORT:
            return warning(
                f"the KV cache holds {held_tokens:,} tokens, {held_tokens / plan.fit.cache_tokens:.0%} of the planned {plan.fit.cache_tokens:,}",
                "fewer requests run at once than planned: see what else takes HBM, or plan with a lower gpu_memory_utilization",
            )
        return None

    without = "; simulated slices have a cache of a fixed size" if facts.simulated else ""
    return _each(facts, look, f"the KV cache is what was planned{without}")


def host_memory(facts: Facts) -> list[Finding]:
    def look(_: SliceRecord, plan: Plan, start: StartRecord) -> Finding | None:
        machine = plan.slice.hardware.machine(plan.slice.machine_type)
        if machine is None or machine.memory_gb is None:
            return None
        most = max(start.workers, key=lambda worker: worker.memory_bytes)
        if most.memory_bytes > machine.memory_gb * GB * _MEMORY_FULL:
            return warning(
                f"worker {most.worker_id} had {gib(most.memory_bytes)} of its host's {machine.memory_gb} GB at most",
                "stream the weights (`gs://`), or take a machine with more memory",
            )
        return None

    return _each(facts, look, "the start left memory on every host")


def programs(facts: Facts) -> list[Finding]:
    def look(_: SliceRecord, __: Plan, start: StartRecord) -> Finding | None:
        missed = [worker for worker in start.workers if worker.precompiles and not worker.cache_hits]
        if missed:
            return warning(
                f"{_compiled(start)}: none came from the cache",
                "right for a first start; at the next, see VLLM_XLA_CACHE_PATH: is it on storage that outlives the pod?",
            )
        return None

    starts = [start for _, _, start in _started(facts)]
    return _each(facts, look, "; ".join(dict.fromkeys(_compiled(start) for start in starts)))


def first_requests(facts: Facts) -> list[Finding]:
    waiting = [start for _, _, start in _started(facts) if start.late_programs is None]
    if any(not worker.precompiles for _, _, start in _started(facts) for worker in start.workers):
        return [not_looked_at("these hosts compile as requests come (SKIP_JAX_PRECOMPILE)")]

    def look(_: SliceRecord, __: Plan, start: StartRecord) -> Finding | None:
        if start.late_programs and start.late_compile_s >= _LATE_S:
            return failed(
                f"{counted(start.late_programs, 'program')} compiled for {start.late_compile_s:.0f} s while the first {start.requests} requests waited",
                "tell this project the model and the requests; until then send such requests before users do",
            )
        return None

    findings = _each(
        facts,
        look,
        f"no program of the model was compiled for the first {FIRST_REQUESTS} requests{_small(facts)}",
    )
    if waiting and len(waiting) == len(_started(facts)):
        return [not_yet(f"fewer than {FIRST_REQUESTS} requests have ended; send some of every kind")]
    return findings


def start_time(facts: Facts) -> list[Finding]:
    """How long each phase took, against what starts of others took."""

    def look(record: SliceRecord, plan: Plan, start: StartRecord) -> Finding | None:
        if record.simulated:
            return None
        predicted = plan.start_time
        warm = any(worker.cache_hits for worker in start.workers)
        compiling = predicted.compile_warm if warm else predicted.compile
        took = dict(record.phases)
        expected = {"compiling": compiling, "loading weights": predicted.weights}
        for phase, time in expected.items():
            if time and took.get(phase, 0.0) > time.high_s * _SLOW:
                return warning(
                    f"{phase} took {took[phase]:.0f} s, and {time.low_s:.0f} to {time.high_s:.0f} s by {counted(time.starts, 'published start')}",
                    _WHY_SLOW[phase],
                )
        return None

    phases = dict.fromkeys(f"{record.slice}: {_phases(record)}" for record, _, _ in _started(facts))
    without = "; what simulated slices take says nothing about TPUs" if facts.simulated else ""
    return _each(facts, look, f"{listed(phases)}{without}")


# As of the alert CompilesWhileServing. The first requests of each kind bring some twenty programs of one operation each, which take a
# second together; a program of the model takes seconds on a TPU.
_LATE_S = 5.0


def _small(facts: Facts) -> str:
    most = max(
        (start for _, _, start in _started(facts)), key=lambda start: start.late_compile_s, default=None
    )
    if most is None or not most.late_programs:
        return ""
    return (
        f"; {counted(most.late_programs, 'program')} of one operation each took {most.late_compile_s:.1f} s"
    )


# Times that few starts stand for: beyond the longest by half, something is wrong with this one.
_SLOW = 1.5
_WHY_SLOW = {
    "compiling": "see NUM_PRECOMPILE_WORKERS and the pod's CPUs; at a second start VLLM_XLA_CACHE_PATH",
    "loading weights": "see where the bucket is, and the limits of the GCS FUSE sidecar; stream them (`gs://`)",
}


def _phases(record: SliceRecord) -> str:
    return ", ".join(f"{name} {seconds:.0f} s" for name, seconds in record.phases if seconds >= 1)


def _compiled(start: StartRecord) -> str:
    most = max(start.workers, key=lambda worker: worker.programs)
    return f"{counted(most.programs, 'program')} in {most.compile_s:.0f} s, {most.cache_hits} of them from the cache"


def _size(worker: WorkerStart) -> int:
    size = 1
    for of_axis in worker.mesh.values():
        size *= of_axis
    return size


def _axes(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "one device"


def _started(facts: Facts) -> list[tuple[SliceRecord, Plan, StartRecord]]:
    return [
        (record, plan, start)
        for record, plan in facts.serving
        if (start := facts.starts.get(record.replica)) and start.workers
    ]


def _each(facts: Facts, look: Look, well: str) -> list[Finding]:
    """One finding for each thing that some slices show; one for all where none does."""
    if isinstance(facts.snapshot, str):
        return [not_looked_at(facts.snapshot)]
    if not facts.serving:
        return [not_yet("no slice serves what the YAML says")]
    if not (started := _started(facts)):
        return [not_looked_at("the engines told nothing; the simulated one has no devices")]
    findings = ((record.slice, look(record, plan, start)) for record, plan, start in started)
    return together(findings, f"{counted(len(started), 'slice')}: {well}")


START: Sequence[Check] = (
    Check("devices", "JAX sees all devices of the slice, with their HBM.", devices),
    Check("order", "Ranks, JAX processes and worker ids agree.", order),
    Check("collective", "A sum over all devices of the mesh is right.", collective),
    Check(
        "implementation",
        "The engine runs the model's implementation that the plan counts with.",
        implementation,
    ),
    Check("mesh", "The engine's mesh is the plan's.", mesh),
    Check("KV cache", "The cache holds the tokens that the plan says.", cache),
    Check("host memory", "The start left memory on every host.", host_memory),
    Check(
        "programs",
        "How many programs were compiled, how long that took, and what came from the cache.",
        programs,
    ),
    Check("start time", "Where the time of the start went, against published starts.", start_time),
    Check(
        "first requests",
        "No program of the model was compiled for the first hundred requests.",
        first_requests,
    ),
)
