"""What a higher priority gains where every seat is taken, what a lower one pays, and whether every paused text is whole.

    python -m benchmarks.preemption                 # a minute without preemption, a minute with it, and the comparison of texts
    python -m benchmarks.preemption --seconds 10

Two simulated engines of Llama 3.3 70B on v6e 2x4 with eight seats each, in processes of their own, behind one real router. 24
clients of a low key stream one answer after another; those of a high key come at random times. Every answer that was paused is
asked again of an engine alone, without a router, and compared word for word.
"""

import argparse
import asyncio
import itertools
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
import uvloop

from benchmarks.children import child, ended, told, until_input_ends
from benchmarks.simulator import nowhere
from serving.config import ModelSpec, RouterSpec
from serving.planning import Plan, plan
from serving.router.core import RouterCore, Served
from serving.router.http import auth
from serving.router.http.door import Door, Relay
from serving.simulation.engine.server import SimulatorServer
from serving.simulation.engine.tokenizer import WORDS
from serving.state.records import SliceRecord, SliceState, Snapshot

MODEL, ENGINES, SEATS = "llama-70b", 2, 8
_BEAT_S = 0.5
_PATH = "/v1/completions"


@dataclass(frozen=True)
class Load:
    """Clients of the low key, answers a second of the high one, and how long prompts (words) and answers (tokens) are."""

    model: str = MODEL
    clients: int = 24
    low_words: int = 500
    low_tokens: int = 300
    highs_per_s: float = 1.0
    high_words: int = 200
    high_tokens: int = 50


LOAD = Load()


@dataclass
class Answer:
    """One streamed answer, as its client had it; seconds since it was asked."""

    prompt: str
    key: str
    texts: list[str] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    paused: bool = False
    whole: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class Row:
    """What came of one run."""

    name: str
    seconds: float
    highs: list[Answer]
    lows: list[Answer]
    different: int = 0

    @property
    def paused(self) -> list[Answer]:
        return [answer for answer in self.lows if answer.paused]

    @property
    def failed(self) -> int:
        return sum(not answer.whole for answer in (*self.highs, *self.lows))

    def cells(self) -> list[str]:
        ttft_ms = [1e3 * answer.first_s for answer in self.highs]
        written = sum(len(answer.texts) for answer in self.lows)
        return [
            self.name,
            str(len(self.highs)),
            f"{statistics.median(ttft_ms):.0f}",
            f"{statistics.quantiles(ttft_ms, n=100)[98]:.0f}",
            f"{written / self.seconds:.0f}",
            f"{statistics.median(answer.last_s for answer in self.lows):.1f}",
            f"{len(self.paused)} of {len(self.lows)}",
            f"{max((answer.longest_gap_s for answer in self.paused), default=0.0):.1f}",
            str(self.different),
            str(self.failed),
        ]


HEAD = (
    "| preemption | higher: answers | TTFT p50, ms | p99, ms | lower: tokens/s | a whole answer, p50, s | paused | longest gap, s "
    "| of those not word for word | failed |\n|---|---|---|---|---|---|---|---|---|---|"
)


def table(rows: Sequence[Row]) -> str:
    return "\n".join([HEAD, *(f"| {' | '.join(row.cells())} |" for row in rows)])


def planned(seats: int) -> Plan:
    spec = {
        "name": MODEL,
        "model": "meta-llama/Llama-3.3-70B-Instruct",
        "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
        "queue": {"wait_s": 120},
        "engine": {"max_num_seqs": seats, "max_model_len": 8192},
    }
    return plan(ModelSpec.model_validate(spec))


async def serve(seats: int) -> None:
    """One engine: print its port, end with the input."""
    server = SimulatorServer(planned(seats), nowhere())
    await server.start()
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.kill()


async def route(
    upstreams: Sequence[str], keys: Path | None, most: int, seats: int, place: tuple[str, str] | None = None
) -> None:
    """A router before these engines, and a store at `place`: print its port, end with the input."""

    async def no_metrics() -> str:
        return ""

    async def find() -> tuple[str, str]:
        assert place is not None  # noqa: S101  nobody asks where there is none
        return place

    found = planned(seats)
    spec = RouterSpec.model_validate({"preemption": {"most": most}})
    core = RouterCore(Served([found], spec), auth.KeyFile(keys), no_metrics, store=find if place else None)

    async def beat() -> None:
        for number in itertools.count():
            entries = tuple(
                SliceRecord(
                    address,
                    MODEL,
                    SliceState.SERVING,
                    "serving",
                    "v6e 2x4",
                    address=address,
                    pool=found.pool,
                    beat=number,
                )
                for address in upstreams
            )
            for _ in core.take(Snapshot(slices=entries), time.monotonic()):
                pass
            await asyncio.sleep(_BEAT_S)

    door: Any = partial(Door, Relay(core.relay))
    config = uvicorn.Config(core.app(), http=door, log_level="critical", timeout_graceful_shutdown=1)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(config)
    beating = [asyncio.create_task(beat()), asyncio.create_task(core.admission.run())]
    if core.usage and core.filler:
        await core.usage.start()
        beating.append(asyncio.create_task(core.filler.run()))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    print(listener.getsockname()[1], flush=True)
    await until_input_ends(dict)
    server.should_exit = True
    await serving
    for task in beating:
        task.cancel()
    if core.usage:
        await core.usage.close()
    await core.close()


