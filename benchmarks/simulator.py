"""What a simulated engine costs the machine: CPU of its process for every 100 tokens a second streamed, memory, start.

    python -m benchmarks.simulator                        # 20 streams of llama-70b-v6e-8 for 20 s
    python -m benchmarks.simulator --streams 64 --seconds 60

One engine in a process of its own at real time, as on a slice but without Ray; the streams are read by this process.
"""

import argparse
import asyncio
import subprocess
import sys
import time

import aiohttp
import psutil

from benchmarks.service import plan_of
from serving.engine.server import EngineServer, EngineSite
from serving.simulation.engine.server import SimulatorServer
from serving.slices.held_slice import HeldSlice, SliceHost

_PROMPT_WORDS = 100


def nowhere() -> EngineSite:
    """A slice of one host that is only this machine."""
    held = HeldSlice("slice-0", (SliceHost(worker_id=0, node_id="none", ip="127.0.0.1", bundle=0),))
    return EngineSite(held, group=None, gcs_address="", replica="")


async def serve(deployment: str) -> None:
    """Print the port once the engine serves; end with the input."""
    server: EngineServer = SimulatorServer(plan_of(deployment), nowhere())
    await server.start()
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.kill()


async def stream(address: str, number: int, until_s: float) -> int:
    """Read answers one after another; returns the events seen."""
    seen = 0
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < until_s:
            body = {
                "prompt": f"stream {number} " + "slice " * _PROMPT_WORDS,
                "max_tokens": 200,
                "stream": True,
                "ignore_eos": True,
            }
            async with session.post(f"{address}/v1/completions", json=body) as answer:
                async for line in answer.content:
                    seen += line.startswith(b"data: {")
    return seen


async def read(address: str, streams: int, until_s: float) -> int:
    """All streams side by side; returns the events seen."""
    return sum(await asyncio.gather(*(stream(address, number, until_s) for number in range(streams))))


def measure(options: argparse.Namespace) -> None:
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.simulator", "--serve", options.deployment],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout  # noqa: S101  it was asked for
    try:
        address = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        print(f"serving after {time.monotonic() - begun:.1f} s from the start of its process")
        watched = psutil.Process(process.pid)
        before, at = sum(watched.cpu_times()[:2]), time.monotonic()
        seen = asyncio.run(read(address, options.streams, at + options.seconds))
        took, cpu = time.monotonic() - at, sum(watched.cpu_times()[:2]) - before
        rate = seen / took
        print(
            f"{options.streams} streams: {rate:.0f} tokens/s, {cpu / took:.1%} of a core, "
            f"{cpu / took / rate * 100:.2%} of a core for every 100 tokens/s"
        )
        print(f"memory: {watched.memory_info().rss / 1e6:.0f} MB")
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deployment", default="llama-70b-v6e-8")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--serve", metavar="DEPLOYMENT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(serve(options.serve)) if options.serve else measure(options)


if __name__ == "__main__":
    main()
