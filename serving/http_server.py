"""The HTTP server of a process that other processes of the cluster ask: of an engine, and of a router's news.

It asks for the cluster's secret, where there is one, and speaks TLS where it is told to. It changes from one to the other on
another port: the former one stays open until routers have read of the new one.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from serving import secret
from serving.pinned_tls import TlsListener, identity
from serving.state.records import Peer
from serving.strangers import GuardedHttp, Strangers

logger = logging.getLogger("ray.serve")

# Longer than a router keeps an idle connection, so that the router closes it.
_KEEP_ALIVE_S = 120
_BACKLOG = 2048


class _Port:
    """One listening port, with what uvicorn asks of a server when it ends. Connections wait in the kernel until it is open."""

    def __init__(self, ip: str, *, tls: bool) -> None:
        self._listener = socket.create_server((ip, 0), backlog=_BACKLOG)
        self._identity = identity("tpu-serving") if tls else None
        self._server: asyncio.Server | TlsListener | None = None
        self.number: int = self._listener.getsockname()[1]
        scheme = "https" if tls else "http"
        self.peer = Peer(
            f"{scheme}://{ip}:{self.number}", self._identity.certificate if self._identity else ""
        )

    async def open(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        if self._identity:
            self._server = TlsListener(self._listener, self._identity.context, protocol)
        else:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(protocol, sock=self._listener, backlog=_BACKLOG)

    def close(self) -> None:
        """Take no more connections; those that are there stay."""
        (self._server or self._listener).close()

    async def wait_closed(self) -> None:
        """Nothing: uvicorn waits for the connections itself."""


class _Uvicorn(uvicorn.Server):
    """uvicorn has the app's life and its connections; `opens` has the ports."""

    def __init__(self, config: uvicorn.Config, opens: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._opens = opens

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002  uvicorn's signature
        await super().startup(sockets=[])
        await self._opens()


class HttpServer:
    """An ASGI app on a free port of its host, served by a task of the running event loop."""

    def __init__(self, app: Any, ip: str, *, tls: bool = False) -> None:
        self._secret = secret.of_this_process()
        if not self._secret and not ip.startswith("127."):
            logger.warning(
                "%s is not set: this slice's port on %s answers everybody who reaches it; `serving secret` makes one",
                secret.VARIABLE,
                ip,
            )
        self._ip = ip
        self._strangers = Strangers()
        self._port = _Port(ip, tls=tls)
        self.uvicorn = _Uvicorn(
            uvicorn.Config(
                secret.guarded(app, self._secret),
                # uvicorn's own config closes every handler, Serve's too; a restarted controller asks replicas for their log file.
                log_config=None,
                log_level="warning",
                interface="asgi3",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            ),
            self._open,
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def peer(self) -> Peer:
        """Where others ask, and what they trust there."""
        return self._port.peer

    @property
    def port(self) -> int:
        return self._port.number

    def start(self) -> None:
        self._serving = asyncio.create_task(self.uvicorn.serve())

    async def speak(self, *, tls: bool) -> Callable[[], None] | None:
        """Speak TLS from now on, or plain HTTP again, on another port; None where it does so already.

        Returns what closes the former port, once whoever asks has read of the new one. Requests under way there end well.
        """
        if tls is bool(self.peer.certificate):
            return None
        former, self._port = self._port, _Port(self._ip, tls=tls)
        await self._open()
        return former.close

    async def ended(self) -> str:
        """Wait until the server has ended."""
        assert self._serving is not None  # noqa: S101  `start` came first
        await asyncio.wait([self._serving])
        return "the engine's HTTP server has ended"

    @property
    def requests_open(self) -> int:
        return len(self.uvicorn.server_state.tasks)

    async def _open(self) -> None:
        await self._port.open(self._protocol)
        self.uvicorn.servers.append(self._port)  # type: ignore[arg-type]  # which it closes when it ends

    def _protocol(self) -> GuardedHttp:
        server = self.uvicorn
        return GuardedHttp(
            self._strangers,
            self._secret,
            config=server.config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
        )
