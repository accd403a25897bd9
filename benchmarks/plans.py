"""Plans against published rates: the prices of a step's parts are fitted to them, and judged on families left out.

    python -m benchmarks.plans           # the tables
    python -m benchmarks.plans --fit     # fit the prices anew and print them
    python -m benchmarks.plans --docs    # write the tables into docs/benchmarks/plans.md

A price is held near what is known of it (`KNOWN`): few rows decide twelve prices. Families are left out one at a time,
never rows: rows of one family have the same errors.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median, quantiles

from benchmarks.pages import put
from serving.config import ModelSpec
from serving.planning import Plan, plan
from serving.planning.architectures import NOT_COUNTED, NOT_ON_TPU
from serving.planning.engine_sizes import engine_sizes
from serving.planning.known_models import CONFIGS
from serving.planning.layout import Layout
from serving.planning.published import HELD, PUBLISHED, Published
from serving.planning.shapes import shape_of
from serving.planning.speed import COSTS, PARTS, Engine, Parts, per_answer_token, spread
from serving.planning.summary import sequences_at_once
from serving.planning.weights import checkpoint_params, tensor_groups

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "plans.md"

# What is known of a price, and how far, as a logarithm, a fit may pull it for one row that is off by NOISE. HBM and matrix
# units: microbenchmarks on v6e reach 0.72 and 0.88 of peak, on v7x 0.87 and 0.83; kernels of attention and of serving's
# small matrices reach less. Counts: a step of tpu-inference takes the host milliseconds, a kernel's start microseconds.
KNOWN = {
    "steps": (2e-3, 0.7),
    "layers": (15e-6, 0.7),
    "layers_by_vllm": (20e-6, 0.8),
    "expert_layers": (40e-6, 0.8),
    "collectives": (8e-6, 0.7),
    "answers": (8e-6, 0.8),
    "untuned": (3e-6, 0.3),
    "weights_s": (1 / 0.75, 0.2),
    "cache_s": (2.0, 0.5),
    "products_s": (1 / 0.6, 0.4),
    "attention_s": (1 / 0.3, 0.6),
    "links_s": (1 / 0.6, 0.5),
    "rows_s": (1.0, 0.8),
    "groups_s": (1.0, 0.8),
    "sampled_s": (1.0, 0.2),
}
NEW = "2026-05"  # since when published runs are of engines like this one's
NOISE = 0.2  # of a published rate: other versions, other days
_FINEST = 1e-3


@dataclass(frozen=True)
class Row:
    """One published rate, with what its output tokens cost part by part."""

    published: Published
    plan: Plan
    load: tuple[int, int, int]
    tokens_per_s: float
    parts: Parts
    sequences: int

    def off_by(self, costs: Parts) -> float:
        """Planned over published, as a logarithm."""
        return math.log(self.plan.data / self.parts.seconds(costs) / self.tokens_per_s)

    @property
    def spread(self) -> float:
        return spread(Engine(self.plan.shape, self.plan.sizes, self.plan.slice, self.plan.layout))

    @property
    def inside(self) -> bool:
        """Whether the published rate is within the range that is printed."""
        return abs(self.off_by(COSTS)) <= math.log(self.spread)


def planned(published: Published) -> Plan:
    generation, topology, *hosts = published.slice.split()
    shape = {"generation": generation, "topology": topology, **({"hosts": int(hosts[0])} if hosts else {})}
    return plan(
        ModelSpec.model_validate(
            {
                "model": published.model,
                "slice": shape,
                "engine": dict(published.engine),
                "parallel": dict(published.parallel),
                "engine_env": dict(published.environment),
            }
        )
    )


def rows(all_published: Sequence[Published] = PUBLISHED) -> list[Row]:
    found = []
    for published in all_published:
        plan_ = planned(published)
        engine = Engine(plan_.shape, plan_.sizes, plan_.slice, plan_.layout)
        for (prompt, answer, load), tokens_per_s in published.rates.items():
            sequences = sequences_at_once(plan_, prompt, answer, load)
            parts = per_answer_token(
                engine, prompt=prompt, answer=answer, sequences=sequences, sampled=published.sampled
            )
            found.append(Row(published, plan_, (prompt, answer, load), tokens_per_s, parts, sequences))
    return found


def fit(measured: Sequence[Row]) -> Parts:
    """The prices nearest to what is known that bring these rows to their rates; far outliers count less than squared."""
    families = [row.published.family for row in measured]
    # A family of many rows has the weight of three.
    weights = [min(1.0, 3 / families.count(family)) for family in families]
    parts = [astuple(row.parts) for row in measured]
    targets = [row.plan.data / row.tokens_per_s for row in measured]

    def cost(logs: Sequence[float]) -> float:
        prices = [KNOWN[name][0] * math.exp(log) for name, log in zip(PARTS, logs, strict=True)]
        misses = (
            math.log(sum(a * b for a, b in zip(part, prices, strict=True)) / target) / NOISE
            for part, target in zip(parts, targets, strict=True)
        )
        off = sum(
            weight * 2 * (math.sqrt(1 + miss**2) - 1) for weight, miss in zip(weights, misses, strict=True)
        )
        return off + sum((log / KNOWN[name][1]) ** 2 for name, log in zip(PARTS, logs, strict=True))

    logs, width = [0.0] * len(PARTS), 0.25
    best = cost(logs)
    while width > _FINEST:
        better = False
        for index in range(len(logs)):
            for turn in (width, -width):
                tried = [*logs]
                tried[index] += turn
                if (found := cost(tried)) < best:
                    logs, best, better = tried, found, True
        if not better:
            width /= 2
    return Parts(*(_rounded(KNOWN[name][0] * math.exp(log)) for name, log in zip(PARTS, logs, strict=True)))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def left_out(measured: Sequence[Row]) -> list[float]:
    """Each row's error by a fit to all other families."""
    families = {row.published.family for row in measured}
    prices = {family: fit([row for row in measured if row.published.family != family]) for family in families}
    return [row.off_by(prices[row.published.family]) for row in measured]


