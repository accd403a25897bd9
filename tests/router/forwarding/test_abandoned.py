"""Clients that go away before their answer is there: requests end in the engines, and nothing of them is left."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
from support.servers import until
from support.simulated_engine import MODEL
from support.two_engines import CHAT, HELLO, Pair, pair

pytestmark = pytest.mark.http


@pytest.mark.parametrize("requests", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_clients_that_go_away_leave_nothing_behind(requests: int) -> None:
    """Streams and whole answers, before the first token, in the middle, and where their slice has just died."""
    with pair() as found:
        before = threads_and_sockets()
        gone = asyncio.run(abandon(found, requests, at_once=100))
        assert gone == requests
        until(lambda: not found.table.in_flight("a") + found.table.in_flight("b"), "none in flight")
        engines = [engine for _, engine in found.engines.values()]
        until(lambda: not any(each.scheduler.running or each.scheduler.waiting for each in engines), "idle")
        assert not any(each._streams or each.scheduler.pool.usage for each in engines)
        assert not found.relay._streams
        until(lambda: threads_and_sockets() <= before + KEPT_ALIVE, "sockets are closed")


KEPT_ALIVE = 4  # connections that wait for the next request


def threads_and_sockets() -> int:
    return threading.active_count() + len(list(Path("/proc/self/fd").iterdir()))


async def abandon(found: Pair, requests: int, *, at_once: int) -> int:
    """Ask and hang up; returns how often."""
    host, port = found.address.removeprefix("http://").split(":")
    numbers, gone = iter(range(requests)), 0

    async def client() -> None:
        nonlocal gone
        for number in numbers:
            stream = bool(number % 3)
            body = json.dumps({"model": MODEL, **HELLO, "max_tokens": 1000, "stream": stream}).encode()
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            writer.write(head.encode() + b"\r\n\r\n" + body)
            await writer.drain()
            if stream and number % 2:
                await reader.readuntil(b"data: ")
            elif number % 5:
                await asyncio.sleep(number % 7 / 500)
            writer.transport.abort() if number % 2 else writer.close()
            gone += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    return gone
