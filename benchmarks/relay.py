"""The service through its front door against the engine's own HTTP server, interleaved on one simulated slice.

    make bench                        # this among the rest
    python -m benchmarks.relay        # this alone

Both paths end in the same engine, vLLM and tpu-inference on JAX's CPU backend over two simulated hosts, so what differs
is the way there: HAProxy and the router. On a machine whose cores the engine fills, CPU seconds say more than times.
"""

from contextlib import ExitStack
from functools import partial

from rich.console import Console

from benchmarks.bare import TOKENS, Size, loads, run
from benchmarks.client import Client, Load
from benchmarks.rounds import Contestant, Results, compete
from benchmarks.service import FRONT, serving

BARE, SERVICE = "the engine's own server", "tpu-serving"


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


if __name__ == "__main__":
    run(__doc__, measure)
