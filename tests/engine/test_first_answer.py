"""A slice that has just started, beside slices that serve: simulated engines on real servers."""

from collections.abc import Iterator
from contextlib import ExitStack

import aiohttp
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from support.simulated_engine import MODEL, serving

from serving.engine.answer_check import Wrong
from serving.engine.first_answer import _ask, wrong_at_start
from serving.http_server import HttpServer
from serving.pinned_tls import identity
from serving.state.records import Peer

pytestmark = pytest.mark.http

NOBODY = Peer("http://127.0.0.1:1")


@pytest.fixture
def slices() -> Iterator[dict[str, Peer]]:
    """Three engines."""
    with ExitStack() as running:
        yield {name: Peer(running.enter_context(serving())[0]) for name in "abc"}


def corrupt(peer: Peer) -> None:
    assert httpx.post(f"{peer.address}/simulator/faults", json={"corrupt": True}).is_success


async def test_slices_that_answer_alike_are_right(slices: dict[str, Peer]) -> None:
    assert await wrong_at_start(MODEL, "a", slices) is None


@pytest.mark.parametrize("wrong", ["a", "b"])
async def test_the_slice_that_starts_or_one_that_serves_may_be_the_wrong_one(
    slices: dict[str, Peer], wrong: str
) -> None:
    corrupt(slices[wrong])
    found = await wrong_at_start(MODEL, "a", slices)
    assert isinstance(found, Wrong)
    assert found.replica == wrong
    assert set(found.others) == set("abc") - {wrong}


async def test_with_one_other_slice_nobody_is_called_wrong(slices: dict[str, Peer]) -> None:
    corrupt(slices["a"])
    assert await wrong_at_start(MODEL, "a", {name: slices[name] for name in "ab"}) is None


async def test_a_slice_that_does_not_answer_accuses_nobody(slices: dict[str, Peer]) -> None:
    corrupt(slices["a"])
    assert await wrong_at_start(MODEL, "a", {**slices, "c": NOBODY}) is None
    assert await wrong_at_start(MODEL, "a", {"a": NOBODY}) is None


async def test_slices_that_do_not_answer_keep_no_wrong_one_from_being_found(slices: dict[str, Peer]) -> None:
    """As where others leave or start anew at the same time: the first two that were picked had to answer."""
    corrupt(slices["a"])
    found = await wrong_at_start(MODEL, "a", {"x": NOBODY, "y": NOBODY, **slices})
    assert isinstance(found, Wrong)
    assert found.replica == "a"


async def test_a_model_that_gives_no_completions_is_not_compared(slices: dict[str, Peer]) -> None:
    assert await wrong_at_start("another", "a", slices) is None


async def test_a_slice_is_asked_by_the_certificate_of_its_record_alone() -> None:
    async def engine(_: Request) -> JSONResponse:
        return JSONResponse({"choices": [{"token_ids": [1, 2, 3]}]})

    server = HttpServer(
        Starlette(routes=[Route("/v1/completions", engine, methods=["POST"])]), "127.0.0.1", tls=True
    )
    server.start()
    async with aiohttp.ClientSession() as session:
        assert await _ask(session, server.peer, b"{}")
        assert await _ask(session, server.peer._replace(certificate=identity("x").certificate), b"{}") is None
    server.uvicorn.should_exit = True
    await server.ended()
