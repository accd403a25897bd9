"""Reads request bodies, with limits on each and on all together."""

import asyncio
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from serving.config import RouterSpec
from serving.errors import OverloadedError, ServingError, SlowBodyError, TooLargeError

# All bodies together that one router is reading. The queue and the seats of slices bound the bodies that were read.
_MOST_BYTES = 512 << 20
# The router reads a refused body up to this many times the allowed size, then cuts the connection.
_DROPPED = 4


class BodyReader:
    """Reads bodies, with a limit on the size and time of each, and on the bytes of all that are on their way.

    `sweep` keeps the deadlines, without a timer for each request.
    """

    def __init__(self, spec: RouterSpec, most_bytes: int = _MOST_BYTES) -> None:
        self._spec = spec
        self._most_bytes = max(most_bytes, spec.max_body_bytes)
        self.under_way_bytes = 0
        self._readers: dict[asyncio.Task[Any], float] = {}
        self._overdue: set[asyncio.Task[Any]] = set()

    async def read(self, request: Request, now_s: float) -> bytes:
        """Raises TooLargeError, SlowBodyError, OverloadedError, ClientDisconnect."""
        length = request.headers.get("content-length", "")
        if (
            length.isdecimal()
            and int(length[:20]) > self._spec.max_body_bytes
            and "expect" in request.headers
        ):
            raise self._too_large()  # the client waits to be asked for the body
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  a coroutine runs in a task
        self._readers[task] = now_s + self._spec.body_timeout_s
        try:
            return await self._pieces(request)
        except asyncio.CancelledError:
            if task not in self._overdue:
                raise
            task.uncancel()
            raise SlowBodyError(
                f"The request body did not come within {self._spec.body_timeout_s:g} s."
            ) from None
        finally:
            del self._readers[task]
            self._overdue.discard(task)

    def sweep(self, now_s: float) -> None:
        """End the reading of bodies whose time is up."""
        for task, deadline_s in self._readers.items():
            if now_s >= deadline_s and task not in self._overdue:
                self._overdue.add(task)
                task.cancel()

    async def _pieces(self, request: Request) -> bytes:
        """Reads and drops the rest of a refused body: a client that is still sending hears no answer."""
        most = self._spec.max_body_bytes
        pieces: list[bytes] = []
        size = kept = 0
        refusal: ServingError | None = None
        try:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                piece = message.get("body", b"")
                size += len(piece)
                if refusal is None:
                    pieces.append(piece)
                    self.under_way_bytes += len(piece)
                    kept = size
                    if size > most:
                        refusal = self._too_large()
                    elif self.under_way_bytes > self._most_bytes:
                        refusal = self._too_many()
                    if refusal:
                        pieces.clear()
                        self.under_way_bytes -= kept
                        kept = 0
                more = message.get("more_body")
                if refusal and (not more or size > _DROPPED * most):
                    raise refusal
                if not more:
                    return b"".join(pieces) if len(pieces) != 1 else pieces[0]
        finally:
            self.under_way_bytes -= kept

    def _too_many(self) -> OverloadedError:
        return OverloadedError(
            f"This router is reading {self.under_way_bytes} bytes of request bodies, more than it holds at a time; "
            "try again shortly."
        )

    def _too_large(self) -> TooLargeError:
        return TooLargeError(
            f"The request body is larger than {self._spec.max_body_bytes} bytes, the most this service takes "
            "(router.max_body_bytes)."
        )
