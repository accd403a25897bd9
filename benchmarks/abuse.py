"""A router under 200 hostile connections, as a well-behaved key sees it.

    make abuse                                   # every attack, 20 s each
    python -m benchmarks.abuse --only silent deep   # some of them
    python -m benchmarks.abuse --bodies             # CPU time that one hostile body costs, alone

One real router process stands before an engine that takes no time; nothing else of the service runs. The well-behaved key asks
for 32 streamed tokens 25 times a second, on connections of its own. Each attack has 200 connections that show a key of
600 requests a minute and 32 at once, or none. Router and attackers share the machine: attackers have a lower priority.
"""

import argparse
import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from benchmarks.children import asked, child, ended, told, until_input_ends
from serving.errors import BadRequestError
from serving.router.http.auth import new
from serving.router.http.validation import parse

MODEL = "llama"
CONNECTIONS = 200
_ASKED_PER_S = 25  # by the well-behaved key: p99 is the fifth slowest of 500 answers in 20 s
_CHAT = "/v1/chat/completions"
_MIB = 1 << 20
_TALK = [{"role": "user", "content": "word " * 200}]


@dataclass
class Seen:
    """What the well-behaved key saw, seconds; what the hostile one was told, by status; the router's memory and CPU.

    `held_s`: how long the router kept its event loop from its next turn, in CPU time, the longest first.
    """

    times_s: list[float] = field(default_factory=list)
    failed: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    most_mib: float = 0.0
    cpu: float = 0.0
    held_s: list[float] = field(default_factory=list)

    def at(self, percent: int) -> float:
        return 1e3 * statistics.quantiles(self.times_s, n=100)[percent - 1]


def head(key: str, length: int | None, path: str = _CHAT) -> bytes:
    shown = f"Authorization: Bearer {key}\r\n" if key else ""
    body = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{shown}{body}\r\n\r\n".encode()
    )


def whole(key: str, body: bytes, path: str = _CHAT) -> bytes:
    return head(key, len(body), path) + body


def chat(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "messages": _TALK, **fields}).encode()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


Attack = Callable[[int, str, Counter[int]], Awaitable[None]]


def sends(*requests: Callable[[str], bytes], pause_s: float = 0.0) -> Attack:
    """Whole requests, one after the other on each connection, as fast as they are answered."""

    async def attack(port: int, key: str, statuses: Counter[int]) -> None:
        made = [request(key) for request in requests]
        for request in itertools.cycle(made):
            async with connected(port) as (reader, writer):
                writer.write(request)
                line = await reader.readline()
                statuses[int(line.split()[1]) if line else 0] += 1
            await asyncio.sleep(pause_s)

    return attack


async def silent(port: int, key: str, statuses: Counter[int]) -> None:  # noqa: ARG001  as Attack has it
    """Connects, and says nothing."""
    async with connected(port) as (reader, _):
        await reader.read()


async def slow(port: int, key: str, statuses: Counter[int]) -> None:
    """A body of a byte a second."""
    async with connected(port) as (reader, writer):
        writer.write(head(key, 1000) + b"{")
        reading = asyncio.create_task(reader.readline())
        while not reading.done():
            await asyncio.sleep(1)
            writer.write(b" ")
        statuses[int(reading.result().split()[1]) if reading.result() else 0] += 1


async def unread(port: int, key: str, statuses: Counter[int]) -> None:
    """A long answer, of which nothing is read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, whole(key, chat(stream=True, max_tokens=2_000_000, n=2)))
        statuses[int((await loop.sock_recv(connection, 12)).split()[1])] += 1
        await asyncio.sleep(3600)
    finally:
        connection.close()


def large(value: bytes, size: int) -> bytes:
    """A chat with a field of as many values as fit."""
    head = b'{"model":"llama","messages":[{"role":"user","content":"hi"}],"a":['
    return head + value * (size // len(value)) + b"0]}"


async def pipelined(port: int, key: str, statuses: Counter[int]) -> None:
    """Thousands of small requests at once, good and without a key, one behind the other."""
    requests = whole(key, b"{}") + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 20
    async with connected(port) as (reader, writer):
        writer.write(requests * 200)
        while line := await reader.readline():
            if line.startswith(b"HTTP/1.1 "):
                statuses[int(line.split()[1])] += 1


def tiny_chunks(key: str) -> bytes:
    return head(key, None) + b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n"


def many_headers(key: str) -> bytes:
    return head(key, 2)[:-2] + b"a:\r\n" * 14_000 + b"\r\n{}"


ATTACKS: dict[str, Attack] = {
    "silent": silent,
    "slow bodies": slow,
    "deep": sends(lambda key: whole(key, b'{"a":' * 100_000)),
    "wide, 4 MiB": sends(lambda key: whole(key, large(b"[],", 4 * _MIB))),
    "wide, 32 MiB": sends(lambda key: whole(key, large(b"[],", 31 * _MIB)), pause_s=1.0),
    "many values": sends(lambda key: whole(key, large(b"1000,", _MIB))),
    "many requests": sends(
        lambda key: whole(key, chat(max_tokens=1)),
        lambda key: whole(key, b'{"model":"other"}'),
        lambda key: whole(key, b"{"),
        lambda key: whole(key, chat(n=10**6)),
        lambda key: whole(key, chat(), "/v1//chat/completions/"),
    ),
    "tiny chunks": sends(tiny_chunks),
    "many headers": sends(many_headers),
    "pipelined": pipelined,
    "no key": sends(lambda _: whole("", chat(max_tokens=1)), lambda _: whole("sk-wrong", chat(max_tokens=1))),
    "unread streams": unread,
}


async def well_behaved(port: int, key: str, seconds: float, seen: Seen) -> None:
    """So many requests a second, however long each takes."""
    request = whole(key, chat(stream=True, max_tokens=32))

    async def ask() -> None:
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(30), connected(port) as (reader, writer):
                writer.write(request)
                answer = await reader.readuntil(b"[DONE]")
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            answer = b""
        if answer.startswith(b"HTTP/1.1 200"):
            seen.times_s.append(time.perf_counter() - began_s)
        else:
            seen.failed += 1

    asking = []
    for _ in range(int(_ASKED_PER_S * seconds)):
        asking.append(asyncio.create_task(ask()))
        await asyncio.sleep(1 / _ASKED_PER_S)
    await asyncio.gather(*asking)


async def hostile(port: int, key: str, name: str) -> None:
    """The attackers' process: 200 connections until it is ended; answers with the statuses so far."""
    statuses: Counter[int] = Counter()

    async def again() -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError, IndexError, ValueError):
                await ATTACKS[name](port, key, statuses)
            await asyncio.sleep(0.1)

    attacking = [asyncio.create_task(again()) for _ in range(CONNECTIONS)]
    print(len(attacking), flush=True)
    await until_input_ends(lambda: statuses)
    os._exit(0)  # attackers have nothing to tidy up


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


