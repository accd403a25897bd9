"""Plans against the TPU's compiler: the table of docs/benchmarks/plans.md, from what serving/planning/compiled.json keeps.

python -m benchmarks.compiled           # the table
python -m benchmarks.compiled --docs    # write it into docs/benchmarks/plans.md
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.pages import show
from serving.config import load
from serving.planning import Plan
from serving.planning.compiled import entries
from serving.planning.plan import plan
from serving.tpu.generations import GIB

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "plans.md"
HEAD = (
    "| file | model | slice | weights | cache | a step | grammars, at start | sampling and the like | programs, at most | prompt logprobs | compiled in |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def deployed() -> Iterator[tuple[str, Plan]]:
    """Every pool of deployments/ as it is planned without the compiler, and its file's name."""
    for path in sorted((ROOT / "deployments").glob("*.yaml")):
        for service in load(path).services.values():
            for model in service.models:
                for pool in model.per_pool():
                    yield path.stem, plan(pool, estimated=True)


def table() -> str:
    """Every pool of deployments/: the plan's estimate and the compiler's figure, or why there is none."""
    lines, reasons = [*HEAD], []
    for file, planned in deployed():
        line, reason = _row(file, planned)
        lines.append(line)
        reasons += [f"- {file}: {reason}"] if reason else []
    return "\n".join([*lines, *(["", "Not compiled, or not whole:", "", *reasons] if reasons else [])])


def _row(file: str, planned: Plan) -> tuple[str, str | None]:
    start = f"| {file} | {planned.model.name} | {planned.slice.generation} {planned.slice.topology} |"
    kept, fit = entries().get(planned.version), planned.fit
    if kept is None:
        return f"{start} not compiled yet |{' |' * 7}", None
    space = fit.workspace
    pairs = (
        (fit.weight_bytes, kept["weight_bytes"]),
        (fit.cache_bytes + fit.state_bytes, kept["cache_bytes"]),
        (space.step_bytes, kept["step_bytes"]),
        (space.grammar_bytes, kept["grammar_bytes"]),
        (space.sampling_bytes, kept["sampling_bytes"]),
        (space.program_bytes, kept["program_bytes"]),
        (space.prompt_logprobs_bytes, kept["prompt_logprobs_bytes"]),
    )
    cells = " | ".join(f"{_gib(estimate)}, {_gib(told)}" for estimate, told in pairs)
    how = f"{kept['seconds']:,.0f} s" + (" (quick)" if kept["quick"] else "")
    return f"{start} {cells} | {how} |", _failure(kept)


def _failure(kept: dict[str, object]) -> str | None:
    if unbuildable := kept["unbuildable"]:
        assert isinstance(unbuildable, list)  # noqa: S101  as tools.compiled keeps it
        return "; ".join(" ".join(reason.split()) for reason in unbuildable)
    programs = kept["programs"]
    assert isinstance(programs, list)  # noqa: S101
    failed = [program for program in programs if program["outcome"] != "compiled"]
    return "; ".join(
        f"{program['name']} {program['outcome']}: {' '.join(program['reason'].split())[:300]}"
        for program in failed
    )


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


if __name__ == "__main__":
    show(__doc__, table(), PAGE, "compiled")
