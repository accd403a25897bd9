"""The service's /metrics: the metrics of every node's Ray agent and every slice's engine, on one page.

A scraper needs one address, wherever the slices are: engines listen on ports that nobody knows beforehand, and Ray's
agents repeat a series for every process.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import urlsplit

import aiohttp

from serving import pinned_tls, secret
from serving.metrics import exposition
from serving.metrics.exposition import Engine
from serving.metrics.table import UNREACHABLE
from serving.state.records import Peer, SliceRecord

_TIMEOUT_S = 3.0  # below any scraper's own
_FRESH_S = 1.0
_IDLE_S = 90.0  # longer than scrapers pause, and shorter than slices keep a connection


class Scraper:
    """Reads every source at once. `agents` gives the addresses of Ray's metrics agents, `entries` the store's slices."""

    def __init__(
        self,
        application: str,
        agents: Callable[[], Awaitable[Sequence[str]]],
        entries: Callable[[], Sequence[SliceRecord]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._page: asyncio.Task[str] | None = None
        self._began_s = 0.0
        self._application = application
        self._agents = agents
        self._entries = entries
        self._secret = secret.headers(secret.of_this_process())
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=64, keepalive_timeout=_IDLE_S),
        )

    async def page(self) -> str:
        """The metrics that can be read within _TIMEOUT_S; the page counts the other sources.

        However many ask, the sources are asked at most once a second: sixteen pages a second took all of the head's agent.
        """
        now_s = self._clock()
        if self._page is None or (self._page.done() and now_s - self._began_s >= _FRESH_S):
            self._began_s = now_s
            self._page = asyncio.create_task(self._read_all())
        return await asyncio.shield(self._page)

    async def _read_all(self) -> str:
        engines = [entry for entry in self._entries() if entry.address]
        agents = await self._agents()
        texts = await asyncio.gather(
            *(self._read(Peer(address)) for address in agents),
            *(self._read(entry.peer, self._secret) for entry in engines),
        )
        engine_pages = [
            (Engine(entry.model, entry.slice, entry.pool, entry.hosts), text or "")
            for entry, text in zip(engines, texts[len(agents) :], strict=True)
        ]
        unread = sum(text is None for text in texts)
        agent_pages = [
            (urlsplit(address).hostname or "", text)
            for address, text in zip(agents, texts, strict=False)
            if text
        ]
        return await asyncio.to_thread(
            exposition.page, self._application, agent_pages, engine_pages, {UNREACHABLE.name: unread}
        )

    async def close(self) -> None:
        if self._page:
            self._page.cancel()
        await self._session.close()

    async def _read(self, peer: Peer, headers: Mapping[str, str] | None = None) -> str | None:
        """A source's page; None where it gives none, or none that is text. One such source leaves the others their series."""
        try:
            trusted = pinned_tls.of(peer.certificate)
            async with self._session.get(f"{peer.address}/metrics", headers=headers, ssl=trusted) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
            return None
