"""Two routers' tables with real ports between them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
from support.many_routers import MODEL, SHAPE, prompt
from support.servers import free_address

from serving import secret
from serving.router.neighbours import _MOST_BYTES, PATH, Neighbours
from serving.router.scheduling.sharing import Batch, Sent
from serving.router.scheduling.slice_table import SliceTable
from serving.state.records import Demand, SliceRecord, SliceState

pytestmark = pytest.mark.http

KEY = b"shared"
LONG = "a word of it " * 400


def table(routers: int = 2) -> SliceTable:
    made = SliceTable({MODEL: 4}, {MODEL: SHAPE}, routers=routers, shared_key=KEY)
    made.update(
        [
            SliceRecord(name, MODEL, SliceState.SERVING, "serving", SHAPE, address="http://x")
            for name in "abcd"
        ],
        100.0,
    )
    return made


def ask(of: SliceTable, text: str) -> str:
    chosen = of.choose(MODEL, (), prompt(text)).replica
    of.begin(chosen)
    return chosen


def known(of: SliceTable) -> set[tuple[str, int]]:
    return {(one.replica, name) for one in of.everything() for name in one.names}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  another router's news has no event here
            await asyncio.sleep(0.01)


async def end(*routers: Neighbours) -> None:
    for router in routers:
        await router.close()
        await router._server.ended()


def demands(*routers: Neighbours) -> list[Demand]:
    return [Demand(router._name, MODEL, **router.peer._asdict()) for router in routers]


@pytest.mark.parametrize("tls", [(False, False), (True, True), (True, False)])
async def test_a_router_sends_a_prompt_where_another_sent_its_beginning(tls: tuple[bool, bool]) -> None:
    tables = [table(), table()]
    routers = [
        Neighbours(name, of, "127.0.0.1", tls=speaks)
        for name, of, speaks in zip("xy", tables, tls, strict=True)
    ]
    for router in routers:
        router.start()
        router.settle(demands(*routers))
    sent = {text: ask(tables[0], text + LONG) for text in ("one", "two", "three", "four", "five")}
    await until(lambda: known(tables[1]) == known(tables[0]))
    assert {text: ask(tables[1], text + LONG + "and more") for text in sent} == sent
    await end(*routers)


async def test_a_router_that_starts_knows_what_the_others_know() -> None:
    tables = [table(), table()]
    old = Neighbours("x", tables[0], "127.0.0.1")
    old.start()
    sent = {text: ask(tables[0], text + LONG) for text in ("one", "two", "three")}
    tables[0].news.take()
    new = Neighbours("y", tables[1], "127.0.0.1")
    new.start()
    new.settle(demands(old, new))
    await until(lambda: known(tables[1]) == known(tables[0]))
    assert {text: ask(tables[1], text + LONG) for text in sent} == sent
    await end(old, new)


async def test_a_router_that_stood_still_asks_what_it_missed() -> None:
    tables = [table(), table()]
    old, paused = [Neighbours(name, of, "127.0.0.1") for name, of in zip("xy", tables, strict=True)]
    for router in (old, paused):
        router.start()
    ask(tables[0], "one" + LONG)
    tables[0].news.take()
    paused.settle(demands(old, paused))
    await until(lambda: known(tables[1]) == known(tables[0]))
    await until(lambda: not paused._asking)
    ask(tables[0], "two" + LONG)
    tables[0].news.take()  # and nobody heard it
    paused._settled_s -= 10
    paused.settle(demands(old, paused))
    await until(lambda: known(tables[1]) == known(tables[0]))
    await end(old, paused)


async def test_routers_that_start_together_ask_the_one_that_was_there_before() -> None:
    """A roll starts some at once: who asked another new one knew nothing from then on."""
    tables = [table(8) for _ in range(7)]
    old, *new = [Neighbours(f"router {at}", of, "127.0.0.1") for at, of in enumerate(tables)]
    for router in (old, *new):
        router.start()
    for text in ("one", "two", "three"):
        ask(tables[0], text + LONG)
    tables[0].news.take()
    away = Demand("away", MODEL, beat=1000, address=free_address())  # longest there, and gone
    there = [replace(demand, beat=900 if at == 0 else at) for at, demand in enumerate(demands(old, *new))]

    def settled() -> bool:
        for router in new:
            router.settle([*reversed(there), away])
        return all(known(of) == known(tables[0]) for of in tables[1:])

    await until(settled)
    await end(old, *new)


@pytest.mark.parametrize("answer", ["nothing", "rubbish", "too much"])
async def test_a_router_that_starts_asks_another_neighbour_where_one_does_not_tell(answer: str) -> None:
    """A neighbour that hangs has no other wait for it."""
    asked, over = asyncio.Event(), asyncio.Event()
    told = {
        "rubbish": b"{}\n",
        "too much": Batch("ill", (Sent("a", tuple(range(_MOST_BYTES // 8))),)).encoded(),
    }.get(answer)

    async def ill(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if told is not None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(told) + told)
        asked.set()
        await over.wait()
        writer.close()

    server = await asyncio.start_server(ill, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    tables = [table(3), table(3)]
    old, new = [Neighbours(name, of, "127.0.0.1") for name, of in zip("xy", tables, strict=True)]
    old.start()
    for text in ("one", "two", "three"):
        ask(tables[0], text + LONG)
    tables[0].news.take()
    new.start()
    there = [*demands(old, new), Demand("ill", MODEL, beat=1000, address=address)]
    new.settle(there)
    await asked.wait()
    if told is None:
        new.settle(there)
    await until(lambda: bool(known(tables[1])))
    await until(lambda: known(tables[1]) == known(tables[0]))
    over.set()
    await end(old, new)
    server.close()


async def test_who_does_not_show_the_secret_tells_and_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.VARIABLE, "known to the cluster")
    router = Neighbours("x", table(), "127.0.0.1")
    router.start()
    async with httpx.AsyncClient(base_url=router.peer.address) as client:
        assert (await client.get(PATH)).status_code == 401
        assert (await client.post(PATH, content=b"{}")).status_code == 401
        shown = secret.headers("known to the cluster")
        assert (await client.get(PATH, headers=shown)).status_code == 200
        assert (await client.post(PATH, content=b"{}", headers=shown)).status_code == 400
        assert (await client.get("/", headers=shown)).status_code == 404
    await end(router)
