"""The policy at work inside the Serve controller: one thread an application reads the store, decides, and logs.

Serve calls its policies inside the controller's loop, which must not wait; a read of the store takes 0.2 ms a slice and
much longer while the head restarts. So Serve's calls only fetch the last decision. It holds while reads fail.
"""

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import ray

from serving.metrics.recorder import Recorder
from serving.metrics.table import DECISIONS
from serving.scaling.policy import (
    Decision,
    PolicyState,
    Report,
    Room,
    Settings,
    aligned,
    decide,
    start,
    unread,
)
from serving.scaling.sharing import Given, Share, given, hardware_given
from serving.state.gcs import Store
from serving.state.liveness import Liveness
from serving.state.records import DecisionRecord, Demand, SliceRecord, SliceState

_EVERY_S = 1.0
# Reading may take this share of the thread's time: with a thousand slices in the store it reads less often.
_BUSY_SHARE = 0.1
_LONGEST_S = 10.0  # a read that waited for a head that restarts says nothing of how much there is to read
# Serve calls several times a second; a model or an application that Serve does not call for so long is gone.
_ABANDONED_S = 60.0
_KEPT = 200
# A limit that binds again within this time is not logged again.
_SHORT_S = 60.0
logger = logging.getLogger("ray.serve")


@dataclass
class _Model:
    settings: Settings
    called_s: float
    targets: dict[str, int] = field(default_factory=dict)  # by pool key, what Serve has
    state: PolicyState | None = None
    announced: dict[str, int] = field(default_factory=dict)  # by pool key
    hold: bool = False
    failing: bool = False
    share: Share | None = None  # of the budget, at the last decision
    short_s: float = -math.inf  # when a limit kept slices away last

    @property
    def decided(self) -> dict[str, int]:
        """Slices wanted by pool key; empty before the first decision."""
        return {pool.key: pool.wanted for pool in self.state.pools} if self.state else {}

    @property
    def in_full(self) -> dict[str, int]:
        """As `decided`, once slices of pools that the YAML no longer has have gone."""
        if not self.state:
            return {}
        return {pool.key: count for pool, count in zip(self.state.pools, self.state.in_full, strict=False)}

    @property
    def present(self) -> list[int]:
        """Slices to leave room for, by pool: those decided for in full, before that those that Serve has, and at least `min`."""
        counts = self.in_full or self.targets
        return [counts.get(pool.key, pool.min) for pool in self.settings.pools]

    @property
    def called(self) -> bool:
        """Whether Serve has called for every pool that scales, so that none is taken for its `min`."""
        return all(pool.key in self.targets for pool in self.settings.pools if pool.min < pool.max)