@contextmanager
def started(*arguments: str) -> Iterator[str]:
    """The address of a process of this benchmark."""
    process = child("benchmarks.preemption", *arguments)
    try:
        yield f"http://127.0.0.1:{told(process)}"
    finally:
        ended(process)


async def ask(
    session: aiohttp.ClientSession, address: str, model: str, prompt: str, tokens: int, key: str
) -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    answer, asked_s = Answer(prompt, key), time.monotonic()
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(address + _PATH, json=body, headers=headers) as response:
        async for line in response.content:
            if line.startswith(b": paused"):
                answer.paused = True
            elif line.startswith(b"data: [DONE]"):
                answer.whole = len(answer.texts) == tokens
            elif line.startswith(b"data: {"):
                fields = json.loads(line.removeprefix(b"data: "))
                if fields.get("choices"):
                    answer.texts.append(fields["choices"][0]["text"])
                    now_s = time.monotonic() - asked_s
                    answer.longest_gap_s = max(answer.longest_gap_s, now_s - (answer.last_s or now_s))
                    answer.first_s, answer.last_s = answer.first_s or now_s, now_s
    return answer


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


async def answers(
    load: Load, address: str, low: str, high: str, seconds: float
) -> tuple[list[Answer], list[Answer]]:
    """Those of the high key, which begin once every seat is taken, and those of the low one."""
    until_s = time.monotonic() + seconds
    lows: list[Answer] = []
    highs: list[Answer] = []

    async def stream(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < until_s:
            prompt = words(draw, load.low_words)
            lows.append(await ask(session, address, load.model, prompt, load.low_tokens, low))

    async def one(draw: random.Random) -> None:
        prompt = words(draw, load.high_words)
        highs.append(await ask(session, address, load.model, prompt, load.high_tokens, high))

    async def come() -> None:
        draw = random.Random(-1)
        await asyncio.sleep(min(5.0, seconds / 4))
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < until_s:
                group.create_task(one(random.Random(draw.random())))
                await asyncio.sleep(draw.expovariate(load.highs_per_s))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        await asyncio.gather(*(stream(number) for number in range(load.clients)), come())
    return highs, lows


async def different(load: Load, addresses: Sequence[str], given: Sequence[Answer]) -> int:
    """How many of the low key's answers an engine alone gives otherwise."""
    connector = aiohttp.TCPConnector(limit=ENGINES * SEATS)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:
        again = await asyncio.gather(
            *(
                ask(session, address, load.model, answer.prompt, load.low_tokens, "none")
                for answer, address in zip(given, itertools.cycle(addresses), strict=False)
            )
        )
    return sum(one.text != other.text for one, other in zip(given, again, strict=True))


def play(name: str, most: int, seconds: float) -> Row:
    low, low_line = auth.new("low", priority=0)
    high, high_line = auth.new("high", priority=10)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(f"{low_line}\n{high_line}\n")
        with started("--engine") as first, started("--engine") as second:
            engines = [first, second]
            options = ("--keys", str(keys), "--most", str(most))
            with started("--route", *engines, *options) as address:
                began_s = time.monotonic()
                highs, lows = asyncio.run(answers(LOAD, address, low, high, seconds))
                row = Row(name, time.monotonic() - began_s, highs, lows)
            row.different = asyncio.run(different(LOAD, engines, row.paused))
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of load, with and without")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--route", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--store", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--seats", type=int, default=SEATS, help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--most", type=int, default=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        uvloop.run(serve(options.seats))
    elif options.route:
        uvloop.run(route(options.route, options.keys, options.most, options.seats, options.store))
    else:
        rows = [
            play(name, most, options.seconds)
            for name, most in (("off (`most: 0`)", 0), ("on, the defaults", 2))
        ]
        print(table(rows))


if __name__ == "__main__":
    main()
