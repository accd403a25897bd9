"""What the compiler says of a plan, beside what the plan says. Bytes are of one device, that of the fullest stage."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from serving.compiler.records import BACKBONE, Compiled, Program, Stage, ledger
from serving.compiler.schedule import Schedule
from serving.planning import Plan
from serving.planning.fit import RESIDENT_BYTES
from serving.tpu.generations import GIB

# Runs for requests with prompt_logprobs alone; at start it is compiled and not run.
_ON_DEMAND = "compute_and_gather_prompt_logprobs"
# Runs at start beside the cache, for every bucket of requests, and all of their logits lie in HBM until the last has run
# (CompilationManager._precompile_structured_decoding). Gemma 4 E2B on a v5e chip at 0.95 ended there, 37 MiB short.
_GRAMMARS = "structured_decode"
# "Ran out of memory in memory space hbm. Used 32.40G of 31.24G hbm", or "... exceeds available HBM (31.24G)".
_AVAILABLE = re.compile(r"(?:of|HBM \()\s*([\d.]+)G(?: hbm|\))")


@dataclass(frozen=True)
class Line:
    """One line of the table of HBM; None where the side says nothing."""

    name: str
    plan_bytes: int | None
    compiler_bytes: int | None


@dataclass(frozen=True)
class Asked:
    """What was asked of the compiler: how deep a model, all programs or the largest, with which versions."""

    command: str
    date: str
    versions: dict[str, str]
    quick: bool
    full: bool


def hbm(plan: Plan, stages: Sequence[Stage]) -> tuple[Line, ...]:
    """The plan's table of HBM, line by line, with the compiler's figure."""
    fit = plan.fit
    built = [stage.built for stage in stages]
    step = _largest(stages, "step")
    other = _largest(stages, "other")
    grammars = _largest(stages, "grammars")
    code = max((code_bytes(stage) for stage in stages), default=0)
    known = step is not None
    weights = max(stage.weight_bytes for stage in built)
    cache = max(stage.cache_bytes for stage in built)
    return (
        Line("usable", fit.usable_bytes, available_bytes(stages)),
        Line("weights", fit.weight_bytes, weights),
        Line("resident", RESIDENT_BYTES, None),
        Line("cache and state", fit.cache_bytes + fit.state_bytes, cache),
        Line("a step", fit.workspace.step_bytes, step),
        Line("grammars, at start", fit.workspace.grammar_bytes, grammars),
        Line("sampling and the like", fit.workspace.sampling_bytes, other),
        Line("prompt logprobs, if asked for", None, _largest(stages, "on demand")),
        Line("programs, at most", fit.workspace.program_bytes, code if known else None),
        Line(
            "all of it",
            fit.weight_bytes + fit.state_bytes + RESIDENT_BYTES + fit.cache_bytes + fit.workspace.bytes,
            weights + cache + RESIDENT_BYTES + max(step or 0, grammars or 0, other or 0) if known else None,
        ),
    )


def needs_bytes(lines: Sequence[Line]) -> int | None:
    return lines[-1].compiler_bytes


def available_bytes(stages: Sequence[Stage]) -> int | None:
    """HBM that the compiler lets a program have, which it only tells when it refuses one."""
    for stage in stages:
        for entry in stage.compiled:
            if entry.outcome == "refused" and (stated := _AVAILABLE.search(entry.reason)):
                return int(float(stated[1]) * GIB)
    return None


def code_bytes(stage: Stage) -> int:
    """Code of all programs at start, at most: of each, that of the smallest compiled program of its name whose buckets are no smaller.

    It does not lie in HBM at once. The runtime gives loaded programs up for buffers (openxla.org/xla/errors/error_0101), and Qwen3.5 397B,
    whose programs have 32 GiB of code, runs where 9.5 are left.
    """
    known = {entry.index: entry.code_bytes for entry in stage.compiled if entry.outcome == "compiled"}
    compiled = [(stage.built.programs[index], size) for index, size in known.items()]

    def most(program: Program) -> int:
        of_name = [(other, size) for other, size in compiled if other.name == program.name]
        covering = [size for other, size in of_name if _covers(other.bucket, program.bucket)]
        return min(covering) if covering else max((size for _, size in of_name), default=0)

    return sum(known.get(index, most(program)) for index, program in enumerate(stage.built.programs))


def _covers(bucket: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return all(bucket.get(name, 0) >= size for name, size in other.items())


def _largest(stages: Sequence[Stage], kind: str) -> int | None:
    """Bytes of the largest program of a kind, with its code: steps, grammars, those on demand, or all others."""
    sizes = [
        entry.extra_bytes + entry.code_bytes + _held_bytes(stage, entry)
        for stage in stages
        for entry in stage.compiled
        if entry.outcome == "compiled" and _kind(stage.built.programs[entry.index].name) == kind
    ]
    return max(sizes, default=None)


def _held_bytes(stage: Stage, entry: Compiled) -> int:
    """Arguments of a program's smaller buckets that lie in HBM while it runs at start."""
    program = stage.built.programs[entry.index]
    if program.name != _GRAMMARS:
        return 0
    buckets = [other.bucket["num_reqs"] for other in stage.built.programs if other.name == _GRAMMARS]
    return entry.argument_bytes * (sum(buckets) - program.bucket["num_reqs"]) // program.bucket["num_reqs"]


