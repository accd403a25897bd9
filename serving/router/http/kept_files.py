"""The way to the process that keeps files, batches and usage: a router settles whose request it is, and passes it on.

Pieces of a file go through one by one, in both directions.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
import jiter
from fastapi import Request
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from serving import secret
from serving.errors import StoreAwayError

logger = logging.getLogger("ray.serve")

# Of a client's headers, those that say how to read its body.
_PASSED = ("content-type", "content-length")
_RETURNED = ("content-type", "content-length")
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=300)


class KeptFiles:
    """`find` gives the process's address and the token that it wants to be shown; it may have moved after a failure."""

    def __init__(self, find: Callable[[], Awaitable[tuple[str, str]]]) -> None:
        self._find = find
        self._place: tuple[str, str] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._is_away = False

    async def ask(self, request: Request, path: str, key: str) -> Response:
        """A client's request, answered there for the key of this hash. Raises StoreAwayError."""
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        query = request.scope.get("query_string", b"").decode("latin-1")
        has_body = request.method == "POST"
        answer = await self._ask(
            request.method,
            f"{path}?{query}" if query else path,
            {**headers, secret.KEY_HEADER: key},
            _pieces(request) if has_body else None,
        )
        kept = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
        if path.endswith("/content") and answer.status == HTTPStatus.OK:
            done = BackgroundTask(answer.release)
            return StreamingResponse(
                answer.content.iter_any(), status_code=answer.status, headers=kept, background=done
            )
        try:
            return Response(await answer.read(), status_code=answer.status, headers=kept)
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(error) from None

    async def call(self, path: str, fields: Mapping[str, Any]) -> Any:
        """A question of the router's own. Raises StoreAwayError."""
        try:
            async with await self._ask("POST", path, {}, None, dict(fields)) as answer:
                if answer.status != HTTPStatus.OK:
                    raise StoreAwayError(f"The store answers {answer.status}: {(await answer.text())[:300]}")
                return jiter.from_json(await answer.read())  # some MB of lines, each one text
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(error) from None

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def _ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        data: AsyncIterator[bytes] | None,
        fields: dict[str, Any] | None = None,
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False)
        try:
            if self._place is None:
                self._place = await self._find()
            address, token = self._place
            answer = await self._session.request(
                method,
                address + path,
                headers={**headers, **secret.headers(token)},
                data=data,
                json=fields,
                allow_redirects=False,
            )
        except ClientDisconnect:
            raise
        except Exception as error:  # noqa: BLE001  whatever finding it raises
            raise self._away(error) from None
        if answer.status == HTTPStatus.UNAUTHORIZED:  # another process has taken the port
            answer.release()
            raise self._away(PermissionError("it does not know this router"))
        self._is_away = False
        return answer

    def _away(self, error: Exception) -> StoreAwayError:
        self._place = None
        if not self._is_away:  # once, and not with every question
            logger.warning("the store can't be reached: %s", error)
        self._is_away = True
        return StoreAwayError("The store can't be reached now; try again shortly.")


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece
