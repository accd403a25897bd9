"""Turns a request's record into metrics, log line and spans. And publishes the metrics of a router's slices."""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from serving.config import SloSpec
from serving.errors import PoisonousRequestError
from serving.metrics import table
from serving.metrics.recorder import Recorder
from serving.router.telemetry.record import Checks, RequestRecord
from serving.router.telemetry.spans import RequestSpans
from serving.state.records import Demand, SliceRecord, Wanted

logger = logging.getLogger("ray.serve")


class Journal:
    """Everything that one router process tells of itself, except in the store."""

    def __init__(
        self,
        recorder: Recorder,
        *writers: Callable[[RequestRecord], None],
        spans: RequestSpans | None = None,
        slos: Mapping[str, SloSpec] | None = None,
        keep_content: bool = False,
        together: int = 1,
    ) -> None:
        """`slos` by model. `writers` get each record that is over, with prompt and answer where `keep_content`.

        `together`: how many wait to be counted and written in one go, or until `settle`.
        """
        self._recorder = recorder
        self._spans = spans
        self._writers = (self._count, *((spans.end,) if spans else ()), *writers)
        self._slos = slos or {}
        self._keys = {table.NO_KEY}
        self._keep_content = keep_content
        self._together = together
        self._ended: list[RequestRecord] = []

    def begin(self, path: str, headers: Mapping[str, str]) -> RequestRecord:
        """The record of a request that came."""
        record = RequestRecord(
            path,
            request_id(headers.get("x-request-id")),
            on_end=self.take,
            answer=[] if self._keep_content else None,
        )
        if self._spans:
            self._spans.begin(record, headers)
        return record

    def take(self, record: RequestRecord) -> None:
        """Take the record of a request that is over, once per request."""
        self._ended.append(record)
        if len(self._ended) >= self._together:
            self.settle()

    def settle(self) -> None:
        """Count and write the records that wait."""
        ended, self._ended = self._ended, []
        for writer in self._writers:
            for record in ended:
                try:
                    writer(record)
                except Exception:  # a full disk or a tracing library's bug must not cost an answer
                    logger.exception("a request's record could not be written")

    def publish(
        self,
        entries: Sequence[SliceRecord],
        wanted: Iterable[Wanted],
        demands: Iterable[Demand],
        left_out: Collection[str] = (),
        quarantined: Collection[tuple[str, str]] = (),
    ) -> None:
        """Once a beat: hand Ray the metrics of slices and of this router's own demand.

        `left_out` has the replicas that get no request, `quarantined` slice and host of slices that get no engine.
        """
        recorder = self._recorder
        recorder.only(table.QUARANTINED, dict.fromkeys(quarantined, 1.0))
        recorder.only(
            table.SLICE_STATE,
            {(entry.model, entry.slice, entry.pool, entry.state.value): 1.0 for entry in entries},
        )
        recorder.only(
            table.BREAKER_OPEN,
            {
                (entry.model, entry.slice): float(entry.replica in left_out)
                for entry in entries
                if entry.slice
            },
        )
        for entry in wanted:
            recorder.set(table.WANTED, entry.slices, entry.model)
            recorder.set(table.MISSING, entry.missing, entry.model)
            recorder.set(table.MISSING_SECONDS, entry.missing_for_s, entry.model)
        for demand in demands:
            recorder.set(table.IN_FLIGHT, demand.in_flight, demand.model)
            recorder.set(table.HELD, demand.held, demand.model)
        recorder.total(table.ROUTER_CPU, time.process_time())
        recorder.flush()

    def publish_checks(self, counts: Mapping[str, Checks]) -> None:
        """Hand Ray what became of answers that were asked again, by model."""
        for model, checks in counts.items():
            self._recorder.total(table.CHECKED, checks.looked, model)
            self._recorder.total(table.DIFFERED, checks.differed, model)
            self._recorder.total(table.WRONG, checks.wrong, model)
        self._recorder.flush()

    def _count(self, record: RequestRecord) -> None:
        recorder = self._recorder
        model, pool, key = record.model, record.pool, self._key(record.key)
        recorder.add(table.REQUESTS, 1, model, key, record.outcome, pool)
        if record.prompt_tokens is not None:
            recorder.add(table.PROMPT_TOKENS, record.prompt_tokens, model, key, pool)
        if record.output_tokens is not None:
            recorder.add(table.OUTPUT_TOKENS, record.output_tokens, model, key, pool)
        if record.code == PoisonousRequestError.code:
            recorder.add(table.POISONOUS, 1, model)
        if record.retries:
            recorder.add(table.RETRIES, record.retries, model)
        if record.continuations:
            recorder.add(table.CONTINUATIONS, record.continuations, model)
        if record.preemptions:
            recorder.add(table.PREEMPTIONS, record.preemptions, model)
            recorder.add(table.PAUSED_SECONDS, record.paused_s, model)
        if (router_s := record.router_s) is not None:
            recorder.observe(table.ROUTER, router_s, model)
            recorder.observe(table.QUEUE, record.queued_s, model)
        if record.outcome == "ok":  # an error's times would hide how long answers take
            self._time(record)

    def _time(self, record: RequestRecord) -> None:
        recorder, model, pool = self._recorder, record.model, record.pool
        recorder.observe(table.REQUEST, record.ended_s - record.arrived_s, model, pool)
        # An answer in one piece has all of its tokens before its first bytes.
        ttft_s = record.first_s - record.arrived_s if record.streamed and record.first_s else None
        if ttft_s is not None:
            recorder.observe(table.TTFT, ttft_s, model, pool)
            if (slice_ttft_s := record.slice_ttft_s) is not None:
                recorder.observe(table.SLICE_TTFT, slice_ttft_s, model, pool)
        if (inter_token_s := record.inter_token_s) is not None:
            recorder.observe(table.INTER_TOKEN, inter_token_s, model, pool)
            recorder.observe(table.LONGEST_GAP, record.longest_gap_s, model, pool)
        if slo := self._slos.get(model):
            self._judge(model, "ttft", ttft_s, slo.ttft_s)
            self._judge(model, "itl", inter_token_s, slo.itl_s)

    def _judge(self, model: str, target: str, took_s: float | None, most_s: float | None) -> None:
        if took_s is not None and most_s is not None:
            self._recorder.add(table.SLO, 1, model, target, "yes" if took_s <= most_s else "no")

    def _key(self, key: str) -> str:
        if key not in self._keys:
            if len(self._keys) >= table.MOST_KEYS:
                return table.OTHER_KEYS
            self._keys.add(key)
        return key


def request_id(asked: str | None) -> str:
    """The client's own id for its request where it is valid, else a new id."""
    if asked and len(asked) <= 128 and asked.isascii() and asked.isprintable():
        return asked
    return os.urandom(12).hex()
