"""Planned time of a step's products against the compiler's cycles, of what serving/planning/compiled.json keeps. Nothing has run.

python -m benchmarks.cycles           # the table
python -m benchmarks.cycles --docs    # write it into docs/benchmarks/plans.md
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.compiled import PAGE, deployed
from benchmarks.pages import show
from serving.planning import Plan
from serving.planning.compiled import entries
from serving.planning.speed import COSTS, PARTS, Engine, step

HEAD = (
    "| file | slice | tokens | products | copies | rest | sum, ms | planned, ms | off by | no estimate of |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
# Inferred, stated by nobody: 918 and 197 TFLOP/s are those of four MXUs of 256 x 256 and of 128 x 128 at this clock.
CLOCK_HZ = {"v6e": 1.75e9, "v5e": 1.5e9}
_MILLION = 1e6
# What the compiler schedules itself: not attention and its cache, not collectives, not the host.
_SCHEDULED = frozenset({"layers", "weights_s", "products_s"})


def table() -> str:
    """A row for every step of a dense model of deployments/ whose cycles are kept."""
    return "\n".join([*HEAD, *(row for file, planned in deployed() for row in _rows(file, planned))])


def _rows(file: str, planned: Plan) -> Iterator[str]:
    """The table's rows of one pool; none where experts or another stage would take part of the step."""
    kept, generation = entries().get(planned.version), planned.slice.generation
    if kept is None or generation not in CLOCK_HZ or planned.shape.experts or planned.pipeline > 1:
        return
    compiled = [program for program in kept["programs"] if "schedule" in program]
    logits = next((program for program in compiled if program["name"] == "compute_logits"), None)
    if logits is None:
        return
    for program in compiled:
        if program["name"] != "backbone":
            continue
        tokens = program["bucket"]["num_tokens"]
        products, copies, rest = (
            program["schedule"][f"{kind}_cycles"] + logits["schedule"][f"{kind}_cycles"]
            for kind in ("product", "move", "other")
        )
        compiler_s = (products + copies + rest) / CLOCK_HZ[generation]
        planned_s = _planned_s(planned, tokens, logits["bucket"]["num_reqs"])
        figures = " | ".join(f"{cycles / _MILLION:.1f}" for cycles in (products, copies, rest))
        without = _without(program["schedule"]["unestimated"])
        yield (
            f"| {file}{' (quick)' if kept['quick'] else ''} | {generation} {planned.slice.topology} | {tokens:,} | {figures} | "
            f"{compiler_s * 1e3:.1f} | {planned_s * 1e3:.1f} | {planned_s / compiler_s - 1:+.0%} | {without} |"
        )


def _planned_s(planned: Plan, tokens: int, sequences: int) -> float:
    """The plan's seconds for the same: a step of `tokens`, of which `sequences` at most write, without its other parts."""
    engine = Engine(planned.shape, planned.sizes, planned.slice, planned.layout)
    decodes = min(tokens, sequences)
    parts = step(engine, decodes=decodes, prompt_tokens=tokens - decodes)
    others: dict[str, float] = dict.fromkeys((name for name in PARTS if name not in _SCHEDULED), 0.0)
    return replace(parts, **others).seconds(COSTS)


def _without(unestimated: dict[str, Any]) -> str:
    """Attention's kernels together, and the rest by name."""
    kernels = sum(count for name, count in unestimated.items() if name.startswith("RPA"))
    others = {name: count for name, count in unestimated.items() if not name.startswith("RPA")}
    return ", ".join(f"{count} {name}" for name, count in {"attention": kernels, **others}.items() if count)


if __name__ == "__main__":
    show(__doc__, table(), PAGE, "cycles")