class Scaler:
    """All models of one application. `wanted` is called by Serve's loop, `step` by the thread."""

    def __init__(
        self,
        application: str,
        store: Callable[[], Store],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store` opens the store of the cluster that this process has joined."""
        self._application = application
        self._store = store
        self._budget = Room()
        self._leaving = (0.0, 0.0)
        self._recorder = Recorder(application)
        self._clock = clock
        self._liveness = Liveness()
        self._models: dict[str, _Model] = {}
        self._kept: list[DecisionRecord] | None = None
        self._unsaved = False
        self._ordered: dict[str, int] = {}
        self._hardware: dict[str, Given] = {}  # by model that waits for hardware
        self._called_s = clock()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wanted(
        self,
        settings: Settings,
        pool: str,
        target: int,
        budget: Room,
        *,
        fixed: Sequence[Settings] = (),
        leaving: tuple[float, float] = (0, 0.0),
        deployed: bool = False,
    ) -> int:
        """Slices wanted in the pool of this key: the last decision, before the first one what Serve has.

        `fixed`: models for which Serve never calls; they take part in what models leave to one another. `leaving`: slices of pools that
        the YAML no longer has, and their dollars an hour. `deployed`: Serve calls for the first time since the pool was deployed. If it
        then has another number than was wanted, the pool was deleted in between, and its model starts anew.
        """
        with self._lock:
            self._budget, self._leaving = budget, leaving
            self._called_s = self._clock()
            model = self._models.get(settings.model)
            if model and deployed and model.decided.get(pool, target) != target:
                model = None
            if model is None:
                model = self._models[settings.model] = _Model(settings, self._called_s)
            model.settings, model.called_s = settings, self._called_s
            model.targets[pool] = target
            for uncalled in fixed:
                known = self._models.setdefault(uncalled.model, _Model(uncalled, self._called_s))
                known.settings, known.called_s = uncalled, self._called_s
            if self._thread is None or not self._thread.is_alive():
                for other in self._models.values():  # Serve itself stood still: no model is gone for that
                    other.called_s = self._called_s
                self._thread = threading.Thread(target=self._run, name="scaling", daemon=True)
                self._thread.start()
            return model.decided.get(pool, target)

    def in_full(self, model: str, pool: str) -> tuple[int | None, Sequence[str]]:
        """Slices wanted of a pool once others have gone, and the pools that the decision counted on.

        None before a look at the model's load has decided for it.
        """
        with self._lock:
            decided = self._models[model].in_full if model in self._models else {}
        return decided.get(pool), list(decided)

    def _run(self) -> None:
        while self._clock() - self._called_s < _ABANDONED_S:
            began_s = time.monotonic()
            try:
                self.step()
            except Exception:
                logger.exception("scaling of %s failed; every model keeps its slices", self._application)
            took_s = time.monotonic() - began_s
            time.sleep(min(max(_EVERY_S, took_s / _BUSY_SHARE), _LONGEST_S))
        self._leave()

    def _leave(self) -> None:
        """Nobody calls any more: the application is deleted, or none of its models scales."""
        try:
            self._store().delete_scaling(self._application)
        except Exception as error:  # noqa: BLE001  as in `step`; an application of the same name overwrites the records
            logger.warning("scaling of %s leaves its records in the store (%s)", self._application, error)
        self._kept = None
        self._ordered = {}

    def step(self) -> None:
        """Read the store and decide once for every model."""
        now_s = self._clock()
        self._forget_removed(now_s)
        try:
            snapshot = self._store().read(self._application)
            marked, _ = self._liveness.slices(snapshot.slices, now_s)
            entries = _as_told(marked, snapshot.slices)
            demands, _ = self._liveness.routers(snapshot.demands, now_s)
        except Exception as error:  # noqa: BLE001  whatever a restarting head makes of a read, the slices stay
            problem = f"the store can't be read ({error})"
            for model in self._models.values():
                self._hold(model, problem)
                if model.state:
                    with self._lock:
                        model.state = unread(model.state, problem, now_s)
            return
        shares = {name: model.share for name, model in self._models.items() if model.share}
        self._hardware = hardware_given(shares, self._hardware)
        gives = given({name: share for name, share in shares.items() if not self._models[name].hold})
        # Those that give come first: what they give would count as lacking at the next look too, and a second slice would go for it.
        for name, model in sorted(self._models.items(), key=lambda item: item[0] not in gives):
            if model.called:
                try:
                    self._decide(model, entries, demands, gives.get(name, (0.0, 0.0)), now_s)
                except Exception as error:
                    logger.exception("scaling of %s failed; it keeps its slices", model.settings.model)
                    self._hold(model, f"scaling failed ({type(error).__name__})")
        self._save()

    def _forget_removed(self, now_s: float) -> None:
        """A model that a changed YAML no longer has, or no longer scales, must not hold a share of the budget."""
        with self._lock:
            kept = {
                name: model for name, model in self._models.items() if now_s - model.called_s < _ABANDONED_S
            }
            self._unsaved |= len(kept) < len(self._models)
            self._models = kept

    def _decide(
        self,
        model: _Model,
        entries: list[SliceRecord],
        demands: list[Demand],
        gives: tuple[float, float],
        now_s: float,
    ) -> None:
        """`gives`: slices and dollars an hour of the room that it leaves to models that lack them."""
        settings, remarks = self._without_what_it_gives(model.settings)
        with self._lock:
            targets = dict(model.targets)
        state = aligned(settings, model.state, targets) if model.state else start(settings, targets)
        room = self._room(settings.model).less(*gives)
        report = Report(
            [entry for entry in entries if entry.model == settings.model],
            [demand for demand in demands if demand.model == settings.model],
            room,
            self._leaving,
        )
        decision = decide(settings, state, report, now_s)
        decision = replace(decision, reason="; ".join([decision.reason, *remarks]))
        with self._lock:
            model.state = decision.state
        if not decision.held:
            pools = zip(settings.pools, decision.state.pools, strict=True)
            late = [known.overdue(now_s, pool.patience_s) for pool, known in pools]
            model.share = Share(
                settings.pools,
                room,
                decision.asked,
                decision.state.in_full,
                late,
                present=[known.delivered for known in decision.state.pools],
                out=[known.late for known in decision.state.pools],
                failing=any(known.failed for known in decision.state.pools),
                apart=any(entry.bought_for for entry in entries),
            )
        self._tell(model, decision)

    def _without_what_it_gives(self, settings: Settings) -> tuple[Settings, list[str]]:
        """The settings with less of the pools whose hardware the model gives to others, and to whom."""
        pools, remarks = list(settings.pools), []
        for waiting, part in self._hardware.items():
            if part.model == settings.model:
                pools = [
                    replace(pool, max=min(pool.max, part.kept.get(pool.key, pool.max))) for pool in pools
                ]
                counts = [f"{part.kept[pool.key]} of {pool.name}" for pool in pools if pool.key in part.kept]
                remarks.append(f"{waiting}, which waits for hardware, allows {' and '.join(counts)}")
        return replace(settings, pools=tuple(pools)), remarks

    def _room(self, model: str) -> Room:
        """The budget less what the other models want, or have until they are decided for."""
        slices, dollars = 0, 0.0
        for name, other in self._models.items():
            if name != model:
                wanted = other.present
                slices += sum(wanted)
                dollars += sum(
                    count * pool.dollars_per_hour
                    for count, pool in zip(wanted, other.settings.pools, strict=True)
                )
        return self._budget.less(slices, dollars)

    def _hold(self, model: _Model, problem: str) -> None:
        if model.state and not model.hold:
            state = aligned(model.settings, model.state, model.targets)
            self._tell(model, Decision(state.wanted, f"holding: {problem}", held=True, state=state))

    def _tell(self, model: _Model, decision: Decision) -> None:
        """Log and keep news: another number for a pool, reports that can't be used, a limit that binds, starts that fail."""
        if not model.settings.scales:
            return
        now_s = self._clock()
        short = decision.short and now_s - model.short_s > _SHORT_S
        if decision.short:
            model.short_s = now_s
        wanted = {pool.key: count for pool, count in zip(model.settings.pools, decision.wanted, strict=True)}
        news = short or decision.held > model.hold or decision.failing > model.failing
        changes = [
            (pool, wanted[pool.key])
            for pool in model.settings.pools
            if model.announced.get(pool.key) != wanted[pool.key] or news
        ]
        before, model.announced, model.hold = model.announced, wanted, decision.held
        if not decision.held:
            model.failing = decision.failing
        for pool, count in changes:
            direction = "hold" if decision.held else _direction(before.get(pool.key), count)
            self._recorder.add(DECISIONS, 1, model.settings.model, pool.key, direction)
            logger.info("%s wants %d of %s: %s", model.settings.model, count, pool.name, decision.reason)
            if self._kept is None:
                self._kept = []
            self._kept.append(
                DecisionRecord(
                    time.time(),
                    model.settings.model,
                    pool.name,
                    count,
                    decision.reason,
                    self._application,
                )
            )
            self._unsaved = True
        self._recorder.flush()

    def _save(self) -> None:
        if not self._unsaved and self._ordered == self._in_full():
            return
        known = {(record.at, record.pool) for record in self._kept or ()}
        store = self._store()
        records = store.read(self._application).decisions
        before = [record for record in records if (record.at, record.pool) not in known]
        self._kept = [*before, *(self._kept or ())][-_KEPT:]
        store.put_decisions(self._application, self._kept)
        self._ordered = self._in_full()
        store.put_ordered(self._application, self._ordered)
        self._unsaved = False

    def _in_full(self) -> dict[str, int]:
        """By model, slices wanted once those that leave have gone: they still count among those that serve."""
        scaling = {name: model for name, model in self._models.items() if model.settings.scales}
        return {name: sum(model.in_full.values()) for name, model in scaling.items() if model.state}


def _as_told(marked: Sequence[SliceRecord], records: Iterable[SliceRecord]) -> list[SliceRecord]:
    """A slice that starts and is silent has not failed: the store may be slow. It has once its record says so, or is gone.

    One that leaves is silent once it has ended.
    """
    kept = (SliceState.STARTING, SliceState.DRAINING)
    known = {entry.replica: entry for entry in records if entry.state in kept}
    return [known.get(entry.replica, entry) for entry in marked]


def _direction(before: int | None, count: int) -> str:
    if before is None:
        return "start"
    return "up" if count > before else "down" if count < before else "short"


_SCALERS: dict[str, Scaler] = {}
_MAKING = threading.Lock()


def scaler(application: str) -> Scaler:
    """The application's scaler in this process, the same for all of its deployments; made on the first call."""
    with _MAKING:
        known = _SCALERS.get(application)
        if known is None:
            known = _SCALERS[application] = Scaler(application, _cluster_store)
        return known


@functools.cache
def _cluster_store() -> Store:
    return Store(ray.get_runtime_context().gcs_address)
