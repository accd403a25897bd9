"""What a slice replica tells Prometheus of its slice, out of its own entry on the board."""

import logging
import time

from serving.engine.chip_use import chip_use
from serving.metrics import table
from serving.metrics.recorder import Recorder
from serving.planning import Plan
from serving.slices.board import Entry

logger = logging.getLogger("ray.serve")

# Ray sends every 10 s, on simulated hosts every 2 s, and forgets a gauge that was not set anew in two of those.
_EVERY_S = 0.9


class SliceMetrics:
    """Told the entry at every beat, from the board's thread."""

    def __init__(self, plan: Plan, recorder: Recorder | None = None) -> None:
        self._plan = plan
        self._recorder = recorder or Recorder()
        self._before: Entry | None = None
        self._before_s = time.monotonic()

    def beat(self, entry: Entry) -> None:
        """Hand over what changed; never raises, for the entry has to go on beating."""
        now_s = time.monotonic()
        if now_s - self._before_s < _EVERY_S:
            return
        try:
            self.tell(entry, now_s)
        except Exception:
            logger.exception("the slice's metrics could not be handed over")

    def tell(self, entry: Entry, now_s: float) -> None:
        """What the entry says, and what has happened since the last one."""
        passed_s, self._before_s = now_s - self._before_s, now_s
        recorder, name = self._recorder, (entry.model, entry.slice, str(entry.pool))
        if entry.slice:  # a replica that waits for its slice is none yet
            if self._before is None or not self._before.slice:
                recorder.add(table.SLICE_STARTS, 1, entry.model, str(entry.pool))
            recorder.add(table.SLICE_STATE_SECONDS, passed_s, *name, entry.state.value)
            recorder.set(table.SLICE_RUNNING, entry.running, *name)
            recorder.set(table.SLICE_WAITING, entry.waiting, *name)
            recorder.set(table.SLICE_KV, entry.kv_usage, *name)
            recorder.total(table.SLICE_PROMPT, entry.prompt_tokens, *name)
            recorder.total(table.SLICE_CACHED, entry.cached_tokens, *name)
            recorder.total(table.SLICE_OUTPUT, entry.output_tokens, *name)
            for phase, seconds in entry.phases:
                recorder.set(table.SLICE_START, seconds, *name, phase)
            if entry.simulated:
                self._chips(entry, passed_s)
        self._before = entry
        recorder.flush()

    def _chips(self, entry: Entry, passed_s: float) -> None:
        use = chip_use(self._plan, self._before or entry, entry, passed_s)
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
