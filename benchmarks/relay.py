"""The service through its front door against the engine's own HTTP server, interleaved on one simulated slice.

    make bench                                        # or with ARGS="--rounds 6 --concurrency 8 --json relay.json"

Both paths end in the same engine, so what differs is the way there: HAProxy and the router. Rounds alternate as
A B B A, so that a machine that slows down slows both. Every request is a streamed chat of 32 tokens with a prompt of
its own; bursts of every size and a round of each path that are not counted come first. On a machine whose cores the
engine fills, CPU seconds say more than times: they are read from /proc for every process of the simulation, before and
after each round, and for the machine as a whole, which tells whether anything else ran beside.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import psutil
from rich.console import Console

from serving.slices import board
from serving.slices.simulation import SimulatedCluster, default_directory
from serving.trial import running

BARE, SERVICE = "engine's own server", "front door"
CHAT = "/v1/chat/completions"
TOKENS = 32
FEWEST = 16  # requests of a round
CLIENT = "load client"
ELSEWHERE = "not of this run"  # the machine was not quiet where this is not small
# What a process is for, by a word of its command line; the first that fits.
ROLES = (
    ("haproxy", "HAProxy"),
    (":router", "router replica"),
    ("ServeReplica", "slice replica (HTTP)"),
    ("EngineCore", "EngineCore"),
    ("Worker", "engine workers"),
    ("Serve", "Serve controller and proxy"),
    ("Proxy", "Serve controller and proxy"),
)
OTHER = "Ray and the rest"

_numbers = itertools.count()


@dataclass(frozen=True)
class Round:
    """One round of one path."""

    path: str
    concurrency: int
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    chunks: int
    cpu_s: dict[str, float]


FIGURES = {
    "requests_per_s": "requests/s",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "itl_p50_ms": "ITL p50, ms",
}


@dataclass
class Times:
    """What one round's clients saw, in seconds."""

    first: list[float]
    between: list[float]
    chunks: int = 0


async def ask(session: aiohttp.ClientSession, address: str, model: str, times: Times) -> None:
    """One streamed chat; times are those of reads off the socket. Raises RuntimeError unless it is complete."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{next(_numbers)}: tell me about slices"}],
        "stream": True,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    sent = last = time.perf_counter()
    end, chunks = b"", 0
    async with session.post(address + CHAT, json=body) as response:
        async for data in response.content.iter_any():
            now = time.perf_counter()
            if not chunks:
                times.first.append(now - sent)
            else:
                times.between.append(now - last)
            last = now
            chunks += data.count(b"\n\n")
            end = (end + data)[-16:]
    if response.status != 200 or not end.endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"{address} answered {response.status} and ended with {end!r}")
    times.chunks += chunks


async def load(address: str, model: str, concurrency: int, requests: int) -> tuple[float, Times]:
    """So many clients that ask one request after the other until `requests` are answered; seconds and times."""
    times = Times([], [])
    left = iter(range(requests))

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in left:
            await ask(session, address, model, times)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
        return time.perf_counter() - started, times


def cpu_by_role(cluster: SimulatedCluster) -> Counter[str]:
    """CPU seconds so far of every process of the simulation, by what it is for."""
    seconds: Counter[str] = Counter()
    for process in cluster.processes():
        try:
            used = process.cpu_times()
            seconds[role(" ".join([process.name(), *process.cmdline()]))] += used.user + used.system
        except psutil.Error:
            continue
    return seconds


def busy_s() -> float:
    """CPU seconds of the whole machine so far, with what its hypervisor took from it."""
    used = psutil.cpu_times()
    return float(used.user + used.nice + used.system + used.irq + used.softirq + used.steal)


def role(command: str) -> str:
    return next((name for word, name in ROLES if word in command), OTHER)


def play(
    cluster: SimulatedCluster, path: str, address: str, model: str, concurrency: int, requests: int
) -> Round:
    before, machine_s, client_s = cpu_by_role(cluster), busy_s(), time.process_time()
    seconds, times = asyncio.run(load(address, model, concurrency, requests))
    client_s, machine_s, after = time.process_time() - client_s, busy_s() - machine_s, cpu_by_role(cluster)
    spent = {name: after[name] - before[name] for name in after} | {CLIENT: client_s}
    spent[ELSEWHERE] = machine_s - sum(spent.values())
    return Round(
        path,
        concurrency,
        requests / seconds,
        quantile(times.first, 0.5) * 1000,
        quantile(times.first, 0.99) * 1000,
        quantile(times.between, 0.5) * 1000,
        times.chunks,
        spent,
    )


def warm_up(address: str, model: str, most: int) -> None:
    """Let the engine meet every size of batch: compiling one takes seconds, in whichever round it is met first."""
    for exponent in range(most.bit_length()):
        asyncio.run(load(address, model, 2**exponent, 2 ** (exponent + 1)))


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def order(rounds: int) -> Iterator[tuple[str, str]]:
    """A B, B A, A B, ..."""
    return itertools.islice(itertools.cycle([(BARE, SERVICE), (SERVICE, BARE)]), rounds)


def times_table(rounds: Sequence[Round]) -> list[str]:
    """Median (least to most) of a path's rounds, and the ratio of each pair of rounds."""
    lines = [f"| concurrency | path | {' | '.join(FIGURES.values())} |", "|---|---|" + "---|" * len(FIGURES)]
    for concurrency in sorted({one.concurrency for one in rounds}):
        bare, service = (
            [one for one in rounds if (one.concurrency, one.path) == (concurrency, path)]
            for path in (BARE, SERVICE)
        )
        for path, found in ((BARE, bare), (SERVICE, service)):
            cells = [spread([getattr(one, figure) for one in found], 1) for figure in FIGURES]
            lines.append(f"| {concurrency} | {path} | {' | '.join(cells)} |")
        ratios = [
            spread([getattr(s, figure) / getattr(b, figure) for b, s in zip(bare, service, strict=True)], 2)
            for figure in FIGURES
        ]
        lines.append(f"| {concurrency} | front door / own server | {' | '.join(ratios)} |")
    return lines


