"""The service through its front door against the engine's own HTTP server, interleaved on one simulated slice.

    make bench                        # this among the rest
    python -m benchmarks.relay        # this alone

Both paths end in the same engine, vLLM and tpu-inference on JAX's CPU backend over two simulated hosts, so what differs
is the way there: HAProxy and the router. On a machine whose cores the engine fills, CPU seconds say more than times.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from benchmarks import accounting
from benchmarks.client import Client, Load
from benchmarks.rounds import Contestant, Results, compete
from benchmarks.service import FRONT, serving
from benchmarks.tables import cpu_table, memory_table, missing_lines, times_table

BARE, SERVICE = "the engine's own server", "tpu-serving"
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


def warm_up(client: Client, address: str, model: str, most: int) -> None:
    """Let the engine meet every size of batch: compiling one takes seconds, in whichever round it is met first."""
    for exponent in range(most.bit_length()):
        client.run([address], model, Load(2**exponent, TOKENS, 1.0))


def measure(size: Size, console: Console) -> tuple[Results, list[Contestant]]:
    """The whole run; what it started ends with it."""
    results = Results()
    say = partial(console.print, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        client = stack.enter_context(Client())
        service = stack.enter_context(serving("llama", 1, engine="vllm", console=console))
        contestants = [
            Contestant(BARE, service.engines, service.model),
            Contestant(SERVICE, (service.address,), service.model, partial(service.processes, *FRONT), BARE),
        ]
        warm_up(client, service.engines[0], service.model, max(size.concurrency))
        compete(client, contestants, loads(size), size.sets, service.processes, results, say)
    return results, contestants


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


def main(arguments: Sequence[str] | None = None) -> None:
    accounting.unwind_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=FULL.sets, help="rounds of each path")
    options = parser.parse_args(arguments)
    size = Size(options.sets, FULL.seconds)
    print(report(*measure(size, Console(stderr=True)), size))


if __name__ == "__main__":
    sys.exit(main())
