"""Clients that go on asking while something is done to a service."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from support import quick_http as http
from support.service import MODEL, Service


@contextmanager
def load(running: Service) -> Iterator[list[str]]:
    """Streams one after the other from four clients; what went wrong with any is in the list."""
    wrong: list[str] = []
    count = 0
    over = threading.Event()
    fields = {"model": MODEL, "prompt": "a roll", "max_tokens": 40, "stream": True, "ignore_eos": True}

    def client() -> None:
        nonlocal count
        while not over.is_set():
            try:
                with http.stream(
                    "POST", f"{running.address}/v1/completions", json=fields, timeout=30
                ) as answer:
                    text = answer.read().decode()
                if not text.endswith("data: [DONE]\n\n") or '"error"' in text:
                    wrong.append(f"{answer.status_code}: {text[-300:]}")
            except httpx.HTTPError as error:
                wrong.append(repr(error))
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
