"""A plan, compiled: a process builds the engine and compiles its programs one after the other.

A program whose time is up is ended with its process, and another process goes on behind it. With more than one job every step has
a process of its own.
"""

import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from serving.compiler import processes
from serving.compiler.configs import quick_layers
from serving.compiler.records import BACKBONE, Built, Compiled, Job, Stage, chosen
from serving.compiler.report import extended
from serving.errors import CompileError
from serving.planning import Plan

# What a process does now, in words, and whether that is its end.
Progress = Callable[[str, str], None]


@dataclass(frozen=True)
class Wish:
    """How to ask: `quick` takes two small depths in place of all layers, `full` every program in place of the largest."""

    quick: bool
    full: bool
    jobs: int
    limit_s: float
    cache: str | None


@dataclass(frozen=True)
class Answer:
    """A plan's stages. `unbuilt` has a reason for every stage that can't be built; `logs` is kept where something failed."""

    stages: tuple[Stage, ...]
    unbuilt: tuple[str, ...]
    logs: Path | None


def compile_plan(
    file: str, plan: Plan, config: Mapping[str, Any], libtpu: Path, wish: Wish, progress: Progress
) -> Answer:
    """Ask the compiler about one pool of a model, of which `config` is the checkpoint's. Ends its processes whatever happens."""
    if plan.sizes.pools:
        raise CompileError(
            f"{plan.model.name}: the engine of a model that embeds or scores texts moves arrays to its TPU while it loads "
            "(tpu_runner.py, StepPooler), and there is none here; compile the others of the file by --model"
        )
    depths = quick_layers(config) if wish.quick else None
    if wish.quick and depths is None:
        raise CompileError(
            f"{plan.model.name}: --quick needs a model whose layers repeat in a short pattern, each with a cache of its own; "
            "leave --quick out"
        )
    logs = Path(tempfile.mkdtemp(prefix="serving-compile-"))
    job = Job(file, plan.model.name, plan.pool, str(libtpu), full=wish.full, cache=wish.cache)
    running = processes.Running()
    work = _Work(plan, job, wish, logs, progress, depths, running, threading.Event())
    # First, last, and one that is neither: the stages between are alike.
    numbers = sorted({0, min(1, plan.pipeline - 1), plan.pipeline - 1})
    try:
        results = [work.stage(number) for number in numbers]
    except BaseException:
        shutil.rmtree(logs)
        raise
    stages = tuple(result for result in results if isinstance(result, Stage))
    unbuilt = tuple(result for result in results if isinstance(result, str))
    failed = bool(unbuilt) or any(entry.outcome != "compiled" for stage in stages for entry in stage.compiled)
    if not failed:
        shutil.rmtree(logs)
    return Answer(stages, unbuilt, logs if failed else None)


@dataclass(frozen=True)
class _Work:
    plan: Plan
    job: Job
    wish: Wish
    logs: Path
    progress: Progress
    depths: tuple[int, int] | None
    running: processes.Running
    stopped: threading.Event

    def stage(self, number: int) -> Stage | str:
        """One pipeline stage, or why its engine can't be built."""
        job = replace(self.job, stage=number)
        name = f"stage {number + 1} of {self.plan.pipeline}: " if self.plan.pipeline > 1 else ""
        alone = self.wish.jobs == 1 and self.depths is None
        self.progress(f"{name}engine", "building")
        outcome = self._run(replace(job, programs=None if alone else ()), f"{number}-engine", name, None)
        if outcome.built is None:
            self.progress(f"{name}engine", "can't be built")
            return f"{name}{outcome.reason}"
        built = outcome.built
        wanted = chosen(built.programs, sequences=self.plan.most_sequences, full=self.wish.full)
        done = list(outcome.compiled)
        left = tuple(index for index in wanted if index not in {entry.index for entry in done})
        tasks = self._tasks(replace(job, programs=left), built, name)
        with ThreadPoolExecutor(self.wish.jobs) as pool:
            try:
                done += [entry for entries in pool.map(lambda task: task(), tasks) for entry in entries]
            except BaseException:
                self.stopped.set()
                self.running.end()  # or the pool would wait for compiles that nobody wants any more
                raise
        return Stage(built, tuple(sorted(done, key=lambda entry: wanted.index(entry.index))), number)

    def _tasks(self, job: Job, built: Built, name: str) -> list[Callable[[], list[Compiled]]]:
        """What can be done at once: every step apart, and all other programs together, which are small."""
        steps = [index for index in job.programs or () if built.programs[index].name.startswith(BACKBONE)]
        others = tuple(index for index in job.programs or () if index not in steps)
        tasks: list[Callable[[], list[Compiled]]] = []
        if self.depths is not None and steps:
            depths = self.depths
            tasks.append(lambda: self._extended(replace(job, programs=tuple(steps)), depths, built, name))
        else:
            tasks += [partial(self._programs, replace(job, programs=(step,)), built, name) for step in steps]
        if others:
            tasks.append(partial(self._programs, replace(job, programs=others), built, name))
        return tasks

    def _extended(self, job: Job, depths: tuple[int, int], built: Built, name: str) -> list[Compiled]:
        shallow, deep = (
            self._programs(replace(job, layers=layers, blocks=built.cache_blocks), built, name)
            for layers in depths
        )
        layers = self.plan.shape.layers
        return [extended(*pair, depths=depths, layers=layers) for pair in zip(shallow, deep, strict=True)]

    def _programs(self, job: Job, built: Built, name: str) -> list[Compiled]:
        """Compile programs one after the other; where one takes the process with it, another process goes on behind it."""
        done: list[Compiled] = []
        while (left := (job.programs or ())[len(done) :]) and not self.stopped.is_set():
            log = f"{job.stage}-{left[0]}-{job.layers or 'all'}"
            outcome = self._run(replace(job, programs=left), log, name, built)
            done += outcome.compiled or [
                Compiled(left[0], "died" if outcome.built else "not lowered", outcome.reason)
            ]
        return done

    def _run(self, job: Job, log: str, name: str, built: Built | None) -> processes.Outcome:
        depth = f", {job.layers} layers" if job.layers else ""

        def on_event(event: processes.Event) -> None:
            nonlocal built
            if isinstance(event, Built):
                built = built or event
                self.progress(f"{name}engine{depth}", f"built, {len(event.programs)} programs")
            elif built is not None:
                index, state = event
                self.progress(f"{name}{built.programs[index]}{depth}", state)

        return processes.run(
            job, self.logs / f"{log}.log", on_event, limit_s=self.wish.limit_s, running=self.running
        )
