"""Bytes from a slice to a client as they come, and an error in their place where a slice dies.

aiohttp rather than httpx, because every streamed chunk passes here; an assumption: benchmarks/relay.py measures what this
relay costs, not what httpx would.
"""

import asyncio
import json
import socket
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from serving.errors import NoSliceError, ServingError, SliceLostError, UnknownPathError
from serving.router.ask import Ask
from serving.router.table import SliceTable
from serving.slices.board import Entry

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    b"content-length expect".split()
)
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server"}  # the HTTP server in front sends its own
# What aiohttp would add where the client sent none; a client that takes no gzip must not get any.
_NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_CONNECT_TIMEOUT_S = 3
_RETRY_AFTER_S = 5
_EVENT_END = b"\n\n"
_NO_ROUTE = b'{"detail":"Not Found"}'  # what vLLM's app says where its routes end, not in OpenAI's shape
# A host that vanishes without a word is found by the kernel in 5 s; one that only computes answers its probes.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
)


class Relay:
    """The router's HTTP connections to slices."""

    def __init__(self, table: SliceTable, *, connect_timeout_s: float = _CONNECT_TIMEOUT_S) -> None:
        self._table = table
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, socket_factory=_socket),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_NOT_ADDED,
        )

    async def open(self, ask: Ask) -> tuple[Entry, aiohttp.ClientResponse]:
        """A slice's answer up to its headers. A slice that takes no connection is skipped: it has seen nothing."""
        tried: list[str] = []
        target = quote(ask.path) + (f"?{ask.query}" if ask.query else "")
        headers = _forwarded(ask.headers)
        while True:
            entry = self._table.choose(ask.model, tried)
            self._table.begin(entry.replica)
            ask.record.sent(entry)
            try:
                response = await self._session.request(
                    "POST",
                    URL(entry.address + target, encoded=True),  # as it came: no /v1/.. is resolved on the way
                    data=ask.body,
                    headers=headers,
                    allow_redirects=False,
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                self._table.suspect(entry.replica)
                self._table.end(entry.replica)
                tried.append(entry.replica)
            except aiohttp.ClientError as error:
                self._table.suspect(entry.replica)
                self._table.end(entry.replica)
                raise SliceLostError(
                    f"The slice serving {ask.model!r} was lost before it answered."
                ) from error
            except BaseException:
                self._table.end(entry.replica)
                raise
            else:
                return entry, response

    def give_back(self, entry: Entry, response: aiohttp.ClientResponse) -> None:
        """End a request. A response not read to its end closes its connection: the engine aborts the request."""
        self._table.end(entry.replica)
        response.close() if not response.content.at_eof() else response.release()

    def lost(self, entry: Entry) -> SliceLostError:
        self._table.suspect(entry.replica)
        return SliceLostError(f"The slice serving {entry.model!r} was lost before its answer was complete.")

    async def close(self) -> None:
        await self._session.close()


class RelayedResponse(Response):
    """An ASGI response that is a slice's, picked when it is sent.

    The client going away ends it within the event loop's next turn.
    """

    def __init__(self, relay: Relay, ask: Ask) -> None:
        super().__init__()
        self._relay = relay
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._respond(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                self._ask.record.cancelled()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._ask.record.end()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            entry, response = await self._relay.open(self._ask)
        except ServingError as error:
            self._ask.record.failed(error)
            await error_response(error)(scope, receive, send)
            return
        streamed = response.content_type == "text/event-stream"
        self._ask.record.answered(response.status, streamed=streamed)
        try:
            if streamed:
                await self._stream(entry, response, send)
            else:
                await (await self._whole(entry, response))(scope, receive, send)
        finally:
            self._relay.give_back(entry, response)

    async def _stream(self, entry: Entry, response: aiohttp.ClientResponse, send: Send) -> None:
        """Whole events only, so that an error event never lands inside one that was cut off."""
        await send({"type": "http.response.start", "status": response.status, "headers": _headers(response)})
        rest, record = b"", self._ask.record
        try:
            async for chunk in response.content.iter_any():
                events, rest = _whole_events(rest + chunk)
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    record.passed_on(events, events.count(_EVENT_END))
        except aiohttp.ClientError:
            error = self._relay.lost(entry)
            record.failed(error)
            rest = b"data: " + json.dumps(error.openai_body()).encode() + _EVENT_END
        await send({"type": "http.response.body", "body": rest})

    async def _whole(self, entry: Entry, response: aiohttp.ClientResponse) -> Response:
        try:
            body = await response.read()
        except aiohttp.ClientError:
            error = self._relay.lost(entry)
            self._ask.record.failed(error)
            return error_response(error)
        self._ask.record.passed_on(body)
        if response.status == HTTPStatus.NOT_FOUND and body == _NO_ROUTE:
            return error_response(UnknownPathError(f"{entry.model!r} takes no {self._ask.path}."))
        whole = Response(body, response.status)
        whole.raw_headers = [*_headers(response), (b"content-length", str(len(body)).encode())]
        return whole


def error_response(error: ServingError) -> JSONResponse:
    headers = {"retry-after": str(_RETRY_AFTER_S)} if isinstance(error, NoSliceError) else None
    return JSONResponse(error.openai_body(), status_code=error.status, headers=headers)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Split after the last event's end; vLLM ends events with an empty line and sends each in one piece."""
    if data.endswith(_EVENT_END):
        return data, b""
    events, end, rest = data.rpartition(_EVENT_END)
    return events + end, rest


def _socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    for level, option, value in _KEEPALIVE:
        made.setsockopt(level, option, value)
    return made


def _forwarded(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [
        (name.decode("latin-1"), value.decode("utf-8", "replace"))  # aiohttp encodes as UTF-8
        for name, value in raw
        if name.lower() not in _HOP_BY_HOP
    ]


def _headers(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower(), value) for name, value in response.raw_headers if name.lower() not in _NOT_RETURNED
    ]
