"""Reads request bodies, with limits on each, on all of one key and on all together."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from serving.config import RouterSpec
from serving.errors import OverloadedError, ServingError, SlowBodyError, TooLargeError

T = TypeVar("T")

# All bodies together that one router has, from their first byte to their request's end. Parsed they take two to three times
# as much.
_MOST_BYTES = 512 << 20
# The router reads a refused body up to this many times the allowed size, then cuts the connection.
_DROPPED = 4
# Of a body that nobody asked for: a client that is still sending hears no answer.
_MOST_DROPPED_BYTES = 1 << 18
# To take a megabyte off its connection keeps the event loop for a millisecond. What a key's connections send beyond this pace
# waits there, so that the loop has time for others; the beginning of each body and so many seconds' worth do not wait.
_BYTES_PER_S = 32 << 20
_AHEAD_S = 0.01
_UNPACED_BYTES = 1 << 16
_MOST_PACED = 1000  # keys whose pace is remembered; beyond those, only while they wait
# A file has as much more time as it takes at this pace.
_SLOWEST_BYTES_PER_S = 1 << 16


class Holder(Protocol):
    """Whose body it is: `body_bytes` are what is kept of it."""

    owner: str
    body_bytes: int


class BodyReader:
    """Reads bodies, with a limit on the size and time of each, and on the bytes of all that are here.

    A key may have as many bytes here as are free: alone it gets half of all, and leaves room for the next. `sweep` keeps the
    deadlines, without a timer for each request.
    """

    def __init__(self, spec: RouterSpec, most_bytes: int = _MOST_BYTES) -> None:
        self._spec = spec
        self._most_bytes = max(most_bytes, 2 * spec.max_body_bytes)
        self.held_bytes = 0
        self._of_owner: Counter[str] = Counter()
        self._due_s: dict[str, float] = {}  # by owner, when what was read of it is due at its pace
        self._readers: dict[asyncio.Task[Any], float] = {}
        self._overdue: set[asyncio.Task[Any]] = set()

    async def read(self, request: Request, holder: Holder, now_s: float) -> bytes:
        """Raises TooLargeError, SlowBodyError, OverloadedError, ClientDisconnect. `forget` ends the holding."""
        length = request.headers.get("content-length", "")
        if (
            length.isdecimal()
            and int(length[:20]) > self._spec.max_body_bytes
            and "expect" in request.headers
        ):
            raise self._too_large()  # the client waits to be asked for the body
        return await self._in_time(self._pieces(request, holder), now_s)

    async def pass_on(
        self, request: Request, owner: str, carry: Callable[[AsyncIterator[bytes]], Coroutine[Any, Any, T]]
    ) -> T:
        """What `carry` makes of a body's pieces as they come. Raises SlowBodyError, and ClientDisconnect from the pieces.

        Nothing is kept here; who is silent, or slower than any line of today, is cut off.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  a coroutine runs in a task
        return await self._in_time(carry(self._passing(request, owner, task)), time.monotonic())

    async def drop(self, request: Request, holder: Holder, now_s: float) -> bool:
        """Read and forget a body of which nothing is wanted, up to a size; whether it is over. Raises ClientDisconnect."""
        try:
            return await self._in_time(self._dropped(request, holder), now_s)
        except SlowBodyError:
            return False

    async def add(self, holder: Holder, size_bytes: int) -> None:
        """Hold so many bytes more for a request, which do not come from its client; raises OverloadedError."""
        if size_bytes > _UNPACED_BYTES:
            await self._in_pace(holder.owner, size_bytes)
        self._hold(holder, size_bytes)
        if self._is_too_much(holder):
            raise self._too_many(holder)

    def forget(self, holder: Holder) -> None:
        """A body is no longer here; a second call changes nothing."""
        self.held_bytes -= holder.body_bytes
        self._of_owner[holder.owner] -= holder.body_bytes
        if not self._of_owner[holder.owner]:
            del self._of_owner[holder.owner]
        holder.body_bytes = 0

    def sweep(self, now_s: float) -> None:
        """End the reading of bodies whose time is up."""
        for task, deadline_s in self._readers.items():
            if now_s >= deadline_s and task not in self._overdue:
                self._overdue.add(task)
                task.cancel()

    async def _in_time(self, reading: Coroutine[Any, Any, T], now_s: float) -> T:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  a coroutine runs in a task
        self._readers[task] = now_s + self._spec.body_timeout_s
        try:
            return await reading
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
            # A cancelled task keeps its error, and that this frame: the circle would keep the body until a garbage collection.
            del task

    async def _pieces(self, request: Request, holder: Holder) -> bytes:
        """Reads and drops the rest of a refused body: a client that is still sending hears no answer."""
        most = self._spec.max_body_bytes
        pieces: list[bytes] = []
        size = 0
        refusal: ServingError | None = None
        try:
            while True:
                piece, more = await _piece(request)
                size += len(piece)
                if size > _UNPACED_BYTES:
                    await self._in_pace(holder.owner, len(piece))
                if refusal is None:
                    pieces.append(piece)
                    self._hold(holder, len(piece))
                    if size > most:
                        refusal = self._too_large()
                    elif self._is_too_much(holder):
                        refusal = self._too_many(holder)
                    if refusal:
                        pieces.clear()
                        self.forget(holder)
                if refusal and (not more or size > _DROPPED * most):
                    raise refusal  # noqa: TRY301  the body is forgotten below
                if not more:
                    return b"".join(pieces) if len(pieces) != 1 else pieces[0]
        except BaseException:
            self.forget(holder)
            raise

    async def _passing(self, request: Request, owner: str, task: asyncio.Task[Any]) -> AsyncIterator[bytes]:
        size, more = 0, True
        while more:
            piece, more = await _piece(request)
            size += len(piece)
            if size > _UNPACED_BYTES:
                await self._in_pace(owner, len(piece))
            if task in self._readers:
                # Once all is here, it is the store that takes its time.
                self._readers[task] += len(piece) / _SLOWEST_BYTES_PER_S if more else math.inf
            if piece:
                yield piece

    async def _dropped(self, request: Request, holder: Holder) -> bool:
        size, more = 0, True
        while more and size <= _MOST_DROPPED_BYTES:
            piece, more = await _piece(request)
            size += len(piece)
            if size > _UNPACED_BYTES:
                await self._in_pace(holder.owner, len(piece))
        return not more

    async def _in_pace(self, owner: str, size_bytes: int) -> None:
        """Wait until so many bytes more are due to be read of a key's bodies."""
        now_s = asyncio.get_running_loop().time()
        if len(self._due_s) > _MOST_PACED:
            self._due_s = {name: due_s for name, due_s in self._due_s.items() if due_s > now_s}
        due_s = self._due_s[owner] = max(now_s, self._due_s.get(owner, 0.0)) + size_bytes / _BYTES_PER_S
        if due_s - now_s > _AHEAD_S:
            await asyncio.sleep(due_s - now_s - _AHEAD_S)

    def _hold(self, holder: Holder, size_bytes: int) -> None:
        holder.body_bytes += size_bytes
        self.held_bytes += size_bytes
        self._of_owner[holder.owner] += size_bytes

    def _is_too_much(self, holder: Holder) -> bool:
        return self._of_owner[holder.owner] > self._most_bytes - self.held_bytes

    def _too_many(self, holder: Holder) -> OverloadedError:
        return OverloadedError(
            f"This router has {self.held_bytes} bytes of request bodies, {self._of_owner[holder.owner]} of them this key's, "
            f"and room for {self._most_bytes}; a key may have as many as are free. Try again shortly."
        )

    def _too_large(self) -> TooLargeError:
        return TooLargeError(
            f"The request body is larger than {self._spec.max_body_bytes} bytes, the most this service takes "
            "(router.max_body_bytes)."
        )


async def _piece(request: Request) -> tuple[bytes, bool]:
    """The next piece of a body, and whether there is more."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), bool(message.get("more_body"))
