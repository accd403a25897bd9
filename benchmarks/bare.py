"""What comparisons with a real engine's own HTTP server share: how long, at which concurrency, and the report."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from benchmarks import accounting
from benchmarks.client import Load
from benchmarks.rounds import Contestant, Results
from benchmarks.tables import cpu_table, memory_table, missing_lines, times_table

TOKENS = 32


@dataclass(frozen=True)
class Size:
    """How long a run is: `sets` of rounds and seconds of each."""

    sets: int
    seconds: float
    concurrency: tuple[int, ...] = (1, 8, 32, 128)


FULL = Size(sets=3, seconds=3.0)


def loads(size: Size) -> dict[str, Load]:
    return {f"c={c}": Load(c, TOKENS, size.seconds) for c in size.concurrency}


def report(results: Results, contestants: Sequence[Contestant], size: Size) -> str:
    """Markdown."""
    return "\n".join(
        [
            *times_table(results, contestants, list(loads(size)), "answers"),
            "",
            *cpu_table(results, contestants, "c=32", "answer"),
            "",
            *memory_table(results, contestants),
            "",
            *missing_lines(results),
        ]
    )


def run(
    about: str | None,
    measure: Callable[[Size, Console], tuple[Results, list[Contestant]]],
    arguments: Sequence[str] | None = None,
) -> None:
    """One such comparison as a command."""
    accounting.unwind_on_sigterm()
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=FULL.sets, help="rounds of each")
    options = parser.parse_args(arguments)
    size = Size(options.sets, FULL.seconds)
    print(report(*measure(size, Console(stderr=True)), size))
