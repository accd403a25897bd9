"""What the choice of a slice is worth: policies and other projects' routers in front of the same simulated engines.

    make bench-routing                                   # some 8 minutes; --quick for three
    python -m benchmarks.routing --svg docs/benchmarks/routing.svg

Four engines of Llama 3.3 70B on v6e 2x4 at their calibrated pace, without Ray, each in a process of its own; one router at
a time in front of them. Our policies run in our relay and differ in their choice alone. Conversations begin at random
times whatever becomes of those before them; every router gets the same ones, with a first word of its own, so that none
finds in a cache what another left there. A request is good if its first token came within TTFT_S and the others at
TPOT_S each. Hits are tokens that the engines found in their caches, of the prompts' tokens.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.routing.load import HEAD, LOADS, Load, Seen, play
from benchmarks.routing.picture import svg
from benchmarks.routing.policies import ENGINES, POLICIES, Policy
from benchmarks.routing.processes import engines, route, routers, serve


def compare(
    policies: Sequence[Policy],
    loads: Sequence[Load],
    seconds: float,
    rounds: int,
    say: Callable[[str], None],
) -> list[Seen]:
    """Rounds alternate between the policies, so that a machine that slows down slows all of them."""
    rows = {
        (load.name, policy.name): Seen(policy.name, load.name, seconds)
        for load in loads
        for policy in policies
    }
    with engines(ENGINES) as addresses:
        for load in loads:
            for number in range(rounds):
                for policy in policies if number % 2 == 0 else policies[::-1]:
                    with routers(policy, addresses) as fronts:
                        seen = asyncio.run(play(policy, fronts, addresses, load, seconds, seed=number))
                    rows[load.name, policy.name].add(seen)
                    say(seen.row())
    return list(rows.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5, help="of each round (default: 5)")
    parser.add_argument("--rounds", type=int, default=3, help="of each load on each router (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round of four seconds of each")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="policies by name")
    parser.add_argument("--svg", type=Path, help="where to draw the plot")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--route", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("engines", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        asyncio.run(serve())
    elif options.route:
        policy = next(policy for policy in POLICIES if policy.name == options.route)
        asyncio.run(route(policy, options.port, options.engines, options.folder))
    else:
        policies = [policy for policy in POLICIES if not options.only or policy.name in options.only]
        seconds, rounds = (4, 1) if options.quick else (options.seconds, options.rounds)
        loads_before = os.getloadavg()
        rows = compare(policies, LOADS, seconds, rounds, lambda row: print(row, file=sys.stderr))
        print("\n".join([HEAD, *(row.row() for row in rows)]))
        busy = " to ".join(f"{load[0]:.0f}" for load in (loads_before, os.getloadavg()))
        print(
            f"\nThe machine's load average was {busy} on {os.cpu_count()} cores; beside others' work times mean little."
        )
        if options.svg:
            options.svg.write_text(svg(rows))


if __name__ == "__main__":
    main()
