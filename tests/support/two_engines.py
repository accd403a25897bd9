"""A router and two simulated engines, each on a real server: what fails on one is to go on on the other."""

import json
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request

from serving.config import Affinity, FailoverSpec
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.forwarding.response import Forwarding
from serving.router.http.downstream import Downstream
from serving.router.http.protocol import InferenceRequest
from serving.router.http.validation import kept
from serving.router.scheduling.slice_table import SliceTable
from serving.simulation.engine import tokenizer
from serving.simulation.engine.engine import Engine
from serving.simulation.engine.physics import Factors
from serving.state.records import SliceRecord, SliceState
from support.doors import LateDoor
from support.servers import PATIENCE_S, asgi_server, until
from support.simulated_engine import MODEL, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
STEPS_OF_3_MS = Factors(0.5, 0.5, 0.5, 0.5)


@dataclass
class Pair:
    """A router and two engines; requests go to a first."""

    address: str
    table: SliceTable
    engines: dict[str, tuple[str, Engine]]
    client: httpx.Client
    relay: Dispatcher

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(self.address + path, json={"model": MODEL, **fields})

    def kill(self, name: str) -> None:
        self.fault(name, die=True)

    def fault(self, name: str, **fields: Any) -> None:
        self.client.post(f"{self.engines[name][0]}/simulator/faults", json=fields)

    def written(self, name: str) -> int:
        return self.engines[name][1].scheduler.totals.written_tokens

    def settle(self) -> None:
        """A beat, in which dead slices leave the table."""
        alive = {name: address for name, (address, engine) in self.engines.items() if not engine.dead}
        entries = entries_of(alive)
        self.table.update(entries, time.monotonic())
        done = threading.Event()
        loop = self.relay._watching.get_loop()
        loop.call_soon_threadsafe(lambda: (self.relay.settle(entries), done.set()))
        assert done.wait(PATIENCE_S)


def entries_of(addresses: Mapping[str, str]) -> list[SliceRecord]:
    return [
        SliceRecord(name, MODEL, SliceState.SERVING, "serving", "v6e 2x4", address=address)
        for name, address in addresses.items()
    ]


@contextmanager
def pair(
    failover: FailoverSpec | None = None, names: str = "ab", sentinel: float = 0.0, key: str = ""
) -> Iterator[Pair]:
    """A router before one engine for each letter of `names`, and `sentinel` of its greedy answers asked again; all clients have this key."""
    # By load alone: a prompt's home may be any of them.
    table = SliceTable({MODEL: len(names)}, {MODEL: "v6e 2x4"}, affinity=Affinity.NONE)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.relay = Dispatcher(table, failover, sentinel=sentinel)
        yield
        await app.state.relay.close()

    async def forward(request: Request, client: Downstream) -> None:
        body = await request.body()
        asked = InferenceRequest.of(request, MODEL, request.scope["path"], body, kept(json.loads(body)))
        await Forwarding(app.state.relay, replace(asked, key=key)).run(client)

    door = LateDoor()
    door.answer = forward
    app = Starlette(lifespan=lifespan)
    with ExitStack() as running:
        engines = {name: running.enter_context(serving(STEPS_OF_3_MS)) for name in names}
        address = running.enter_context(asgi_server(app, **door.options))
        table.update(entries_of({name: upstream for name, (upstream, _) in engines.items()}), 0.0)
        with httpx.Client(timeout=PATIENCE_S) as client:
            yield Pair(address, table, engines, client, app.state.relay)
        until(lambda: not any(map(table.in_flight, names)), "no request counted in flight")


def deadly_prompts(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that get a prompt with "deadly" in it, as they do; `hang_up` ends them."""
    asked, submit = list[Engine](), Engine.submit

    def note(engine: Engine, stream: Any, prompt: list[int], *args: Any, **kwargs: Any) -> None:
        submit(engine, stream, prompt, *args, **kwargs)
        if "deadly" in tokenizer.decode(prompt):
            asked.append(engine)

    monkeypatch.setattr(Engine, "submit", note)
    return asked


def hang_up(fleet: Pair, deadly: list[Engine], prompt: str) -> Any:
    """Ask, and go as soon as an engine has the prompt, which ends after that; the answer where none gets it."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1500, "ignore_eos": True})
    host, port = fleet.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: deadly or select.select([client], [], [], 0)[0], "an engine that has it, or an answer")
        if not deadly:
            return json.loads(b"".join(iter(lambda: client.recv(1 << 16), b"")).partition(b"\r\n\r\n")[2])
    until(lambda: not any(map(fleet.table.in_flight, fleet.engines)), "the router to see its client go")
    ends = deadly.pop()
    fleet.kill(next(name for name, (_, engine) in fleet.engines.items() if engine is ends))
    fleet.settle()
    until(lambda: all(verdict.done() for verdict in fleet.relay._verdicts.values()), "why it ended")
    return None
