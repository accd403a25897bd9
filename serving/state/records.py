"""What slices, routers and scaling publish: plain records, kept as JSON. Pure.

Every record belongs to one application. Times are seconds.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Self, TypeVar

_Record = TypeVar("_Record")


def known_fields(kind: type[_Record], fields: Mapping[str, Any]) -> _Record:
    """A record of what JSON kept of it. A store that outlives the head may have those of another version, with other fields."""
    return kind(**{name: value for name, value in fields.items() if name in kind.__dataclass_fields__})  # type: ignore[attr-defined]


class Peer(NamedTuple):
    """Where a process of the cluster listens, and the certificate (PEM) that it shows; without one it speaks plain HTTP."""

    address: str
    certificate: str = ""


class SliceState(StrEnum):
    """Where a slice replica is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True)
class SliceRecord:
    """One slice replica.

    `pool` is the key of its pool: the slice's shape and the way it is bought. `bought_for` is the label of its hosts that says for
    which pool they were bought, empty where they have none. `reading`: requests, running or waiting, that
    have no token yet. `kv_usage` is a share of 1.
    `prompt_tokens` (of them `cached_tokens` from the prefix cache) and `output_tokens` count since the engine's start. The
    prefix cache has dropped what it was last asked for `cache_age_s` ago and earlier; 0 where it has dropped nothing yet.
    `sequences` it runs at once; 0 where it does not say. `compiling_s`: for how long its engine has compiled a program and given no
    token; 0 where it does not.
    `late_programs` were compiled while it served, in `late_compile_s`; 0 of an engine that compiles as requests come.
    `hbm_bytes`, `weight_bytes` and `cache_bytes` are the plan's figures for one chip. `since` is when the replica entered
    its state, seconds since 1970 by its own clock. `certificate` (PEM) is what its port shows; empty where `address` is plain HTTP. `adapters` has its engine; None where it does not say. `tag` is Serve's name of the replica within `deployment`, `pod_type` Ray's of
    the slice.
    """

    replica: str
    model: str
    state: SliceState
    phase: str
    shape: str
    application: str = ""
    slice: str = ""
    hosts: tuple[str, ...] = ()
    address: str = ""
    certificate: str = ""
    simulated: bool = False
    max_model_len: int = 0
    phases: tuple[tuple[str, float], ...] = ()
    reason: str = ""
    running: int = 0
    waiting: int = 0
    reading: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    compiling_s: float = 0.0
    cache_age_s: float = 0.0
    late_programs: int = 0
    late_compile_s: float = 0.0
    pool: str = ""
    bought_for: str = ""
    chips_per_host: int = 0
    hbm_bytes: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    sequences: int = 0
    adapters: tuple[str, ...] | None = None
    deployment: str = ""
    tag: str = ""
    version: str = ""
    pod_type: str = ""
    since: float = 0.0
    beat: int = 0

    @property
    def serves(self) -> bool:
        return self.state is SliceState.SERVING

    @property
    def peer(self) -> Peer:
        return Peer(self.address, self.certificate)

    @property
    def fixed(self) -> Self:
        """The record without what changes from beat to beat."""
        return self.beaten(_AT_REST)

    @property
    def load(self) -> list[float]:
        """The fields BEATING."""
        return [getattr(self, name) for name in BEATING]

    def beaten(self, load: Sequence[float]) -> Self:
        """The record under another beat: `load` has the fields BEATING. Ten times as quick as dataclasses.replace."""
        record = object.__new__(type(self))
        record.__dict__.update(self.__dict__)
        # Another version's load may have more, or less.
        record.__dict__.update(zip(BEATING, load, strict=False))
        return record

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """The record of what JSON kept of it."""
        fields["state"] = SliceState(fields["state"])
        fields["hosts"] = tuple(fields["hosts"])
        fields["phases"] = tuple((name, seconds) for name, seconds in fields["phases"])
        if fields.get("adapters") is not None:
            fields["adapters"] = tuple(fields["adapters"])
        return known_fields(cls, fields)


# What changes from beat to beat: the store has it apart from the rest, which is read once.
BEATING = (
    *("beat", "running", "waiting", "reading", "kv_usage"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "compiling_s", "cache_age_s"),
)
_AT_REST = (0,) * len(BEATING)


