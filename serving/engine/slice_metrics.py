"""The metrics that a slice replica gives Prometheus, made from its own record."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from serving.metrics import table
from serving.metrics.recorder import Recorder
from serving.planning import Plan
from serving.state.records import SliceRecord

logger = logging.getLogger("ray.serve")

# Ray sends every 10 s, on simulated hosts every 2 s, and forgets a gauge that was not set within two of these periods.
_EVERY_S = 0.9


@dataclass(frozen=True)
class ChipUse:
    """The use of one chip, as libtpu gives it: shares in percent, memory in bytes."""

    tensorcore: float = 0.0
    bandwidth: float = 0.0
    duty_cycle: float = 0.0
    hbm_used: float = 0.0
    hbm_total: float = 0.0


# Works out chip use from two records of a slice and the seconds between them.
ChipsOf = Callable[[Plan, SliceRecord, SliceRecord, float], ChipUse]


class SliceMetrics:
    """Metrics from the record, every beat, in the thread that writes it."""

    def __init__(self, plan: Plan, application: str, chips_of: ChipsOf | None = None) -> None:
        """`chips_of` works out a simulated slice's chip use; Ray's agent reads a real one from the chips."""
        self._plan = plan
        self._chips_of = chips_of
        self._recorder = Recorder(application)
        self._before: SliceRecord | None = None
        self._before_s = time.monotonic()

    def publish(self, entry: SliceRecord) -> None:
        """Hand over what changed. Never raises: the record must go on beating."""
        now_s = time.monotonic()
        if now_s - self._before_s < _EVERY_S:
            return
        try:
            self.tell(entry, now_s)
        except Exception:
            logger.exception("the slice's metrics could not be handed over")

    def tell(self, entry: SliceRecord, now_s: float) -> None:
        """Hand over the entry's figures, and what happened since the last entry."""
        passed_s, self._before_s = now_s - self._before_s, now_s
        recorder, name = self._recorder, (entry.model, entry.slice, entry.pool)
        if entry.slice:  # a replica that waits for hardware has no slice yet
            if self._before is None or not self._before.slice:
                recorder.add(table.SLICE_STARTS, 1, entry.model, entry.pool)
            recorder.add(table.SLICE_STATE_SECONDS, passed_s, *name, entry.state.value)
            recorder.set(table.SLICE_RUNNING, entry.running, *name)
            recorder.set(table.SLICE_WAITING, entry.waiting, *name)
            recorder.set(table.SLICE_KV, entry.kv_usage, *name)
            recorder.total(table.SLICE_PROMPT, entry.prompt_tokens, *name)
            recorder.total(table.SLICE_CACHED, entry.cached_tokens, *name)
            recorder.total(table.SLICE_OUTPUT, entry.output_tokens, *name)
            recorder.total(table.SLICE_LATE_PROGRAMS, entry.late_programs, *name)
            recorder.total(table.SLICE_LATE_COMPILE, entry.late_compile_s, *name)
            for phase, seconds in entry.phases:
                recorder.set(table.SLICE_START, seconds, *name, phase)
            if entry.simulated and self._chips_of:
                self._chips(entry, self._chips_of(self._plan, self._before or entry, entry, passed_s))
        self._before = entry
        recorder.flush()

    def _chips(self, entry: SliceRecord, use: ChipUse) -> None:
        for host in entry.hosts:
            for chip in range(self._plan.slice.chips_per_host):
                labels = (entry.model, entry.slice, host, str(chip), "true")
                for row, value in (
                    (table.TENSORCORE, use.tensorcore),
                    (table.BANDWIDTH, use.bandwidth),
                    (table.DUTY_CYCLE, use.duty_cycle),
                    (table.HBM_USED, use.hbm_used),
                    (table.HBM_TOTAL, use.hbm_total),
                ):
                    self._recorder.set(row, value, *labels)
