"""One answer to a client, of as many slices as it takes.

A slice fails before the client has anything: another slice is asked anew, except after a client's own error. It fails within
a stream: another slice goes on from there (serving.router.forwarding.continuation), or the stream ends with an error event.
A stream that makes room for a request of higher priority ends at its slice too, and goes on once it has seats again.
"""

import asyncio
import sys
import time
from http import HTTPStatus

from serving.errors import (
    BadRequestError,
    PoisonousKindError,
    PoisonousRequestError,
    ServingError,
    SliceLostError,
    TooLargeError,
    UnknownPathError,
)
from serving.router.forwarding.connecting import UpstreamError
from serving.router.forwarding.continuation import Transcript, ids_of, with_ids, without_ids
from serving.router.forwarding.dispatch import Dispatcher, failed
from serving.router.forwarding.seat import Seat
from serving.router.forwarding.stalls import Stream
from serving.router.forwarding.steps import StepTranscript, transcript_of
from serving.router.forwarding.upstream import SliceResponse, returned
from serving.router.http import sse
from serving.router.http.downstream import Downstream, respond
from serving.router.http.envelope import error_object
from serving.router.http.errors import error_event, error_response
from serving.router.http.protocol import InferenceRequest
from serving.router.telemetry.record import RequestRecord
from serving.state.records import SliceRecord

_NO_ROUTE = b'{"detail":"Not Found"}'  # what vLLM's app says where its routes end, not in OpenAI's shape
_EVENTS = sse.MEDIA_TYPE.encode()
# Of an answer in one piece so much is held, until it is whole: a client has nothing of it, and another slice may be asked.
_MOST_HELD_BYTES = 4 << 20
_TOO_LONG = b'{"message":"The engine refuses the request, and says so in more than 4 MiB."}'
# One event is held until it is whole: logprobs of a long prompt have hundreds of megabytes.
_MOST_EVENT_BYTES = 16 << 20
_PAUSED = b": paused\n\n"  # a comment, which clients skip