@dataclass(frozen=True)
class WorkerStart:
    """What one worker of an engine found once the engine was up: JAX's view of its host and of the slice.

    `hbm_bytes` are those of one device that a program may have, 0 on simulated hosts. `summed` is a sum over all devices of
    `mesh`, of a one on each. `implementation` is `vllm` or `flax_nnx`. `cache_tokens` are those that the slice can hold: copies of
    the model share the blocks (tpu-inference's dp_scheduler.py). `memory_bytes` is the most that the worker's process had in the host's memory.
    `programs` were compiled or read from the cache, `cache_hits` of them read; `compile_s` is the seconds of all, also of
    those that took place at once. `precompiles`: whether the engine compiles before it serves.
    """

    worker_id: int
    process_index: int
    local_devices: int
    devices: int
    hbm_bytes: int
    summed: int
    mesh: Mapping[str, int]
    implementation: str
    cache_tokens: int
    memory_bytes: int
    programs: int
    compile_s: float
    cache_hits: int
    precompiles: bool = True


@dataclass(frozen=True)
class StartRecord:
    """What the workers of a slice replica found, and how many programs its first requests had compiled.

    `requests` have ended since it serves; `late_programs` is None until there were FIRST_REQUESTS of them. They took `late_compile_s`.
    """

    workers: tuple[WorkerStart, ...]
    requests: int = 0
    late_programs: int | None = None
    late_compile_s: float = 0.0

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """The record of what JSON kept of it."""
        workers = tuple(known_fields(WorkerStart, worker) for worker in fields["workers"])
        return known_fields(cls, {**fields, "workers": workers})


FIRST_REQUESTS = 100  # after which an engine has seen what it is asked for


@dataclass(frozen=True)
class Wanted:
    """What a router says of a model: how many slices the model is to have, for how long some have been missing, and why."""

    model: str
    shape: str
    slices: int
    missing: int
    missing_for_s: float
    application: str = ""
    why: str = ""


@dataclass(frozen=True)
class Release:
    """What Serve is to run of one deployment: the version of its engine, on slices of this pool.

    `other_pools` are the keys of the service's other pools of the same pod type, on whose hosts no slice of this one is placed.
    """

    version: str
    pool: str
    other_pools: tuple[str, ...] = ()


@dataclass(frozen=True)
class RefusedDeploy:
    """What Serve was last told to run of an application and refused, at a time in seconds since 1970: what ran before runs on."""

    application: str
    reason: str
    at: float


@dataclass(frozen=True)
class Rollout:
    """A changed engine on its way through the slices of one deployment: `changed` of `slices` serve its version.

    `failed` starts of the version ended in `reason`. `stopped`: too many failed, and old slices serve until somebody
    deploys, or asks that it is tried again.
    """

    application: str
    deployment: str
    model: str
    pool: str
    version: str
    slices: int
    changed: int
    failed: int = 0
    stopped: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Demand:
    """What one router has to do for one model, and how requests of late went.

    `arrived`, `refused`, `abandoned` (by clients that hung up while they waited) and `prompt_bytes` count since the router's start. `held` requests wait in the router for a slice;
    `in_flight` requests are with a slice. A percentile is 0 where nothing was answered. `seats` sequences are with slices,
    `seats_wanted` wait, `seats_leased` is the most that this router lets be with slices. `keys` is what limited keys have in
    this router, by the beginning of a key's hash, in the order of the fields of `serving.router.admission.shares.KeyUse`.
    `address` is where other routers tell this one what they sent, and `certificate` what is shown there; empty where they do not. `waiting` has pairs of a priority and how
    many requests of it wait for a seat, the highest first.

    Lines of batches are no demand: `filling` of them are with a slice, beside `in_flight` and `seats`; `seats_leased` has theirs.
    Those that ended since the router's start had `filled_prompt_tokens` and `filled_output_tokens`. Where slices are ordered for
    batches (`batch.may_scale`) these are 0: `expected` lines were due since the router's start, and `filled` ended.
    """

    router: str
    model: str
    held: int = 0
    in_flight: int = 0
    arrived: int = 0
    refused: int = 0
    abandoned: int = 0
    prompt_bytes: int = 0
    ttft_p50_s: float = 0.0
    ttft_p90_s: float = 0.0
    itl_p50_s: float = 0.0
    itl_p90_s: float = 0.0
    seats: int = 0
    seats_wanted: int = 0
    seats_leased: int = 0
    waiting: Sequence[Sequence[int]] = field(default_factory=list, hash=False)
    keys: Mapping[str, Sequence[float]] = field(default_factory=dict, hash=False)
    beat: int = 0
    application: str = ""
    address: str = ""
    certificate: str = ""
    filling: int = 0
    filled_prompt_tokens: int = 0
    filled_output_tokens: int = 0
    expected: float = 0.0
    filled: int = 0


