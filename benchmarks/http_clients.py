"""The router's own connections to slices beside aiohttp and httpx: CPU time of reading answers from a server that takes none.

    python -m benchmarks.http_clients

Every chunk is read as it comes, as the relay reads it. Rounds take turns; each client is a process of its own.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp
import httpx

from serving.router.forwarding.upstream import Upstream
from serving.router.http.protocol import InferenceRequest
from serving.state.records import SliceRecord, SliceState

ROUNDS = 5
AT_ONCE = 32
ANSWERS = 1500  # of one token
STREAMS, TOKENS = 64, 200

Ask = Callable[[int], Awaitable[int]]


async def with_the_routers(address: str, load: Callable[[Ask], Awaitable[int]]) -> int:
    upstream = Upstream(1.0)
    entry = SliceRecord("", "", SliceState.SERVING, "", "", address=address.rstrip("/"))

    async def ask(tokens: int) -> int:
        body = b'{"max_tokens": %d}' % tokens
        response = await upstream.post(entry, InferenceRequest("", "/", body, {}), body, {})
        pieces = 0

        def take(_: bytes) -> bool:
            nonlocal pieces
            pieces += 1
            return True

        await response.pipe(take)
        return pieces

    try:
        return await load(ask)
    finally:
        await upstream.close()


async def with_aiohttp(address: str, load: Callable[[Ask], Awaitable[int]]) -> int:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
    ) as client:

        async def ask(tokens: int) -> int:
            async with client.post(address, json={"max_tokens": tokens}) as answer:
                return len([1 async for _ in answer.content.iter_any()])

        return await load(ask)


async def with_httpx(address: str, load: Callable[[Ask], Awaitable[int]]) -> int:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None) as client:  # noqa: S113  neither has one here

        async def ask(tokens: int) -> int:
            async with client.stream("POST", address, json={"max_tokens": tokens}) as answer:
                return len([1 async for _ in answer.aiter_raw()])

        return await load(ask)


async def many(ask: Ask, count: int, tokens: int) -> int:
    """How many pieces `count` answers came in, AT_ONCE answers at a time."""
    left = iter(range(count))

    async def client() -> int:
        return sum([await ask(tokens) for _ in left])

    return sum(await asyncio.gather(*(client() for _ in range(AT_ONCE))))


CLIENTS = {"the router's": with_the_routers, "aiohttp": with_aiohttp, "httpx": with_httpx}


async def measure(name: str, address: str) -> tuple[float, float]:
    """CPU microseconds of an answer of one token, and of each of a stream's tokens."""
    reads = CLIENTS[name]
    await reads(address, lambda ask: many(ask, AT_ONCE, 1))
    began = time.process_time()
    await reads(address, lambda ask: many(ask, ANSWERS, 1))
    answers = time.process_time() - began
    began = time.process_time()
    await reads(address, lambda ask: many(ask, STREAMS, TOKENS))
    return 1e6 * answers / ANSWERS, 1e6 * (time.process_time() - began) / (STREAMS * TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--client", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        print(*asyncio.run(measure(options.client, options.address)))
        return
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.instant"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None and server.stdin is not None  # noqa: S101, PT018  they are pipes
    address = f"http://127.0.0.1:{server.stdout.readline().strip()}/"
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CLIENTS}
    try:
        for _ in range(ROUNDS):
            for name, rounds in found.items():
                said = subprocess.run(
                    [sys.executable, "-m", "benchmarks.http_clients", "--client", name, "--address", address],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout.split()
                rounds.append((float(said[0]), float(said[1])))
    finally:
        server.stdin.close()
        server.wait()
    print("| client | CPU µs an answer of one token | CPU µs a token of a stream |\n|---|---|---|")
    for name, rounds in found.items():
        columns = [
            f"{statistics.median(column):.0f} ({min(column):.0f} to {max(column):.0f})"
            for column in zip(*rounds, strict=True)
        ]
        print(f"| {name} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
