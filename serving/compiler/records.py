"""What a compile process is asked and what it reports, as plain data. Bytes are of one device."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from serving.compiler.schedule import Schedule

Outcome = Literal["compiled", "refused", "not lowered", "timed out", "died"]
BACKBONE = "backbone"


@dataclass(frozen=True)
class Job:
    """What one process does: build the engine of a pool of a model, then compile `programs` by their place in its ledger.

    Where `programs` is None, the job compiles those that `chosen` chooses, of which `full` is one way. `stage` is the pipeline stage
    that is built, and `layers` cuts the model. `blocks` fixes the cache's blocks. `cache` is a folder for JAX's persistent
    compilation cache.
    """

    file: str
    model: str
    pool: str
    libtpu: str
    stage: int = 0
    layers: int | None = None
    blocks: int | None = None
    programs: tuple[int, ...] | None = ()
    full: bool = False
    cache: str | None = None

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Job":
        programs = data["programs"]
        return cls(**{**data, "programs": None if programs is None else tuple(programs)})


@dataclass(frozen=True)
class Program:
    """One program that the engine compiles at start: a function at one bucket of every size that it is padded to."""

    name: str
    bucket: Mapping[str, int]

    def __str__(self) -> str:
        sizes = ", ".join(f"{value} {size}" for size, value in self.sizes())
        return f"{self.name} ({sizes})" if sizes else self.name

    def sizes(self) -> list[tuple[str, int]]:
        """The bucket in words: the sizes that padding rounds up, then the switches that are on."""
        return [(_WORDS.get(key, key.replace("_", " ")), value) for key, value in self.bucket.items()]


_WORDS = {
    "num_tokens": "tokens",
    "num_reqs": "sequences",
    "array_size": "tokens",
    "index_size": "sequences",
    "next_tokens_size": "next tokens",
}


@dataclass(frozen=True)
class Built:
    """The engine as it stands before it compiles: what lies in HBM, and its ledger of programs."""

    implementation: str
    mesh: Mapping[str, int]
    weight_bytes: int
    cache_bytes: int
    cache_blocks: int
    block_tokens: int
    programs: tuple[Program, ...]
    seconds: float

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Built":
        programs = tuple(Program(entry["name"], entry["bucket"]) for entry in data["programs"])
        return cls(**{**data, "programs": programs})


@dataclass(frozen=True)
class Compiled:
    """What became of one program. `arguments` hold weights and cache where the program takes them.

    `extra_bytes` is what the program takes beside weights and cache while it runs, its code not counted.
    """

    index: int
    outcome: Outcome
    reason: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    aliased_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    resident_bytes: int = 0
    lower_s: float = 0.0
    compile_s: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Compiled":
        return cls(**{**data, "schedule": Schedule(**data["schedule"])})

    @property
    def extra_bytes(self) -> int:
        inputs = max(0, self.argument_bytes - self.resident_bytes)
        return inputs + self.output_bytes - self.aliased_bytes + self.temporary_bytes


@dataclass(frozen=True)
class Stage:
    """One pipeline stage of a plan, counted from 0: its engine, and what became of the programs that were asked for."""

    built: Built
    compiled: tuple[Compiled, ...]
    number: int = 0

    def of(self, name: str) -> list[tuple[Program, Compiled]]:
        return [
            (self.built.programs[entry.index], entry)
            for entry in self.compiled
            if self.built.programs[entry.index].name == name
        ]


@dataclass(frozen=True)
class Ledger:
    """How many programs of each name the engine compiles at start, and the range of each of their sizes."""

    counts: Mapping[str, int]
    buckets: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)


def ledger(programs: Iterable[Program]) -> Ledger:
    counts: dict[str, int] = {}
    buckets: dict[str, dict[str, set[int]]] = {}
    for program in programs:
        counts[program.name] = counts.get(program.name, 0) + 1
        sizes = buckets.setdefault(program.name, {})
        for key, value in program.bucket.items():
            sizes.setdefault(key, set()).add(value)
    return Ledger(
        counts, {name: {key: tuple(sorted(s)) for key, s in sizes.items()} for name, sizes in buckets.items()}
    )


def chosen(programs: tuple[Program, ...], *, sequences: int, full: bool) -> tuple[int, ...]:
    """The programs to compile: all, or the largest of each name and the step that decodes `sequences` at once.

    Larger buckets take more of everything, so that the largest of a name stands for the others.
    """
    if full:
        return tuple(range(len(programs)))
    largest: dict[str, int] = {}
    for index, program in enumerate(programs):
        best = largest.get(program.name)
        if best is None or _size(program) > _size(programs[best]):
            largest[program.name] = index
    decodes = [
        index
        for index, program in enumerate(programs)
        if program.name == BACKBONE and program.bucket.get("num_tokens", 0) >= sequences
    ]
    # A step of the fewest tokens may have several buckets of requests (ATTN_BUCKETIZED_NUM_REQS).
    decode = min(decodes, key=lambda index: _fewest_tokens(programs[index]), default=None)
    return tuple(dict.fromkeys([*([] if decode is None else [decode]), *largest.values()]))


def _fewest_tokens(program: Program) -> tuple[int, int]:
    """Orders steps by tokens; of equals the one with the most requests is first."""
    return program.bucket["num_tokens"], -program.bucket.get("num_reqs", 0)


def _size(program: Program) -> tuple[int, ...]:
    return tuple(program.bucket.values())
