"""Scaling policies against each other, on fleets in simulated time.

    python -m benchmarks.fleet                    # the table: four policies on four traces
    python -m benchmarks.fleet --svg docs/benchmarks/fleet.svg    # and what ours wanted, ordered and had
    python -m benchmarks.fleet --hindsight        # the other policies' targets, each the best for its trace
    python -m benchmarks.fleet --check            # the fluid that the table rests on, beside requests one by one
    python -m benchmarks.fleet --rollout          # a changed engine through 1,000 slices: how long, and how many serve
    python -m benchmarks.fleet --size             # 1,000 slices for 24 hours: how long that takes, and a policy call

Slices are Llama 3.3 70B on v6e-8 as deployments/llama-70b-v6e-8.yaml plans it. Nothing here was measured on a TPU.
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.fleet import requests, rolling, traces
from benchmarks.fleet.fluid import Outcome, World, run
from benchmarks.fleet.rivals import Fixed, Ours, Policy, QueueLength, ServeDefault, View
from benchmarks.fleet.supply import Market
from serving import config
from serving.planning import plan
from serving.planning.prices import slice_hour
from serving.scaling.capacity import Capacity, Lengths, capacity, pool_of, with_room
from serving.scaling.policy import Settings

_DEPLOYMENT = Path(__file__).parents[2] / "deployments" / "llama-70b-v6e-8.yaml"
_LENGTHS = Lengths(prompt=1000, answer=300)
_TTFT_S, _ITL_S = 2.0, 0.04
_MOST = 60
# Targets to look back on, of a slice's sequences: requests that are with it, and requests that wait.
_ONGOING = [share / 100 for share in range(30, 101, 5)]
_WAITING = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 2)


def world(most: int = _MOST, market: Market | None = None) -> World:
    """Slices that take four minutes to come and three to start, and are preempted every other day."""
    (service,) = config.load(_DEPLOYMENT).services.values()
    found = plan(service.models[0])
    priced = pool_of(found, slice_hour(found.model.slice, found.slice, service.prices))
    pools = (replace(priced, min=1, max=most),)
    return World(pools, (market or Market(preempted_per_hour=1 / 48),), _LENGTHS, _TTFT_S, _ITL_S)


def policies(there: World, peak: float) -> list[Policy]:
    """The rivals' targets as an operator would set them who knows what a slice takes: four fifths of it."""
    one = capacity(there.pools[0], there.lengths, there.itl_s)
    most = there.pools[0].max
    return [
        Ours(settings(there)),
        ServeDefault(1, most, target=0.8 * one.sequences),
        QueueLength(1, most, target=0.05 * one.sequences),
        Fixed(needed(peak, one)),
    ]


def settings(there: World) -> Settings:
    return Settings("model", there.pools, there.ttft_s, there.itl_s)


def needed(rate: float, one: Capacity) -> int:
    return math.ceil(with_room(rate, one) / one.requests_per_s)


def compare(there: World, every: Sequence[traces.Trace]) -> list[Outcome]:
    return [played(there, trace, policy) for trace in every for policy in policies(there, trace.peak)]


def played(there: World, trace: traces.Trace, policy: Policy) -> Outcome:
    """A trace from a fleet that is as large as it takes at its beginning."""
    one = capacity(there.pools[0], there.lengths, there.itl_s)
    opening = needed(trace.rate(0.0), one)
    first = [policy.count] if isinstance(policy, Fixed) else [opening]
    if isinstance(policy, ServeDefault | QueueLength):
        policy.current = opening
    if isinstance(policy, Ours):
        policy.opening = first
    return run(there, trace, policy, first)


