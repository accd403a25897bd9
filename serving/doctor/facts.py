"""What `serving doctor` found, as plain data: what checks decide on. Nothing here looks at anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.planning import Plan
from serving.slices.preflight import Facts as Preflight
from serving.slices.preflight import Needs
from serving.slices.tpu_hosts import TpuHost, by_slice, is_of
from serving.state.records import SliceRecord, SliceState, Snapshot, StartRecord
from serving.tpu import serves_pool

# The variables of a host that checks read. None of them is a secret.
VARIABLES = (
    "TPU_NAME",
    "TPU_WORKER_ID",
    "TPU_WORKER_HOSTNAMES",
    "TPU_ACCELERATOR_TYPE",
    "TPU_TOPOLOGY",
    "RAY_AUTH_MODE",
    "RAY_REDIS_ADDRESS",
    "RAY_gcs_storage",
    "NUM_PRECOMPILE_WORKERS",
    "VLLM_XLA_CACHE_PATH",
    "JAX_PLATFORMS",
    "RAY_SERVE_HAPROXY_BINARY_PATH",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S",
)


def is_asked(model: str) -> bool:
    """Whether a host can look at the weights of a model. Stores of others than Google have credentials that no check knows."""
    scheme, at, _ = model.partition("://")
    return not at or scheme == "gs"


@dataclass(frozen=True)
class HostFacts:
    """What one host told of itself.

    `devices` are its chips as device files. `memlock_bytes` is what a process may lock in memory, None without a limit.
    `cpus` are those that a process there may use, of `cores`. `versions` are of installed packages, and of `python`.
    `secret` is a digest of the cluster's secret, empty without one. `weights` says by model why the host can't read its weights,
    and nothing where it can. `hugepages` is the kernel's word for when it gives programs transparent ones, empty where it has none.
    """

    has: Preflight
    needs: Needs = field(default_factory=Needs)
    devices: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    memlock_bytes: int | None = None
    hugepages: str = ""
    memory_bytes: int = 0
    cpus: float = 0
    cores: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    secret: str = ""
    weights: Mapping[str, str] = field(default_factory=dict)
    simulated: bool = False


@dataclass(frozen=True)
class Endpoints:
    """What Kubernetes says of the application's Service: addresses behind it that are ready, and those of heads."""

    service: str
    ready: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    there: bool = True


@dataclass(frozen=True)
class Deployed:
    """What Kubernetes has of the application in the namespace, by its label.

    `wanted` is the RayService that the YAML renders, `service` the one that is there. `clusters` are the RayClusters that KubeRay made
    of it, `pods` those of head, slices and Redis. `kuberay` is whether Kubernetes knows RayServices, `unseen` why they can't be seen.
    `node_pools` are the node pools of TPU nodes by the nodes' names; a text why they can't be seen.
    """

    label: str
    namespace: str
    wanted: Mapping[str, Any]
    service: Mapping[str, Any] | None
    clusters: tuple[Mapping[str, Any], ...] = ()
    pods: tuple[Mapping[str, Any], ...] = ()
    kuberay: bool = True
    unseen: str = ""
    node_pools: Mapping[str, str] | str = field(default_factory=dict)


@dataclass(frozen=True)
class Application:
    """What Serve says of an application: its status, a message, and by name the messages of deployments that failed."""

    status: str
    message: str = ""
    deployments: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """Everything that checks decide on. A text in place of facts says why they were not looked at.

    `plans` are of every pool of the YAML, `models` its models' names by application. `cluster` are the versions of `ray` and `python` that the head was started with, `here`
    those of the caller. `hosts` are the TPU hosts that Ray lists; `told` what each said of itself, by Ray's node id, or why it said
    nothing; `head` the same of the head. `serve` has Serve's applications by name. `starts` are what the engines' workers found, by replica.
    `cut_short` says how the cluster went away under the look; what was found before stands beside it.
    """

    plans: Sequence[Plan]
    cluster: Mapping[str, str] | str
    here: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[TpuHost] | str = ()
    told: Mapping[str, HostFacts | str] = field(default_factory=dict)
    head: HostFacts | str = "nobody asked it"
    snapshot: Snapshot | str = field(default_factory=Snapshot)
    endpoints: Sequence[Endpoints] | str = ()
    deployed: Deployed | str = "nobody asked Kubernetes"
    serve: Mapping[str, Application] | str = field(default_factory=dict)
    starts: Mapping[str, StartRecord] = field(default_factory=dict)
    models: Mapping[str, Sequence[str]] = field(default_factory=dict)
    cut_short: str = ""

    @property
    def seen(self) -> list[tuple[TpuHost, HostFacts]]:
        """The TPU hosts that told of themselves."""
        hosts = [] if isinstance(self.hosts, str) else self.hosts
        pairs = [(host, self.told.get(host.node_id)) for host in hosts]
        return [(host, host_facts) for host, host_facts in pairs if isinstance(host_facts, HostFacts)]

    @property
    def slices(self) -> dict[str, list[TpuHost]]:
        return {} if isinstance(self.hosts, str) else by_slice(self.hosts)

    @property
    def records(self) -> list[SliceRecord]:
        """The slice replicas of all applications that are not lost."""
        if isinstance(self.snapshot, str):
            return []
        return [record for record in self.snapshot.slices if record.state is not SliceState.LOST]

    @property
    def serving(self) -> list[tuple[SliceRecord, Plan]]:
        """The YAML's slices that serve, each with its plan. A slice whose engine is not of the YAML's version is left out."""
        plans = {(plan.model.name, plan.version): plan for plan in self.plans}
        serving = [record for record in self.records if record.serves and record.application in self.models]
        return [(record, plan) for record in serving if (plan := plans.get((record.model, record.version)))]

    @property
    def simulated(self) -> bool:
        return any(host_facts.simulated for _, host_facts in self.seen) or any(
            entry.simulated for entry in self.records
        )

    def plans_of(self, host: TpuHost) -> list[Plan]:
        """The plans whose slices the host may be of; those that it lacks no chip for, if there are any."""
        plans = [
            plan for plan in self.plans if is_of([host], plan.slice) and serves_pool(host.pool, plan.pool)
        ]
        return [plan for plan in plans if plan.slice.chips_per_host == host.chips] or plans

    def runs_engine(self, host: TpuHost) -> bool:
        """Whether a replica holds the host's slice: then its engine has the chips, the memory and the files."""
        return any(record.slice == host.slice for record in self.records if record.slice)
