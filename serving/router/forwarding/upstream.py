"""The router's HTTP connections to slices: one pool, headers as they came, and keepalive probes by the kernel.

aiohttp and not httpx, because every streamed chunk passes here: httpx takes 20 times the CPU per answer and 6 times per
streamed token (benchmarks/http_clients.py).
"""

import asyncio
import logging
import socket
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from serving import secret
from serving.router.http.protocol import InferenceRequest
from serving.state.records import SliceRecord

logger = logging.getLogger("ray.serve")

# No connection was made: the slice has not seen the request.
NotConnected = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    b"content-length expect".split()
)
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server"}  # the HTTP server in front sends its own
# aiohttp would add these where the client sent none; a client that takes no gzip must not get any.
_NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
# The kernel finds a vanished host in 5 s; a busy host still answers the probes.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
)


class WrongSecretError(aiohttp.ClientError):
    """The slice has another secret of the cluster than this router."""


class Upstream:
    """Connections to slices, kept for the next request."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._secret = secret.headers(secret.of_this_process())
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, socket_factory=_socket),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_NOT_ADDED,
        )

    async def post(
        self, entry: SliceRecord, request: InferenceRequest, body: bytes, carried: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """A slice's answer up to its headers; `carried` are headers of the router's own.

        Raises what aiohttp raises, and WrongSecretError.
        """
        target = quote(request.path) + (f"?{request.query}" if request.query else "")
        response = await self._session.request(
            "POST",
            URL(entry.address + target, encoded=True),  # as it came: no /v1/.. is resolved on the way
            data=body,
            headers=_forwarded(request.headers, {**carried, **self._secret}),
            allow_redirects=False,
        )
        if response.status == HTTPStatus.UNAUTHORIZED:  # a client would take it for a word on its own key
            response.close()
            logger.error(
                "slice %s of %s refuses this router: %s is not the same in both",
                entry.slice,
                entry.model,
                secret.VARIABLE,
            )
            raise WrongSecretError
        return response

    async def is_well(self, entry: SliceRecord, within_s: float) -> bool:
        """Whether a slice calls itself healthy."""
        try:
            async with asyncio.timeout(within_s), self._session.get(f"{entry.address}/health") as response:
                return response.ok
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def reaches(self, entry: SliceRecord, within_s: float) -> bool:
        """Whether anything comes back from a slice."""
        try:
            async with asyncio.timeout(within_s), self._session.get(f"{entry.address}/health"):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        await self._session.close()


def returned(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """A slice's headers as they go to the client."""
    return [
        (name.lower(), value) for name, value in response.raw_headers if name.lower() not in _NOT_RETURNED
    ]


def _socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    connection = socket.socket(family, kind, protocol)
    for level, option, value in _KEEPALIVE:
        connection.setsockopt(level, option, value)
    return connection


def _forwarded(raw: Iterable[tuple[bytes, bytes]], ours: Mapping[str, str]) -> list[tuple[str, str]]:
    """The router's headers and the client's, except where the router sets its own."""
    dropped = _HOP_BY_HOP | {name.encode() for name in ours} if ours else _HOP_BY_HOP
    return [*ours.items()] + [
        (name.decode("latin-1"), value.decode("utf-8", "replace"))  # aiohttp encodes as UTF-8
        for name, value in raw
        if name.lower() not in dropped
    ]
