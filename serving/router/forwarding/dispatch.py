"""Sends a request to a slice, and to another slice where the first one fails.

The table says which slice comes first, the breaker which slices are left out, and the watch which streams are silent.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from http import HTTPStatus

from serving import secret
from serving.config import FailoverSpec
from serving.errors import (
    NoSliceError,
    PoisonousKindError,
    PoisonousRequestError,
    ServingError,
    SliceLostError,
)
from serving.router.forwarding.circuit_breaker import CircuitBreaker
from serving.router.forwarding.connecting import NotConnectedError, UpstreamError
from serving.router.forwarding.sentinel import Sentinel
from serving.router.forwarding.slice_timing import SliceTiming
from serving.router.forwarding.stalls import Stream, stalled
from serving.router.forwarding.suspects import (
    HEARD_S,
    LONGEST_S,
    REFUSED_S,
    Flight,
    Suspects,
    fingerprint,
    kind_of,
    whose,
)
from serving.router.forwarding.trials import Trials
from serving.router.forwarding.upstream import Health, SliceResponse, Upstream
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.record import RequestRecord
from serving.state.records import SliceRecord, SliceState
from serving.timings import TIMINGS, Timings

logger = logging.getLogger("ray.serve")

_MOST_LEFT = 4096
_MOST_HUNG = 256  # their fingerprints go to all routers where their slice dies


@dataclass
class Tries:
    """How often and where one request was tried since it last got a token."""

    left: int
    wait_s: float
    tried: set[str] = field(default_factory=set)
    # Slices that answered with an error. It is their fault if another slice answers well.
    accused: set[str] = field(default_factory=set)
    deadline_s: float | None = None
    pause_s: float = 0.0

    def again(self, replica: str) -> bool:
        """Count a failure; false where no try is left."""
        self.tried.add(replica)
        self.left -= 1
        self.waits()
        return self.left >= 0

    def waits(self) -> None:
        """From now on wait for a slice where none serves: the request has been with one."""
        if self.deadline_s is None:
            self.deadline_s = time.monotonic() + self.wait_s


class _TrialAwaitedError(Exception):
    """A suspect has to wait until a slice is free of other suspects."""


class Dispatcher:
    """What all answers of one router share: connections, and which slices are left out."""

    def __init__(
        self,
        table: SliceTable,
        failover: FailoverSpec | None = None,
        *,
        timings: Timings = TIMINGS,
        routers: int = 1,
        sentinel: float = 0.0,
    ) -> None:
        """`routers`: how many share the slices. `sentinel`: the share of greedy answers that are asked again."""
        self.failover = failover or FailoverSpec()
        self.breaker = CircuitBreaker(timings)
        self.timing = SliceTiming(timings)
        self._timings = timings
        self.now: Callable[[], float] = time.time  # what other routers' clocks show, too
        self._table = table
        self._upstream = Upstream(timings.connect_s)
        self.suspects = Suspects(HEARD_S if routers > 1 else 0.0)
        self.trials = Trials(self.suspects)
        self.sentinel = Sentinel(sentinel, table, self._upstream, routers=routers)
        self._asking: dict[asyncio.Timeout, tuple[SliceRecord, InferenceRequest, float]] = {}
        self.gone: set[str] = set()  # replicas that were asked, and nobody listened
        self._hung: list[tuple[SliceRecord, Flight]] = []  # what clients that hung up left on slices
        self._verdicts: dict[str, asyncio.Task[None]] = {}
        # Verdicts that are being found, and the requests that they may be about.
        self._finding: dict[asyncio.Task[None], frozenset[str]] = {}
        self._dead: dict[str, float] = {}  # replicas that were found dead, and when
        self._left: dict[str, None] = {}  # replicas that went, or go, as planned
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
        """The answer of the first slice that does not fail, up to its headers; raises ServingError.

        The last slice's own error is an answer too.
        """
        tries = tries or self.tries()
        self.refuse_guilty(request)
        while True:
            entry = await self._choose(request, tries)
            self._table.begin(entry.replica)
            record.sent(entry)
            asked_s = time.monotonic()
            trial = self.breaker.began(entry.replica, asked_s)
            # The headers of a stream come with its first token, those of a whole answer with its last.
            within_s = self.timing.first_s(entry.replica) if trial and request.streams else None
            try:
                response = await self._post(
                    entry, request, record, request.body if body is None else body, within_s
                )
            except (UpstreamError, TimeoutError) as error:
                self.broke(entry)
                await self._judged(entry, request, error)
                if not tries.again(entry.replica):
                    raise self._given_up(entry, error) from error
            except BaseException:
                self._hung_up(entry, request, asked_s)
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
        """Raises PoisonousRequestError where this request has ended slices, and PoisonousKindError where too many of its kind have."""
        if not self.suspects:
            return
        name = fingerprint(request)
        if self.suspects.is_guilty(name):
            raise PoisonousRequestError(
                f"This request (fingerprint {name}) has ended two slices of {request.model!r}; it is refused for "
                f"{REFUSED_S / 60:.0f} minutes. Send another one."
            )
        if not request.fills and (wait_s := self.suspects.paced(name, self.now())):
            raise _poisonous_kind(request, wait_s)

    def look_at_kind(self, request: InferenceRequest) -> None:
        """A new request is suspected where others of its kind are guilty; raises PoisonousKindError where it is not to be tried yet.

        A line of a batch waits for that: nobody asks it again later.
        """
        if not (kind := self.suspects.kind(request)):
            return
        if not request.fills and (wait_s := self.suspects.paced_s(kind, self.now())):
            raise _poisonous_kind(request, wait_s)
        self.suspects.blame(fingerprint(request), kind, request.model, self.now())

    def may_be_suspected(self, entry: SliceRecord, request: InferenceRequest) -> bool:
        """Whether the death of this slice would make it a suspect, also once it has got tokens.

        Another slice has died under it of late, or is being asked whether it has.
        """
        name, its_own = fingerprint(request), self._verdicts.get(entry.replica)
        return self.suspects.deaths(name) > 0 or any(finding is not its_own for finding in self._about(name))

    async def judge(self, entry: SliceRecord, request: InferenceRequest, *, waits: bool = True) -> None:
        """After a slice broke off or failed on a request: if the slice is dead, whoever had just come there is suspected.

        All requests of a slice have one verdict. `waits`: whether this one may be a suspect, and so waits for it, and for those on
        slices that it was on before. Raises PoisonousRequestError where the request is found guilty.
        """
        verdict = self._verdict(entry)
        if waits:
            await asyncio.shield(asyncio.gather(verdict, *self._about(fingerprint(request))))
            self.refuse_guilty(request)

    def _verdict(self, entry: SliceRecord) -> asyncio.Task[None]:
        """Who is to be blamed is whoever is there when the first one asks."""
        if entry.replica not in self._verdicts:
            there = self._flights(entry.replica)
            since_s = self.now() - time.monotonic() + self.timing.worked_since_s(entry.replica)
            finding = asyncio.create_task(self._find_out(entry, there, since_s))
            self._verdicts[entry.replica] = finding
            self._finding[finding] = frozenset(flight.name for flight in there)
            finding.add_done_callback(self._finding.pop)
        return self._verdicts[entry.replica]

    def _about(self, name: str) -> list[asyncio.Task[None]]:
        """The verdicts that are being found on slices where this request was."""
        return [finding for finding, names in self._finding.items() if name in names]

    async def _find_out(self, entry: SliceRecord, there: list[Flight], since_s: float) -> None:
        if not await self._is_dead(entry):
            del self._verdicts[entry.replica]  # the slice's next failure is judged anew
            return
        self._dead[entry.replica] = time.monotonic()
        requests = {flight.name: flight.request for flight in there if flight.request}
        for name in self.suspects.died(entry.replica, there, self.now(), since_s):
            if request := requests.get(name):
                self.suspects.of_kind(name, kind_of(request))
            logger.error("request %s of %s has ended two slices; it is refused", name, entry.model)
            self.trials.end(name, entry.replica, HEARD_S)  # other routers have the same request waiting

    async def _is_dead(self, entry: SliceRecord) -> bool:
        """Whether the record says so, or the slice fails its health check. The record may be a beat old.

        A slice that goes as planned dies of no request.
        """
        known = self._table.entry(entry.replica)
        if entry.replica in self._left or (known and known.state is SliceState.DRAINING):
            return False
        if known is None or known.state is SliceState.LOST:
            return True
        return not await self.is_well(entry)

    def _flights(self, replica: str) -> list[Flight]:
        """The requests that a slice has now, or may still have of clients that hung up."""
        moment = self.now() - time.monotonic()
        asking = [
            Flight(fingerprint(request), request.model, moment + asked_s, request=request)
            for entry, request, asked_s in self._asking.values()
            if entry.replica == replica
        ]
        gone = [
            replace(flight, since_s=moment + flight.since_s)
            for entry, flight in self._hung
            if entry.replica == replica
        ]
        return [*gone, *asking] + [
            Flight(
                fingerprint(stream.request),
                stream.request.model,
                moment + stream.asked_s,
                answered=stream.heard_s > 0,
                request=stream.request,
            )
            for stream in self._streams
            if stream.entry.replica == replica
        ]

    def watch(self, stream: Stream) -> None:
        """Have the watch cut the stream when its slice falls silent."""
        stream.watched = True

    def hung_up(self, stream: Stream) -> None:
        """The client has gone before the end of its answer."""
        self._hung_up(stream.entry, stream.request, stream.asked_s, answered=stream.heard_s > 0)

    def give_back(self, stream: Stream) -> None:
        """End a request. A response that is not read to its end closes its connection: the engine aborts the request."""
        self._streams.discard(stream)
        self._end(stream.entry, stream.request)
        stream.response.close()

    def settle(
        self, entries: Collection[SliceRecord], free_seats: Callable[[str], int] = lambda _: 0
    ) -> None:
        """Once a beat: take over the slices, and how many more sequences each model's slices may run.

        Requests of a lost slice go on elsewhere. Those that can't end once the slice is forgotten, because a stopped host's
        kernel keeps its connections up. Requests of a leaving slice go on elsewhere at once, as far as there are seats; the
        others have the slice's `drain_s` to end.
        """
        replicas = {entry.replica for entry in entries}
        self.timing.settle(entries, time.monotonic())
        self.breaker.keep(replicas)
        for replica in self.breaker.on_trial:
            # The report that a slice's tokens are counted from may be a beat old.
            self.breaker.worked(replica, self.timing.moved_s(replica) - self._timings.beat_s)
        self.sentinel.settle(replicas, free_seats)
        self._settle_hung(entries)
        self._settle_verdicts(entries)
        forgotten = self._lost - replicas
        self._lost = {entry.replica for entry in entries if entry.state is SliceState.LOST}
        for limit, (entry, _, _) in self._asking.items():
            if (entry.replica in forgotten or self._is_elsewhere(entry)) and not limit.expired():
                limit.reschedule(0.0)
        silent_since_s = time.monotonic() - self._timings.stale_s
        for stream in self._streams:
            over = stream.entry.replica in forgotten or (stream.movable and self._is_elsewhere(stream.entry))
            if over and stream.heard_s < silent_since_s:  # a host that sends tokens is not stopped
                stream.cut()
        self._leaving = {entry.replica for entry in entries if entry.state is SliceState.DRAINING}
        if self._leaving and self.failover.continue_streams:
            self._move(free_seats)

    def _settle_hung(self, entries: Collection[SliceRecord]) -> None:
        """Judge slices that were lost where clients have hung up: nobody else may be there to ask why."""
        alive = {entry.replica for entry in entries if entry.state is not SliceState.LOST}
        for entry in {entry.replica: entry for entry, _ in self._hung if entry.replica not in alive}.values():
            self._verdict(entry)
        oldest_s = time.monotonic() - LONGEST_S
        self._hung = [
            (entry, flight)
            for entry, flight in self._hung
            if entry.replica in alive
            and flight.since_s > max(oldest_s, self.timing.worked_since_s(entry.replica))
        ][-_MOST_HUNG:]

    def _settle_verdicts(self, entries: Collection[SliceRecord]) -> None:
        for gone in self._verdicts.keys() - {entry.replica for entry in entries}:
            if self._verdicts[gone].done():  # else it is still being found out what to forget
                del self._verdicts[gone]
                self._dead.pop(gone, None)
        now_s = time.monotonic()
        for replica in [
            name for name, found_s in self._dead.items() if now_s - found_s > self._timings.late_s
        ]:
            # Its health check was late, and it serves on: its next failure is judged anew.
            if (entry := self._table.entry(replica)) and entry.serves:
                del self._dead[replica], self._verdicts[replica]
                self.suspects.lives(replica)
        self._left.update((entry.replica, None) for entry in entries if entry.state is SliceState.DRAINING)
        while len(self._left) > _MOST_LEFT:
            del self._left[next(iter(self._left))]

    def _move(self, free_seats: Callable[[str], int]) -> None:
        """Take streams off slices that leave. Such streams already hold seats, which `free_seats` does not count."""
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

    async def is_well(self, entry: SliceRecord) -> bool:
        """Whether a slice calls itself healthy, whatever the store says of it."""
        health = await self._upstream.health(entry, self._timings.well_s)
        if health is Health.GONE:
            self.gone.add(entry.replica)
        return health is Health.WELL

    async def reaches(self, entry: SliceRecord) -> bool:
        """Whether a slice answers at all, whatever the store says of it."""
        health = await self._upstream.health(entry, self._timings.probe_reach_s)
        return health in (Health.WELL, Health.FAILING)

    def broke(self, entry: SliceRecord) -> None:
        """The slice broke a connection off."""
        self.breaker.failed(entry.replica, time.monotonic(), broken=True)

    def answered(self, entry: SliceRecord, request: InferenceRequest, tries: Tries) -> None:
        """The slice answered well: blame those that answered this request with an error."""
        self._acquit(request, whole=not request.streams)
        self.breaker.answered(entry.replica)
        for replica in tries.accused - {entry.replica}:
            self.breaker.failed(replica, time.monotonic(), broken=False)
        tries.accused.clear()

    def finished(self, request: InferenceRequest) -> None:
        """The client of a stream has its end."""
        self._acquit(request, whole=True)

    async def close(self) -> None:
        self._watching.cancel()
        self.sentinel.close()
        await self._upstream.close()

    def _acquit(self, request: InferenceRequest, *, whole: bool) -> None:
        """The request has its first token, or its whole answer."""
        if self.suspects.remembers:
            name = fingerprint(request)
            self.trials.end(name, self.suspects.answered(name, whole=whole))
            if kind := self.suspects.kind(request):
                self.suspects.sound(kind)

    async def _watch(self) -> None:
        looked = self.now()
        while True:
            await asyncio.sleep(self._timings.stall_look_s)
            before, looked = looked, self.now()
            self.suspects.stood_still(looked - before - self._timings.stall_look_s)
            for name in self.suspects.survivors(looked):
                self.trials.end(name, self.suspects.outlived(name))
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
    ) -> SliceResponse:
        """Raises UpstreamError, and TimeoutError where the slice is lost or late."""
        limit = asyncio.timeout(within_s)
        headers = {**record.carried, secret.KEY_HEADER: record.key}
        self._asking[limit] = entry, request, time.monotonic()
        try:
            async with limit:
                return await self._upstream.post(entry, request, body, headers)
        except (UpstreamError, TimeoutError) as error:
            if not isinstance(error, NotConnectedError):
                await self.judge(entry, request, waits=False)  # while this one still counts as there
            raise
        finally:
            del self._asking[limit]
            # A cancelled task keeps its error, that this frame, and the limit its task: the circle would keep the body.
            del limit

    def _is_elsewhere(self, entry: SliceRecord) -> bool:
        """Whether the store calls the slice lost and another one serves."""
        return entry.replica in self._lost and self._elsewhere(entry)

    def _elsewhere(self, entry: SliceRecord) -> bool:
        left_out = self.breaker.left_out(time.monotonic()) | {entry.replica}
        return any(
            other.serves and other.replica not in left_out for other in self._table.entries(entry.model)
        )

    async def _judged(self, entry: SliceRecord, request: InferenceRequest, error: Exception) -> None:
        """End a request that a slice broke off; a slice that took no connection has not seen the request."""
        try:
            if not isinstance(error, NotConnectedError):
                await self.judge(entry, request)
        finally:
            self._end(entry, request)

    def _hung_up(
        self, entry: SliceRecord, request: InferenceRequest, asked_s: float, *, answered: bool = False
    ) -> None:
        flight = Flight(fingerprint(request), request.model, asked_s, answered, whose=whose(request))
        self._hung.append((entry, flight))
        self.suspects.hung_up(flight.name, entry.replica)

    def _end(self, entry: SliceRecord, request: InferenceRequest) -> None:
        if self.suspects:
            name = fingerprint(request)
            self.trials.end(name, self.suspects.left(name, entry.replica))
        self._table.end(entry.replica)
        self.breaker.ended(entry.replica)

    async def _choose(self, request: InferenceRequest, tries: Tries) -> SliceRecord:
        """The slice to ask; waits where a slice may come back, or where the client has a part of the answer."""
        if tries.pause_s:
            await asyncio.sleep(tries.pause_s * random.uniform(0.5, 1))
        tries.pause_s = min(self._timings.longest_pause_s, tries.pause_s * 2) if tries.tried else 0.0
        while True:
            left_out = self.breaker.left_out(time.monotonic()) | tries.tried
            try:
                if not self.suspects:
                    return self._alive(request, left_out)
                return await self._choose_among_suspects(request, left_out)
            except _TrialAwaitedError:
                tries.deadline_s = None  # slices serve: it is only not its turn yet
            except NoSliceError:
                if tries.deadline_s is None:
                    self._table.choose(request.model)  # raises at once where no slice serves at all
                    tries.deadline_s = time.monotonic() + tries.wait_s
                if time.monotonic() >= tries.deadline_s:
                    raise
            # Where no other slice is there, one that failed this request may try it again after a while.
            tries.tried.clear()
            tries.pause_s = max(self._timings.first_pause_s, tries.pause_s)
            await asyncio.sleep(self._timings.look_again_s)

    def _alive(self, request: InferenceRequest, left_out: set[str]) -> SliceRecord:
        """A slice that was not found dead, if there is one: where several die at once their 500s would use all tries up.

        Raises NoSliceError.
        """
        if self._dead:
            with contextlib.suppress(NoSliceError):
                return self._table.choose(request.model, left_out | self._dead.keys(), request)
        return self._table.choose(request.model, left_out, request)

    async def _choose_among_suspects(self, request: InferenceRequest, left_out: set[str]) -> SliceRecord:
        """As `_choose` while some requests are suspected: a suspect has a slice where it is the only one.

        Raises _TrialAwaitedError where there is none now, NoSliceError where none serves, and PoisonousRequestError for the guilty.
        """
        self.refuse_guilty(request)
        name = fingerprint(request)
        if not self.suspects.suspects(name, self.now()):
            return self._alive(request, left_out)
        await asyncio.sleep(max(0.0, self.suspects.heard_in_s(name, self.now())))
        self.refuse_guilty(request)
        if not self.suspects.suspects(name, self.now()):  # the same request has been answered meanwhile
            return self._alive(request, left_out)
        if self.trials.open_to(name):
            elsewhere = self.trials.closed() | self.suspects.died_under(name) | set(self._dead)
            try:
                entry = self._table.choose(request.model, left_out | elsewhere, request)
            except NoSliceError:
                pass
            else:
                if await self.trials.begin(name, entry.replica):
                    return entry
        self._table.choose(request.model)  # raises where no slice serves at all
        raise _TrialAwaitedError

    def _given_up(self, entry: SliceRecord, error: Exception) -> ServingError:
        if isinstance(error, NotConnectedError):
            return NoSliceError(f"No slice of {entry.model!r} takes a connection; try again shortly.")
        return SliceLostError(f"The slice serving {entry.model!r} was lost before it answered.")


def _poisonous_kind(request: InferenceRequest, wait_s: float) -> PoisonousKindError:
    return PoisonousKindError(
        f"Several requests of this key have ended slices of {request.model!r}; "
        f"the next one like them is tried in {wait_s:.0f} s. Send other parameters, or wait."
    )


def failed(status: int) -> bool:
    """Whether the engine failed; an engine that does not offer a feature (501) has not."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED
