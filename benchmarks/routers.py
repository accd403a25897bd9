"""What is put in front of engines, side by side in one run, in front of the same four simulated engines.

    make bench                                  # this and the real engines
    python -m benchmarks.routers                # this alone; --quick for a minute of it without litellm

The engines are those of this service's own slices, Llama 3.3 70B on v6e 2x4 at its calibrated pace; peers get their
addresses. Two kinds of load: `paced`, streams at the pace of the hardware, which shows what is added to times; and flat
out, the engines told to take no time for a step, which shows what a router core can do.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
from rich.console import Console

from benchmarks import accounting, peers, plot
from benchmarks.client import Client, Load, Seen
from benchmarks.rounds import Contestant, Results, compete
from benchmarks.service import FRONT, serving
from benchmarks.tables import (
    ceiling_line,
    chunk_us,
    cost_table,
    cpu_table,
    flat_out_table,
    missing_lines,
    request_us,
    times_table,
)
from serving.simulation.ports import free_port

BARE, HAPROXY, PYTHON_PROXY = "straight to the engines", "tpu-serving", "tpu-serving, Serve's Python proxy"
DIRECT = "tpu-serving, door: direct"
SLICES = 4
TOKENS = 32
_PAUSE_S = 0.04  # two steps of the engine
_NO_TIME = 1e-6  # of a step's time, flat out
_FLAT_OUT = 32
_ALONE, _ANSWERS, _STREAMS = "1 token, c=1", f"1 token, c={_FLAT_OUT}", f"streams, c={_FLAT_OUT}"
_CEILING_S = 1.5


@dataclass(frozen=True)
class Size:
    """How long a run is: `sets` of rounds, seconds of each, and who is left out."""

    sets: int
    paced_s: float
    flat_out_s: float
    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    left_out: tuple[str, ...] = ()


FULL = Size(sets=4, paced_s=2.0, flat_out_s=1.5)
QUICK = Size(sets=2, paced_s=1.0, flat_out_s=1.0, concurrency=(1, 32), left_out=("litellm",))


def paced(size: Size) -> dict[str, Load]:
    return {f"c={c}": Load(c, TOKENS, size.paced_s, _PAUSE_S) for c in size.concurrency}


def flat_out(size: Size) -> dict[str, Load]:
    return {
        _ALONE: Load(1, 1, size.flat_out_s),
        _ANSWERS: Load(_FLAT_OUT, 1, size.flat_out_s),
        _STREAMS: Load(_FLAT_OUT, TOKENS, size.flat_out_s),
    }


def measure(size: Size, console: Console) -> tuple[Results, list[Contestant], Seen]:
    """The whole run; what it started ends with it."""
    results = Results()
    say = partial(console.print, highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        invited = list(prepared(size, results, say))  # before anything runs beside it
        client = stack.enter_context(Client(peers.KEY))
        ceiling = client_ceiling(client)
        service = stack.enter_context(serving("llama-70b-v6e-8", SLICES, engine="simulated", console=console))
        model, engines = service.model, service.engines
        contestants = [
            Contestant(BARE, engines, model),
            Contestant(HAPROXY, (service.address,), model, partial(service.processes, *FRONT), BARE),
            Contestant(
                DIRECT, (service.direct_address,), model, partial(service.processes, "router replica"), BARE
            ),
            Contestant(
                PYTHON_PROXY,
                (service.proxy_address,),
                model,
                partial(service.processes, "Serve's Python proxy", "router replica"),
                BARE,
            ),
        ]
        for name, peer, home in invited:
            try:
                contestants.append(stack.enter_context(in_front(name, peer, home, engines, model)))
            except peers.PeerError as error:
                say(f"{name}: {error}")
                results.missing[name] = str(error)
        compete(client, contestants, paced(size), size.sets, service.processes, results, say)
        for engine in engines:
            httpx.post(f"{engine}/simulator/faults", json={"slow": _NO_TIME}).raise_for_status()
        compete(client, contestants, flat_out(size), size.sets, service.processes, results, say)
    return results, contestants, ceiling


@contextlib.contextmanager
def in_front(
    name: str, peer: peers.Peer, home: Path, engines: Sequence[str], model: str
) -> Iterator[Contestant]:
    """A peer's router in front of the engines, up; raises PeerError where it does not come up."""
    port, tag = free_port(), uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        command = peer.command(engines, model, port, Path(folder))
        with peers.started(
            peer.name,
            home,
            command,
            port,
            log=Path(folder) / "log",
            tag=tag,
            variables=dict(peer.environment),
            ready=peers.chats(model),
        ) as address:
            processes = partial(_processes, tag, peer.name)
            yield Contestant(name, (address,), model, processes, BARE, shown(command))


