"""Open loop: requests start when the arrivals say, whether the ones before are answered or not.

One `OpenLoop` user runs on each of locust's workers and starts every n-th arrival in a greenlet of its own. Latency counts from
the intended moment, so that neither a slow service nor a busy load generator hides (coordinated omission). What the generator
could not start on time or at all is counted: rows `start` and `dropped`. `OpenLoopShape` is locust's shape for it: when
arrivals end, it waits for the answers under way, and it ends a ramp at the first step that breaks a threshold.
"""

import itertools
import math
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import ClassVar

import gevent
from gevent import GreenletExit
from gevent.pool import Pool
from locust import LoadTestShape, task
from locust.exception import StopUser
from locust.runners import WORKER_REPORT_INTERVAL, MasterRunner, Runner

import arrivals
import exchange
import traces
from bad_input import BadInputError
from prompts import InferenceRequest, Prompts
from ramping import Ramping
from rows import REQUEST, Recorder, count
from thresholds import Thresholds
from users import AskingUser, ClosedLoopUser

Arrival = tuple[float, InferenceRequest]


class NotStartedError(Exception):
    """As many requests in flight as `--max-in-flight` allows."""

    def __repr__(self) -> str:
        return str(self)


class UnfinishedError(NotStartedError):
    """Without a whole answer when `--drain-s` was over."""


def rate(options: Namespace) -> arrivals.Rate:
    """What the options describe; raises BadInputError."""
    return arrivals.rate(
        options.arrivals,
        per_s=options.rate,
        peak_per_s=options.peak_rate,
        period_s=options.period_s,
        burst_s=options.burst_s,
        step_per_s=options.step_rate,
        step_s=options.step_s,
    )


def trace(options: Namespace) -> list[traces.Record]:
    """The trace to replay; raises BadInputError."""
    if not options.trace:
        raise BadInputError("--arrivals replay needs a trace: --trace FILE.jsonl")
    if not options.speed > 0:
        raise BadInputError(f"--speed {options.speed:g} is not above 0")
    return traces.load(Path(options.trace))


def schedule(options: Namespace, mix: list[type[ClosedLoopUser]]) -> Iterator[Arrival]:
    """When each request of the whole run is to start, and what it asks."""
    if options.arrivals == "replay":
        records = trace(options)  # read now: the first of them is due at once
        return ((one.at_s / options.speed, partial(Prompts.replay, record=one)) for one in records)
    random = Random(f"kinds {options.seed}")
    asks, weights = [user.kind for user in mix], [user.weight for user in mix]
    times = arrivals.poisson(rate(options), options.seed)
    return ((at_s, random.choices(asks, weights)[0]) for at_s in times)


class OpenLoop(AskingUser):
    """A worker's share of the arrivals."""

    mix: ClassVar[list[type[ClosedLoopUser]]]

    def on_start(self) -> None:
        self.in_flight = Pool()
        self.arrived = False
        super().on_start()

    @task
    def arrive(self) -> None:
        options = self.environment.parsed_options
        share = getattr(self.environment.runner, "worker_index", 0) % options.open_loop_workers
        arriving = itertools.islice(schedule(options, self.mix), share, None, options.open_loop_workers)
        began = time.perf_counter()
        for at_s, kind in arriving:
            if at_s >= options.open_loop_s:
                break
            intended = began + at_s
            gevent.sleep(max(intended - time.perf_counter(), 0))  # 0 lets those under way read
            if len(self.in_flight) < options.max_in_flight:
                self.in_flight.spawn(self._start, kind, intended)
            else:
                name = exchange.label(*self.next(kind))
                Recorder(self.environment.stats, name).count("dropped")
                self._fail(name, NotStartedError(f"{options.max_in_flight} requests in flight already"))
        self.arrived = True
        self.in_flight.join()
        raise StopUser

    def _start(self, kind: InferenceRequest, intended: float) -> None:
        prompt, key = self.next(kind)
        name = exchange.label(prompt, key)
        recorder = Recorder(self.environment.stats, name)
        recorder.time("start", time.perf_counter() - intended)
        try:
            self.send(prompt, key, intended)
        except GreenletExit:
            if self.arrived:
                waited_s = time.perf_counter() - intended
                recorder.time("latency", waited_s)
                self._fail(name, UnfinishedError("no whole answer when the run ended"), waited_s)
        except Exception as error:  # noqa: BLE001  as locust does for what a task of its own raises
            self.environment.events.user_error.fire(
                user_instance=self, exception=error, tb=error.__traceback__
            )

    def _fail(self, name: str, error: Exception, waited_s: float | None = None) -> None:
        self.environment.events.request.fire(
            request_type=REQUEST,
            name=name,
            response_time=None if waited_s is None else waited_s * 1000,
            response_length=0,
            exception=error,
            context={},
        )

    def on_stop(self) -> None:
        self.in_flight.kill()


class OpenLoopShape(LoadTestShape):
    """Runs `OpenLoop` until arrivals are over and answered, or a ramp breaks."""

    use_common_options = True  # --run-time
    abstract = True  # chosen by --arrivals, not by being here

    def __init__(self, options: Namespace, thresholds: Thresholds) -> None:
        super().__init__()
        self._options, self._thresholds = options, thresholds
        self._begin()

    def reset_time(self) -> None:
        """Locust calls it where a run starts; options may have changed in the web UI."""
        super().reset_time()
        self._begin()

    def _begin(self) -> None:
        options = self._options
        seconds = options.run_time
        self.rate: arrivals.Rate | None = None
        if options.arrivals == "replay":
            trace_s = trace(options)[-1].at_s / options.speed + 1e-3
            self.seconds = min(seconds or trace_s, trace_s)
        else:
            self.rate = rate(options)
            self.seconds = seconds or math.inf
        self.ramp = Ramping(self.rate, self._thresholds) if isinstance(self.rate, arrivals.Ramp) else None

    def tick(self) -> tuple[int, float] | None:
        if self.runner is None:
            return None
        now, counts = self.get_run_time(), count(self.runner.stats)
        if self.ramp and self.ramp.ended(min(now, self.seconds), counts):
            return None
        if now >= self.seconds and self._drained(self.runner, now - self.seconds):
            return None
        # Workers get both with the options that locust sends them.
        self._options.open_loop_s = self.seconds
        self._options.open_loop_workers = workers = max(self.runner.worker_count, 1)
        return workers, workers

    def _drained(self, runner: Runner, waited_s: float) -> bool:
        """Whether every answer is there or was waited for long enough; what workers say comes late.

        A user ends once all its arrivals are answered. Requests sent and not answered don't tell: one may be about to be sent.
        """
        lag_s = 2 * WORKER_REPORT_INTERVAL if isinstance(runner, MasterRunner) else 0
        return waited_s >= lag_s and (runner.user_count == 0 or waited_s >= self._options.drain_s)
