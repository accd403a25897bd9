"""The policy at work inside the Serve controller: one thread an application reads the board, decides, and says so.

Serve calls its policies inside the controller's loop, which must not wait; a read of the board takes 0.2 ms a slice and
much longer while the head restarts. So Serve's calls only fetch what the thread decided last. What can't be read holds.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from serving.metrics.recorder import Recorder
from serving.metrics.table import DECISIONS
from serving.scaling.policy import Decision, Report, Room, Settings, State, decide, start
from serving.slices import board

_EVERY_S = 1.0
# Reading may take this share of the thread's time: with a thousand slices on the board it reads less often.
_BUSY_SHARE = 0.1
# Serve calls several times a second; a model or an application without calls for so long is gone.
_ABANDONED_S = 60.0
_KEPT = 200
# A limit that binds on and off is told once.
_SHORT_S = 60.0
logger = logging.getLogger("ray.serve")


@dataclass
class _Model:
    settings: Settings
    called_s: float
    targets: dict[int, int] = field(default_factory=dict)  # by pool, what Serve has
    state: State | None = None
    told: tuple[int, ...] = ()
    hold: bool = False
    short_s: float = -math.inf  # when a limit kept slices away last


class Scaler:
    """All models of one application. `wanted` is called by Serve's loop, `step` by the thread."""

    def __init__(self, application: str, budget: Room, clock: Callable[[], float] = time.monotonic) -> None:
        self._application = application
        self.budget = budget
        self._recorder = Recorder()
        self._clock = clock
        self._reader = board.Reader()
        self._models: dict[str, _Model] = {}
        self._kept: list[board.Decision] | None = None
        self._unsaved = False
        self._called_s = clock()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wanted(self, settings: Settings, pool: int, target: int) -> int:
        """Slices wanted in a pool: what was decided last, until then what Serve has."""
        with self._lock:
            self._called_s = self._clock()
            model = self._models.get(settings.model)
            if model is None or len(model.settings.pools) != len(settings.pools):
                model = self._models[settings.model] = _Model(settings, self._called_s)
            model.settings, model.called_s = settings, self._called_s
            model.targets[pool] = target
            if self._thread is None or not self._thread.is_alive():
                for one in self._models.values():  # Serve itself stood still: none of them is gone for that
                    one.called_s = self._called_s
                self._thread = threading.Thread(target=self._run, name="scaling", daemon=True)
                self._thread.start()
            return model.state.pools[pool].wanted if model.state else target

    def _run(self) -> None:
        while self._clock() - self._called_s < _ABANDONED_S:
            began_s = time.monotonic()
            try:
                self.step()
            except Exception:
                logger.exception("scaling of %s failed; every model keeps its slices", self._application)
            took_s = time.monotonic() - began_s
            time.sleep(max(_EVERY_S, took_s / _BUSY_SHARE))

    def step(self) -> None:
        """Read the board and decide once for every model."""
        now_s = self._clock()
        self._forget_removed(now_s)
        try:
            entries, _ = self._reader.live(board.read(), now_s)
            demands, _ = self._reader.asking(board.demands(), now_s)
        except Exception as error:  # noqa: BLE001  whatever the head's restart makes of a read, the fleet stays
            problem = f"the board can't be read ({error})"
            for model in self._models.values():
                self._hold(model, problem)
            return
        for model in list(self._models.values()):
            self._decide(model, entries, demands, now_s)
        self._save()

    def _forget_removed(self, now_s: float) -> None:
        """A model that a changed YAML no longer has, or no longer scales, must not hold a share of the budget."""
        with self._lock:
            kept = {name: one for name, one in self._models.items() if now_s - one.called_s < _ABANDONED_S}
            self._unsaved |= len(kept) < len(self._models)
            self._models = kept

    def _decide(
        self, model: _Model, entries: list[board.Entry], demands: list[board.Demand], now_s: float
    ) -> None:
        settings = model.settings
        state = model.state or start(
            settings, [model.targets.get(at, pool.min) for at, pool in enumerate(settings.pools)]
        )
        report = Report(
            [entry for entry in entries if entry.model == settings.model],
            [demand for demand in demands if demand.model == settings.model],
            self._room(settings.model),
        )
        decision = decide(settings, state, report, now_s)
        with self._lock:
            model.state = decision.state
        self._tell(model, decision)

    def _room(self, but: str) -> Room:
        """The budget less what the other models want, at least their `min`."""
        slices, dollars = 0, 0.0
        for name, other in self._models.items():
            if name != but:
                wanted = other.state.wanted if other.state else [pool.min for pool in other.settings.pools]
                slices += sum(wanted)
                dollars += sum(
                    count * pool.dollars_per_hour
                    for count, pool in zip(wanted, other.settings.pools, strict=True)
                )
        return self.budget.less(slices, dollars)

    def _hold(self, model: _Model, problem: str) -> None:
        if model.state and not model.hold:
            self._tell(
                model, Decision(model.state.wanted, f"holding: {problem}", held=True, state=model.state)
            )

    def _tell(self, model: _Model, decision: Decision) -> None:
        """Log and keep what is new: another number for a pool, that reports can't be used, or that a limit binds."""
        now_s = self._clock()
        short = decision.short and now_s - model.short_s > _SHORT_S
        if decision.short:
            model.short_s = now_s
        news = [
            (at, pool.name, count)
            for at, (pool, count) in enumerate(zip(model.settings.pools, decision.wanted, strict=True))
            if model.told[at : at + 1] != (count,) or decision.held > model.hold or short
        ]
        before, model.told, model.hold = model.told, decision.wanted, decision.held
        for at, pool, count in news:
            direction = "hold" if decision.held else _direction(before[at : at + 1], count)
            self._recorder.add(DECISIONS, 1, model.settings.model, str(at), direction)
            logger.info("%s wants %d of %s: %s", model.settings.model, count, pool, decision.reason)
            if self._kept is None:
                self._kept = []
            self._kept.append(board.Decision(time.time(), model.settings.model, pool, count, decision.reason))
            self._unsaved = True
        self._recorder.flush()

    def _save(self) -> None:
        if not self._unsaved:
            return
        known = {(one.at, one.pool) for one in self._kept or ()}
        before = [one for one in board.decisions(self._application) if (one.at, one.pool) not in known]
        self._kept = [*before, *(self._kept or ())][-_KEPT:]
        board.keep_decisions(self._application, self._kept)
        wanted = {name: sum(model.state.wanted) for name, model in self._models.items() if model.state}
        board.order(self._application, wanted)
        self._unsaved = False


def _direction(before: tuple[int, ...], count: int) -> str:
    if not before:
        return "start"
    return "up" if count > before[0] else "down" if count < before[0] else "short"


_SCALERS: dict[str, Scaler] = {}


def scaler(application: str, budget: Mapping[str, float | None]) -> Scaler:
    """The application's scaler in this process, the same for all of its deployments."""
    found = _SCALERS.setdefault(application, Scaler(application, Room()))
    found.budget = Room(budget.get("slices"), budget.get("dollars_per_hour"))
    return found
