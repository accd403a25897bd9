"""The routers of one service tell each other what they sent to which slice: small batches over HTTP, for which no request waits.

A router listens on a port of its own and writes the address into the store, with its demand. The port asks for the cluster's
secret, as the ports of slices do. News go out a few times a second. A neighbour that has not yet taken the last batch does not get
the next: what it misses is told again (serving.router.scheduling.sharing). A router that starts, or stood still, asks a neighbour for
everything: the one that has been there longest, since others may have just started too. With each beat, or once one has failed, it
asks another, until one has told.
"""

import asyncio
import logging
from collections.abc import Collection
from http import HTTPStatus

from starlette.types import Receive, Scope, Send

from serving.http_server import HttpServer
from serving.router.forwarding.connecting import UpstreamError
from serving.router.forwarding.upstream import Upstream
from serving.router.scheduling import sharing
from serving.router.scheduling.slice_table import SliceTable
from serving.state.records import Demand, Peer
from serving.timings import TIMINGS, Timings

logger = logging.getLogger("ray.serve")

PATH = "/sent"
_STEP_NAMES = 1000  # taken over at once: half a millisecond
_MOST_BYTES = 4 << 20  # of a batch: MOST_TOLD names are 512 KiB, and their head may be as long
_WITHIN_S = 1.0
_ALL_WITHIN_S = 5.0
_STOOD_STILL_S = 5.0  # between two beats: others have told in vain meanwhile
# A batch of ten prompts costs sender and receiver 0.25 ms together: any number of neighbours takes under 1% of a core.
EVERY_S = 0.05
_EVERY_NEIGHBOUR_S = 0.025


class Neighbours:
    """The other routers, as one router knows them. Lives in the router's event loop."""

    def __init__(
        self, name: str, table: SliceTable, ip: str, timings: Timings = TIMINGS, *, tls: bool = False
    ) -> None:
        """`name`: this router's own; `ip`: of its host. `tls`: whether others ask by TLS."""
        self._name = name
        self._table = table
        self._server = HttpServer(self._app, ip, tls=tls)
        self._upstream = Upstream(timings.connect_s)
        self._peers: dict[str, Peer] = {}
        self._beats: dict[str, int] = {}
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._knows = False  # what routers that were there before told
        self._settled_s = 0.0
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._asked: set[str] = set()  # neighbours that have not told
        self._next_s = 0.0
        self.peer = self._server.peer

    def start(self) -> None:
        self._server.start()
        self._table.news.on_first = self._tell_soon

    def settle(self, demands: Collection[Demand]) -> None:
        """Once a beat: take over which routers there are."""
        self._peers = {
            demand.router: Peer(demand.address, demand.certificate)
            for demand in demands
            if demand.address and demand.router != self._name
        }
        self._beats = {demand.router: demand.beat for demand in demands}
        now_s = asyncio.get_running_loop().time()
        if now_s - self._settled_s > _STOOD_STILL_S:
            self._knows = False
        self._settled_s = now_s
        if not self._knows:
            if not self._asking:
                self._asked.clear()
            self._ask_another()

    async def close(self) -> None:
        self._table.news.on_first = lambda: None
        for task in (*self._telling.values(), *self._asking.values()):
            task.cancel()
        await self._upstream.close()
        self._server.uvicorn.should_exit = True

    def _tell_soon(self) -> None:
        """Once there are news: at once, unless a batch has just gone out."""
        loop = asyncio.get_running_loop()
        loop.call_at(max(self._next_s, loop.time()), self._tell_all)

    def _tell_all(self) -> None:
        sent = self._table.news.take()
        if not self._peers:
            return
        paced_s = max(EVERY_S, _EVERY_NEIGHBOUR_S * len(self._peers))
        self._next_s = asyncio.get_running_loop().time() + paced_s
        raw = sharing.Batch(self._name, sent).encoded()
        for router, peer in self._peers.items():
            if router not in self._telling:
                self._telling[router] = asyncio.create_task(self._tell(router, peer, raw))

    async def _tell(self, router: str, peer: Peer, raw: bytes) -> None:
        try:
            async with asyncio.timeout(_WITHIN_S):
                await self._upstream.call(peer, b"POST", PATH, raw, most_bytes=_MOST_BYTES)
        except (UpstreamError, TimeoutError) as error:
            logger.debug("the router at %s was not told: %s", peer.address, error)
        finally:
            del self._telling[router]

    def _ask_another(self) -> None:
        """Ask one more neighbour, the one that has been there longest: those that are being asked may hang."""
        if unasked := self._peers.keys() - self._asked:
            router = max(unasked, key=lambda router: self._beats[router])
            self._asked.add(router)
            self._asking[router] = asyncio.create_task(self._ask(router, self._peers[router]))

    async def _ask(self, router: str, peer: Peer) -> None:
        """Have a neighbour tell everything."""
        try:
            async with asyncio.timeout(_ALL_WITHIN_S):
                raw = await self._upstream.call(peer, b"GET", PATH, most_bytes=_MOST_BYTES)
            await self._take(sharing.Batch.decoded(raw))
            self._knows = True
        except (UpstreamError, TimeoutError, ValueError) as error:
            logger.debug("the router at %s has not told what it knows: %s", peer.address, error)
            self._ask_another()
        finally:
            del self._asking[router]

    async def _take(self, batch: sharing.Batch) -> None:
        for part in sharing.in_steps(batch.sent, _STEP_NAMES):
            self._table.take_news(part)
            await asyncio.sleep(0)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST tells this router a batch, GET asks for everything that it knows."""
        if scope["type"] != "http":
            return
        status, body = HTTPStatus.NOT_FOUND, b""
        if scope["path"] == PATH and scope["method"] == "GET":
            status, body = HTTPStatus.OK, sharing.Batch(self._name, self._table.everything()).encoded()
        elif scope["path"] == PATH and scope["method"] == "POST":
            try:
                await self._take(sharing.Batch.decoded(await _body(receive)))
                status = HTTPStatus.OK
            except ValueError as error:
                logger.debug("a router told what is no batch: %s", error)
                status = HTTPStatus.BAD_REQUEST
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": int(status), "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive) -> bytes:
    """The whole body; raises ValueError where it is too large or its sender has gone."""
    raw, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ValueError("its sender has gone")
        raw += message.get("body", b"")
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES} bytes")
        more = message.get("more_body", False)
    return bytes(raw)