def hindsight(there: World, every: Sequence[traces.Trace]) -> str:
    """The rivals at every target, each at the one that is best for the trace, beside ours at its only setting."""
    one = capacity(there.pools[0], there.lengths, there.itl_s)
    most = there.pools[0].max
    lines = [
        "| trace | ours | policy | goodput of its best target at no more slice-hours | slice-hours for our goodput |",
        "|---|---|---|---|---|",
    ]
    for trace in every:
        ours = played(there, trace, Ours(settings(there)))
        for rival, shares in ((ServeDefault, _ONGOING), (QueueLength, _WAITING)):
            found = [played(there, trace, rival(1, most, share * one.sequences)) for share in shares]
            cheap = [each.goodput for each in found if each.slice_hours <= ours.slice_hours]
            good = [each.slice_hours for each in found if each.goodput >= ours.goodput]
            lines.append(
                f"| {trace.name} | {ours.goodput:.2%}, {ours.slice_hours:.0f} slice-hours | {rival.name} "
                f"| {f'{max(cheap):.2%}' if cheap else 'none'} | {f'{min(good):.0f}' if good else 'never'} |"
            )
    return "\n".join(lines)


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown."""
    lines = [
        "| trace | policy | within both targets | refused | slice-hours | USD |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.trace} | {one.policy} | {one.goodput:.2%} | {one.refused / one.arrived:.2%} | {one.slice_hours:.0f} "
        f"| {one.dollars:,.0f} |"
        for one in outcomes
    ]
    return "\n".join(lines)


def svg(outcomes: Sequence[Outcome]) -> str:
    """Ours on every trace: slices wanted, held and serving over time, and the queue below."""
    width, height, edge = 460, 190, 34
    shapes = [f'<rect width="{2 * width}" height="{2 * height}" fill="white"/>']
    for number, one in enumerate(outcomes):
        left, top = number % 2 * width + edge, number // 2 * height + 26
        wide, high, low = width - 2 * edge, height - 80, 24
        most = max(max(point.wanted, point.serving + point.ordered) for point in one.timeline) * 1.1
        queue = max(1.0, *(point.queued for point in one.timeline))
        last = one.timeline[-1].at_s

        def line(values: Sequence[float], scale: float, base: float, tall: float) -> str:
            return " ".join(
                f"{left + wide * at / (len(values) - 1):.1f},{base - tall * value / scale:.1f}"  # noqa: B023
                for at, value in enumerate(values)
            )

        base = top + high
        held = [point.serving + point.ordered for point in one.timeline]
        serving = [point.serving for point in one.timeline]
        shapes += [
            (
                f'<text x="{left}" y="{top - 8}" font-weight="bold">{one.trace}: {one.goodput:.1%} within targets, '
                f"{one.slice_hours:.0f} slice-hours</text>"
            ),
            f'<polygon points="{left},{base} {line(held, most, base, high)} {left + wide},{base}" fill="#f3d9a4"/>',
            f'<polygon points="{left},{base} {line(serving, most, base, high)} {left + wide},{base}" fill="#a9c6e8"/>',
            (
                f'<polyline points="{line([point.wanted for point in one.timeline], most, base, high)}" '
                'stroke="#1f3a5f" fill="none"/>'
            ),
            (
                f'<polyline points="{line([point.queued for point in one.timeline], queue, base + 4 + low, low)}" '
                'stroke="#d1495b" fill="none"/>'
            ),
            f'<text x="{left - 4}" y="{top + 8}" text-anchor="end">{most / 1.1:.0f}</text>',
            f'<text x="{left + wide + 4}" y="{base + 4 + low}">{queue:.0f}</text>',
            f'<text x="{left + wide}" y="{base + 18 + low}" text-anchor="end">{last / 3600:.0f} h</text>',
        ]
    keys = (
        ("wanted", "#1f3a5f"),
        ("on order or starting", "#d9a441"),
        ("serving", "#5b8fc7"),
        ("queue", "#d1495b"),
    )
    shapes += [
        f'<text x="{edge + at * 140}" y="{2 * height + 4}" fill="{colour}">{name}</text>'
        for at, (name, colour) in enumerate(keys)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width}" height="{2 * height + 12}" '
        f'font-family="sans-serif" font-size="11">\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def check() -> str:
    """Ours on small fleets, once as a fluid and once request by request through the router's own choice."""
    there = world(market=Market())
    one = capacity(there.pools[0], there.lengths, there.itl_s)
    lines = [
        "| trace | within both targets: fluid | by request | slice-hours: fluid | by request |",
        "|---|---|---|---|---|",
    ]
    for trace in (traces.steady(20, 0.5), traces.bursts(12, 1, seed=3), traces.spike(3, 2.5)):
        found = []
        for each in (run, requests.run):
            opening = [needed(trace.rate(0.0), one)]
            policy = Ours(settings(there), opening)
            found.append(each(there, trace, policy, opening))
        fluid, single = found
        lines.append(
            f"| {trace.name} | {fluid.goodput:.1%} | {single.goodput:.1%} | {fluid.slice_hours:.1f} | {single.slice_hours:.1f} |"
        )
    return "\n".join(lines)


class _Timed:
    """A policy that is timed, in CPU seconds of its own."""

    def __init__(self, policy: Ours) -> None:
        self.name = policy.name
        self.took_s: list[float] = []
        self._policy = policy

    def wanted(self, view: View) -> Sequence[int]:
        began = time.process_time()
        wanted = self._policy.wanted(view)
        self.took_s.append(time.process_time() - began)
        return wanted


def size(slices: int, hours: float) -> str:
    """A day of a fleet that large, at whose peak it needs as many slices as it may have."""
    there = world(most=slices)
    one = capacity(there.pools[0], there.lengths, there.itl_s)
    mean = slices * one.requests_per_s / 1.8 * 0.95
    trace = traces.diurnal(mean, hours)
    timed = _Timed(Ours(settings(there)))
    began, cpu = time.monotonic(), time.process_time()
    outcome = run(there, trace, timed, [needed(trace.rate(0.0), one)], every_s=30)
    most = max(point.serving for point in outcome.timeline)
    return (
        f"{hours:.0f} h of up to {most} slices and {outcome.arrived / 1e6:.0f} million requests in "
        f"{time.monotonic() - began:.0f} s ({time.process_time() - cpu:.0f} s of CPU); {outcome.goodput:.2%} within both "
        f"targets, {outcome.slice_hours:,.0f} slice-hours; a policy call took {1e3 * statistics.median(timed.took_s):.2f} ms "
        f"(median), at most {1e3 * max(timed.took_s):.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--svg", type=Path, help="where to draw the timelines")
    parser.add_argument("--size", action="store_true", help="only: 1,000 slices for 24 hours")
    parser.add_argument("--hindsight", action="store_true", help="only: the rivals at their best targets")
    parser.add_argument("--check", action="store_true", help="only: the fluid against requests one by one")
    parser.add_argument("--rollout", action="store_true", help="only: a changed engine through 1,000 slices")
    options = parser.parse_args()
    if options.rollout:
        print(f"{rolling.table()}\n\n{rolling.failure()}")
        return
    if options.check:
        print(check())
        return
    if options.size:
        print(size(1000, 24))
        return
    every = [traces.steady(40), traces.diurnal(40), traces.bursts(40), traces.spike(20)]
    if options.hindsight:
        print(hindsight(world(), every))
        return
    outcomes = compare(world(), every)
    print(table(outcomes))
    if options.svg:
        options.svg.write_text(svg([one for one in outcomes if one.policy == "ours"]))


if __name__ == "__main__":
    main()