def verdict(errors: Sequence[float]) -> str:
    shares = [abs(math.exp(error) - 1) for error in errors]
    within = sum(share <= 0.15 for share in shares)
    ninth = math.exp(quantiles([abs(error) for error in errors], n=10)[8])
    return f"median {median(shares):.0%} off, {within} of {len(shares)} within 15%, nine of ten within a factor of {ninth:.2f}"


def table(measured: Sequence[Row], unseen: Sequence[float]) -> str:
    lines = [
        "| model | slice | in/out, in flight | tok/s published | planned | off | range | by a fit to other families |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, error in zip(measured, unseen, strict=True):
        off, rate = row.off_by(COSTS), row.tokens_per_s * math.exp(row.off_by(COSTS))
        factor = row.spread
        inside = "" if row.inside else " (outside)"
        name = row.published.model.partition("/")[2]
        prompt, answer, load = row.load
        floor = " (a floor)" if row.published.floor else ""
        slice_ = " ".join(row.published.slice.split()[:2])
        lines.append(
            f"| {name} | {slice_} | {prompt}/{answer}, {load} | {row.tokens_per_s:,.0f}{floor} | {rate:,.0f} "
            f"| {math.exp(off) - 1:+.0%} | {rate / factor:,.0f} to {rate * factor:,.0f}{inside} | {math.exp(error) - 1:+.0%} |"
        )
    return "\n".join(lines)


def held_table(held: Sequence[Row]) -> str:
    lines = [
        "| model | slice | measured | in/out, in flight | tok/s published | planned | off | range |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in held:
        rate, factor = row.tokens_per_s * math.exp(row.off_by(COSTS)), row.spread
        inside = "" if row.inside else " (outside)"
        name = row.published.model.partition("/")[2]
        prompt, answer, load = row.load
        slice_ = " ".join(row.published.slice.split()[:2])
        lines.append(
            f"| {name} | {slice_} | {row.published.date} | {prompt}/{answer}, {load} | {row.tokens_per_s:,.0f} | {rate:,.0f} "
            f"| {math.exp(row.off_by(COSTS)) - 1:+.0%} | {rate / factor:,.0f} to {rate * factor:,.0f}{inside} |"
        )
    return "\n".join(lines)


def held_verdict(held: Sequence[Row]) -> str:
    """Rows of engines as new as this one's apart from older ones, whose kernels were others."""
    parts = []
    for name, chosen in (
        (f"since {NEW}", [row for row in held if row.published.date >= NEW]),
        ("before", [row for row in held if row.published.date < NEW]),
    ):
        within = sum(row.inside for row in chosen)
        parts.append(
            f"{name}: {verdict([row.off_by(COSTS) for row in chosen])}, {within} of {len(chosen)} within their range"
        )
    return "; ".join(parts)


def coverage() -> str:
    lines = [
        "| model | architecture | parameters, B | of the checkpoint, B | runs as |",
        "|---|---|---|---|---|",
    ]
    for model in CONFIGS:
        shape = shape_of(model)
        sizes = engine_sizes({"max_model_len": 1024}, shape)
        total = sum(group.params for group in tensor_groups(shape, sizes, Layout(1)))
        runs = "vLLM's, by torchax" if sizes.by_vllm else "tpu-inference's, in JAX"
        lines.append(
            f"| {model} | {shape.architecture} | {total / 1e9:,.2f} | {checkpoint_params(shape) / 1e9:,.2f} | {runs} |"
        )
    refused = [f"- {name}: {reason}." for name, reason in NOT_ON_TPU.items()]
    uncounted = [f"- {name}: {reason}." for name, reason in NOT_COUNTED.items()]
    return "\n".join(
        [
            *lines,
            "",
            "Refused, with this reason:",
            "",
            *refused,
            "",
            "Refused because their bytes are not counted, with what this reader lacks:",
            "",
            *uncounted,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the prices anew and print them")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/benchmarks/plans.md")
    options = parser.parse_args()
    measured = rows()
    if options.fit:
        for name, value in zip(PARTS, astuple(fit(measured)), strict=True):
            print(f"    {name}={value:g},")
    unseen, held = left_out(measured), rows(HELD)
    report = "\n\n".join(
        [
            table(measured, unseen),
            f"Fitted: {verdict([row.off_by(COSTS) for row in measured])}.",
            f"By a fit to other families: {verdict(unseen)}.",
            "## Rates that no price was fitted to",
            held_table(held),
            f"Not fitted, {held_verdict(held)}.",
        ]
    )
    print(report)
    if options.docs:
        PAGE.write_text(put(PAGE.read_text(), "plans", f"{report}\n\n## Coverage\n\n{coverage()}"))


if __name__ == "__main__":
    main()
