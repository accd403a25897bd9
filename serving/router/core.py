"""One router's parts, put together: the table of slices, admission, forwarding, telemetry and the HTTP surface.

Nothing here knows Ray or Serve. `take` gets the store's records; `demands` and `wanted` go back there.
"""

import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from fastapi import FastAPI

from serving import secret
from serving.config import Affinity, BatchSpec, RouterSpec
from serving.metrics.recorder import Recorder
from serving.planning import Plan
from serving.planning.prices import slice_hour
from serving.router.admission.controller import AdmissionController
from serving.router.admission.meter import Meter, Rate
from serving.router.filler import Filler
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.http.api import Api
from serving.router.http.auth import KeyFile
from serving.router.http.kept_files import KeptFiles
from serving.router.http.response_store import ResponseStore
from serving.router.neighbours import Neighbours
from serving.router.prompt_pace import PromptPace, Reading
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.audit_log import AuditLog
from serving.router.telemetry.journal import Journal
from serving.router.telemetry.latency import RecentLatency
from serving.router.telemetry.record import RequestRecord
from serving.router.telemetry.request_log import RequestLog
from serving.router.telemetry.spans import RequestSpans
from serving.router.usage_loop import UsageLoop
from serving.slices import quarantine
from serving.slices.tpu_hosts import TpuHost, why_waiting
from serving.state.liveness import Liveness
from serving.state.records import (
    Demand,
    SliceFailures,
    SliceRecord,
    SliceState,
    Snapshot,
    Suspicion,
    Wanted,
)
from serving.status.document import Status, status
from serving.status.rates import Rates
from serving.timings import TIMINGS, Timings

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Served:
    """What a router serves, as the YAML says. `plans` has one plan per pool, the preferred pool of each model first."""

    plans: Sequence[Plan]
    router: RouterSpec = field(default_factory=RouterSpec)
    batch: BatchSpec = field(default_factory=BatchSpec)
    prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outputs:
    """Where a router writes about its requests, beside the metrics."""

    log: RequestLog | None = None
    audit: AuditLog | None = None
    spans: RequestSpans | None = None

    @property
    def writers(self) -> list[RequestLog | AuditLog]:
        """Those that get the record of every request that is over."""
        return [writer for writer in (self.log, self.audit) if writer]


_NOWHERE = Outputs()
_TOGETHER = 32  # records of requests that are counted and written in one go: a third of a millisecond


@dataclass(frozen=True)
class Forgotten:
    """Records that leave the store: of slices and routers that have long been silent, of models that no router has, and of failures that
    are old or explained.
    """

    slices: tuple[SliceRecord, ...]
    demands: tuple[Demand, ...]
    wanted: tuple[Wanted, ...]
    failures: tuple[SliceFailures, ...]
    explained: tuple[SliceFailures, ...] = ()  # what is left of failures that requests are guilty of


def abandoned(snapshot: Snapshot, models: Iterable[str] = ()) -> tuple[Wanted, ...]:
    """What the store has of models that are neither these nor those of a router; a router says its demand first."""
    alive = {*models, *(demand.model for demand in snapshot.demands)}
    return tuple(entry for entry in snapshot.wanted if entry.model not in alive)


