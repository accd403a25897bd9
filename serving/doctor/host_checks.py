"""Checks of every host: facts in, findings out."""

from collections import Counter
from collections.abc import Callable, Sequence

from serving.doctor.facts import Facts, HostFacts, is_asked
from serving.doctor.findings import Check, Finding, failed, not_looked_at, not_yet, ok, together, warning
from serving.doctor.versions import locked
from serving.planning.host_memory import loads_whole
from serving.slices.preflight import CHIPS_FREE, DISK, MEMORY, PEERS, gib, problems
from serving.slices.tpu_hosts import TpuHost, counted, listed

# What a program may lock where the kernel's own limit was not raised: 64 KiB once, 8 MiB since Linux 5.16.
_KERNEL_MEMLOCK_BYTES = 8 << 20
# Google's samples give a pod 20 to 24 CPUs on 4 chips.
_CPUS_PER_CHIP = 5

Look = Callable[[TpuHost, HostFacts], Finding | None]


def answers(facts: Facts) -> list[Finding]:
    if isinstance(facts.hosts, str):
        return [not_looked_at(facts.hosts)]
    if not facts.hosts:
        return [not_yet("no TPU host has joined")]
    if facts.cut_short and not facts.told:
        return [not_looked_at(facts.cut_short)]
    silent = [
        failed(
            f"{_name(host)}: {answer}", "see the pod's log; a host whose image differs can't take the check"
        )
        for host in facts.hosts
        if isinstance(answer := facts.told.get(host.node_id, "it was not asked"), str)
    ]
    return silent or [ok(f"{counted(len(facts.hosts), 'host')} answered")]


def chips(facts: Facts) -> list[Finding]:
    def look(host: TpuHost, host_facts: HostFacts) -> Finding | None:
        wanted = _chips(facts, host)
        if len(host_facts.devices) != wanted:
            remedy = "see the TPU device plugin's pod on the node; the pod has to ask for all chips (google.com/tpu)"
            return failed(f"{counted(len(host_facts.devices), 'chip')} to be seen, of {wanted}", remedy)
        if facts.runs_engine(host):
            return None
        return _problem(host_facts, CHIPS_FREE)

    return _each(facts, look, "all chips there, and free where no engine runs")


def tpu_resource(facts: Facts) -> list[Finding]:
    def look(host: TpuHost, host_facts: HostFacts) -> Finding | None:
        if host.chips != len(host_facts.devices):
            return failed(
                f"Ray counts {counted(host.chips, 'chip')}, and {len(host_facts.devices)} are to be seen",
                "do not set rayStartParams.resources or num-tpus: Ray counts the devices itself",
            )
        return None

    return _each(facts, look, "Ray counts the chips that are there")


def memlock(facts: Facts) -> list[Finding]:
    def look(_: TpuHost, host_facts: HostFacts) -> Finding | None:
        if host_facts.memlock_bytes is None or host_facts.memlock_bytes > _KERNEL_MEMLOCK_BYTES:
            return None
        return failed(
            f"a program may lock {gib(host_facts.memlock_bytes)} of memory, the kernel's own limit: libtpu needs more",
            "run `ulimit -l 68719476736` as root before `ray start`; on GKE set run_as_user: 0 and capabilities: [SYS_RESOURCE] in gke",
        )

    return _each_real(facts, look, "memory may be locked", "simulated hosts lock none")


def hugepages(facts: Facts) -> list[Finding]:
    def look(_: TpuHost, host_facts: HostFacts) -> Finding | None:
        if host_facts.hugepages == "always":
            return None
        return warning(
            f"transparent hugepages are {host_facts.hugepages or 'not there'}, not always: by JAX's own word the TPU's runtime starts and ends slowly",
            "on the host: echo always > /sys/kernel/mm/transparent_hugepage/enabled; on GKE transparentHugepageEnabled of the node pool",
        )

    return _each_real(facts, look, "transparent hugepages", "simulated hosts have no runtime")


def disk(facts: Facts) -> list[Finding]:
    return _each(facts, _of_preflight(facts, DISK), "room for the weights")


def memory(facts: Facts) -> list[Finding]:
    def look(host: TpuHost, host_facts: HostFacts) -> Finding | None:
        if not host_facts.simulated:
            plans = [plan for plan in facts.plans_of(host) if loads_whole(plan.sizes)]
            needed = max((plan.checkpoint_bytes for plan in plans), default=0)
            if needed > host_facts.memory_bytes:
                return failed(
                    f"loading holds the whole checkpoint, {gib(needed)}, and the host has {gib(host_facts.memory_bytes)}",
                    "raise the pod's memory limit, or take a machine with more",
                )
        return _of_preflight(facts, MEMORY)(host, host_facts)

    return _each(facts, look, "memory for an engine's processes")


def cpu(facts: Facts) -> list[Finding]:
    def look(host: TpuHost, host_facts: HostFacts) -> Finding | None:
        wanted = _CPUS_PER_CHIP * _chips(facts, host)
        if host_facts.cpus >= wanted:
            return None
        return warning(
            f"{host_facts.cpus:g} CPUs, and {wanted} are usual for {counted(_chips(facts, host), 'chip')}: compiling will be slow",
            f"lift the pod's CPU limit; the host has {host_facts.cores}",
        )

    return _each_real(facts, look, "CPUs for its chips", "simulated hosts share this machine's")


