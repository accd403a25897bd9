"""The simulated engine against what was measured on TPUs: factors fitted to half of the rows, errors on all of them.

    python -m benchmarks.calibration                        # the table
    python -m benchmarks.calibration --svg docs/benchmarks/calibration.svg  # and a plot

Every row is a run of `vllm bench serve`, here in simulated time. Which requests share a step does not depend on how long
steps take as long as a client keeps its number of requests in flight, so the time of a run is linear in the factors and
one pass over each row is all that a fit needs. The factors are those of serving/engine/simulator/calibration.py unless
--fit asks for new ones.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from benchmarks.service import plan_of
from serving.planning import Plan
from serving.simulation.engine.calibration import FACTORS, PUBLISHED, Published, family
from serving.simulation.engine.physics import Factors, Parts
from serving.simulation.engine.replay import Outcome, replay

# A factor may be off by e for what 10% of a run's time cost: few rows decide four factors, the rest stay near 1.
_STIFFNESS = 0.01
_FINEST = 1e-4


@dataclass(frozen=True)
class Run:
    """A published run: the roofline's time for its steps, part by part, and the time it really took."""

    published: Published
    plan: Plan
    family: str
    parts: Parts
    took_s: float


@dataclass(frozen=True)
class Row:
    """A published run beside the simulated one; `foreseen` is its throughput by a fit to the family's other rows."""

    published: Published
    simulated: Outcome
    foreseen: float

    @property
    def off_by(self) -> float:
        return self.simulated.tokens_per_s / self.published.tokens_per_s - 1


def fit(runs: Sequence[Run]) -> Factors:
    """The factors that bring these runs to the time they took, by relative error, each no further from 1 than it must."""
    if not runs:
        return Factors()
    logs = [0.0] * len(astuple(Factors()))

    def cost(logs: Sequence[float]) -> float:
        factors = Factors(*map(math.exp, logs))
        misses = (math.log(run.parts.seconds(factors) / run.took_s) for run in runs)
        return sum(miss**2 for miss in misses) + _STIFFNESS * sum(log**2 for log in logs)

    step, best = 0.5, cost(logs)
    while step > _FINEST:
        tried = [
            [log + turn * (at == index) for at, log in enumerate(logs)]
            for index in range(len(logs))
            for turn in (step, -step)
        ]
        found = min(tried, key=cost)
        if cost(found) < best:
            logs, best = found, cost(found)
        else:
            step /= 2
    return Factors(*(round(math.exp(log), 2) for log in logs))


def measure(published: Sequence[Published]) -> list[Run]:
    """Every published run on the bare roofline."""
    runs = []
    for each in published:
        found = plan_of(each.deployment)
        bare = replay(found, each.load, Factors())
        took_s = bare.seconds * bare.tokens_per_s / each.tokens_per_s
        runs.append(Run(each, found, family(found), bare.parts, took_s))
    return runs


def fit_families(runs: Sequence[Run]) -> dict[str, Factors]:
    """The factors of each family by the runs that may be looked at."""
    names = dict.fromkeys(run.family for run in runs)
    return {name: fit([run for run in runs if run.family == name and run.published.fits]) for name in names}


