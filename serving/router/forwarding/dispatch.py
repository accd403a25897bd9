"""From a request to the slice that takes it: asked, and asked again elsewhere where a slice fails.

The table says who is asked first, the breaker who is not to be asked, and the watch which streams have fallen silent.
"""

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp

from serving.config import FailoverSpec
from serving.errors import NoSliceError, PoisonousRequestError, ServingError, SliceLostError
from serving.router.forwarding.circuit_breaker import CircuitBreaker
from serving.router.forwarding.slice_timing import SliceTiming
from serving.router.forwarding.stalls import Stream, stalled
from serving.router.forwarding.suspects import REFUSED_S, Suspects, fingerprint
from serving.router.forwarding.upstream import NotConnected, Upstream
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.record import RequestRecord
from serving.state.records import SliceRecord, SliceState
from serving.timings import TIMINGS, Timings

logger = logging.getLogger("ray.serve")


@dataclass
class Tries:
    """How often and where one request was tried since it last got anything."""

    left: int
    wait_s: float
    tried: set[str] = field(default_factory=set)
    # Answered with an error; the slice's fault if another can do it.
    accused: set[str] = field(default_factory=set)
    deadline_s: float | None = None
    pause_s: float = 0.0

    def again(self, replica: str) -> bool:
        """Count a failure; false once it was the last."""
        self.tried.add(replica)
        self.left -= 1
        if self.deadline_s is None:
            self.deadline_s = time.monotonic() + self.wait_s
        return self.left >= 0