def network(facts: Facts) -> list[Finding]:
    return _each(
        facts, lambda _, host_facts: _problem(host_facts, PEERS), "each host reaches the others of its slice"
    )


def versions(facts: Facts) -> list[Finding]:
    if not facts.seen:
        return _unseen(facts)
    findings: list[Finding] = []
    hosts = {_name(host): host_facts for host, host_facts in facts.seen}
    if isinstance(facts.head, HostFacts):
        hosts["the head"] = facts.head
    wanted = locked(simulated=facts.simulated)
    packages = dict.fromkeys(
        [*wanted, *(name for host_facts in hosts.values() for name in host_facts.versions)]
    )
    for package in packages:
        there = {name: host_facts.versions.get(package, "none") for name, host_facts in hosts.items()}
        usual = wanted.get(package) or Counter(there.values()).most_common(1)[0][0]
        if other := {name: version for name, version in there.items() if version != usual}:
            differing = listed(f"{name} has {version}" for name, version in other.items())
            of = "the lock" if package in wanted else "the others"
            findings.append(
                failed(
                    f"{package}: {of} {'has' if package in wanted else 'have'} {usual}; {differing}",
                    _ONE_IMAGE,
                )
            )
    return findings or [ok(f"{', '.join(f'{name} {version}' for name, version in wanted.items())}")]


def weights(facts: Facts) -> list[Finding]:
    def look(_: TpuHost, host_facts: HostFacts) -> Finding | None:
        unreadable = [f"{model}: {why}" for model, why in host_facts.weights.items() if why]
        if not unreadable:
            return None
        return failed(
            "; ".join(unreadable),
            "set HF_TOKEN by gke.token_secret, or give the slices' service account the bucket's role",
        )

    if facts.simulated:
        return [not_looked_at("simulated hosts load a stand-in model")]
    models = dict.fromkeys(plan.model.model for plan in facts.plans)
    findings = [
        not_looked_at(f"no check knows the credentials of {model}") for model in models if not is_asked(model)
    ]
    asked = _each(facts, look, "weights can be read") if len(findings) < len(models) else []
    return asked + findings


_ONE_IMAGE = "build one image from the lock, and restart the pods that have another"


def _chips(facts: Facts, host: TpuHost) -> int:
    """The chips that a host should have: by its plan, else what most of its slice has."""
    return next((plan.slice.chips_per_host for plan in facts.plans_of(host)), host.chips)


def _of_preflight(facts: Facts, lacks: str) -> Look:
    """What an engine lacks on a host; where one runs already, it has what it needs."""
    return lambda host, host_facts: None if facts.runs_engine(host) else _problem(host_facts, lacks)


def _problem(host_facts: HostFacts, lacks: str) -> Finding | None:
    lacking = (problem for problem in problems(host_facts.needs, host_facts.has) if problem.lacks == lacks)
    return next((failed(problem.said, problem.remedy) for problem in lacking), None)


def _each(facts: Facts, look: Look, well: str) -> list[Finding]:
    """One finding for each thing that some hosts lack; one for all where none lacks any."""
    if not facts.seen:
        return _unseen(facts)
    findings = ((_name(host), look(host, host_facts)) for host, host_facts in facts.seen)
    return together(findings, f"{counted(len(facts.seen), 'host')}: {well}")


def _each_real(facts: Facts, look: Look, well: str, simulated: str) -> list[Finding]:
    """As `_each`, of what simulated hosts can't lack; `simulated` says why."""

    def look_at_real(host: TpuHost, host_facts: HostFacts) -> Finding | None:
        return None if host_facts.simulated else look(host, host_facts)

    return _each(facts, look_at_real, f"{well}; {simulated}" if facts.simulated else well)


def _unseen(facts: Facts) -> list[Finding]:
    if isinstance(facts.hosts, str):
        return [not_looked_at(facts.hosts)]
    return [not_looked_at("no host answered") if facts.hosts else not_yet("no TPU host has joined")]


def _name(host: TpuHost) -> str:
    return f"{host.slice}/{host.worker_id} ({host.ip})" if host.named else host.ip


HOSTS: Sequence[Check] = (
    Check("hosts", "Every TPU host answers.", answers),
    Check("chips", "Every chip of a host is there, and no stranger holds it.", chips),
    Check("TPU resource", "Ray counts the chips that are there.", tpu_resource),
    Check("memlock", "Programs may lock the memory that libtpu's buffers take.", memlock),
    Check("hugepages", "The kernel gives the TPU's runtime transparent hugepages.", hugepages),
    Check("disk", "The disk has room for the weights.", disk),
    Check(
        "memory",
        "The memory holds an engine's processes, and the checkpoint where it is loaded whole.",
        memory,
    ),
    Check("cpu", "The pod has CPUs for the compiler.", cpu),
    Check("network", "Hosts of a slice reach each other, on Ray's port and on one opened for this.", network),
    Check("versions", "Packages are those of the lock, on all hosts and the head.", versions),
    Check(
        "weights", "Every host can read the weights: token, mounted bucket, or bucket by its API.", weights
    ),
)
