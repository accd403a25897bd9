"""Streams that go on: two simulated engines behind the relay, and one of them ends in the middle of an answer."""

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from servers import asgi_server, until
from simulated_engine import MODEL, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.config import FailoverSpec
from serving.engine.simulator.engine import Engine
from serving.engine.simulator.physics import Factors
from serving.router.ask import Ask
from serving.router.relay import Relay, RelayedResponse
from serving.router.table import SliceTable
from serving.slices.board import Entry, State

pytestmark = pytest.mark.unit

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

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(self.address + path, json={"model": MODEL, **fields})

    def kill(self, name: str) -> None:
        self.client.post(f"{self.engines[name][0]}/simulator/faults", json={"die": True})

    def written(self, name: str) -> int:
        return self.engines[name][1].scheduler.totals.written_tokens


@contextmanager
def pair(failover: FailoverSpec | None = None) -> Iterator[Pair]:
    table = SliceTable({MODEL: 2}, {MODEL: "v6e 2x4"})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.relay = Relay(table, failover)
        yield
        await app.state.relay.close()

    async def forward(request: Request) -> Response:
        body = await request.body()
        path = request.scope["path"]
        return RelayedResponse(app.state.relay, Ask.of(request, MODEL, path, body, json.loads(body)))

    app = Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])], lifespan=lifespan)
    with serving(STEPS_OF_3_MS) as a, serving(STEPS_OF_3_MS) as b, asgi_server(app) as address:
        engines = {"a": a, "b": b}
        table.update(
            [
                Entry(name, MODEL, State.SERVING, "serving", "v6e 2x4", address=address)
                for name, (address, _) in engines.items()
            ],
            0.0,
        )
        with httpx.Client(timeout=20) as client:
            yield Pair(address, table, engines, client)
        until(lambda: not table.in_flight("a") and not table.in_flight("b"), "no request counted in flight")


def read(pair: Pair, path: str, fields: dict[str, Any], kill_after: int) -> list[bytes]:
    """A stream's events; the engine that gives them ends after so many."""
    events: list[bytes] = []
    with pair.client.stream("POST", pair.address + path, json={"model": MODEL, **fields}) as answer:
        assert answer.status_code == 200
        rest = b""
        for data in answer.iter_raw():
            *whole, rest = (rest + data).split(b"\n\n")
            events += whole
            if len(events) >= kill_after and pair.engines["a"][1].dead is None:
                pair.kill("a")
    return events


def alike(event: bytes) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    del body["id"], body["created"]
    return body


@pytest.mark.parametrize("kill_after", [1, 2, 20])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {**HELLO, "max_tokens": 60}),
        (
            CHAT,
            {
                **HELLO,
                "max_tokens": 60,
                "logprobs": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        ),
        (COMPLETIONS, {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "logprobs": 1}),
    ],
    ids=["chat", "chat with logprobs and usage", "completions with logprobs"],
)
def test_a_stream_goes_on_word_for_word_where_its_engine_dies(
    path: str, fields: dict[str, Any], kill_after: int
) -> None:
    with pair() as found:
        expected = [
            event
            for event in found.client.post(
                found.engines["b"][0] + path, json={"model": MODEL, "stream": True, **fields}
            ).content.split(b"\n\n")
            if event
        ]
        alone = found.written("b")
        events = read(found, path, {**fields, "stream": True}, kill_after)
        assert found.written("b") > alone
    assert events[-1] == expected[-1] == b"data: [DONE]"
    assert [alike(event) for event in events[:-1]] == [alike(event) for event in expected[:-1]]
    assert len({json.loads(event[6:])["id"] for event in events[:-1]}) == 1


def test_a_whole_answer_is_run_anew() -> None:
    with pair() as found:
        expected = found.post(CHAT, **HELLO, max_tokens=100, n=2).json()["choices"]
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(found.post(CHAT, **HELLO, max_tokens=100, n=2))
        )
        asking.start()
        until(lambda: found.engines["a"][1].scheduler.running, "it runs on a")
        found.kill("a")
        asking.join()
    assert answers[0].json()["choices"] == expected


def test_what_can_t_go_on_ends_with_an_error_event() -> None:
    with pair() as found:
        fields = {**HELLO, "max_tokens": 100, "n": 2, "stream": True}
        events = read(found, CHAT, fields, 20)
    error = json.loads(events[-2].removeprefix(b"data: "))["error"]
    assert error["code"] == 500
    assert events[-1] == b"data: [DONE]"


def test_switched_off_a_stream_that_breaks_stays_broken() -> None:
    with pair(FailoverSpec(continue_streams=False)) as found:
        events = read(found, CHAT, {**HELLO, "max_tokens": 60, "stream": True}, 20)
    assert b'"error"' in events[-2]
    assert events[-1] == b"data: [DONE]"
