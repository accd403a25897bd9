"""A slice's answer to a client, bytes as they come; where the slice fails, another's.

Nothing sent yet: the request is asked anew of another slice, but never for an error of the client's own. Part of a
stream of tokens sent: it goes on elsewhere from there (serving.router.continuation). What can't go on ends with an
error event. The breaker says who is not to be asked, the table who is.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.asgi import disconnected
from serving.config import FailoverSpec
from serving.errors import NoSliceError, ServingError, SliceLostError, UnknownPathError
from serving.router.ask import Ask
from serving.router.breaker import Breaker
from serving.router.continuation import Transcript
from serving.router.streams import Stream, stalled
from serving.router.table import SliceTable
from serving.router.timing import Timing
from serving.router.upstream import NotConnected, Upstream, returned
from serving.slices.board import Entry

_CONNECT_TIMEOUT_S = 3
_RETRY_AFTER_S = 5
_NO_ROUTE = b'{"detail":"Not Found"}'  # what vLLM's app says where its routes end, not in OpenAI's shape
_EVENT_END = b"\n\n"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_LOOK_AGAIN_S = 0.1
_WATCH_S = 0.5

logger = logging.getLogger("ray.serve")


@dataclass
class Tries:
    """How often and where one request was tried since it last got anything."""

    left: int
    wait_s: float
    tried: set[str] = field(default_factory=set)
    accused: set[str] = field(
        default_factory=set
    )  # answered with an error; the slice's fault if another can do it
    deadline_s: float | None = None
    pause_s: float = 0.0

    def again(self, replica: str) -> bool:
        """Count a failure; false once it was the last."""
        self.tried.add(replica)
        self.left -= 1
        if self.deadline_s is None:
            self.deadline_s = time.monotonic() + self.wait_s
        return self.left >= 0


class Relay:
    """What all answers of one router share: connections, and who is not to be asked."""

    def __init__(
        self,
        table: SliceTable,
        failover: FailoverSpec | None = None,
        *,
        connect_timeout_s: float = _CONNECT_TIMEOUT_S,
    ) -> None:
        self.failover = failover or FailoverSpec()
        self.breaker = Breaker()
        self.timing = Timing()
        self._table = table
        self._upstream = Upstream(connect_timeout_s)
        self._streams: set[Stream] = set()
        self._watching = asyncio.create_task(self._watch())

    def tries(self) -> Tries:
        return Tries(self.failover.retries, self.failover.wait_s)

    async def open(self, ask: Ask, body: bytes | None = None, tries: Tries | None = None) -> Stream:
        """A slice's answer up to its headers, of the first slice that does not fail; raises ServingError.

        The last slice's own error is an answer too.
        """
        tries = tries or self.tries()
        while True:
            entry = await self._choose(ask, tries)
            self._table.begin(entry.replica)
            ask.record.sent(entry)
            asked_s = time.monotonic()
            trial = self.breaker.began(entry.replica, asked_s)
            try:
                async with asyncio.timeout(self.timing.first_s(entry.replica) if trial else None):
                    response = await self._upstream.post(entry, ask, ask.body if body is None else body)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.broke(entry)
                self._end(entry)
                if not tries.again(entry.replica):
                    raise self._given_up(entry, error) from error
            except BaseException:
                self._end(entry)
                raise
            else:
                stream = Stream(entry, response, asked_s, trial)
                if not _failed(response.status):
                    return stream
                tries.accused.add(entry.replica)
                if not tries.again(entry.replica):
                    return stream
                self.give_back(stream)

    def watch(self, stream: Stream) -> None:
        """Take care that it does not fall silent."""
        self._streams.add(stream)

    def give_back(self, stream: Stream) -> None:
        """End a request. A response not read to its end closes its connection: the engine aborts the request."""
        self._streams.discard(stream)
        self._end(stream.entry)
        response = stream.response
        response.close() if not response.content.at_eof() else response.release()

    def settle(self, replicas: Collection[str]) -> None:
        """Once a beat: these are the slices there are."""
        self.timing.settle(replicas)
        self.breaker.keep(set(replicas))

    def broke(self, entry: Entry) -> None:
        """It broke a connection off."""
        self.breaker.failed(entry.replica, time.monotonic(), broken=True)

    def answered(self, entry: Entry, tries: Tries) -> None:
        """It could do what others answered with an error."""
        self.breaker.answered(entry.replica)
        for replica in tries.accused - {entry.replica}:
            self.breaker.failed(replica, time.monotonic(), broken=False)
        tries.accused.clear()

    async def close(self) -> None:
        self._watching.cancel()
        await self._upstream.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            for stream in stalled(self._streams, self.timing, self._table.in_flight, time.monotonic()):
                if self._elsewhere(stream.entry):
                    logger.warning(
                        "slice %s of %s has stalled: a stream leaves it",
                        stream.entry.slice,
                        stream.entry.model,
                    )
                    stream.cut()

    def _elsewhere(self, entry: Entry) -> bool:
        left_out = self.breaker.left_out(time.monotonic()) | {entry.replica}
        return any(one.serves and one.replica not in left_out for one in self._table.entries(entry.model))

    def _end(self, entry: Entry) -> None:
        self._table.end(entry.replica)
        self.breaker.ended(entry.replica)

    async def _choose(self, ask: Ask, tries: Tries) -> Entry:
        """The slice to ask; waits for one where there is hope of one, or where a part of the answer is with the client."""
        if tries.pause_s:
            await asyncio.sleep(tries.pause_s * random.uniform(0.5, 1))
        tries.pause_s = min(_LONGEST_PAUSE_S, tries.pause_s * 2) if tries.tried else 0.0
        while True:
            left_out = self.breaker.left_out(time.monotonic())
            try:
                return self._table.choose(ask.model, left_out | tries.tried, ask)
            except NoSliceError:
                if tries.deadline_s is None:
                    self._table.choose(ask.model)  # none at all: that is for the client to know
                    tries.deadline_s = time.monotonic() + tries.wait_s
                if time.monotonic() >= tries.deadline_s:
                    raise
            # Whoever failed this request may have it again after a while, if nobody else is there.
            tries.tried.clear()
            tries.pause_s = max(_FIRST_PAUSE_S, tries.pause_s)
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _given_up(self, entry: Entry, error: Exception) -> ServingError:
        if isinstance(error, NotConnected):
            return NoSliceError(f"No slice of {entry.model!r} takes a connection; try again shortly.")
        return SliceLostError(f"The slice serving {entry.model!r} was lost before it answered.")


class RelayedResponse(Response):
    """An ASGI response that is a slice's, picked when it is sent.

    The client going away ends it within the event loop's next turn.
    """

    def __init__(self, relay: Relay, ask: Ask) -> None:
        super().__init__()
        self._relay = relay
        self._ask = ask
        self._transcript = Transcript.of(ask) if relay.failover.continue_streams else None
        self._tries = relay.tries()
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._respond(scope, receive, send))
        gone = asyncio.ensure_future(disconnected(receive))
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
            if self._transcript and self._transcript.tokens:
                self._ask.record.used(self._transcript.prompt_tokens, self._transcript.tokens)
            self._ask.record.end()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        over = False
        while not over:
            body = self._transcript.body if self._transcript else None
            try:
                stream = await self._relay.open(self._ask, body, self._tries)
            except ServingError as error:
                await self._end_with(error, scope, receive, send)
                return
            streamed = stream.response.content_type == "text/event-stream"
            self._ask.record.answered(stream.response.status, streamed=streamed)
            try:
                if streamed:
                    over = await self._stream(stream, scope, receive, send)
                else:
                    over = await self._whole(stream, scope, receive, send)
            finally:
                self._relay.give_back(stream)

    async def _stream(self, stream: Stream, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whole events only, so that what follows never lands inside one that was cut off. False: ask another slice."""
        transcript, rest, new = self._transcript, b"", True
        response, timing = stream.response, self._relay.timing
        if transcript:
            self._relay.watch(stream)
        try:
            async for chunk in response.content.iter_any():
                stream.heard(timing, time.monotonic())
                events, rest = _whole_events(rest + chunk)
                if transcript and events:
                    events = transcript.take(events)
                    stream.movable = transcript.movable
                    if transcript.failed:
                        await self._say(events, response, send)
                        break
                if events:
                    if new:
                        new = False
                        self._relay.answered(stream.entry, self._tries)
                        self._tries = self._relay.tries()
                    await self._say(events, response, send)
            else:
                if transcript is None or transcript.done:
                    await self._say(rest, response, send, end=True)
                    return True
        except aiohttp.ClientError:
            pass
        return await self._go_on(stream, scope, receive, send)

    async def _go_on(self, stream: Stream, scope: Scope, receive: Receive, send: Send) -> bool:
        """After a slice broke off: false where another is to be asked for the rest, true once the client knows the end."""
        entry, response = stream.entry, stream.response
        said = self._transcript.failed if self._transcript else b""
        self._tries.accused.add(entry.replica) if said else self._relay.broke(entry)
        if self._transcript and (ending := self._transcript.ending()):
            await self._say(ending, response, send, end=True)
            return True
        why = self._transcript.resume() if self._transcript else "it is no stream of tokens" * self._started
        if why:
            error = SliceLostError(
                f"The slice serving {entry.model!r} was lost before its answer was complete, and another can't go on: {why}."
            )
        elif self._tries.again(entry.replica):
            return False
        else:
            error = _lost(entry)
        if said and self._started:
            self._ask.record.failed(error)
            await self._say(said, response, send, end=True)
        else:
            await self._end_with(error, scope, receive, send)
        return True

    async def _whole(self, stream: Stream, scope: Scope, receive: Receive, send: Send) -> bool:
        """An answer that is no stream, run anew elsewhere where it breaks off: the client has nothing of it yet."""
        entry, response = stream.entry, stream.response
        try:
            body = await response.read()
        except aiohttp.ClientError:
            self._relay.broke(entry)
            if self._tries.again(entry.replica):
                return False
            await self._end_with(_lost(entry), scope, receive, send)
            return True
        if not _failed(response.status):
            self._relay.answered(entry, self._tries)
        if self._started:  # a slice that will not go on with what another began
            await self._end_with(_lost(entry), scope, receive, send)
            return True
        if response.status == HTTPStatus.NOT_FOUND and body == _NO_ROUTE:
            error = UnknownPathError(f"{entry.model!r} takes no {self._ask.path}.")
            await self._end_with(error, scope, receive, send)
            return True
        self._ask.record.passed_on(body)
        whole = Response(body, response.status)
        whole.raw_headers = [*returned(response), (b"content-length", str(len(body)).encode())]
        await whole(scope, receive, send)
        return True

    async def _say(
        self, events: bytes, response: aiohttp.ClientResponse, send: Send, *, end: bool = False
    ) -> None:
        if not events and not end:
            return
        if not self._started:
            self._started = True
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status,
                    "headers": returned(response),
                }
            )
        await send({"type": "http.response.body", "body": events, "more_body": not end})
        if events:
            self._ask.record.passed_on(events, events.count(_EVENT_END))

    async def _end_with(self, error: ServingError, scope: Scope, receive: Receive, send: Send) -> None:
        """An error in the place of an answer, or of the rest of one."""
        self._ask.record.failed(error)
        if self._started:
            await send({"type": "http.response.body", "body": _error_event(self._ask.path, error)})
        else:
            await error_response(error)(scope, receive, send)


def error_response(error: ServingError) -> JSONResponse:
    headers = {"retry-after": str(_RETRY_AFTER_S)} if isinstance(error, NoSliceError) else None
    return JSONResponse(error.openai_body(), status_code=error.status, headers=headers)


def _error_event(path: str, error: ServingError) -> bytes:
    """An error in a stream, as the clients of its route read it."""
    if path == "/v1/messages":
        body = {"type": "error", "error": {"type": "api_error", "message": error.message}}
        return b"event: error\ndata: " + json.dumps(body).encode() + _EVENT_END
    return b"data: " + json.dumps(error.openai_body()).encode() + _EVENT_END


def _lost(entry: Entry) -> SliceLostError:
    return SliceLostError(f"The slice serving {entry.model!r} was lost before its answer was complete.")


def _failed(status: int) -> bool:
    """Whether it is the engine's failure; one that does not do a thing at all (501) has not failed."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED


def _whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Split after the last event's end; vLLM ends events with an empty line and sends each in one piece."""
    if data.endswith(_EVENT_END):
        return data, b""
    events, end, rest = data.rpartition(_EVENT_END)
    return events + end, rest