def measure(router: subprocess.Popen[str], port: int, good: str, bad: str, name: str, seconds: float) -> Seen:
    """One attack, from its beginning on; none where the name is empty."""
    seen = Seen()
    before_s, cpu_before_s = time.monotonic(), asked(router)["cpu_s"]
    attackers = child("benchmarks.abuse", "--hostile", str(port), bad, name, nice=15) if name else None
    if attackers:
        told(attackers)  # they have begun
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            seen.most_mib = max(seen.most_mib, resident_mib(router.pid))

    watching = threading.Thread(target=watch)
    watching.start()
    uvloop.run(well_behaved(port, good, seconds, seen))
    over.set()
    watching.join()
    used = asked(router)
    seen.cpu = (used["cpu_s"] - cpu_before_s) / (time.monotonic() - before_s)
    seen.held_s = used["held_s"]
    if attackers:
        seen.statuses.update({int(status): count for status, count in asked(attackers).items()})
        ended(attackers)
    return seen


def table(rows: list[tuple[str, Seen]]) -> str:
    quiet = rows[0][1].at(99)
    lines = [
        "| 200 connections | answered | p50, ms | p99, ms | slowest, ms | p99 against quiet | loop held, ms of CPU: most, 10th | router, MiB | router, cores | hostile answers |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, seen in rows:
        answers = ", ".join(f"{count} x {status or 'cut'}" for status, count in sorted(seen.statuses.items()))
        held = [*seen.held_s, *[0.0] * 10]
        lines.append(
            f"| {name or 'quiet'} | {len(seen.times_s)} of {len(seen.times_s) + seen.failed} | {seen.at(50):.1f} | "
            f"{seen.at(99):.1f} | {1e3 * max(seen.times_s):.1f} | {seen.at(99) / quiet:.1f} | {1e3 * held[0]:.1f}, {1e3 * held[9]:.1f} | {seen.most_mib:.0f} | {seen.cpu:.2f} | {answers} |"
        )
    return "\n".join(lines)


def bodies() -> str:
    """CPU time that the router takes to read or refuse one body: best of five."""
    made = {
        "4 MiB of empty lists": large(b"[],", 4 * _MIB),
        "32 MiB of empty lists": large(b"[],", 31 * _MIB),
        "600 KB of nesting": b'{"a":' * 100_000,
        "260,000 numbers, the most": b'{"a":[' + b"1000," * 260_000 + b"0]}",
        "65,000 lists, the most": b'{"a":[' + b"[]," * 65_000 + b"0]}",
        "32 MiB, one text": b'{"a":"' + b"x" * (31 * _MIB) + b'"}',
        "32 MiB, one text of quotes": b'{"a":"' + b'\\"' * (15 * _MIB) + b'"}',
        "8 MiB of quotes, the most": b'{"a":"' + b'\\"' * (4 * _MIB) + b'"}',
    }
    lines = ["| body | answer | CPU time, ms |", "|---|---|---|"]
    for name, body in made.items():
        times_s = []
        for _ in range(5):
            began_s = time.process_time()
            try:
                parse(body)
                told = "read"
            except BadRequestError:
                told = "400"
            times_s.append(time.process_time() - began_s)
        lines.append(f"| {name} | {told} | {1e3 * min(times_s):.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--bodies", action="store_true")
    parser.add_argument("--hostile", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bodies:
        print(bodies())
        return
    if given.hostile:
        port, key, name = given.hostile
        uvloop.run(hostile(int(port), key, name))
        return
    (good, good_line), (bad, bad_line) = new("good"), new("bad", requests_per_minute=600, concurrency=32)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.yaml")
        keys.write_text(f"{good_line}\n{bad_line}\n")
        engine = child("benchmarks.instant")
        upstream = f"http://127.0.0.1:{told(engine)}"
        router = child("benchmarks.one_router", upstream, "--keys", str(keys), "--held")
        port = told(router)
        try:
            measure(router, port, good, bad, "", 3)  # the first requests import what is needed
            rows = []
            for name in ("", *given.only, ""):
                rows.append((name, measure(router, port, good, bad, name, given.seconds)))
                print(table(rows[:1] + rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
            print(table(rows))
        finally:
            ended(router)
            ended(engine)


if __name__ == "__main__":
    main()
