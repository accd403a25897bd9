"""The status document: models, their slices, queues and rates, and the last scaling decisions, out of the store alone.

The page at `/` draws it and `serving status --watch` prints it. Nothing in it is a prompt, an answer or a key.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from pydantic import BaseModel, ConfigDict

from serving.slices import quarantine
from serving.state.records import (
    BatchRecord,
    DecisionRecord,
    Demand,
    RefusedDeploy,
    SliceFailures,
    SliceRecord,
    SliceState,
    Snapshot,
    Suspicion,
    UsageRecord,
    Wanted,
)
from serving.status.rates import STEP_S, Point, Rates, slowest

_DECISIONS = 20
_BATCHES = 50
_KEPT_S = 60.0  # what the store says is this old at most


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True)


class HostStatus(_Document):
    """One VM of a slice, in worker order."""

    ip: str
    chips: int


class Hbm(_Document):
    """Bytes of one chip as the plan has them; `used` is weights and the share of the cache that holds tokens."""

    usable: int
    weights: int
    cache: int
    used: int


class Start(_Document):
    """How far a start is: phases done with their seconds, and what the last start of the pool took, if one was seen."""

    elapsed_s: float
    expected_s: float | None
    phases: tuple[tuple[str, float], ...]


class SliceStatus(_Document):
    """One slice replica."""

    replica: str
    slice: str
    shape: str
    pool: str
    state: SliceState
    for_s: float
    phase: str
    reason: str
    simulated: bool
    hosts: tuple[HostStatus, ...]
    running: int
    waiting: int
    kv_usage: float
    output_tokens_per_s: float
    hbm_planned: Hbm | None
    start: Start | None


class History(_Document):
    """One value a step, the oldest first; the last one is now."""

    step_s: float
    output_tokens_per_s: tuple[float, ...]
    ttft_p50_s: tuple[float | None, ...]
    ttft_p90_s: tuple[float | None, ...]


class ModelStatus(_Document):
    """One model: slices wanted and there, requests by where they are, rates, and every slice."""

    name: str
    application: str
    shape: str
    simulated: bool
    max_model_len: int | None
    slices_wanted: int
    slices_serving: int
    slices_missing: int
    missing_for_s: float
    missing_why: str
    held: int
    in_flight: int
    waiting: int
    running: int
    refused: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    itl_p50_s: float | None
    itl_p90_s: float | None
    history: History
    slices: tuple[SliceStatus, ...]


class DecisionStatus(_Document):
    """One scaling decision: slices wanted of a pool, or of the model; `at` is seconds since 1970."""

    at: float
    model: str
    pool: str = ""
    wanted: int
    reason: str
    application: str = ""


class RefusedStatus(_Document):
    """A request that ended two slices and is refused: its fingerprint, its model and for how long it has been refused."""

    fingerprint: str
    model: str
    for_s: float


class QuarantinedStatus(_Document):
    """A slice that is left out of placement for so long yet, after so many failures on one host, and the last one's reason.

    `engine_only`: it is left out for the engine that failed there, not for others.
    """

    slice: str
    host: str
    failures: int
    for_s: float
    reason: str
    engine_only: bool


class RolloutStatus(_Document):
    """A changed engine on its way through a pool: `changed` of `slices` serve it. `stopped`: old slices serve until a deploy."""

    model: str
    pool: str
    slices: int
    changed: int
    failed: int
    stopped: bool
    reason: str
    application: str = ""


class RefusedDeployStatus(_Document):
    """What Serve refused to deploy so long ago: what ran before runs on."""

    application: str
    reason: str
    for_s: float


class BatchStatus(_Document):
    """A batch that is not over: of `total` lines, as far as they are read, those answered and those refused; its age; what it waits for."""

    name: str
    state: str
    total: int
    completed: int
    failed: int
    for_s: float
    application: str = ""
    why: str = ""


class UsageStatus(_Document):
    """What a key, by the first digits of its hash, has used on a day of UTC in all routers."""

    key: str
    day: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    dollars: float
    application: str = ""


class Status(_Document):
    """The whole service. `at` is seconds since 1970."""

    at: float
    models: tuple[ModelStatus, ...]
    decisions: tuple[DecisionStatus, ...]
    refused: tuple[RefusedStatus, ...] = ()
    quarantined: tuple[QuarantinedStatus, ...] = ()
    rollouts: tuple[RolloutStatus, ...] = ()
    refused_deploys: tuple[RefusedDeployStatus, ...] = ()
    batches: tuple[BatchStatus, ...] = ()
    usage: tuple[UsageStatus, ...] = ()


def status(seen: Snapshot, window: Rates, at: float) -> Status:
    """The document, from one read of the store without the silent, and what the window remembers; the latest decision first."""
    decisions = sorted(decision_statuses(seen.decisions), key=lambda decision: decision.at, reverse=True)
    return Status(
        at=at,
        models=tuple(_model(record, seen.slices, seen.demands, window, at) for record in seen.wanted),
        decisions=tuple(decisions[:_DECISIONS]),
        refused=_refused(seen.suspicions.values(), at),
        quarantined=quarantined(seen.slice_failures, at),
        rollouts=tuple(
            RolloutStatus(**{name: getattr(rollout, name) for name in RolloutStatus.model_fields})
            for rollout in sorted(seen.rollouts, key=lambda rollout: rollout.deployment)
        ),
        refused_deploys=refused_deploys(seen.refused_deploys, at),
        batches=_batches(seen.batches, at),
        usage=_usage(seen.usage, at),
    )


def _batches(batches: Iterable[BatchRecord], at: float) -> tuple[BatchStatus, ...]:
    """The oldest first. What nobody has said again of late is left out: its process is gone."""
    return tuple(
        BatchStatus(
            name=batch.name,
            state=batch.state,
            total=batch.total,
            completed=batch.completed,
            failed=batch.failed,
            for_s=round(max(0.0, at - batch.created), 1),
            application=batch.application,
            why=batch.why,
        )
        for batch in sorted(batches, key=lambda batch: batch.created)
        if at - batch.at < _KEPT_S
    )[:_BATCHES]


def _usage(usage: Iterable[UsageRecord], at: float) -> tuple[UsageStatus, ...]:
    """Who used most comes first, as the store said of late."""
    return tuple(
        UsageStatus(**{name: getattr(record, name) for name in UsageStatus.model_fields})
        for record in usage
        if at - record.at < _KEPT_S
    )


def refused_deploys(refused: Iterable[RefusedDeploy], at: float) -> tuple[RefusedDeployStatus, ...]:
    """What Serve was last told to run, and refused."""
    return tuple(
        RefusedDeployStatus(
            application=entry.application, reason=entry.reason, for_s=round(max(0.0, at - entry.at), 1)
        )
        for entry in sorted(refused, key=lambda entry: entry.application)
    )


def quarantined(failures: Iterable[SliceFailures], at: float) -> tuple[QuarantinedStatus, ...]:
    """The slices that are left out of placement now."""
    return tuple(
        QuarantinedStatus(
            slice=failed.slice,
            host=failed.host,
            failures=failed.failures,
            for_s=round(quarantine.until(failed) - at, 1),
            reason=failed.reason,
            engine_only=bool(failed.version),
        )
        for failed in quarantine.quarantined(failures, at)
    )


def _refused(suspicions: Iterable[Mapping[str, Suspicion]], at: float) -> tuple[RefusedStatus, ...]:
    """Every router keeps the guilty, so each stands here once."""
    guilty = {
        name: suspicion
        for of_router in suspicions
        for name, suspicion in of_router.items()
        if suspicion.guilty
    }
    return tuple(
        RefusedStatus(fingerprint=name, model=suspicion.model, for_s=round(max(0.0, at - suspicion.at), 1))
        for name, suspicion in sorted(guilty.items())
    )


def decision_statuses(records: Iterable[DecisionRecord]) -> list[DecisionStatus]:
    """The store's decisions, for the document."""
    return [DecisionStatus(**asdict(record)) for record in records]


