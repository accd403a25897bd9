import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
from servers import asgi_server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks import relay
from benchmarks.relay import BARE, SERVICE, Round

pytestmark = pytest.mark.unit

FIRST_S, NEXT_S, TOKENS = 0.1, 0.03, 4


def service(last: bytes = b"data: [DONE]\n\n") -> Starlette:
    async def stream() -> AsyncIterator[bytes]:
        for number in range(TOKENS):
            await asyncio.sleep(NEXT_S if number else FIRST_S)
            yield b'data: {"choices": []}\n\n'
        yield last

    async def chat(request: Request) -> Response:
        asked = await request.json()
        return StreamingResponse(stream()) if asked["model"] == "llama" else JSONResponse({}, 404)

    return Starlette(routes=[Route(relay.CHAT, chat, methods=["POST"])])


def test_the_clients_see_the_times_of_the_service() -> None:
    with asgi_server(service()) as address:
        seconds, times = asyncio.run(relay.load(address, "llama", concurrency=3, requests=6))
    assert 2 * (FIRST_S + 3 * NEXT_S) <= seconds < 1
    assert times.chunks == 6 * (TOKENS + 1)
    assert len(times.first) == 6
    assert FIRST_S <= relay.quantile(times.first, 0.5) < FIRST_S + 0.1
    assert NEXT_S * 0.8 <= relay.quantile(times.between, 0.5) < NEXT_S + 0.03


@pytest.mark.parametrize(
    ("model", "last"), [("qwen", b"data: [DONE]\n\n"), ("llama", b'data: {"error": 1}\n\n')]
)
def test_an_answer_that_is_not_complete_is_never_measured(model: str, last: bytes) -> None:
    with asgi_server(service(last)) as address, pytest.raises(RuntimeError, match=r"answered (404|200)"):
        asyncio.run(relay.load(address, model, concurrency=1, requests=1))


def test_each_path_is_as_often_first_as_second() -> None:
    assert list(itertools.chain.from_iterable(relay.order(4))) == [BARE, SERVICE, SERVICE, BARE] * 2


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("haproxy -W -f /tmp/haproxy.cfg", "HAProxy"),
        ("ray::ServeReplica:llama:router", "router replica"),
        ("ray::ServeReplica:llama:llama-3.1-8b-instruct", "slice replica (HTTP)"),
        ("VLLM::EngineCore", "EngineCore"),
        ("ray::ServeController", "Serve controller and proxy"),
        ("raylet --node-ip-address=127.77.0.1", "Ray and the rest"),
    ],
)
def test_processes_are_told_apart_by_their_command_lines(command: str, role: str) -> None:
    assert relay.role(command) == role


def test_tables_pair_the_rounds_that_ran_side_by_side() -> None:
    def one(path: str, figure: float) -> Round:
        return Round(path, 8, figure, figure, figure, figure, 500, {"HAProxy": 0.5})

    rounds = [one(BARE, 10), one(SERVICE, 9), one(SERVICE, 24), one(BARE, 20)]
    times, cpu = relay.times_table(rounds), relay.cpu_table(rounds)
    assert times[2].startswith(f"| 8 | {BARE} | 15.0 (10.0 to 20.0) |")
    assert times[4].startswith("| 8 | front door / own server | 1.05 (0.90 to 1.20) |")
    assert "| HAProxy | 1.00 | 1.00 |" in cpu
