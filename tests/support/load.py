"""Clients that go on asking while something is done to a service."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from support.service import MODEL, Service


@contextmanager
def load(running: Service) -> Iterator[list[str]]:
    """Streams one after the other from four clients; what went wrong with any is in the list."""
    wrong: list[str] = []
    count = 0
    over = threading.Event()
    fields = {"model": MODEL, "prompt": "a roll", "max_tokens": 40, "stream": True, "ignore_eos": True}

    begun_s = time.monotonic()

    def times(asked_s: float) -> str:
        return f"asked after {asked_s - begun_s:.1f} s, ended after {time.monotonic() - begun_s:.1f} s:"

    def client() -> None:
        nonlocal count
        while not over.is_set():
            asked_s = time.monotonic()
            try:
                with httpx.stream(
                    "POST", f"{running.address}/v1/completions", json=fields, timeout=30
                ) as answer:
                    text = answer.read().decode()
                if not text.endswith("data: [DONE]\n\n") or '"error"' in text:
                    wrong.append(
                        f"{times(asked_s)} {answer.status_code} {dict(answer.headers)}: {text[-300:]}"
                    )
            except httpx.HTTPError as error:
                wrong.append(f"{times(asked_s)} {error!r}")
            count += 1

    clients = [threading.Thread(target=client) for _ in range(4)]
    for one in clients:
        one.start()
    try:
        yield wrong
    finally:
        over.set()
        for one in clients:
            one.join()
    assert count > len(clients)