def _model(
    wanted: Wanted, every: Sequence[SliceRecord], routers: Sequence[Demand], window: Rates, at: float
) -> ModelStatus:
    owner = wanted.application, wanted.model
    entries = sorted(
        (entry for entry in every if (entry.application, entry.model) == owner),
        key=lambda entry: (entry.pool, entry.slice, entry.replica),
    )
    demands = [demand for demand in routers if (demand.application, demand.model) == owner]
    serving = [entry for entry in entries if entry.serves]
    alive = [entry for entry in entries if entry.state is not SliceState.LOST]
    rates = [window.rates(entry.replica) for entry in alive]
    return ModelStatus(
        name=wanted.model,
        application=wanted.application,
        shape=wanted.shape,
        simulated=any(entry.simulated for entry in entries),
        max_model_len=max((entry.max_model_len for entry in serving), default=None),
        slices_wanted=wanted.slices,
        slices_serving=len(serving),
        slices_missing=wanted.missing,
        missing_for_s=wanted.missing_for_s,
        missing_why=wanted.why,
        held=sum(demand.held for demand in demands),
        in_flight=sum(demand.in_flight for demand in demands),
        waiting=sum(entry.waiting for entry in alive),
        running=sum(entry.running for entry in alive),
        refused=sum(demand.refused for demand in demands),
        output_tokens_per_s=round(sum(output for output, _ in rates), 1),
        prompt_tokens_per_s=round(sum(prompt for _, prompt in rates), 1),
        ttft_p50_s=slowest(demand.ttft_p50_s for demand in demands),
        ttft_p90_s=slowest(demand.ttft_p90_s for demand in demands),
        itl_p50_s=slowest(demand.itl_p50_s for demand in demands),
        itl_p90_s=slowest(demand.itl_p90_s for demand in demands),
        history=_history(window.points(*owner)),
        slices=tuple(_slice(entry, window, at) for entry in entries),
    )