def _processes(tag: str, name: str) -> dict[psutil.Process, str]:
    return accounting.by_role(accounting.of_bench(tag), name)


def prepared(
    size: Size, results: Results, say: Callable[[str], None]
) -> Iterator[tuple[str, peers.Peer, Path]]:
    """Peers with their names in the tables and their environments; why another has none goes into the results."""
    for peer in peers.ROUTERS:
        name = f"{peer.name} {peers.version(peer)}"
        if peer.name in size.left_out:
            results.missing[name] = "left out of the quick form"
            continue
        try:
            home = peers.environment(peer.pins)
        except peers.PeerError as error:
            say(f"{name}: {error}")
            results.missing[name] = str(error)
        else:
            yield name, peer, home


def client_ceiling(client: Client) -> Seen:
    """The client against a server that answers at once."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.instant"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout  # noqa: S101  it was asked for
        address = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        try:
            return client.run([address], "none", Load(_FLAT_OUT, TOKENS, _CEILING_S))
        finally:
            server.kill()


def shown(command: Sequence[str]) -> str:
    """The command line, without what differs from run to run."""
    words = list(command[: command.index("--worker-urls") + 1] if "--worker-urls" in command else command)
    for flag, instead in (("--port", "PORT"), ("--prometheus-port", "PORT"), ("--config", "ENGINES.yaml")):
        if flag in words:
            words[words.index(flag) + 1] = instead
    return " ".join(words) + (" ENGINES" if words[-1] == "--worker-urls" else "")


def report(results: Results, contestants: Sequence[Contestant], ceiling: Seen, size: Size) -> str:
    """Markdown."""
    busiest = f"c={_FLAT_OUT}"
    return "\n".join(
        [
            *times_table(results, contestants, list(paced(size))),
            "",
            *flat_out_table(results, contestants, _ALONE, _ANSWERS, _STREAMS),
            "",
            *cost_table(results, contestants, _ANSWERS, busiest),
            "",
            *cpu_table(results, contestants, busiest),
            "",
            *missing_lines(results),
            "",
            ceiling_line(ceiling, _CEILING_S),
            "",
            *(f"- `{contestant.command}`" for contestant in contestants if contestant.command),
        ]
    )


def panels(results: Results, contestants: Sequence[Contestant], size: Size) -> list[plot.Lines | plot.Bars]:
    """Time to first token by clients; what a chunk and an answer cost in front."""
    lines, chunks, requests = {}, {}, {}
    for contestant in contestants:
        lines[contestant.name] = [
            (clients, statistics.median(found))
            for clients in size.concurrency
            if (found := results.figures(contestant.name, f"c={clients}", "ttft_p50_ms"))
        ]
        short = {one.set: one for one in results.of(contestant.name, _ANSWERS)}
        long = [one for one in results.of(contestant.name, f"c={_FLAT_OUT}") if one.set in short]
        if contestant.bare and long:
            chunks[contestant.name] = statistics.median(chunk_us(one, short[one.set]) for one in long)
            requests[contestant.name] = statistics.median(map(request_us, short.values()))
    return [
        plot.Lines("TTFT p50, ms", {name: line for name, line in lines.items() if line}),
        plot.Bars("CPU µs a streamed chunk", chunks),
        plot.Bars("CPU µs a 1-token answer", requests),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    accounting.unwind_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a minute of it, without litellm")
    parser.add_argument("--svg", type=Path, help="where to draw the plot")
    parser.add_argument("--json", type=Path, help="write every round here")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    measured = measure(size, Console(stderr=True))
    print(report(*measured, size))
    if options.svg:
        options.svg.write_text(plot.svg(panels(measured[0], measured[1], size)))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in measured[0].rounds], indent=1))


if __name__ == "__main__":
    sys.exit(main())
