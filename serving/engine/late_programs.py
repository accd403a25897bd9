"""Programs that an engine compiles while it serves: all requests of its slice wait meanwhile.

tpu-inference compiles the programs of its ledger, which `serving compile` lists, before it serves. A worker notes what it compiles
afterwards, and the step that needed it; the replica asks for its notes, counts and names them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self

from serving.slices.tpu_hosts import counted

_KEPT = 64  # late programs that a worker can still name when the replica asks
_SHOWN = 3  # requests of a step, and programs of a line, that are named


@dataclass(frozen=True)
class StepRequest:
    """One request of a step by the engine's id, which holds the request's own: its tokens in this step, and those of its prompt.

    `prompt_tokens` is None of a request that was in an earlier step.
    """

    id: str
    tokens: int
    prompt_tokens: int | None

    def __str__(self) -> str:
        prompt = "" if self.prompt_tokens is None else f", new, prompt of {self.prompt_tokens}"
        return f"{self.id} ({counted(self.tokens, 'token')}{prompt})"


@dataclass(frozen=True)
class Step:
    """A step's size, and some of its requests: new ones first, then those with most tokens."""

    requests: int
    tokens: int
    shown: tuple[StepRequest, ...]

    def __str__(self) -> str:
        more = self.requests - len(self.shown)
        others = f" and {more} more" if more else ""
        size = f"{counted(self.requests, 'request')} and {counted(self.tokens, 'token')}"
        return f"a step of {size}: {', '.join(map(str, self.shown))}{others}"


@dataclass(frozen=True)
class LateProgram:
    """A program by JAX's name of its function. `step` is None where no step of requests was under way."""

    name: str
    seconds: float
    cached: bool
    step: Step | None

    def __str__(self) -> str:
        return f"{self.name} ({self.seconds:.2f} s{', from the cache' if self.cached else ''})"


@dataclass(frozen=True)
class Late:
    """How many programs a worker has compiled since its engine serves, the seconds of all, and the newest of them."""

    programs: int = 0
    seconds: float = 0.0
    newest: tuple[LateProgram, ...] = ()

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """From plain data, as it crosses processes."""
        return cls(data["programs"], data["seconds"], tuple(map(_program, data["newest"])))

    def after(self, programs: int) -> tuple[LateProgram, ...]:
        """What was compiled after the first `programs`, as far as it can still be named."""
        return self.newest[-(self.programs - programs) :] if self.programs > programs else ()


def most(workers: Sequence[Late]) -> Late:
    """An engine's: its workers compile the same program at the same step, and stages of a pipeline one each."""
    return max(workers, key=lambda late: (late.programs, late.seconds), default=Late())


def step_of(scheduled: Any) -> Step:
    """What vLLM's SchedulerOutput says of a step."""
    prompts = {new.req_id: len(new.prompt_token_ids or ()) for new in scheduled.scheduled_new_reqs}
    sizes = scheduled.num_scheduled_tokens.items()
    return shown([StepRequest(name, tokens, prompts.get(name)) for name, tokens in sizes])


def shown(requests: Sequence[StepRequest]) -> Step:
    """A step of these requests."""
    first = sorted(requests, key=lambda request: (request.prompt_tokens is None, -request.tokens))
    return Step(len(requests), sum(request.tokens for request in requests), tuple(first[:_SHOWN]))


def lines(programs: Sequence[LateProgram]) -> list[str]:
    """In words, a line a step."""
    return [
        _line(list(of_step), step) for step, of_step in groupby(programs, key=lambda program: program.step)
    ]


def _line(programs: Sequence[LateProgram], step: Step | None) -> str:
    more = len(programs) - _SHOWN
    named = ", ".join(map(str, programs[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
    return f"{named}, for {step or 'no step of requests'}"


def _program(data: Mapping[str, Any]) -> LateProgram:
    step = data["step"]
    if step is not None:
        step = Step(
            step["requests"], step["tokens"], tuple(StepRequest(**request) for request in step["shown"])
        )
    return LateProgram(data["name"], data["seconds"], data["cached"], step)


@dataclass
class Compilations:
    """The programs of a process: all of them, the seconds of all, those read from the cache, and `late` ones since `serve`."""

    programs: int = 0
    seconds: float = 0.0
    cache_hits: int = 0
    late: Late | None = None
    _hits: set[int] = field(default_factory=set)  # threads whose next program came from the cache

    def serve(self) -> Late:
        """Programs are late from the first call on; returns those that are."""
        self.late = self.late or Late()
        return self.late

    def hit(self, thread: int) -> None:
        """A thread has found a program in the cache; `compiled` follows."""
        self.cache_hits += 1
        self._hits.add(thread)

    def compiled(self, name: str, seconds: float, thread: int, step: Step | None = None) -> None:
        self.programs += 1
        self.seconds += seconds
        cached = thread in self._hits
        self._hits.discard(thread)
        if late := self.late:
            program = LateProgram(name, round(seconds, 3), cached, step)
            newest = (*late.newest, program)[-_KEPT:]
            self.late = Late(late.programs + 1, late.seconds + seconds, newest)
