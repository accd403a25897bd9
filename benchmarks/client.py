"""The load client: chats one after the other over connections that stay open, in a process of its own.

`Client` runs it and hands it one load at a time. A clock is read when bytes come off the socket and nothing is parsed
but HTTP, so that the client costs a fraction of what it measures; how much, it says itself, and `ceiling` in
benchmarks/routers.py drives it against a server that answers at once. Between two chats a connection pauses for a random
time of up to `pause_s`: without it a batch that ends together asks again together, and the engine's steps hide what
the way there adds.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httptools
import uvloop

CHAT = "/v1/chat/completions"
_EVENT = b"data: {"
_DONE = b"data: [DONE]"
_ALL_TOKENS = b'"length"'  # the reason to finish of an answer that has every token asked for
_END_BYTES = 1024  # hold the last event and the end mark
_WORDS = "Say in a few words what a slice is, what a host is and how the two go together. " * 6
_PATIENCE_S = 60  # beyond the load's own seconds


@dataclass(frozen=True)
class Load:
    """So many connections that each ask for answers of `tokens`, one after the other, for `seconds`."""

    concurrency: int
    tokens: int
    seconds: float
    pause_s: float = 0.0


@dataclass
class Seen:
    """What came of a load. Counts are of the whole of it, but for `in_time`: events within its seconds."""

    took_s: float = 0.0
    in_time: int = 0
    answers: int = 0
    events: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


class LoadError(Exception):
    """An answer that was not whole; what was measured with it means nothing."""


class Client:
    """The client's process; every request carries `key`."""

    def __init__(self, key: str = "none") -> None:
        self._key = key
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Unbuffered, a line of 170 kB that a signal cuts short loses its end.
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, addresses: Sequence[str], model: str, load: Load) -> Seen:
        """Put a load on these addresses, the connections dealt out to them in turn; raises LoadError."""
        assert self._process.stdin  # noqa: S101  both were asked for
        assert self._process.stdout  # noqa: S101
        job = {"addresses": list(addresses), "model": model, "load": asdict(load), "key": self._key}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "the client died"}')
        if "error" in answer:
            raise LoadError(answer["error"])
        return Seen(**answer)


class _Connection(asyncio.Protocol):
    """One client: its chats, one after the other."""

    def __init__(self, address: str, model: str, load: Load, seen: Seen, began_s: float, key: str) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._host = urlsplit(address).netloc
        self._model = model
        self._key = key
        self._load = load
        self._seen = seen
        self._until_s = began_s + load.seconds
        self._random = random.Random()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pause()

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"sent what is no HTTP: {error}")

    def connection_lost(self, _: Exception | None) -> None:
        self._fail("closed the connection")

    # httptools calls these.

    def on_body(self, body: bytes) -> None:
        found = self._rest + body
        events = found.count(_EVENT)
        self._rest = found[-len(_EVENT) + 1 :]  # an event's mark may come in two pieces
        self._end = (self._end + body)[-_END_BYTES:]
        if not events:
            return
        if self._events:
            self._seen.gaps_s.append(self._now_s - self._last_s)
        else:
            self._seen.first_s.append(self._now_s - self._sent_s)
        # Events that come in one piece came at the same time.
        self._seen.gaps_s.extend([0.0] * (events - 1))
        self._last_s = self._now_s
        self._events += events
        if self._now_s <= self._until_s:
            self._seen.in_time += events

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        # Not by the number of events: an engine holds tokens back until they make up characters.
        whole = self._end.rstrip().endswith(_DONE) and _ALL_TOKENS in self._end
        if status != 200 or not whole:
            self._fail(f"answered {status}, {self._events} events, and ended with {self._end[-200:]!r}")
            return
        self._seen.answers += 1
        self._seen.events += self._events
        if not self._parser.should_keep_alive():
            self._fail("does not keep the connection")
        elif self._now_s < self._until_s:
            self._pause()
        else:
            self._finish()

    def _pause(self) -> None:
        pause_s = self._random.uniform(0, self._load.pause_s)
        if pause_s:
            asyncio.get_running_loop().call_later(pause_s, self._ask)
        else:
            self._ask()

    def _ask(self) -> None:
        if self.ended.done() or self._transport is None:
            return
        self._sent_s = time.perf_counter()
        if self._sent_s >= self._until_s:
            self._finish()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._events, self._rest, self._end = 0, b"", b""
        body = json.dumps(
            {
                "model": self._model,
                # A beginning of its own: no answer comes from a cache of prefixes.
                "messages": [{"role": "user", "content": f"{self._random.getrandbits(64):x} {_WORDS}"}],
                "stream": True,
                "max_tokens": self._load.tokens,
                "ignore_eos": True,
                "temperature": 0,
            }
        ).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self._key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)

    def _finish(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _fail(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(LoadError(f"{self._host} {why}"))


async def put(addresses: Sequence[str], model: str, load: Load, key: str = "none") -> Seen:
    """The load in this process; raises LoadError."""
    seen = Seen()
    loop = asyncio.get_running_loop()
    cpu_s, began_s = time.process_time(), time.perf_counter()
    clients: list[_Connection] = []
    try:
        for number in range(load.concurrency):
            address = addresses[number % len(addresses)]
            url = urlsplit(address)
            _, client = await loop.create_connection(
                lambda address=address: _Connection(address, model, load, seen, began_s, key),
                url.hostname,
                url.port,
            )
            clients.append(client)
        async with asyncio.timeout(load.seconds + _PATIENCE_S):
            await asyncio.gather(*(client.ended for client in clients))
    except TimeoutError:
        raise LoadError(f"{addresses[0]} did not end its answers within {_PATIENCE_S} s") from None
    except OSError as error:
        raise LoadError(f"{addresses[0]} takes no connection: {error}") from None
    finally:
        for client in clients:
            client.ended.cancel()
            if client._transport:  # noqa: SLF001  this module's own
                client._transport.abort()  # noqa: SLF001
    seen.took_s = time.perf_counter() - began_s
    seen.cpu_s = time.process_time() - cpu_s
    return seen


def main() -> None:
    """A job a line in, what was seen of it a line out."""
    for line in sys.stdin:
        job = json.loads(line)
        try:
            seen = uvloop.run(put(job["addresses"], job["model"], Load(**job["load"]), job["key"]))
        except LoadError as error:
            print(json.dumps({"error": str(error)}), flush=True)
        else:
            print(json.dumps(asdict(seen)), flush=True)


if __name__ == "__main__":
    main()
