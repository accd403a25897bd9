"""The one process of a service that opens its database, and the port on which routers ask it.

It is a Serve deployment of one replica on the head: an SQLite file is on the head's disk, wherever routers run. Whoever asks has
to show a token, which a router gets by Serve alone. Parts that keep something in the database bring their routes.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Protocol

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from serving import secret
from serving.config import StoreSpec
from serving.database.database import Database
from serving.errors import ServingError
from serving.strangers import GuardedHttp, Strangers

logger = logging.getLogger("ray.serve")

# Longer than a router keeps an idle connection, so that the router closes it.
_KEEP_ALIVE_S = 120
_RETRY_AFTER_S = 5


class Part(Protocol):
    """What of a service lives in the database."""

    def routes(self) -> APIRouter: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


MakesPart = Callable[[Database, StoreSpec], Part]


class Owner:
    """The process's parts before an open database."""

    def __init__(self, spec: StoreSpec, makers: Sequence[MakesPart], ip: str = "127.0.0.1") -> None:
        self._spec = spec
        self._makers = makers
        self._ip = ip
        self._parts: list[Part] = []
        self._token = secrets.token_urlsafe(32)
        self._serving: asyncio.Task[None] | None = None
        self._database: Database | None = None

    async def start(self) -> None:
        """Open the database and the port; raises ConfigError."""
        database = self._database = await Database.open(self._spec.database_at)
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        app.add_exception_handler(ServingError, _on_error)
        for make in self._makers:
            part = make(database, self._spec)
            app.include_router(part.routes())
            await part.start()
            self._parts.append(part)
        self._listener = socket.create_server((self._ip, 0))
        config = uvicorn.Config(
            secret.Guard(app, self._token),
            log_config=None,
            access_log=False,
            log_level="warning",
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_S,
            http=partial(GuardedHttp, Strangers(), self._token),  # type: ignore[arg-type]  # a class or what makes one
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    def place(self) -> tuple[str, str]:
        """Where routers ask, and the token that they show."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{host}:{port}", self._token

    @property
    def is_well(self) -> bool:
        return self._serving is not None and not self._serving.done()

    async def close(self) -> None:
        if self._serving:
            self._server.should_exit = self._server.force_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        for part in reversed(self._parts):
            await part.close()
        if self._database:
            await self._database.close()


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServingError)  # noqa: S101  the handler is registered for this class
    headers = None
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers = {"retry-after": str(_RETRY_AFTER_S)}
    elif error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        headers = {"x-should-retry": "false"}  # which OpenAI's clients heed
    return JSONResponse(error.openai_body(), status_code=error.status, headers=headers)