def compare(runs: Sequence[Run], factors: Mapping[str, Factors]) -> list[Row]:
    """Every published run simulated with these factors."""
    rows = []
    for run in runs:
        others = fit([other for other in runs if other.family == run.family and other is not run])
        foreseen = run.published.tokens_per_s * run.took_s / run.parts.seconds(others)
        simulated = replay(run.plan, run.published.load, factors[run.family])
        rows.append(Row(run.published, simulated, foreseen))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        (
            "| model and slice | in/out, in flight | | tok/s published | simulated | off | by a fit to the others "
            "| TPOT ms | simulated | TTFT ms | simulated |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        each, found = row.published, row.simulated
        load = f"{each.load.prompt}/{each.load.answer}, {each.load.concurrency}"
        lines.append(
            f"| {each.deployment} | {load} | {'fit' if each.fits else 'held out'} | {each.tokens_per_s:,.0f} "
            f"| {found.tokens_per_s:,.0f} | {row.off_by:+.0%} | {row.foreseen / each.tokens_per_s - 1:+.0%} "
            f"| {_ms(each.tpot_s)} | {_ms(found.tpot_s)} | {_ms(each.ttft_s, 0)} | {_ms(found.ttft_s, 0)} |"
        )
    return "\n".join(lines)


def verdict(rows: Sequence[Row]) -> str:
    """The errors of rows that no factor has seen: of those held out, and of each row when it alone is left out."""
    held = [row for row in rows if not row.published.fits]
    worst = max(held, key=lambda row: abs(row.off_by))
    within = sum(abs(row.off_by) <= 0.15 for row in held)
    mean = sum(abs(row.off_by) for row in held) / len(held)
    alone = [abs(row.foreseen / row.published.tokens_per_s - 1) for row in rows]
    return (
        f"held out: {within} of {len(held)} within 15%, {mean:.0%} off on average, "
        f"worst {worst.published.deployment} {worst.off_by:+.0%}\n"
        f"each by a fit to its family's others: {sum(off <= 0.15 for off in alone)} of {len(alone)} within 15%, "
        f"{sum(alone) / len(alone):.0%} off on average, worst {max(alone):.0%}"
    )


def svg(rows: Sequence[Row]) -> str:
    """Simulated over published throughput on logarithmic axes, with a band of 15%."""
    size, edge, low, high = 460, 60, 1000.0, 10000.0

    def at(value: float) -> float:
        return edge + (size - 2 * edge) * math.log(value / low) / math.log(high / low)

    def point(x: float, y: float) -> str:
        return f"{at(x):.1f},{size - at(y):.1f}"

    shapes = [
        f'<rect width="{size}" height="{size}" fill="white"/>',
        (
            f'<polygon points="{point(low, low / 1.15)} {point(high, high / 1.15)} {point(high, high * 1.15)} '
            f'{point(low, low * 1.15)}" fill="#e8eef7"/>'
        ),
        f'<polyline points="{point(low, low)} {point(high, high)}" stroke="#7a8ca8" fill="none"/>',
    ]
    for tick in (1000, 2000, 5000, 10000):
        shapes.append(f'<text x="{at(tick):.1f}" y="{size - edge + 18}" text-anchor="middle">{tick}</text>')
        shapes.append(f'<text x="{edge - 6}" y="{size - at(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    for row in rows:
        x, y = point(row.published.tokens_per_s, row.simulated.tokens_per_s).split(",")
        load = row.published.load
        name = f"{row.published.deployment} {load.prompt}/{load.answer} at {load.concurrency}"
        fill = "#7a8ca8" if row.published.fits else "#d1495b"
        shapes.append(
            f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}"><title>{name}: {row.off_by:+.0%}</title></circle>'
        )
    middle = size / 2
    shapes += [
        f'<text x="{middle}" y="{size - 16}" text-anchor="middle">published output tokens/s of a slice</text>',
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">simulated</text>',
        f'<text x="{edge + 8}" y="{edge}" fill="#7a8ca8">fitted</text>',
        f'<text x="{edge + 8}" y="{edge + 16}" fill="#d1495b">held out; the band is 15%</text>',
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" '
        f'font-family="sans-serif" font-size="12">\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _ms(seconds: float | None, digits: int = 1) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the factors anew and print them")
    parser.add_argument("--svg", type=Path, help="where to draw the plot")
    options = parser.parse_args()
    runs = measure(PUBLISHED)
    factors = fit_families(runs) if options.fit else FACTORS
    rows = compare(runs, factors)
    if options.fit:
        for name, found in factors.items():
            print(f'    "{name}": {found},')
        print()
    print(f"{table(rows)}\n\n{verdict(rows)}")
    if options.svg:
        options.svg.write_text(svg(rows))


if __name__ == "__main__":
    main()