class RouterCore:
    """One router. Lives in one event loop; `name` is the router's own among those that share the store."""

    def __init__(
        self,
        served: Served,
        keys: KeyFile,
        metrics: Callable[[], Awaitable[str]],
        *,
        name: str = "router",
        application: str = "",
        outputs: Outputs = _NOWHERE,
        timings: Timings = TIMINGS,
        store: Callable[[], Awaitable[tuple[str, str]]] | None = None,
    ) -> None:
        """`metrics` gives the page of all metrics. `store` finds the process that keeps files, batches and usage, where there is one."""
        plans, spec = served.plans, served.router
        self.name = name
        self.application = application
        self.plans = plans
        self.audit = outputs.audit
        self._outputs = outputs
        rates = _rates(plans, served.prices)
        self.table = _table(plans, spec, application, rates)
        self.neighbours: Neighbours | None = None
        self._shares = _shares(spec)
        self._tls = spec.slices_tls
        self.dispatcher = Dispatcher(
            self.table,
            spec.failover,
            timings=timings,
            routers=spec.replicas,
            sentinel=spec.sentinel.share,
        )
        self._kept = KeptFiles(store) if store else None
        # A name of this process: one that starts anew numbers its flushes anew.
        meter = Meter(f"{name}-{uuid.uuid4().hex}"[-80:], rates) if store else None
        self.usage = UsageLoop(meter, self._kept, keys) if meter and self._kept else None
        self.admission = AdmissionController(spec, plans, self.table, keys, meter=meter)
        if self.usage:
            self.admission.hear = self.usage.hear
        self.admission.batches_scale = served.batch.may_scale
        self.admission.spare = served.batch.spare
        self.latency = RecentLatency()
        self._pace = _pace(plans, spec, served.batch.ttft_p99_s)
        self.journal = Journal(
            Recorder(application),
            self.latency,
            self._keeps_pace,
            *outputs.writers,
            spans=outputs.spans,
            slos={plan.model.name: plan.model.slo for plan in plans},
            keep_content=spec.log_content,
            together=_TOGETHER,
        )
        self.now: Callable[[], float] = time.time
        if self.audit:
            keys.tell = self.audit.tell
            self.admission.tell_refused = self.audit.refused
            self.audit.tell("start", {"router": name, **_told_at_start(spec, keys)})
        self.seen = Snapshot()  # the store's, without the silent and the forgotten
        self._responses = ResponseStore(spec.responses_store) if spec.responses_store else None
        self._api = Api(
            plans,
            self.table,
            self.dispatcher,
            self.admission,
            self.journal,
            self.status,
            metrics,
            self._responses,
            self._kept,
        )
        self.filler = self._filler(served, self._kept) if self._kept else None
        # Answers a POST of a model's route outside of the app; see serving.router.http.door.
        self.relay = self._api.inference.relay
        self._scaled = {plan.model.name for plan in plans if plan.model.replicas.scales}
        self.liveness = Liveness(timings, asks=True)
        self._rates = Rates()
        self._serving: set[str] = set()
        self._why: dict[str, str] = {}  # by model, why it waits for slices
        self._beats = 0

    def keep_time(self, now: Callable[[], float]) -> None:
        """Count by the cluster's time, seconds since 1970, what this router shares with others."""
        self.now = self.dispatcher.now = self.dispatcher.trials.now = self.admission.calendar = now
        if self.usage:
            self.usage.calendar = now

    def _filler(self, served: Served, kept: KeptFiles) -> Filler:
        return Filler(
            self._api.inference,
            self.admission,
            self.table,
            kept,
            served.batch,
            name=self.name,
            pace=self._pace,
        )

    def _keeps_pace(self, record: RequestRecord) -> None:
        """Of a request that is over: lines are read as its time to the first token says."""
        if record.streamed and record.outcome == "ok" and record.first_s:
            first_s = record.first_s - record.arrived_s
            self._pace.answered(record.model, record.arrived_s, first_s, time.monotonic())

    def listen(self, ip: str) -> None:
        """Open the port on which other routers tell what they sent, where they do; `ip`: of this router's host."""
        if self._shares:
            self.neighbours = Neighbours(self.name, self.table, ip, tls=self._tls)
            self.neighbours.start()

    def reconfigure(self, slices: Mapping[str, int | None]) -> None:
        """Take over how many slices each model is to have; None where scaling says it in the store."""
        self._scaled = {model for model, count in slices.items() if count is None}
        for model, count in slices.items():
            if count is not None:
                self.table.want(model, count)

    def app(self, *, returns_id: bool = True) -> FastAPI:
        """The HTTP surface; `returns_id`: whether answers get their X-Request-Id here."""
        return self._api.app(returns_id=returns_id)

    def take(self, snapshot: Snapshot, now_s: float) -> Generator[None, None, Forgotten]:
        """Take over what the store holds now, in steps between which requests may go on; returns the records to delete there."""
        self.liveness.ended(self.dispatcher.gone)
        self.dispatcher.gone.clear()
        entries, silent = self.liveness.slices(snapshot.slices, now_s)
        demands, gone = self.liveness.routers(snapshot.demands, now_s)
        ordered = snapshot.ordered.get(self.application, {})
        # The store keeps an old order for a model whose number is now fixed.
        for model in self._scaled & ordered.keys():
            self.table.want(model, ordered[model])
        yield from self.table.update_in_steps(entries, now_s)
        old_failures = frozenset(quarantine.forgotten(snapshot.slice_failures, self.now()))
        failures = tuple(failed for failed in snapshot.slice_failures if failed not in old_failures)
        self.seen = replace(snapshot, slices=tuple(entries), demands=tuple(demands), slice_failures=failures)
        yield
        self._rates.observe(entries, demands, now_s)
        yield
        yield from self.admission.others(demands, self.name)
        if self.neighbours:
            self.neighbours.settle(demands)
        others = [suspicions for router, suspicions in snapshot.suspicions.items() if router != self.name]
        self.dispatcher.suspects.take(others, self.now())
        serving = {entry.replica for entry in entries if entry.serves}
        # At once: admission must not count seats on slices that dispatch no longer finds.
        if serving != self._serving:
            self._serving = serving
            self.admission.refresh()
        yield
        self.dispatcher.settle(entries, self.admission.free_seats)
        return Forgotten(
            tuple(silent),
            tuple(gone),
            abandoned(snapshot, self.table.shapes),
            tuple(old_failures),
            tuple(quarantine.explained(failures, self.dispatcher.suspects.ended)),
        )

    @property
    def suspicions(self) -> Mapping[str, Suspicion]:
        """The requests that this router suspects of ending slices."""
        return self.dispatcher.suspects.ours

    def wrong_slices(self) -> list[tuple[SliceRecord, str]]:
        """Slices that were found to give wrong tokens since the last call, and why."""
        wrong, self.dispatcher.sentinel.wrong = self.dispatcher.sentinel.wrong, []
        return wrong

    def demands(self) -> list[Demand]:
        """What this router has to do for each model, under a new beat."""
        self.journal.settle()  # the latest answers count
        self._beats += 1
        return [self._demand(model) for model in self.table.shapes]

    def wanted(self, now_s: float) -> list[Wanted]:
        return [
            replace(
                entry,
                application=self.application,
                why=self._why.get(entry.model, "") if entry.missing else "",
            )
            for entry in self.table.wanted(now_s)
        ]

    def explain(self, hosts: Sequence[TpuHost]) -> None:
        """See on the TPU hosts that Ray lists why models wait for slices."""
        taken = {entry.slice for entry in self.seen.slices if entry.state is not SliceState.LOST}
        known = quarantine.of_hosts_there(self.seen.slice_failures, {(host.slice, host.ip) for host in hosts})
        left_out = {failed.slice for failed in quarantine.quarantined(known, self.now())}
        pools = {
            model: [(plan.slice, plan.pool) for plan in self.plans if plan.model.name == model]
            for model in self.table.shapes
        }
        self._why = {
            model: why_waiting(of_model, hosts, taken, left_out) for model, of_model in pools.items()
        }

    def status(self) -> Status:
        wanted, suspicions = tuple(self.wanted(time.monotonic())), {self.name: self.suspicions}
        return status(replace(self.seen, wanted=wanted, suspicions=suspicions), self._rates, self.now())

    def publish(self, demands: Sequence[Demand], now_s: float) -> None:
        """Hand metrics to Ray and lines to the request log's file; blocks."""
        left_out = self.dispatcher.breaker.left_out(now_s)
        quarantined = [
            (failed.slice, failed.host)
            for failed in quarantine.quarantined(self.seen.slice_failures, self.now())
        ]
        self.journal.publish(self.seen.slices, self.table.wanted(now_s), demands, left_out, quarantined)
        self.journal.publish_checks(self.dispatcher.sentinel.counts)
        for writer in self._outputs.writers:
            writer.flush()

    async def close(self) -> None:
        if self.neighbours:
            await self.neighbours.close()
        await self.dispatcher.close()
        if self._kept:
            await self._kept.close()
        if self._responses:
            await self._responses.close()
        self.journal.settle()
        if self.audit:
            self.audit.tell("stop", {"router": self.name})
        for writer in self._outputs.writers:
            writer.close()

    def _demand(self, model: str) -> Demand:
        fields: dict[str, Any] = {**self.admission.counts(model), **self.latency.percentiles(model)}
        # One record of a router tells of the keys, which have no model.
        keys = self.admission.key_uses() if model == next(iter(self.table.shapes)) else {}
        return Demand(
            self.name,
            model,
            **fields,
            keys=keys,
            beat=self._beats,
            application=self.application,
            **(self.neighbours.peer._asdict() if self.neighbours else {}),
        )


