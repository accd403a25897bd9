"""A new connection to a slice or a router: plain, or TLS with the one certificate that its record shows.

The kernel sends keepalive probes, and finds a vanished host in 5 s.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from serving import pinned_tls
from serving.state.records import Peer

_Protocol = TypeVar("_Protocol", bound=asyncio.BaseProtocol)

# The kernel takes a connection, but a handshake waits for the slice's event loop, as an answer does.
_HANDSHAKE_S = 10.0
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
)


class UpstreamError(Exception):
    """A slice broke a connection off, or sent what is no HTTP."""


class NotConnectedError(UpstreamError):
    """No connection was made: the slice has not seen the request."""


class NobodyListensError(NotConnectedError):
    """The slice's host is there, its process is not."""


class UntrustedError(NotConnectedError):
    """Who listens at the slice's address is not who wrote its record: it has another certificate, or speaks no TLS."""


async def connected(
    peer: Peer, protocol: Callable[[], _Protocol], within_s: float, handshake_s: float = _HANDSHAKE_S
) -> _Protocol:
    """A protocol on a new connection; raises NotConnectedError.

    A peer with a certificate, or an address of https, is never spoken to in plain text.
    """
    parts = urlsplit(peer.address)
    host, port = parts.hostname or "", parts.port or 80
    try:
        if peer.certificate or parts.scheme != "http":
            context = pinned_tls.trusting(peer.certificate)
            return await _by_tls(await _tcp(host, port, within_s), context, protocol, handshake_s)
        return await _plain(host, port, protocol, within_s)
    except ConnectionRefusedError as error:
        raise NobodyListensError(f"{peer.address} takes no connection: {error}") from error
    except ssl.SSLError as error:
        raise UntrustedError(
            f"{peer.address} does not show the certificate of its record: {error}"
        ) from error
    except (OSError, TimeoutError) as error:
        raise NotConnectedError(f"{peer.address} takes no connection: {error}") from error


def probed(connection: socket.socket) -> None:
    """Have the kernel look whether the other host is still there."""
    for level, option, value in _KEEPALIVE:
        connection.setsockopt(level, option, value)


async def _plain(host: str, port: int, protocol: Callable[[], _Protocol], within_s: float) -> _Protocol:
    async with asyncio.timeout(within_s):
        _, made = await asyncio.get_running_loop().create_connection(protocol, host, port)
    return made


async def _tcp(host: str, port: int, within_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        connection.setblocking(False)
        probed(connection)  # also while it shakes hands
        async with asyncio.timeout(within_s):
            await asyncio.get_running_loop().sock_connect(connection, (host, port))
    except BaseException:
        connection.close()
        raise
    return connection


async def _by_tls(
    connection: socket.socket, context: ssl.SSLContext, protocol: Callable[[], _Protocol], within_s: float
) -> _Protocol:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(within_s):
        _, made = await loop.create_connection(protocol, sock=connection, ssl=context, server_hostname="")
    return made