def cpu_table(rounds: Sequence[Round]) -> list[str]:
    """CPU seconds a thousand streamed chunks, by what they are spent on."""
    columns = sorted({(one.concurrency, one.path) for one in rounds})
    names = [*dict.fromkeys(name for _, name in ROLES), OTHER, CLIENT, ELSEWHERE]
    lines = [
        f"| CPU seconds / 1,000 chunks | {' | '.join(f'{path}, c={c}' for c, path in columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    for name in names:
        cells = []
        for column in columns:
            found = [one for one in rounds if (one.concurrency, one.path) == column]
            spent = sum(one.cpu_s.get(name, 0.0) for one in found)
            cells.append(f"{1000 * spent / sum(one.chunks for one in found):.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("yaml", type=Path, nargs="?", default=Path("deployments/llama.yaml"))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each path (default: 4)")
    parser.add_argument("--each", type=int, default=4, help="requests of each client a round (default: 4)")
    parser.add_argument("--name", default="bench", help="name of the simulation (default: bench)")
    parser.add_argument("--json", type=Path, help="write every round here")
    options = parser.parse_args(arguments)
    rounds: list[Round] = []
    console = Console(stderr=True)
    with running(options.yaml, directory=default_directory(options.name), console=console) as trial:
        model = trial.plans[0].model.name
        slice_ = next(entry for entry in board.read() if entry.serves and entry.model == model)
        addresses = {BARE: slice_.address, SERVICE: trial.address}
        warm_up(slice_.address, model, max(options.concurrency))
        for concurrency in options.concurrency:
            for number, pair in enumerate([(BARE, SERVICE), *order(options.rounds)]):
                for path in pair:
                    requests = max(concurrency * options.each, FEWEST)
                    played = play(trial.cluster, path, addresses[path], model, concurrency, requests)
                    console.print(
                        f"c={concurrency} {path}: {played.requests_per_s:.1f} requests/s", highlight=False
                    )
                    if number:
                        rounds.append(played)
    print("\n".join([*times_table(rounds), "", *cpu_table(rounds)]))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in rounds], indent=1))


if __name__ == "__main__":
    sys.exit(main())