class Forwarding:
    """One request on its way to a slice, chosen when `run` is called, and the answer on its way back."""

    def __init__(
        self, dispatcher: Dispatcher, request: InferenceRequest, record: RequestRecord | None = None
    ) -> None:
        """`record` hears what becomes of the request."""
        self._dispatcher = dispatcher
        self._record = record or RequestRecord(request.path)
        self._request = request
        self._transcript = transcript_of(request) if dispatcher.failover.continue_streams else None
        self._tries = dispatcher.tries()
        self._started = False
        self._client: Downstream
        self._looked_into = dispatcher.sentinel.samples(request)
        self._slices: set[str] = set()
        self._seat: Seat | None = None

    async def run(self, client: Downstream, seat: Seat | None = None) -> None:
        """Answer the client. Cancelled where the client has gone. Without a `seat` it never makes room for another."""
        self._client, self._seat = client, seat
        try:
            await self._respond()
        except asyncio.CancelledError:
            self._record.cancelled()
            raise
        finally:
            if self._transcript and self._transcript.tokens:
                self._record.used(self._transcript.prompt_tokens, self._transcript.tokens)

    async def _respond(self) -> None:
        try:
            self._dispatcher.look_at_kind(self._request)
        except ServingError as error:
            self._end_with(error)
            return
        over = False
        while not over:
            if self._seat and self._seat.wanted and not await self._make_room(self._seat):
                return
            body = self._transcript.body if self._transcript else None
            if self._looked_into and not self._request.streams:
                body = with_ids(self._request)
            try:
                stream = await self._dispatcher.open(self._request, self._record, body, self._tries)
            except ServingError as error:
                self._end_with(error)
                return
            self._slices.add(stream.entry.replica)
            streamed = stream.response.content_type == _EVENTS
            self._record.answered(stream.response.status, streamed=streamed)
            try:
                over = await (self._stream(stream) if streamed else self._whole(stream))
            except asyncio.CancelledError:
                self._dispatcher.hung_up(stream)
                raise
            finally:
                self._dispatcher.give_back(stream)

    async def _make_room(self, seat: Seat) -> bool:
        """Wait between two slices for others to be answered; false where no slice is left to go on."""
        self._looked_into = False  # the answer is in two parts, though it may be of one slice
        refusal = await seat.regain(self._tell_paused)
        if refusal:
            self._end_with(refusal.error)
            return False
        self._tries = self._dispatcher.tries()
        self._tries.waits()
        return True

    def _tell_paused(self) -> None:
        if self._started and not self._client.paused:
            self._client.write(_PAUSED)

    async def _stream(self, stream: Stream) -> bool:
        """False: ask another slice."""
        transcript = self._transcript
        if transcript and transcript.speaks:
            self._dispatcher.watch(stream)
        relay = _EventRelay(self, stream)
        self._client.source = relay
        try:
            ended = await stream.response.pipe(relay.take)
        except UpstreamError:
            ended = False
        except TooLargeError as error:
            self._end_with(error)
            return True
        finally:
            self._client.source = None
            if self._seat:
                self._seat.stops()
        if transcript.done if transcript else ended:
            self.say(relay.rest, stream.response, end=True)
            self._dispatcher.finished(self._request)
            if self._looked_into and transcript:
                self._look_into(stream.entry, transcript.token_ids)
            return True
        return await self._go_on(stream, failed=relay.failed)

    async def _go_on(self, stream: Stream, *, failed: bool) -> bool:
        """After a slice broke off, or its engine said that it `failed`.

        False where another slice is to be asked for the rest, true once the client has the end.
        """
        entry, response = stream.entry, stream.response
        failure = self._transcript.engine_error if self._transcript else b""
        if failed:
            self._tries.accused.add(entry.replica)
        elif not stream.moving:
            self._dispatcher.broke(entry)
        if self._transcript and (ending := self._transcript.ending()):
            self.say(ending, response, end=True)
            return True
        try:
            if not stream.moving:
                waits = not stream.heard_s or self._dispatcher.may_be_suspected(entry, self._request)
                await self._dispatcher.judge(entry, self._request, waits=waits)
        except (PoisonousRequestError, PoisonousKindError) as refused:
            self._end_with(refused)
            return True
        why = "it is no stream of tokens" if self._started else ""
        if self._transcript:
            why = self._transcript.resume()
        if why:
            error = SliceLostError(
                f"The slice serving {entry.model!r} was lost before its answer was complete, and another can't go on: {why}."
            )
        elif stream.moving or (self._seat and self._seat.wanted) or self._tries.again(entry.replica):
            return False
        else:
            error = _lost(entry)
        if failure and self._started:
            self._record.failed(error)
            self.say(failure, response, end=True)
        else:
            self._end_with(error)
        return True

    async def _whole(self, stream: Stream) -> bool:
        """Send an answer that is no stream. Where it breaks off the client has nothing yet: false, ask another slice."""
        entry, response = stream.entry, stream.response
        try:
            body = await self._held(response)
        except UpstreamError:
            self._dispatcher.broke(entry)
            error: ServingError = _lost(entry)
            try:
                await self._dispatcher.judge(entry, self._request)
                if self._tries.again(entry.replica):
                    return False
            except (PoisonousRequestError, PoisonousKindError) as refused:
                error = refused
            self._end_with(error)
            return True
        if not failed(response.status):
            self._dispatcher.answered(entry, self._request, self._tries)
        if self._started:  # the slice refuses to go on with what another slice began
            self._end_with(_lost(entry))
            return True
        if body is None:
            await self._pass_on(stream)
            return True
        if response.status == HTTPStatus.NOT_FOUND and body == _NO_ROUTE:
            self._end_with(UnknownPathError(f"{entry.model!r} takes no {self._request.path}."))
            return True
        if self._looked_into:
            self._look_into(entry, ids_of(body))
            if not self._request.fields.get("return_token_ids"):
                body = without_ids(body)
        self._record.passed_on(body)
        self._client.start(response.status, [*returned(response), (b"content-length", b"%d" % len(body))])
        self._client.end(body)
        return True

    async def _held(self, response: SliceResponse) -> bytes | None:
        """A whole body; None where it is too long for that. Raises UpstreamError."""
        if response.status < HTTPStatus.BAD_REQUEST:
            # One that is looked into has ids to be cut out.
            return await response.read_if_within(sys.maxsize if self._looked_into else _MOST_HELD_BYTES)
        body = await response.read_if_within(_MOST_HELD_BYTES)
        if body is None:  # vLLM repeats a wrong field for each type that it could have had
            response.close()
            return _TOO_LONG
        return body

    async def _pass_on(self, stream: Stream) -> None:
        """Send a long answer in one piece as it comes. Where it breaks off it looks cut to its client."""
        entry, response = stream.entry, stream.response
        length = [header for header in response.headers if header[0] == b"content-length"]
        self._client.start(response.status, [*returned(response), *length])
        relay = _PartRelay(self._client, self._record, response)
        self._client.source = relay
        try:
            await response.pipe(relay.take)
        except UpstreamError:
            self._dispatcher.broke(entry)
            self._record.failed(_lost(entry))
            await self._dispatcher.judge(entry, self._request, waits=False)
        else:
            self._client.end()
        finally:
            self._client.source = None

    def _look_into(self, entry: SliceRecord, tokens: tuple[int, ...]) -> None:
        """Have an answer that came of one slice alone looked into."""
        if len(self._slices) == 1:
            self._dispatcher.sentinel.look(self._request, entry, tokens)

    def say(self, events: bytes, response: SliceResponse, *, end: bool = False) -> None:
        """Send events to the client, and the answer's head before the first."""
        if events or end:
            self._start(response)
        if events:
            self._record.passed_on(events, sse.count(events))
        if end:
            self._client.end(events)
        elif events:
            self._client.write(events)

    def _start(self, response: SliceResponse) -> None:
        if not self._started:
            self._started = True
            self._client.start(response.status, returned(response))

    def _end_with(self, error: ServingError) -> None:
        """Send an error in the place of the answer, or of its rest."""
        self._record.failed(error)
        if self._started:
            self._client.end(error_event(self._request.path, error))
        else:
            respond(self._client, error_response(error))

    def note_error(self, events: bytes) -> None:
        """An engine's error is among events that go to the client: no other slice is asked about it."""
        failed = next(event for event in sse.split(events) if event.startswith(sse.ERROR))
        error = error_object(failed.removeprefix(sse.DATA), HTTPStatus.INTERNAL_SERVER_ERROR)
        self._record.failed_within(error["code"], clients=error["type"] == BadRequestError.kind)

    def first_events(self, stream: Stream) -> None:
        """A slice's first events are about to go to the client."""
        stream.movable = self._transcript is not None and stream.movable
        self._dispatcher.answered(stream.entry, self._request, self._tries)
        self._tries = self._dispatcher.tries()
        if self._seat and self._transcript:
            self._seat.runs(_Running(stream, self._transcript))