@dataclass(frozen=True)
class DecisionRecord:
    """What scaling decided for one pool of a model, when (seconds since 1970) and why."""

    at: float
    model: str
    pool: str
    wanted: int
    reason: str
    application: str = ""


@dataclass(frozen=True)
class Suspicion:
    """One request that a router blames for a slice's death, by fingerprint: when (seconds since 1970), and its model.

    `guilty`: it alone was suspected where a slice died, and it is refused. `ran_s`: how long it had run on the slice that died last,
    which was `replica`. `before`: replicas that had died under it before. `kind`: what it has in common with requests that may end slices as
    it did. `answered`: one of these was answered. `hung`: whose it is, where its client had hung up.
    """

    at: float
    guilty: bool
    model: str
    ran_s: float = 0.0
    replica: str = ""
    before: Sequence[str] = ()
    kind: str = ""
    answered: bool = False
    hung: str = ""


@dataclass(frozen=True)
class SliceFailures:
    """Failures one after the other on one host of a slice, the last of them at `at`, seconds since 1970.

    `replica` is the one that failed last, `pod_type` the slice's as Ray names it. `version` is the engine's where the
    engine may be at fault, and empty where the host is. `wrong`: the last was wrong tokens. `early`: an engine among them died
    early in its service, so that the next one's beginning to serve clears nothing.
    """

    slice: str
    host: str
    pod_type: str
    failures: int
    at: float
    reason: str
    version: str
    replica: str
    application: str = ""
    wrong: bool = False
    early: bool = False


@dataclass(frozen=True)
class BatchRecord:
    """How far a batch is that is not over: of `total` lines, as far as they are read. `at`, `created`: seconds since 1970.

    `why`: what it waits for, where it is the storage of files.
    """

    name: str
    state: str
    total: int
    completed: int
    failed: int
    created: float
    at: float
    application: str = ""
    why: str = ""


@dataclass(frozen=True)
class UsageRecord:
    """What a key, by the first digits of its hash, has used on a day of UTC in all routers. `at`: seconds since 1970."""

    key: str
    day: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    dollars: float
    at: float
    application: str = ""


@dataclass(frozen=True)
class Snapshot:
    """All records of one application, or of all applications, at one moment.

    `wanted` is sorted by model, `decisions` by time. `ordered` says how many slices scaling wants, by application and
    model; a model with a fixed number is not in it. `suspicions` are by router and fingerprint.
    """

    slices: tuple[SliceRecord, ...] = ()
    demands: tuple[Demand, ...] = ()
    wanted: tuple[Wanted, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()
    ordered: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    suspicions: Mapping[str, Mapping[str, Suspicion]] = field(default_factory=dict)
    rollouts: tuple[Rollout, ...] = ()
    refused_deploys: tuple[RefusedDeploy, ...] = ()
    slice_failures: tuple[SliceFailures, ...] = ()
    batches: tuple[BatchRecord, ...] = ()
    usage: tuple[UsageRecord, ...] = ()


def dump(
    record: Wanted | Release | RefusedDeploy | Rollout | Demand | SliceFailures | StartRecord,
) -> bytes:
    """A record as the store keeps it."""
    return json.dumps(dataclasses.asdict(record)).encode()


def deployment(application: str, name: str) -> str:
    """A deployment's name across applications, as Serve has it in the names of its replicas."""
    return f"{application}#{name}"