def _told_at_start(spec: RouterSpec, keys: KeyFile) -> dict[str, Any]:
    """What the audit log has of a router's settings."""
    return {
        "keys": len(keys.ring.keys) if keys.ring.required else None,
        "private_status": spec.private_status,
        "log_content": spec.log_content,
    }


def _rates(plans: Sequence[Plan], prices: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, str], Rate]:
    return {
        (plan.model.name, plan.pool): Rate(
            plan.most_sequences, slice_hour(plan.model.slice, plan.slice, prices)
        )
        for plan in plans
    }


def _pace(plans: Sequence[Plan], spec: RouterSpec, first_s: float | None) -> PromptPace:
    """By the slowest pool of each model; a router sends its share of all lines."""
    readings: dict[str, Reading] = {}
    for plan in plans:
        name, reads = plan.model.name, reading(plan, spec.replicas)
        if name not in readings or reads.tokens_per_s < readings[name].tokens_per_s:
            readings[name] = reads
    return PromptPace(readings, first_s)


def reading(plan: Plan, routers: int) -> Reading:
    """How quickly a slice reads prompts of one of so many routers."""
    longest = plan.fit.max_model_len
    speed = plan.speed(sequences=plan.most_sequences, context=longest // 2)
    return Reading(speed.prefill_tokens_per_s / routers, longest)


def _shares(spec: RouterSpec) -> bool:
    return spec.share and spec.replicas > 1 and spec.affinity is Affinity.PREFIX


def _shared_key(application: str) -> bytes:
    """Of the names that routers of one application tell each other: nobody without the cluster's secret can make any."""
    return blake2b(secret.of_this_process().encode(), key=application.encode()[:64], digest_size=32).digest()


def _table(
    plans: Sequence[Plan], spec: RouterSpec, application: str, rates: Mapping[tuple[str, str], Rate]
) -> SliceTable:
    wanted: Counter[str] = Counter()
    shapes: dict[str, list[str]] = {}
    pools: dict[str, list[str]] = {}
    for plan in plans:
        wanted[plan.model.name] += plan.model.replicas.min
        shapes.setdefault(plan.model.name, []).append(str(plan.slice))
        pools.setdefault(plan.model.name, []).append(plan.pool)
    return SliceTable(
        wanted,
        {model: " or ".join(of_pools) for model, of_pools in shapes.items()},
        adapters={adapter: plan.model.name for plan in plans for adapter in plan.adapters},
        pools=pools,
        affinity=spec.affinity,
        routers=spec.replicas,
        shared_key=_shared_key(application) if _shares(spec) else b"",
        seats={of: rate.sequences for of, rate in rates.items()},
        dollars={of: rate.dollars_per_hour / rate.sequences for of, rate in rates.items()},
        reads={(plan.model.name, plan.pool): reading(plan, 1).tokens_per_s for plan in plans},
        clock=time.monotonic,
    )