def _history(points: Sequence[Point]) -> History:
    return History(
        step_s=STEP_S,
        output_tokens_per_s=tuple(point.output_tokens_per_s for point in points),
        ttft_p50_s=tuple(point.ttft_p50_s for point in points),
        ttft_p90_s=tuple(point.ttft_p90_s for point in points),
    )


def _slice(entry: SliceRecord, window: Rates, at: float) -> SliceStatus:
    gone = entry.state is SliceState.LOST
    return SliceStatus(
        replica=entry.replica,
        slice=entry.slice,
        shape=entry.shape,
        pool=entry.pool,
        state=entry.state,
        for_s=round(max(0.0, at - entry.since), 1) if entry.since else 0.0,
        phase=entry.phase,
        reason=entry.reason,
        simulated=entry.simulated,
        hosts=tuple(HostStatus(ip=ip, chips=entry.chips_per_host) for ip in entry.hosts),
        running=0 if gone else entry.running,
        waiting=0 if gone else entry.waiting,
        kv_usage=0.0 if gone else entry.kv_usage,
        output_tokens_per_s=0.0 if gone else round(window.rates(entry.replica)[0], 1),
        hbm_planned=_hbm(entry) if entry.hbm_bytes else None,
        start=_start(entry, window) if entry.state is SliceState.STARTING else None,
    )


def _hbm(entry: SliceRecord) -> Hbm:
    used = entry.weight_bytes + round(entry.kv_usage * entry.cache_bytes) if entry.serves else 0
    return Hbm(usable=entry.hbm_bytes, weights=entry.weight_bytes, cache=entry.cache_bytes, used=used)


def _start(entry: SliceRecord, window: Rates) -> Start:
    elapsed_s, expected_s = window.start(entry)
    return Start(elapsed_s=round(elapsed_s, 1), expected_s=expected_s, phases=entry.phases)
