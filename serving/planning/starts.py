"""How long a start takes, by phase: ranges of what was published, and from how few starts each comes.

Compile times hardly follow a model's size: those published differ by four times between models of 5 and 671 billion parameters.
So no formula is fitted to them. What a cache saves is taken as a share. Nobody has measured a start of this service on a TPU.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

# tpu-inference compiles one program after the other by default; each at once needs cores and, for a while, memory.
_VCPUS_PER_COMPILATION, _MOST_COMPILATIONS = 8, 16
UNKNOWN_COMPILATIONS = 8  # where no page gives a machine's vCPUs


class Phase(StrEnum):
    """Parts of a start as their times are published."""

    WEIGHTS = "weights"
    COMPILE = "compile"
    COMPILE_WARM = "compile, from the cache"
    REST = "rest"


@dataclass(frozen=True)
class PublishedStart:
    """One published start. Seconds of a phase; of weights, their bytes too. `at_once`: several programs compile at a time."""

    model: str
    where: str
    phase: Phase
    seconds: float
    source: str
    at_once: bool = False
    bytes: float = 0


_ISSUES = "https://github.com/vllm-project/tpu-inference"
_GPT_OSS = f"{_ISSUES}/issues/1707"
_THREADS = f"{_ISSUES}/pull/2517"
_PARALLEL = f"{_ISSUES}/pull/2415"
_E2B = "a run on ct6e-standard-1t, 2026-07, not by Google"
_GPT_OSS_BYTES = 65.2e9  # of the checkpoint's files, in MXFP4

PUBLISHED_STARTS = (
    PublishedStart("gpt-oss-120b", "v7x", Phase.COMPILE, 339.76, _GPT_OSS),
    PublishedStart("gpt-oss-120b", "v7x", Phase.COMPILE_WARM, 135.10, _GPT_OSS),
    PublishedStart("gpt-oss-120b", "v7x", Phase.WEIGHTS, 25.35, _GPT_OSS, bytes=_GPT_OSS_BYTES),
    PublishedStart("gpt-oss-120b", "v7x", Phase.WEIGHTS, 23.34, _GPT_OSS, bytes=_GPT_OSS_BYTES),
    PublishedStart("DeepSeek", "one host", Phase.COMPILE, 630, _PARALLEL),
    PublishedStart("DeepSeek", "one host", Phase.COMPILE, 400, _PARALLEL, at_once=True),
    PublishedStart("Qwen3-30B FP8", "", Phase.COMPILE, 209.4, _THREADS),
    PublishedStart("Qwen3-30B FP8", "", Phase.COMPILE, 94.1, _THREADS, at_once=True),
    PublishedStart("Qwen3-235B", "", Phase.COMPILE, 345.1, _THREADS),
    PublishedStart("Qwen3-235B", "", Phase.COMPILE, 156.6, _THREADS, at_once=True),
    PublishedStart("Gemma 4 E2B", "v6e 1x1", Phase.COMPILE, 329, _E2B),
    # Of 404 s all but compiling: processes, imports, 10 GB of weights, the cache.
    PublishedStart("Gemma 4 E2B", "v6e 1x1", Phase.REST, 75, _E2B),
)


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase, from so many published starts."""

    low_s: float
    high_s: float
    starts: int


@dataclass(frozen=True)
class StartTime:
    """A predicted start. `weights` is None where they are downloaded: nobody published how fast that goes."""

    weights: PhaseTime | None
    compile: PhaseTime
    compile_warm: PhaseTime
    rest: PhaseTime
    compilations: int

    def range_s(self, *, warm: bool) -> tuple[float, float]:
        """Seconds of all phases that are known."""
        phases = [
            self.compile_warm if warm else self.compile,
            self.rest,
            *([self.weights] if self.weights else []),
        ]
        return sum(phase.low_s for phase in phases), sum(phase.high_s for phase in phases)


def compilations(vcpus: int | None) -> int:
    """Programs that a host compiles at once: one for eight vCPUs, up to 16."""
    if vcpus is None:
        return UNKNOWN_COMPILATIONS
    return max(1, min(_MOST_COMPILATIONS, vcpus // _VCPUS_PER_COMPILATION))


def start_time(model: str, checkpoint_bytes: int, vcpus: int | None) -> StartTime:
    """The start of an engine whose every host reads the whole checkpoint of `model`, a path or id as the YAML has it."""
    at_once = compilations(vcpus)
    from_bucket = "://" in model or model.startswith("/")
    rates = [start.bytes / start.seconds for start in _of(Phase.WEIGHTS)]
    cold = _range(start for start in _of(Phase.COMPILE) if start.at_once == (at_once > 1))
    shares = [_share_of_cold(start) for start in _of(Phase.COMPILE_WARM)]
    return StartTime(
        weights=PhaseTime(checkpoint_bytes / max(rates), checkpoint_bytes / min(rates), len(rates))
        if from_bucket
        else None,
        compile=cold,
        compile_warm=PhaseTime(cold.low_s * min(shares), cold.high_s * max(shares), len(shares)),
        rest=_range(_of(Phase.REST)),
        compilations=at_once,
    )


def _share_of_cold(warm: PublishedStart) -> float:
    """Of the time that the same engine takes without a cache."""
    cold = next(
        start for start in _of(Phase.COMPILE) if (start.model, start.source) == (warm.model, warm.source)
    )
    return warm.seconds / cold.seconds


def _of(phase: Phase) -> list[PublishedStart]:
    return [start for start in PUBLISHED_STARTS if start.phase is phase]


def _range(starts: Iterable[PublishedStart]) -> PhaseTime:
    seconds = [start.seconds for start in starts]
    return PhaseTime(min(seconds), max(seconds), len(seconds))