class Dispatcher:
    """What all answers of one router share: connections, and who is not to be asked."""

    def __init__(
        self,
        table: SliceTable,
        failover: FailoverSpec | None = None,
        *,
        timings: Timings = TIMINGS,
    ) -> None:
        self.failover = failover or FailoverSpec()
        self.breaker = CircuitBreaker(timings)
        self.timing = SliceTiming(timings)
        self._timings = timings
        self._table = table
        self._upstream = Upstream(timings.connect_s)
        self.suspects = Suspects()
        self._asking: dict[asyncio.Timeout, tuple[SliceRecord, InferenceRequest]] = {}
        self._verdicts: dict[str, asyncio.Task[None]] = {}
        self._streams: set[Stream] = set()
        self._lost: set[str] = set()
        self._leaving: set[str] = set()
        self._watching = asyncio.create_task(self._watch())

    def tries(self) -> Tries:
        return Tries(self.failover.retries, self.failover.wait_s)

    async def open(
        self,
        request: InferenceRequest,
        record: RequestRecord,
        body: bytes | None = None,
        tries: Tries | None = None,
    ) -> Stream:
        """A slice's answer up to its headers, of the first slice that does not fail; raises ServingError.

        The last slice's own error is an answer too.
        """
        tries = tries or self.tries()
        self.refuse_guilty(request)
        while True:
            entry = await self._choose(request, tries)
            self._begin(entry, request)
            record.sent(entry)
            asked_s = time.monotonic()
            trial = self.breaker.began(entry.replica, asked_s)
            # The headers of a stream come with its first token, those of a whole answer with its last.
            within_s = self.timing.first_s(entry.replica) if trial and request.streams else None
            try:
                response = await self._post(
                    entry, request, record, request.body if body is None else body, within_s
                )
            except (aiohttp.ClientError, TimeoutError) as error:
                self.broke(entry)
                await self._judged(entry, request, error)
                if not tries.again(entry.replica):
                    raise self._given_up(entry, error) from error
            except BaseException:
                self._end(entry, request)
                raise
            else:
                stream = Stream(entry, request, response, asked_s, trial)
                self._streams.add(stream)
                if not failed(response.status):
                    return stream
                tries.accused.add(entry.replica)
                try:
                    await self.judge(entry, request)
                except BaseException:
                    self.give_back(stream)
                    raise
                if not tries.again(entry.replica):
                    return stream
                self.give_back(stream)

    def refuse_guilty(self, request: InferenceRequest) -> None:
        """Raises PoisonousRequestError where this request has ended slices."""
        if self.suspects and self.suspects.is_guilty(name := fingerprint(request)):
            raise PoisonousRequestError(
                f"This request (fingerprint {name}) has ended two slices of {request.model!r}; it is refused for "
                f"{REFUSED_S / 60:.0f} minutes. Send another one."
            )

    async def judge(self, entry: SliceRecord, request: InferenceRequest) -> None:
        """After a slice broke off or failed on a request: if the slice is dead, whoever was running there is suspected.

        Raises PoisonousRequestError where this was its second. All requests of a slice wait for one verdict.
        """
        verdict = self._verdicts.get(entry.replica)
        if verdict is None:
            there = [request, *self._running(entry.replica)]
            verdict = self._verdicts[entry.replica] = asyncio.create_task(self._find_out(entry, there))
        await asyncio.shield(verdict)
        self.refuse_guilty(request)

    async def _find_out(self, entry: SliceRecord, there: list[InferenceRequest]) -> None:
        if await self._is_dead(entry):
            running = {fingerprint(one): one.model for one in there}
            for name in self.suspects.died(entry.replica, running, time.time()):
                logger.error("request %s of %s has ended two slices; it is refused", name, running[name])
        else:
            del self._verdicts[entry.replica]  # its next failure is judged anew

    async def _is_dead(self, entry: SliceRecord) -> bool:
        """Whether the slice says so, or fails to say that it is well. Its record comes with the next beat at the latest."""
        known = self._table.entry(entry.replica)
        if known is None or known.state is SliceState.LOST:
            return True
        return not await self._upstream.is_well(entry, self._timings.probe_reach_s)

    def _running(self, replica: str) -> list[InferenceRequest]:
        asking = [request for entry, request in self._asking.values() if entry.replica == replica]
        return asking + [one.request for one in self._streams if one.entry.replica == replica]

    def watch(self, stream: Stream) -> None:
        """Take care that it does not fall silent."""
        stream.watched = True

    def give_back(self, stream: Stream) -> None:
        """End a request. A response not read to its end closes its connection: the engine aborts the request."""
        self._streams.discard(stream)
        self._end(stream.entry, stream.request)
        response = stream.response
        response.close() if not response.content.at_eof() else response.release()

    def settle(
        self, entries: Collection[SliceRecord], free_seats: Callable[[str], int] = lambda _: 0
    ) -> None:
        """Once a beat: these are the slices there are, and so many sequences more may run on those that serve, by model.

        What a lost slice still has goes on elsewhere, and what can't ends once the slice is forgotten: the kernel of a host
        whose processes are stopped keeps every connection up. What a leaving slice has goes on elsewhere at once, as far as
        there are seats; the rest has the slice's `drain_s` to end.
        """
        replicas = {entry.replica for entry in entries}
        self.timing.settle(replicas)
        self.breaker.keep(replicas)
        for gone in self._verdicts.keys() - replicas:
            del self._verdicts[gone]
        forgotten = self._lost - replicas
        self._lost = {entry.replica for entry in entries if entry.state is SliceState.LOST}
        for limit, (entry, _) in self._asking.items():
            if (entry.replica in forgotten or self._is_elsewhere(entry)) and not limit.expired():
                limit.reschedule(0.0)
        silent_since_s = time.monotonic() - self._timings.stale_s
        for stream in self._streams:
            over = stream.entry.replica in forgotten or (stream.movable and self._is_elsewhere(stream.entry))
            if over and stream.heard_s < silent_since_s:  # one that speaks is not on a stopped host
                stream.cut()
        self._leaving = {entry.replica for entry in entries if entry.state is SliceState.DRAINING}
        if self._leaving and self.failover.continue_streams:
            self._move(free_seats)

    def _move(self, free_seats: Callable[[str], int]) -> None:
        """Take streams off slices that leave. They hold seats of their own, on which others may not count."""
        of_model: defaultdict[str, list[Stream]] = defaultdict(list)
        for stream in self._streams:
            if stream.entry.replica in self._leaving and not stream.moving:
                of_model[stream.entry.model].append(stream)
        for model, streams in of_model.items():
            seats = max(0, free_seats(model) + len(streams))
            able = [stream for stream in streams if stream.movable and stream.heard_s]
            for stream in able[:seats]:
                if self._elsewhere(stream.entry):
                    stream.move()

    async def reaches(self, entry: SliceRecord) -> bool:
        """Whether a slice answers at all, whatever the board says of it."""
        return await self._upstream.reaches(entry, self._timings.probe_reach_s)

    def broke(self, entry: SliceRecord) -> None:
        """It broke a connection off."""
        self.breaker.failed(entry.replica, time.monotonic(), broken=True)

    def answered(self, entry: SliceRecord, request: InferenceRequest, tries: Tries) -> None:
        """The slice could do what others answered with an error."""
        if self.suspects:
            self.suspects.cleared(fingerprint(request))
        self.breaker.answered(entry.replica)
        for replica in tries.accused - {entry.replica}:
            self.breaker.failed(replica, time.monotonic(), broken=False)
        tries.accused.clear()

    async def close(self) -> None:
        self._watching.cancel()
        await self._upstream.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._timings.stall_look_s)
            for stream in stalled(self._streams, self.timing, self._table.in_flight, time.monotonic()):
                if self._elsewhere(stream.entry):
                    logger.warning(
                        "slice %s of %s has stalled: a stream leaves it",
                        stream.entry.slice,
                        stream.entry.model,
                    )
                    stream.cut()

    async def _post(
        self,
        entry: SliceRecord,
        request: InferenceRequest,
        record: RequestRecord,
        body: bytes,
        within_s: float | None,
    ) -> aiohttp.ClientResponse:
        """Raises what aiohttp raises, and TimeoutError where the slice is lost or late."""
        async with asyncio.timeout(within_s) as limit:
            self._asking[limit] = entry, request
            try:
                return await self._upstream.post(entry, request, body, record.carried)
            finally:
                del self._asking[limit]

    def _is_elsewhere(self, entry: SliceRecord) -> bool:
        """Whether its place is, since the board calls it lost."""
        return entry.replica in self._lost and self._elsewhere(entry)

    def _elsewhere(self, entry: SliceRecord) -> bool:
        left_out = self.breaker.left_out(time.monotonic()) | {entry.replica}
        return any(one.serves and one.replica not in left_out for one in self._table.entries(entry.model))

    def _begin(self, entry: SliceRecord, request: InferenceRequest) -> None:
        if self.suspects:
            self.suspects.sent(fingerprint(request), entry.replica)
        self._table.begin(entry.replica)

    async def _judged(self, entry: SliceRecord, request: InferenceRequest, error: Exception) -> None:
        """End a request that a slice broke off; a slice that took no connection has seen nothing of it."""
        try:
            if not isinstance(error, NotConnected):
                await self.judge(entry, request)
        finally:
            self._end(entry, request)

    def _end(self, entry: SliceRecord, request: InferenceRequest) -> None:
        if self.suspects:
            self.suspects.left(fingerprint(request))
        self._table.end(entry.replica)
        self.breaker.ended(entry.replica)

    async def _choose(self, request: InferenceRequest, tries: Tries) -> SliceRecord:
        """The slice to ask; waits for one where there is hope of one, or where a part of the answer is with the client."""
        if tries.pause_s:
            await asyncio.sleep(tries.pause_s * random.uniform(0.5, 1))
        tries.pause_s = min(self._timings.longest_pause_s, tries.pause_s * 2) if tries.tried else 0.0
        while True:
            left_out = self.breaker.left_out(time.monotonic())
            try:
                closed = self._closed_to(request) if self.suspects else set()
                return self._table.choose(request.model, left_out | tries.tried | closed, request)
            except NoSliceError:
                if tries.deadline_s is None:
                    self._table.choose(request.model)  # none at all: that is for the client to know
                    tries.deadline_s = time.monotonic() + tries.wait_s
                if time.monotonic() >= tries.deadline_s:
                    raise
            # Whoever failed this request may have it again after a while, if nobody else is there.
            tries.tried.clear()
            tries.pause_s = max(self._timings.first_pause_s, tries.pause_s)
            await asyncio.sleep(self._timings.look_again_s)

    def _closed_to(self, request: InferenceRequest) -> set[str]:
        """Slices that a suspect may not go to now; all of them while the same request is on trial."""
        name = fingerprint(request)
        self.refuse_guilty(request)
        if not self.suspects.suspects(name):
            return set()
        if self.suspects.on_trial(name):
            return {entry.replica for entry in self._table.entries(request.model)}
        return self.suspects.closed()

    def _given_up(self, entry: SliceRecord, error: Exception) -> ServingError:
        if isinstance(error, NotConnected):
            return NoSliceError(f"No slice of {entry.model!r} takes a connection; try again shortly.")
        return SliceLostError(f"The slice serving {entry.model!r} was lost before it answered.")


def failed(status: int) -> bool:
    """Whether it is the engine's failure; one that does not do a thing at all (501) has not failed."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED
