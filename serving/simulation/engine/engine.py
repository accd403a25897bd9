"""The engine itself: one task takes step after step, each as long as physics says, and hands the tokens out.

A step is due its own time after the step before it was due, not after this process got round to it. So a busy machine
does not slow the slice down unless it falls behind by more than CATCH_UP_S.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from serving.engine import late_programs
from serving.engine.late_programs import Compilations
from serving.errors import SliceLostError
from serving.planning import Plan
from serving.simulation.engine import tokenizer
from serving.simulation.engine.faults import Faults
from serving.simulation.engine.metrics import Metrics
from serving.simulation.engine.physics import Physics
from serving.simulation.engine.scheduler import Limits, Request, Scheduler, Step

CATCH_UP_S = 0.25


@dataclass(eq=False)
class Choice:
    """One answer of a request in flight; `sent` counts its tokens that were passed on."""

    request: Request
    finish: str
    index: int = 0
    sent: int = 0


class Stream:
    """The choices of one request as their tokens come; `id` is the answer's."""

    def __init__(self, id: str = "") -> None:  # noqa: A002  as vLLM's answers have it
        self.id = id
        self.choices: list[Choice] = []
        self._ready = asyncio.Event()
        self._failure: SliceLostError | None = None

    @property
    def done(self) -> bool:
        return all(choice.request.done for choice in self.choices)

    def notify(self, failure: SliceLostError | None = None) -> None:
        self._failure = failure
        self._ready.set()

    async def more(self) -> None:
        """Wait for the next tokens of any choice; raises SliceLostError where the engine is dead."""
        await self._ready.wait()
        self._ready.clear()
        if self._failure:
            raise self._failure


class Engine:
    """The model on a slice, without the model."""

    def __init__(self, plan: Plan, physics: Physics, *, chance: Callable[[], float] = random.random) -> None:
        self.scheduler = Scheduler(Limits.of(plan))
        self.metrics = Metrics(plan.model.name, plan.fit.max_model_len, self.scheduler)
        self.faults = Faults()
        self.dead: str | None = None
        self.last_output_s = 0.0
        self.compiling_since_s: float | None = None
        self.compilations = Compilations()
        self._physics = physics
        self._chance = chance
        self._streams: dict[Request, tuple[Stream, Choice]] = {}
        self._work = asyncio.Event()
        self._changed = asyncio.Event()

    def inject(self, fields: Mapping[str, Any]) -> Faults:
        """Turn faults on or off; raises SimulationError."""
        self.faults = self.faults.changed(fields)
        if self.faults.die:
            self.die("told to die")
        self._changed.set()
        return self.faults

    def cache_age_s(self, now_s: float) -> float:
        """How long ago what the prefix cache has dropped was last asked for; 0 where it has dropped nothing."""
        dropped_s = self.scheduler.pool.dropped_s
        return round(now_s - dropped_s, 1) if dropped_s else 0.0

    def fails_now(self) -> bool:
        """Whether the request that has just come fails, by chance."""
        return self.faults.error_rate > 0 and self._chance() < self.faults.error_rate

    def submit(
        self, stream: Stream, prompt: list[int], answer: list[int], finish: str, cache_salt: str | None = None
    ) -> None:
        """Add a choice to a stream; raises SliceLostError, or ValueError for a choice that can never run."""
        if self.faults.die_on and self.faults.die_on in tokenizer.decode(prompt):
            self.die(f"a prompt holds {self.faults.die_on!r}")
        if self.dead:
            raise SliceLostError(self.dead)
        choice = Choice(
            Request(prompt, answer, time.monotonic(), cache_salt=cache_salt), finish, len(stream.choices)
        )
        self.scheduler.add(choice.request)
        stream.choices.append(choice)
        self._streams[choice.request] = (stream, choice)
        self._work.set()

    def cancel(self, stream: Stream) -> None:
        """Forget a stream that nobody reads any more."""
        for choice in stream.choices:
            self.scheduler.cancel(choice.request)
            self._streams.pop(choice.request, None)

    def die(self, reason: str) -> None:
        """End at once; every request in flight ends with the error."""
        if self.dead:
            return
        self.dead = reason
        for stream, _ in self._streams.values():
            stream.notify(SliceLostError(f"the engine is dead: {reason}"))
        self._streams.clear()
        self._work.set()
        self._changed.set()

    async def probe(self) -> None:
        """Answer while the engine takes steps; hang while it hangs or compiles."""
        await self._while_hanging()
        while self.compiling_since_s is not None and not self.dead:
            self._changed.clear()
            await self._changed.wait()
        if self.dead:
            raise SliceLostError(self.dead)

    async def died(self) -> str:
        """Wait until the engine is dead; returns why."""
        while not self.dead:
            self._changed.clear()
            await self._changed.wait()
        return self.dead

    async def run(self) -> None:
        """Take steps until the engine is dead."""
        due_s = time.monotonic()
        while not self.dead:
            now_s = time.monotonic()
            step = self.scheduler.schedule(now_s)
            if step is None:
                self._work.clear()
                await self._work.wait()
                due_s = time.monotonic()
                continue
            due_s = max(due_s, now_s - CATCH_UP_S) + self.faults.step_s(self._physics.seconds(step.batch))
            compiled_for = self._told(step) if self.faults.compile_s else None
            self.compiling_since_s = now_s if compiled_for else None
            self.faults = self.faults.after_step()
            await asyncio.sleep(max(0, due_s - time.monotonic()))
            if self.compiling_since_s is not None:
                seconds = time.monotonic() - self.compiling_since_s
                self.compilations.compiled("jit(run_model)", seconds, 0, compiled_for)
                self.compiling_since_s = None
                self._changed.set()
            await self._while_hanging()
            if not self.dead:
                self._hand_out(step, time.monotonic())

    def _told(self, step: Step) -> late_programs.Step:
        """The step as a worker of vLLM would tell of it."""
        requests = [
            late_programs.StepRequest(
                self._streams[request][0].id,
                tokens,
                len(request.prompt) if request.first_token_s is None else None,
            )
            for request, tokens in step.work
        ]
        return late_programs.shown(requests)

    def _hand_out(self, step: Step, now_s: float) -> None:
        before = {request: request.last_token_s for request, _ in step.work}
        for request in self.scheduler.complete(step, now_s):
            stream, choice = self._streams[request]
            last_s = before[request]
            self.metrics.token(None if last_s is None else now_s - last_s, now_s - request.arrived_s)
            if request.done:
                self.metrics.finished(request, choice.finish)
                del self._streams[request]
            stream.notify()
            self.last_output_s = now_s
        self.metrics.step(step)

    async def _while_hanging(self) -> None:
        while self.faults.hang and not self.dead:
            self._changed.clear()
            await self._changed.wait()