class _Running:
    """A stream that could make room for another."""

    __slots__ = ("_stream", "_transcript")

    def __init__(self, stream: Stream, transcript: Transcript | StepTranscript) -> None:
        self._stream = stream
        self._transcript = transcript

    @property
    def movable(self) -> bool:
        return self._transcript.movable and self._transcript.speaks

    @property
    def work(self) -> float:
        """The tokens that a slice would read again: prompt and answer."""
        return (self._transcript.prompt_tokens or 0) + self._transcript.tokens

    def preempt(self) -> None:
        self._stream.move()


class _EventRelay:
    """One slice's events on their way to the client, whole events only: later events must not land inside a cut one."""

    __slots__ = (
        *("_beginning", "_beginning_bytes", "_client", "_forwarding", "_new", "_stream", "_timing"),
        *("_transcript", "failed"),
    )

    def __init__(self, forwarding: Forwarding, stream: Stream) -> None:
        self._forwarding = forwarding
        self._stream = stream
        self._client = forwarding._client  # noqa: SLF001
        self._transcript = forwarding._transcript  # noqa: SLF001
        self._timing = forwarding._dispatcher.timing  # noqa: SLF001
        self._new = True
        self._beginning: list[bytes] = []  # of an event whose end is to come
        self._beginning_bytes = 0
        self.failed = False

    @property
    def rest(self) -> bytes:
        """What has come and is not yet the client's."""
        return b"".join(self._beginning)

    def take(self, data: bytes) -> bool:
        """Called with every piece as it comes; false where the slice's answer is of no more use.

        Raises TooLargeError.
        """
        now_s = time.monotonic()
        stream, transcript = self._stream, self._transcript
        events = self._whole_events(data, now_s)
        if events is None:
            return True
        if transcript and events:
            events = transcript.take(events)
            stream.movable = transcript.movable
            self.failed = transcript.failed
        elif sse.NAMED_ERROR in events:
            # vLLM's words there are pydantic's, on a chunk that was its own error.
            events, self.failed = events.partition(sse.NAMED_ERROR)[0], True
        if sse.has_error(events):
            self._forwarding.note_error(events)
        if events and self._new and not self.failed:
            self._new = False
            self._forwarding.first_events(stream)
        if transcript and transcript.done:
            self._beginning.insert(0, events)  # goes out together with the answer's end
            stream.response.complete = True
            return False
        if events:
            self._forwarding.say(events, stream.response)
        if self._client.paused:  # also since before this slice was asked: nobody says so again
            self.pause()
        else:
            stream.delivered(now_s)
        return not self.failed

    def _whole_events(self, data: bytes, now_s: float) -> bytes | None:
        """The events that end in a piece, with what was held of the first. None where it is all held."""
        if self._beginning:
            if b"\n" not in data:  # no event ends in it
                self._hold(data)
                if self._transcript or not self._new:
                    self._stream.heard(self._timing, now_s)
                return None
            data = self.rest + data
            self._let_go()
        if b"\r" in data:  # which no JSON has: lines may end with it too
            data = data.replace(b"\r\n", b"\n")
        if self._new and not isinstance(self._transcript, Transcript) and sse.opens(data):
            # It comes before the engine has seen the request. Until the client has it another slice may be asked.
            self._hold(data)
            return None
        events, rest = sse.whole(data)
        if rest:
            self._hold(rest)
        self._stream.heard(self._timing, now_s)
        return events

    def _hold(self, data: bytes) -> None:
        self._beginning.append(data)
        self._beginning_bytes += len(data)
        if self._beginning_bytes > _MOST_EVENT_BYTES:
            raise TooLargeError(
                f"An event of the answer has more than {_MOST_EVENT_BYTES >> 20} MiB; ask for fewer logprobs, or for the answer "
                "without a stream."
            )

    def _let_go(self) -> None:
        self._beginning.clear()
        self._beginning_bytes = 0

    def pause(self) -> None:
        self._stream.response.pause()

    def resume(self) -> None:
        self._stream.delivered(time.monotonic())
        self._stream.response.resume()


class _PartRelay:
    """The parts of a long answer in one piece on their way to the client."""

    __slots__ = ("_client", "_record", "_response")

    def __init__(self, client: Downstream, record: RequestRecord, response: SliceResponse) -> None:
        self._client = client
        self._record = record
        self._response = response

    def take(self, data: bytes) -> bool:
        self._record.passed_part_on(data)
        self._client.write(data)
        if self._client.paused:
            self.pause()
        return True

    def pause(self) -> None:
        self._response.pause()

    def resume(self) -> None:
        self._response.resume()


def _lost(entry: SliceRecord) -> SliceLostError:
    return SliceLostError(f"The slice serving {entry.model!r} was lost before its answer was complete.")
