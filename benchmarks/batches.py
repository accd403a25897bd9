"""What a batch costs the requests beside it: time to first token with and without one, in turns.

    python -m benchmarks.batches                     # 10 turns of a minute each, half of them with a batch: about 11 minutes
    python -m benchmarks.batches --turns 4 --seconds 15

Two simulated engines of Llama 3.3 70B on v6e 2x4 with 32 seats each, the store's process and one router, each in a process of its
own. Requests come at random times and take a third of the seats; a batch of long lines takes the rest, less `batch.spare`. Turns
with and without it alternate, so that other work on the machine touches both. The range of the ratio is that of 19 of 20 draws of
turns, with replacement (bootstrap): one turn's noise stays together. A range wider than what is to be shown shows nothing: take
more turns, or a quieter machine.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks import preemption
from benchmarks.children import child, ended, told, until_input_ends
from benchmarks.preemption import ask, words
from serving.batches.service import Batches
from serving.config import BatchSpec, StoreSpec
from serving.database.owner import Owner
from serving.metering.service import Metering

MODEL, SEATS, ENGINES = preemption.MODEL, 32, 2
_SETTLED_S = 3.0  # after a batch began or was cancelled, before requests count
_DRAWS = 500


@dataclass(frozen=True)
class Load:
    """Requests a second, and how long prompts (words) and answers (tokens) are."""

    model: str = MODEL
    per_s: float = 8.0
    words: int = 200
    tokens: int = 100
    lines: int = 4000
    line_words: int = 500
    line_tokens: int = 300


@dataclass
class Turn:
    """Some time with or without a batch. `first_s`: times to first token; `gaps_s`: the longest pause of each answer."""

    with_batch: bool
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    failed: int = 0
    lines: int = 0


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def ratio(turns: Sequence[Turn], of: Callable[[Sequence[float]], float]) -> float:
    """With a batch over without."""
    with_batch, without = (
        list(itertools.chain.from_iterable(turn.first_s for turn in turns if turn.with_batch is kind))
        for kind in (True, False)
    )
    return of(with_batch) / of(without)


def likely(turns: Sequence[Turn], of: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    """Between what 19 of 20 draws of as many turns of each kind have this ratio."""
    draw = random.Random(0)
    kinds = [[turn for turn in turns if turn.with_batch is kind] for kind in (True, False)]
    ratios = sorted(
        ratio([turn for kind in kinds for turn in draw.choices(kind, k=len(kind))], of) for _ in range(_DRAWS)
    )
    return ratios[_DRAWS // 40], ratios[-1 - _DRAWS // 40]


def report(turns: Sequence[Turn], seconds: float) -> str:
    rows = [
        "| | requests | failed | TTFT p50, ms | p99, ms | longest pause p99, ms | lines/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kind in (("without a batch", False), ("with one", True)):
        of_kind = [turn for turn in turns if turn.with_batch is kind]
        first_s = [value for turn in of_kind for value in turn.first_s]
        gaps_s = [value for turn in of_kind for value in turn.gaps_s]
        cells = (
            name,
            f"{len(first_s)}",
            f"{sum(turn.failed for turn in of_kind)}",
            f"{1e3 * percentile(first_s, 50):.1f}",
            f"{1e3 * percentile(first_s, 99):.1f}",
            f"{1e3 * percentile(gaps_s, 99):.1f}",
            f"{sum(turn.lines for turn in of_kind) / len(of_kind) / seconds:.1f}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    for percent in (50, 99):
        of = partial(percentile, percent=percent)
        least, most = likely(turns, of)
        rows.append(
            f"\np{percent} of TTFT with a batch over without: {ratio(turns, of):.3f} ({least:.3f} to {most:.3f})"
        )
    return "\n".join(rows)


def lines_of(load: Load) -> bytes:
    """The file of a batch."""
    draw = random.Random(0)
    fixed = {"model": load.model, "max_tokens": load.line_tokens, "ignore_eos": True}
    lines = (
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {**fixed, "prompt": words(draw, load.line_words)},
        }
        for number in range(load.lines)
    )
    return "\n".join(map(json.dumps, lines)).encode()


class Api:
    """Files and batches of the router at an address."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self._address = address

    async def begin(self, lines: bytes) -> str:
        """Upload a batch, and begin it; its id."""
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", lines, filename="in.jsonl")
        file = await self._send("POST", "/v1/files", data=form)
        fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return str((await self._send("POST", "/v1/batches", json=fields))["id"])

    async def answered(self, batch: str) -> int:
        return int((await self._send("GET", f"/v1/batches/{batch}"))["request_counts"]["completed"])

    async def cancel(self, batch: str) -> None:
        await self._send("POST", f"/v1/batches/{batch}/cancel")

    async def _send(self, method: str, path: str, **options: Any) -> Any:
        async with self._session.request(method, self._address + path, **options) as answer:
            answer.raise_for_status()
            return await answer.json()


