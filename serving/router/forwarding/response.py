"""One answer to a client, of as many slices as it takes.

Nothing sent yet: the request is asked anew of another slice, but never for an error of the client's own. Part of a
stream of tokens sent: it goes on elsewhere from there (serving.router.forwarding.continuation). What can't go on ends with an
error event.
"""

import asyncio
import time
from http import HTTPStatus

import aiohttp
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.asgi import unless_gone
from serving.errors import PoisonousRequestError, ServingError, SliceLostError, UnknownPathError
from serving.router.forwarding.continuation import Transcript
from serving.router.forwarding.dispatch import Dispatcher, failed
from serving.router.forwarding.stalls import Stream
from serving.router.forwarding.upstream import returned
from serving.router.http import sse
from serving.router.http.errors import error_event, error_response
from serving.router.http.protocol import InferenceRequest
from serving.router.telemetry.record import RequestRecord
from serving.state.records import SliceRecord

_NO_ROUTE = b'{"detail":"Not Found"}'  # what vLLM's app says where its routes end, not in OpenAI's shape


class ForwardedResponse(Response):
    """An ASGI response that is a slice's, picked when it is sent.

    The client going away ends it within the event loop's next turn.
    """

    def __init__(
        self, dispatcher: Dispatcher, request: InferenceRequest, record: RequestRecord | None = None
    ) -> None:
        """`record` is told what becomes of the request."""
        super().__init__()
        self._dispatcher = dispatcher
        self._record = record or RequestRecord(request.path)
        self._request = request
        self._transcript = Transcript.of(request) if dispatcher.failover.continue_streams else None
        self._tries = dispatcher.tries()
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not await unless_gone(self._respond(scope, receive, send), receive):
                self._record.cancelled()
        except asyncio.CancelledError:  # Serve looks out for the client too
            self._record.cancelled()
            raise
        finally:
            if self._transcript and self._transcript.tokens:
                self._record.used(self._transcript.prompt_tokens, self._transcript.tokens)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        over = False
        while not over:
            body = self._transcript.body if self._transcript else None
            try:
                stream = await self._dispatcher.open(self._request, self._record, body, self._tries)
            except ServingError as error:
                await self._end_with(error, scope, receive, send)
                return
            streamed = stream.response.content_type == sse.MEDIA_TYPE
            self._record.answered(stream.response.status, streamed=streamed)
            try:
                if streamed:
                    over = await self._stream(stream, scope, receive, send)
                else:
                    over = await self._whole(stream, scope, receive, send)
            finally:
                self._dispatcher.give_back(stream)

    async def _stream(self, stream: Stream, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whole events only, so that what follows never lands inside one that was cut off. False: ask another slice."""
        transcript, rest, new = self._transcript, b"", True
        response, timing = stream.response, self._dispatcher.timing
        if transcript and transcript.speaks:
            self._dispatcher.watch(stream)
        try:
            async for chunk in response.content.iter_any():
                stream.heard(timing, time.monotonic())
                events, rest = sse.whole(rest + chunk)
                if transcript and events:
                    events = transcript.take(events)
                    stream.movable = transcript.movable
                    if transcript.failed:
                        await self._say(events, response, send)
                        break
                if events:
                    if new:
                        new = False
                        stream.movable = transcript is not None and stream.movable
                        self._dispatcher.answered(stream.entry, self._request, self._tries)
                        self._tries = self._dispatcher.tries()
                    await self._say(events, response, send)
                stream.told(time.monotonic())
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
        if said:
            self._tries.accused.add(entry.replica)
        elif not stream.moving:
            self._dispatcher.broke(entry)
        if self._transcript and (ending := self._transcript.ending()):
            await self._say(ending, response, send, end=True)
            return True
        try:
            if not stream.moving:
                await self._dispatcher.judge(entry, self._request)
        except PoisonousRequestError as refused:
            await self._end_with(refused, scope, receive, send)
            return True
        why = "it is no stream of tokens" if self._started else ""
        if self._transcript:
            why = self._transcript.resume()
        if why:
            error = SliceLostError(
                f"The slice serving {entry.model!r} was lost before its answer was complete, and another can't go on: {why}."
            )
        elif self._tries.again(entry.replica):
            return False
        else:
            error = _lost(entry)
        if said and self._started:
            self._record.failed(error)
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
            self._dispatcher.broke(entry)
            error: ServingError = _lost(entry)
            try:
                await self._dispatcher.judge(entry, self._request)
                if self._tries.again(entry.replica):
                    return False
            except PoisonousRequestError as refused:
                error = refused
            await self._end_with(error, scope, receive, send)
            return True
        if not failed(response.status):
            self._dispatcher.answered(entry, self._request, self._tries)
        if self._started:  # a slice that will not go on with what another began
            await self._end_with(_lost(entry), scope, receive, send)
            return True
        if response.status == HTTPStatus.NOT_FOUND and body == _NO_ROUTE:
            error = UnknownPathError(f"{entry.model!r} takes no {self._request.path}.")
            await self._end_with(error, scope, receive, send)
            return True
        self._record.passed_on(body)
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
            self._record.passed_on(events, sse.count(events))

    async def _end_with(self, error: ServingError, scope: Scope, receive: Receive, send: Send) -> None:
        """An error in the place of an answer, or of the rest of one."""
        self._record.failed(error)
        if self._started:
            await send({"type": "http.response.body", "body": error_event(self._request.path, error)})
        else:
            await error_response(error)(scope, receive, send)


def _lost(entry: SliceRecord) -> SliceLostError:
    return SliceLostError(f"The slice serving {entry.model!r} was lost before its answer was complete.")
