import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.servers import SSE_HEAD, RawServers, asgi_server, chunk, free_address

from benchmarks.client import CHAT, Client, Load, LoadError, put
from benchmarks.rounds import quantile

pytestmark = pytest.mark.http

FIRST_S, NEXT_S, TOKENS = 0.1, 0.03, 4
EVENT, DONE = b'data: {"choices": [{"finish_reason": "length"}]}\n\n', b"data: [DONE]\n\n"
CUT = b'data: {"choices": [{"finish_reason": "stop"}]}\n\n'


def service(last: bytes = DONE, asked_of: list[str] | None = None) -> Starlette:
    async def stream(tokens: int) -> AsyncIterator[bytes]:
        for number in range(tokens):
            await asyncio.sleep(NEXT_S if number else FIRST_S)
            yield EVENT
        yield last

    async def chat(request: Request) -> Response:
        asked = await request.json()
        assert asked["stream"] is True
        if asked_of is not None:
            asked_of.append(asked["model"])
        return (
            StreamingResponse(stream(asked["max_tokens"]))
            if asked["model"] == "llama"
            else JSONResponse({}, 404)
        )

    return Starlette(routes=[Route(CHAT, chat, methods=["POST"])])


@pytest.fixture(scope="module")
def raw() -> Iterator[RawServers]:
    servers = RawServers()
    yield servers
    servers.stop()


def test_the_client_sees_the_times_of_the_service_from_a_process_of_its_own() -> None:
    asked_of: list[str] = []
    with asgi_server(service(asked_of=asked_of)) as address, Client() as client:
        seen = client.run([address], "llama", Load(concurrency=3, tokens=TOKENS, seconds=1.0))
    # How many fit into the time is the machine's affair. The last of each is asked within it and ends after it.
    assert seen.answers == len(asked_of) >= 3
    assert seen.events == seen.answers * TOKENS
    assert seen.in_time < seen.events
    assert len(seen.first_s) == seen.answers
    assert len(seen.gaps_s) == seen.answers * (TOKENS - 1)
    assert quantile(seen.first_s, 0.5) >= FIRST_S
    assert quantile(seen.gaps_s, 0.5) >= NEXT_S * 0.8
    assert seen.cpu_s > 0


@pytest.mark.parametrize(
    ("model", "last", "why"),
    [
        ("qwen", DONE, "answered 404, 0 events"),
        ("llama", b'data: {"error": 1}\n\n', "answered 200, 5 events"),
    ],
)
async def test_an_answer_that_is_not_whole_is_never_measured(model: str, last: bytes, why: str) -> None:
    with asgi_server(service(last)) as address, pytest.raises(LoadError, match=why):
        await put([address], model, Load(1, TOKENS, 0.1))


async def test_an_answer_without_all_its_tokens_is_not_measured(raw: RawServers) -> None:
    async def short(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(CUT) + chunk(DONE) + b"0\r\n\r\n")

    with pytest.raises(LoadError, match="answered 200, 1 events"):
        await put([raw.start(short)], "llama", Load(1, 2, 0.1))


async def test_events_are_counted_however_they_are_cut(raw: RawServers) -> None:
    async def cut(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(EVENT[:4]))
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.write(chunk(EVENT[4:] + EVENT + EVENT[:10]))
        await asyncio.sleep(0.02)
        writer.write(chunk(EVENT[10:] + DONE[:5]) + chunk(DONE[5:]) + b"0\r\n\r\n")

    seen = await put([raw.start(cut)], "llama", Load(1, 3, 0.01))
    assert seen.events == 3
    assert len(seen.gaps_s) == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [(SSE_HEAD + chunk(EVENT), "closed the connection"), (b"what?\r\n\r\n", "sent what is no HTTP")],
)
async def test_a_server_that_breaks_off_is_named(raw: RawServers, answer: bytes, why: str) -> None:
    async def broken(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    with pytest.raises(LoadError, match=rf"^127\.0\.0\.1:\d+ {why}"):
        await put([raw.start(broken)], "llama", Load(1, 1, 0.1))


async def test_a_server_that_is_not_there_is_named() -> None:
    address = free_address()
    with pytest.raises(LoadError, match=f"{address} takes no connection"):
        await put([address], "llama", Load(1, 1, 0.1))


async def test_connections_are_dealt_out_to_the_addresses_in_turn(raw: RawServers) -> None:
    asked = [0, 0]

    def answer(which: int) -> str:
        async def whole(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked[which] += 1
            await asyncio.sleep(0.1)
            writer.write(SSE_HEAD + chunk(EVENT + DONE) + b"0\r\n\r\n")

        return raw.start(whole)

    await put([answer(0), answer(1)], "llama", Load(4, 1, 0.05))
    assert asked == [2, 2]
