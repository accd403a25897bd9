"""The way to the process that keeps files, batches and usage: a router settles whose request it is, and passes it on.

Pieces of a file go through one by one, in both directions.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
import jiter
from fastapi import Request
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from serving import secret
from serving.asgi import unless_gone
from serving.errors import RateLimitError, StoreAwayError, TooLargeError
from serving.router.http.bodies import BodyReader

logger = logging.getLogger("ray.serve")

# Of a client's headers, those that say how to read its body, and what of a file it wants. Its length goes with a body alone: the
# store would take as much of the connection's next request, which is another key's, for the body of a question that has none.
_PASSED = ("content-type", "range", "if-range")
_LENGTH = "content-length"
_RETURNED = (
    "content-type",
    "content-length",
    "content-range",
    "accept-ranges",
    "retry-after",
    "x-should-retry",
)
_JSON = {"content-type": "application/json"}
_CONNECT_S = 5.0
_TRANSFER_S = 300.0  # of a client's question: a file is on its way to a bucket
_ANSWER_S = 30.0  # of a question of the router's own: a host that is gone closes no connection
_FILES = "/v1/files"
_MOST_TRANSFERS = 16  # of files of one key, in one router
_MOST_FIELDS_BYTES = 64 << 10  # of what is no file
_PIECE_BYTES = 1 << 16
_FIND_S = 5.0  # Serve waits for ever for a process that is not there
_UNREAD_S = 30.0  # after which a client that does not take the next piece of a file is cut off
_OF_QUERIES = "%&=+,:;/?@!$'()*~"  # what a query has unescaped


class Download(Response):
    """A file's content on its way to a client. `ending` is closed however that ends."""

    def __init__(self, answer: aiohttp.ClientResponse, unread_s: float) -> None:
        super().__init__(status_code=answer.status)
        self.raw_headers = [(name.encode(), value.encode()) for name, value in _kept(answer).items()]
        self.ending = AsyncExitStack()
        self._answer = answer
        self._unread_s = unread_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  as ASGI has it
        try:
            await unless_gone(self._pass_on(send), receive)
        except (aiohttp.ClientError, OSError) as error:
            # The server sees an answer without an end, and closes the connection.
            logger.warning("a file did not reach its client: %s", str(error) or "it reads nothing")
        finally:
            self._answer.close()
            await self.ending.aclose()

    async def _pass_on(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._answer.content.iter_chunked(_PIECE_BYTES):
            async with asyncio.timeout(self._unread_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class KeptFiles:
    """`find` gives the process's address and the token that it wants to be shown; it may have moved after a failure."""

    def __init__(
        self,
        find: Callable[[], Awaitable[tuple[str, str]]],
        *,
        find_s: float = _FIND_S,
        unread_s: float = _UNREAD_S,
        answer_s: float = _ANSWER_S,
    ) -> None:
        self._find = find
        self._find_s = find_s
        self._answer_s = answer_s
        self._unread_s = unread_s
        self._place: tuple[str, str] | None = None
        # Clients' transfers take no connection from the router's own questions.
        self._clients: aiohttp.ClientSession | None = None
        self._own: aiohttp.ClientSession | None = None
        self._transfers: Counter[str] = Counter()
        self._is_away = False

    async def ask(self, request: Request, path: str, key: str, owner: str, bodies: BodyReader) -> Response:
        """A client's request, answered there for `key`, at the pace of its `owner`; a Download is still to be sent.

        Raises StoreAwayError, RateLimitError, TooLargeError, SlowBodyError and ClientDisconnect.
        """
        query = quote(request.scope.get("query_string", b""), safe=_OF_QUERIES)
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        headers[secret.KEY_HEADER] = key
        # Escaped anew: a `%2F` or a `?` of a name would make another path of it there.
        where = f"{quote(path)}?{query}" if query else quote(path)
        send = partial(self._ask, self._session_of_clients(), request.method, where, headers)
        if request.method == "POST" and path.rstrip("/") == _FILES:
            if _LENGTH in request.headers:
                headers[_LENGTH] = request.headers[_LENGTH]
            with self._transfer(owner):
                return await bodies.pass_on(request, owner, partial(self._upload, send))
        if request.method == "POST":  # takes no connection before it is whole
            body = await bodies.pass_on(request, owner, _small)
            headers[_LENGTH] = str(len(body))
            return await self._whole(await send(body))
        if not path.endswith("/content"):
            return await self._whole(await send())
        async with AsyncExitStack() as ending:
            ending.enter_context(self._transfer(owner))
            answer = await send()
            if answer.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                return await self._whole(answer)
            download = Download(answer, self._unread_s)
            download.ending.push_async_callback(ending.pop_all().aclose)
        return download

    async def call(self, path: str, fields: Mapping[str, Any]) -> Any:
        """A question of the router's own. Raises StoreAwayError."""
        try:
            if self._own is None:
                self._own = aiohttp.ClientSession(timeout=_timeout(self._answer_s), auto_decompress=False)
            body = to_json(dict(fields))  # results of lines have megabytes
            async with await self._ask(self._own, "POST", path, _JSON, body) as answer:
                if answer.status != HTTPStatus.OK:
                    raise StoreAwayError(f"The store answers {answer.status}: {(await answer.text())[:300]}")
                return jiter.from_json(await answer.read())  # some MB of lines, each one text
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(error) from None

    async def close(self) -> None:
        for session in (self._clients, self._own):
            if session:
                await session.close()

    async def _upload(
        self, send: Callable[[Any], Awaitable[aiohttp.ClientResponse]], pieces: AsyncIterator[bytes]
    ) -> Response:
        return await self._whole(await send(_Pieces(pieces)))

    async def _whole(self, answer: aiohttp.ClientResponse) -> Response:
        try:
            return Response(await answer.read(), status_code=answer.status, headers=_kept(answer))
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(error) from None

    @contextmanager
    def _transfer(self, owner: str) -> Iterator[None]:
        """One of a key's transfers; raises RateLimitError where it has too many."""
        if self._transfers[owner] >= _MOST_TRANSFERS:
            raise RateLimitError(
                f"This key has {_MOST_TRANSFERS} files on their way through this router; wait for one of them."
            )
        self._transfers[owner] += 1
        try:
            yield
        finally:
            self._transfers[owner] -= 1
            if not self._transfers[owner]:
                del self._transfers[owner]

    def _session_of_clients(self) -> aiohttp.ClientSession:
        if self._clients is None:
            connector = aiohttp.TCPConnector(limit=0)  # each key has its own limit
            self._clients = aiohttp.ClientSession(
                connector=connector, timeout=_timeout(_TRANSFER_S), auto_decompress=False
            )
        return self._clients

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        headers: Mapping[str, str],
        data: "_Pieces | bytes | None" = None,
    ) -> aiohttp.ClientResponse:
        try:
            if self._place is None:
                async with asyncio.timeout(self._find_s):
                    self._place = await self._find()
            address, token = self._place
            answer = await session.request(
                method,
                URL(address + path, encoded=True),
                headers={**headers, **secret.headers(token)},
                data=data,
                allow_redirects=False,
            )
        except Exception as error:  # noqa: BLE001  whatever finding it raises
            if (task := asyncio.current_task()) and task.cancelling():
                raise asyncio.CancelledError from None  # Serve says it in words of its own
            if isinstance(data, _Pieces) and data.error:
                raise data.error from None
            raise self._away(error) from None
        if answer.status == HTTPStatus.UNAUTHORIZED:  # another process has taken the port
            answer.release()
            raise self._away(PermissionError("it does not know this router"))
        self._is_away = False
        return answer

    def _away(self, error: Exception) -> StoreAwayError:
        self._place = None
        if not self._is_away:  # once, and not with every question
            logger.warning("the store can't be reached: %s", str(error) or "nobody knows where it is")
        self._is_away = True
        return StoreAwayError("The store can't be reached now; try again shortly.")


def _timeout(answer_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(
        total=None, connect=2 * _CONNECT_S, sock_connect=_CONNECT_S, sock_read=answer_s
    )


class _Pieces:
    """The pieces of a body, and what ended them: aiohttp knows only a lost connection."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self.error: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._pieces:
                yield piece
        except Exception as error:
            self.error = error
            raise


async def _small(pieces: AsyncIterator[bytes]) -> bytes:
    body = b""
    async for piece in pieces:
        body += piece
        if len(body) > _MOST_FIELDS_BYTES:
            raise TooLargeError(
                f"The request body is larger than {_MOST_FIELDS_BYTES} bytes, the most of a batch's fields."
            )
    return body


def _kept(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