def _kind(name: str) -> str:
    if name.startswith(BACKBONE):
        return "step"
    if name == _GRAMMARS:
        return "grammars"
    return "on demand" if name == _ON_DEMAND else "other"


def extended(shallow: Compiled, deep: Compiled, *, depths: tuple[int, int], layers: int) -> Compiled:
    """A step at full depth from two that are less deep, at least: every layer adds the same weights, cache, code and cycles.

    Code of 1, 3 and all 32 layers of Llama 3.1 8B on v6e 2x4 is 2.7, 6.3 and 55.9 MiB. Where more layers took less, as of Gemma 4 26B on
    v6e 2x2, all of them are given the deeper one's. Temporaries and seconds stay those of the deeper one, for the next layer takes the
    buffers of the last: those three take 1.3, 3.2 and 20.0 MiB.
    """
    if shallow.outcome != "compiled" or deep.outcome != "compiled":
        return deep if deep.outcome != "compiled" else shallow
    share = (layers - depths[0]) / (depths[1] - depths[0])

    def of_all(few: int, more: int) -> int:
        return round(max(more, few + share * (more - few)))

    sizes: dict[str, Any] = {
        name: of_all(getattr(shallow, name), getattr(deep, name))
        for name in ("argument_bytes", "output_bytes", "aliased_bytes", "code_bytes", "resident_bytes")
    }
    few, more = shallow.schedule, deep.schedule
    schedule = Schedule(
        product_cycles=of_all(few.product_cycles, more.product_cycles),
        move_cycles=of_all(few.move_cycles, more.move_cycles),
        other_cycles=of_all(few.other_cycles, more.other_cycles),
        unestimated={
            name: of_all(few.unestimated.get(name, 0), count) for name, count in more.unestimated.items()
        },
    )
    return replace(deep, **sizes, schedule=schedule)


def failures(stages: Sequence[Stage]) -> list[tuple[Program, Compiled]]:
    return [
        (stage.built.programs[entry.index], entry)
        for stage in stages
        for entry in stage.compiled
        if entry.outcome != "compiled"
    ]


def document(plan: Plan, asked: Asked, stages: Sequence[Stage], unbuilt: Sequence[str]) -> dict[str, Any]:
    """Everything as plain data: what `--json` prints and what is kept."""
    lines = hbm(plan, stages) if stages and not unbuilt else ()
    return {
        "model": plan.model.name,
        "version": plan.version,
        "checkpoint": plan.model.model,
        "slice": {
            "generation": plan.slice.generation,
            "topology": plan.slice.topology,
            "hosts": plan.slice.hosts,
        },
        "asked": asdict(asked),
        "unbuildable": list(unbuilt),
        "compiles": not unbuilt and bool(stages) and not failures(stages),
        "needs_bytes": needs_bytes(lines) if lines and not failures(stages) else None,
        "device_hbm": [asdict(line) for line in lines],
        "pipeline": plan.pipeline,
        "stages": [_stage(stage) for stage in stages],
    }


def _stage(stage: Stage) -> dict[str, Any]:
    built = stage.built
    counted = ledger(built.programs)
    return {
        "stage": stage.number + 1,
        "implementation": built.implementation,
        "mesh": dict(built.mesh),
        "weight_bytes": built.weight_bytes,
        "cache_bytes": built.cache_bytes,
        "cache_blocks": built.cache_blocks,
        "block_tokens": built.block_tokens,
        "programs": [
            {
                "name": built.programs[entry.index].name,
                "bucket": dict(built.programs[entry.index].bucket),
                **{key: value for key, value in asdict(entry).items() if key != "index"},
                "extra_bytes": entry.extra_bytes,
            }
            for entry in stage.compiled
        ],
        "ledger": {
            name: {
                "programs": count,
                "buckets": {key: list(sizes) for key, sizes in counted.buckets[name].items()},
            }
            for name, count in counted.counts.items()
        },
    }
