"""Bytes from a slice to a client as they come, and an error in their place where a slice dies.

aiohttp rather than httpx: on this path every streamed chunk passes, and the relay shares its cores with nothing else
only on large machines (benchmarks/, "relay").
"""

import asyncio
import json
from collections.abc import Iterable

import aiohttp
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.errors import NoSliceError, ServingError, SliceLostError
from serving.router.table import SliceTable
from serving.slices.board import Entry

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host "
    b"content-length expect".split()
)
_CONNECT_TIMEOUT_S = 3


class Relay:
    """The router's HTTP connections to slices."""

    def __init__(self, table: SliceTable) -> None:
        self._table = table
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def answer(self, request: Request, model: str, body: bytes) -> "RelayedResponse":
        """The response to a request for a model; it picks its slice when it is sent."""
        return RelayedResponse(self, request, model, body)

    async def open(self, request: Request, model: str, body: bytes) -> tuple[Entry, aiohttp.ClientResponse]:
        """A slice's answer up to its headers. A slice that takes no connection is skipped: it has seen nothing."""
        tried: list[str] = []
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = _forwarded(request.headers.raw)
        while True:
            entry = self._table.choose(model, tried)
            self._table.begin(entry.replica)
            try:
                response = await self._session.request(
                    request.method, entry.address + path, data=body, headers=headers
                )
            except aiohttp.ClientConnectorError:
                self._table.suspect(entry.replica)
                self._table.end(entry.replica)
                tried.append(entry.replica)
            except aiohttp.ClientError as error:
                self._table.suspect(entry.replica)
                self._table.end(entry.replica)
                raise SliceLostError(f"The slice serving {model!r} was lost before it answered.") from error
            except BaseException:
                self._table.end(entry.replica)
                raise
            else:
                return entry, response

    def close(self, entry: Entry, response: aiohttp.ClientResponse) -> None:
        """Give a response back. One that was not read to its end closes its connection: the engine aborts the request."""
        self._table.end(entry.replica)
        response.close() if not response.content.at_eof() else response.release()

    def lost(self, entry: Entry) -> SliceLostError:
        self._table.suspect(entry.replica)
        return SliceLostError(f"The slice serving {entry.model!r} was lost before its answer was complete.")


class RelayedResponse(Response):
    """An ASGI response that is a slice's; the client going away ends it within the event loop's next turn."""

    def __init__(self, relay: Relay, request: Request, model: str, body: bytes) -> None:
        super().__init__()
        self._relay = relay
        self._request = request
        self._model = model
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        work = asyncio.ensure_future(self._respond(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _respond(self, send: Send) -> None:
        try:
            entry, response = await self._relay.open(self._request, self._model, self._body)
        except ServingError as error:
            await _send_error(send, error)
            return
        try:
            if response.content_type == "text/event-stream":
                await self._stream(entry, response, send)
            else:
                await self._whole(entry, response, send)
        finally:
            self._relay.close(entry, response)

    async def _stream(self, entry: Entry, response: aiohttp.ClientResponse, send: Send) -> None:
        await send({"type": "http.response.start", "status": response.status, "headers": _headers(response)})
        try:
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except aiohttp.ClientError:
            error = json.dumps(self._relay.lost(entry).openai_body()).encode()
            await send({"type": "http.response.body", "body": b"data: " + error + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _whole(self, entry: Entry, response: aiohttp.ClientResponse, send: Send) -> None:
        try:
            body = await response.read()
        except aiohttp.ClientError:
            await _send_error(send, self._relay.lost(entry))
            return
        headers = [*_headers(response), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_error(send: Send, error: ServingError) -> None:
    body = json.dumps(error.openai_body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, NoSliceError):
        headers.append((b"retry-after", b"5"))
    await send({"type": "http.response.start", "status": int(error.status), "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _forwarded(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in raw
        if name.lower() not in _HOP_BY_HOP
    ]


def _headers(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in _HOP_BY_HOP]
