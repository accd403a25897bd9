"""How much load the load generator itself can make: loadtest/ against a server that takes no time.

    python benchmarks/load_generator.py

The server answers with bytes made beforehand. Locust's users ask again at once, and what its one process gets done in a
second of its CPU time is what a core can do, whatever else runs on the machine. Answers of one chunk tell what a request
costs; long ones at once what a chunk costs that is read together with others, long ones at an engine's pace what a chunk
costs that comes alone.
"""

import argparse
import asyncio
import csv
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Process, Queue
from pathlib import Path

import psutil

LOCUSTFILE = Path(__file__).parents[1] / "loadtest" / "locustfile.py"
# Chunks of an answer, seconds between them, users: enough of them to keep the generator busy.
RUNS = ((1, 0.0, 16), (256, 0.0, 16), (256, 0.02, 128))
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Ceiling:
    """What locust did at full speed, and the CPU seconds it took."""

    tokens: int
    pace_s: float
    requests: int
    chunks: int
    cpu_s: float
    wall_s: float

    @property
    def requests_per_core_s(self) -> float:
        return self.requests / self.cpu_s

    @property
    def chunks_per_core_s(self) -> float:
        return self.chunks / self.cpu_s


class Instant(asyncio.Protocol):
    """Answers a GET with the model and a POST with a stream of `max_tokens` chunks, each in a write of its own."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s, self._seen = pace_s, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        while b"\r\n\r\n" in self._seen:
            head, _, rest = self._seen.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            size = int(length[1]) if length else 0
            if len(rest) < size:
                return
            body, self._seen = rest[:size], rest[size:]
            if head.startswith(b"GET"):
                self._write(_whole({"data": [{"id": "instant"}]}))
            else:
                self._stream(json.loads(body)["max_tokens"])

    def _stream(self, tokens: int) -> None:
        loop = asyncio.get_running_loop()
        self._write(_STREAM)
        left = tokens

        def step() -> None:
            nonlocal left
            if self._transport.is_closing():
                return
            if left:
                self._write(_CHUNK)
                left -= 1
                loop.call_later(self._pace_s, step)
            else:
                self._write(
                    _chunk(json.dumps({"choices": [], "usage": {"completion_tokens": tokens}})) + _DONE
                )

        step()

    def _write(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]


def _whole(answer: dict[str, object]) -> bytes:
    body = json.dumps(answer).encode()
    return _HEAD % (b"application/json", len(body)) + body


def _chunk(data: str) -> bytes:
    event = b"data: " + data.encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


# As long as vLLM's.
_CHUNK = _chunk(
    json.dumps(
        {
            "id": "chatcmpl-0123456789abcdef0123456789abcdef",
            "object": "chat.completion.chunk",
            "created": 1789000000,
            "model": "instant",
            "choices": [
                {"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}
            ],
        }
    )
)
_DONE = _chunk("[DONE]") + b"0\r\n\r\n"


def serve(port: "Queue[int]", pace_s: float) -> None:
    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Instant(pace_s), "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def saturate(port: int, tokens: int, pace_s: float, users: int, seconds: int) -> Ceiling:
    """Raises RuntimeError where locust fails."""
    with tempfile.TemporaryDirectory() as directory:
        locust = psutil.Popen(
            [
                sys.executable,
                "-m",
                "locust",
                "-f",
                str(LOCUSTFILE),
                "ShortChat",
                "--headless",
                "--only-summary",
            ]
            + ["--host", f"http://127.0.0.1:{port}", "-u", str(users), "-r", str(users), "-t", f"{seconds}s"]
            + ["--think-s", "0", "--streamed", "1", "--max-tokens", str(tokens), "--csv", f"{directory}/run"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, marks = "", []
        for line in locust.stdout:
            said += line
            if "All users spawned" in line or "limit reached" in line:
                used = locust.cpu_times()
                marks.append((time.monotonic(), used.user + used.system))
        if locust.wait() or len(marks) != 2:
            raise RuntimeError(f"locust failed:\n{said[-2000:]}")
        with Path(directory, "run_stats.csv").open() as table:
            counted: Counter[str] = Counter()
            for row in csv.DictReader(table):
                counted[row["Type"]] += int(row["Request Count"])
    (began, before), (ended, after) = marks
    # Chunks as they were read: answers under way at the end have theirs too.
    chunks = counted["TTFT"] + counted["ITL"]
    return Ceiling(tokens, pace_s, counted["POST"], chunks, after - before, ended - began)


def measure(tokens: int, pace_s: float, users: int, seconds: int) -> Ceiling:
    """A run against a server of its own."""
    port: Queue[int] = Queue()
    server = Process(target=serve, args=(port, pace_s), daemon=True)
    server.start()
    try:
        return saturate(port.get(timeout=30), tokens, pace_s, users, seconds)
    finally:
        server.terminate()
        server.join()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=int, default=20, help="of each run (default: 20)")
    options = parser.parse_args(arguments)
    print(
        "| chunks an answer | one every | requests a second of a core | chunks a second of a core | it had |"
    )
    print("|---|---|---|---|---|")
    for run in RUNS:
        one = measure(*run, options.seconds)
        print(
            f"| {one.tokens} | {one.pace_s * 1000:.0f} ms | {one.requests_per_core_s:,.0f} "
            f"| {one.chunks_per_core_s:,.0f} | {one.cpu_s / one.wall_s:.0%} of a core |",
            flush=True,
        )


if __name__ == "__main__":
    main()
