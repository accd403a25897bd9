"""The port that the routers of one host share where `router.door` is direct: each new connection is one of theirs (SO_REUSEPORT).

Serve's own server of the replica answers on it as on its own port, with the same protocol and the same draining. A router that
leaves takes no new connection and loses none.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from serving.errors import ConfigError

logger = logging.getLogger("ray.serve")

_BACKLOG = 2048  # as uvicorn's
# In one turn of the event loop, which opens one in 60 us: more than requests begin in a turn (serving.router.http.starts), so that whoever
# comes next waits for few of those before it.
_AT_ONCE = 16
_PAUSE_S = 1.0


def bind(host: str, port: int) -> socket.socket:
    """A socket that shares the port, and does not listen yet; raises ConfigError."""
    (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"router.door: routers can't share {host}:{port} ({error.strerror}); something else has the port: end it, or set another "
            "router.direct_port"
        ) from None
    return bound


def share(server: Any, bound: socket.socket, leaving: Callable[[], bool]) -> None:
    """Have a server of uvicorn's that has not begun listen on one more socket, which it closes with its own."""
    startup = server.startup

    def protocol() -> asyncio.Protocol:
        made: asyncio.Protocol = server.config.http_protocol_class(
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state
        )
        return made

    async def start_both(**how: Any) -> None:
        await startup(**how)
        server.servers.append(Listener(bound, protocol, leaving))

    server.startup = start_both


class Listener:
    """Takes connections on a shared port until it is closed, or `leaving` says that its router ends."""

    def __init__(
        self,
        bound: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """Listens from here on."""
        self._bound = bound
        self._protocol = protocol
        self._leaving = leaving
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[Any]] = set()
        bound.setblocking(False)
        bound.listen(_BACKLOG)
        self._loop.add_reader(bound, self._take)

    def close(self) -> None:
        """Leave the port to the other routers. Whoever the kernel has let in by now is answered."""
        if self.is_serving():
            self._loop.remove_reader(self._bound)
            self._bound.listen(0)  # the kernel lets in one at a time now
            self._take_waiting(_BACKLOG)
            self._bound.close()

    async def wait_closed(self) -> None:
        """As an asyncio server has it; connections that are open go on."""

    def is_serving(self) -> bool:
        return self._bound.fileno() >= 0

    def _take(self) -> None:
        try:
            self._take_waiting(_AT_ONCE)
        except OSError:  # no file is left, for one; whoever waits does so in the kernel
            logger.exception("a router takes no connections for %s s", _PAUSE_S)
            self._loop.remove_reader(self._bound)
            self._loop.call_later(_PAUSE_S, self._again)
        if self._leaving():
            self.close()

    def _again(self) -> None:
        if self.is_serving():
            self._loop.add_reader(self._bound, self._take)

    def _take_waiting(self, most: int) -> None:
        with suppress(BlockingIOError):
            for _ in range(most):
                connection, _ = self._bound.accept()
                opening = self._loop.create_task(
                    self._loop.connect_accepted_socket(self._protocol, connection)
                )
                self._opening.add(opening)
                opening.add_done_callback(self._opening.discard)