async def play(
    load: Load, address: str, turns: int, seconds: float, settled_s: float = _SETTLED_S
) -> list[Turn]:
    # Without, with, with, without: what grows or shrinks all the time touches both alike.
    played = [Turn(with_batch=number % 4 in (1, 2)) for number in range(turns)]
    lines = lines_of(load)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        api = Api(session, address)
        for number, turn in enumerate(played):
            batch = await api.begin(lines) if turn.with_batch else None
            while batch and not await api.answered(batch):  # noqa: ASYNC110  only asking tells
                await asyncio.sleep(0.1)
            await asyncio.sleep(settled_s)
            before = await api.answered(batch) if batch else 0
            await _requests(session, load, address, seconds, turn, random.Random(number // 2))
            if batch:
                turn.lines = await api.answered(batch) - before
                await api.cancel(batch)
            print(f"turn {number + 1} of {turns}: {len(turn.first_s)} answers", file=sys.stderr)
    return played


async def _requests(
    session: aiohttp.ClientSession, load: Load, address: str, seconds: float, turn: Turn, draw: random.Random
) -> None:
    """The same requests at the same times in both turns of a pair."""

    async def one(prompt: str) -> None:
        answer = await ask(session, address, load.model, prompt, load.tokens, "none")
        turn.failed += not answer.whole
        if answer.texts:
            turn.first_s.append(answer.first_s)
            turn.gaps_s.append(answer.longest_gap_s)

    until_s = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < until_s:
            group.create_task(one(words(draw, load.words)))
            await asyncio.sleep(draw.expovariate(load.per_s))


async def keep(folder: Path) -> None:
    """The store: print its address and token, end with the input."""
    batches = partial(Batches, spec=BatchSpec(), models=[MODEL], most_line_bytes=1 << 20)
    owner = Owner(StoreSpec(folder=str(folder)), [batches, lambda database, _: Metering(database)])
    await owner.start()
    print(json.dumps(owner.place()), flush=True)
    await until_input_ends(dict)
    await owner.close()


@contextmanager
def started(*arguments: str, module: str = "benchmarks.batches") -> Iterator[Any]:
    """What a process of this benchmark says first."""
    process = child(module, *arguments)
    try:
        yield told(process)
    finally:
        ended(process)


def measure(load: Load, turns: int, seconds: float) -> list[Turn]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        engine = ("--engine", "--seats", str(SEATS))
        ports = [
            stack.enter_context(started(*engine, module="benchmarks.preemption")) for _ in range(ENGINES)
        ]
        place = stack.enter_context(started("--store", folder))
        route = ["--seats", str(SEATS), "--store", *place, "--route"]
        route += [f"http://127.0.0.1:{port}" for port in ports]
        port = stack.enter_context(started(*route, module="benchmarks.preemption"))
        return asyncio.run(play(load, f"http://127.0.0.1:{port}", turns, seconds))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10, help="half of them with a batch")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a turn")
    parser.add_argument("--per-s", type=float, default=Load.per_s, help="requests a second")
    parser.add_argument("--line-words", type=int, default=Load.line_words, help="of a line's prompt")
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.store:
        uvloop.run(keep(options.store))
        return
    load = Load(per_s=options.per_s, line_words=options.line_words)
    print(report(measure(load, options.turns, options.seconds), options.seconds))


if __name__ == "__main__":
    main()
