"""The seats of one admitted request: the answer's way back to admission, which may want them for another."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from serving.errors import Refusal
from serving.router.admission.queue import Ticket, Where
from serving.router.forwarding.seat import Preemptible, Seat
from serving.router.http.downstream import Downstream, PassesOn
from serving.router.telemetry.record import RequestRecord

# Answers an admitted request.
Answer = Callable[[Downstream, Seat], Awaitable[None]]

# Proxies and clients that wait for bytes give up after 10 s and more.
TELL_S = 5.0


class Admission(Protocol):
    """What a seat asks of the admission controller."""

    def runs(self, ticket: Ticket, stream: Preemptible) -> None: ...

    def stops(self, ticket: Ticket) -> None: ...

    def pause(self, ticket: Ticket) -> None: ...

    async def turn(self, ticket: Ticket) -> None: ...


class AdmittedSeat:
    """A client's. Its stream is paused for a request of higher priority, and goes on."""

    def __init__(
        self, admission: Admission, ticket: Ticket, record: RequestRecord, *, tell_s: float = TELL_S
    ) -> None:
        self._admission = admission
        self._ticket = ticket
        self._record = record
        self._tell_s = tell_s

    @property
    def wanted(self) -> bool:
        return self._ticket.makes_room

    def runs(self, stream: Preemptible) -> None:
        if not self._ticket.fills:
            self._admission.runs(self._ticket, stream)

    def stops(self) -> None:
        if not self._ticket.fills:
            self._admission.stops(self._ticket)

    async def regain(self, tell: Callable[[], None]) -> Refusal | None:
        ticket, began_s = self._ticket, time.monotonic()
        self._admission.pause(ticket)
        self._record.preempted()
        try:
            while ticket.where is Where.HELD:
                tell()
                try:
                    async with asyncio.timeout(self._tell_s):
                        await self._admission.turn(ticket)
                except TimeoutError:
                    pass
        finally:
            self._record.resumed(time.monotonic() - began_s)
        return ticket.refusal


class FillsSeat(PassesOn):
    """The client of a request that only fills a seat: it gives way to any request that waits, and is to ask again.

    Once its answer has begun it does not: a whole answer comes in one piece, and is over then.
    """

    def __init__(self, client: Downstream, record: RequestRecord) -> None:
        super().__init__(client)
        self._record = record
        self._began_s = time.monotonic()
        self._task = asyncio.current_task()
        self._gives_way = False

    def preempt(self) -> None:
        if self._task and not self.started:
            self._record.preempted()
            self._gives_way = True
            self._task.cancel()

    def gave_way(self) -> bool:
        """Whether the cancellation of its task meant this; the task goes on then."""
        return self._gives_way and self._task is not None and not self._task.uncancel()

    @property
    def movable(self) -> bool:
        return not self.started

    @property
    def work(self) -> float:
        """By its age: nobody has counted its tokens."""
        return time.monotonic() - self._began_s
