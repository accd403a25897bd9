"""Has connections' bytes parsed a piece at a time, so that none keeps the event loop: the smallest requests, headers and chunks cost a
microsecond for each of their bytes.

What arrives is read by 256 KiB. As pipelined requests that is a second of work and a gigabyte, as chunks of one byte half a second. Bodies
of a known length cost nothing to parse, and are parsed as they come.
"""

import asyncio
from collections import deque
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# The head of most requests; of chunks of one byte, as many as take a third of a millisecond.
_PIECE_BYTES = 1 << 10
_SMALL_BYTES = 2 << 10  # most requests
# A piece of few calls is followed by one of twice its size, up to this.
_FEW_CALLS = 16
_LARGEST_BYTES = 64 << 10
# In a turn of the loop, of all connections, each some microsecond: the heads of some 25 requests, or six pieces of tiny chunks.
_MOST_CALLS = 1024
_NOTHING = memoryview(b"")


class Feeder:
    """The connections of one event loop that have bytes to be parsed. Who has just sent comes before who has sent much."""

    def __init__(self, most_calls: int = _MOST_CALLS) -> None:
        self._most_calls = most_calls
        self._calls = 0  # in this turn, and in those before it that had few
        self._is_due = False  # whether the next turn is counted
        self._new: deque[PacedProtocol] = deque()
        self._long: deque[PacedProtocol] = deque()

    @property
    def is_free(self) -> bool:
        """Whether what has just come may be parsed at once."""
        return self._calls < self._most_calls and not self._new

    def put(self, connection: "PacedProtocol") -> None:
        """Have a connection's next piece parsed in this turn of the loop or a later one, and what follows in others."""
        if self.is_free:
            self._feed(connection)
        else:
            self._new.append(connection)
        self.spend(0)

    def spend(self, calls: int) -> None:
        """So many calls have been made. A loop with little to do has its turns uncounted: to count each cost a request 5% more CPU."""
        self._calls += calls
        if not self._is_due and (self._long or self._new or 2 * self._calls >= self._most_calls):
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _feed(self, connection: "PacedProtocol") -> None:
        try:
            if connection.feed_next():
                self._long.append(connection)
        finally:
            self._calls += 1 + connection.calls

    def _turn(self) -> None:
        self._calls = 0
        self._is_due = False
        try:
            while self._calls < self._most_calls and (queue := self._new or self._long):
                self._feed(queue.popleft())
        finally:
            self.spend(0)


class Flow(FlowControl):
    """uvicorn's, with a hold: while it lasts nobody has the connection read on."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class PacedProtocol(HttpToolsProtocol):
    """A connection whose bytes are parsed by turns: `feed` parses them, and counts what it calls in `calls`.

    `body_left`: bytes still to come of a body of a known length. Pipelined requests are parsed as those before them are answered.
    """

    flow: Flow

    def __init__(self, feeder: Feeder, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._feeder = feeder
        self._unfed = _NOTHING
        self._piece_bytes = _PIECE_BYTES
        self._waits_for_answer = False
        self.calls = 0
        self.body_left = 0

    def feed(self, data: bytes) -> None:
        super().data_received(data)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is taken of this connection."""
        return self.transport.is_closing()

    # asyncio's

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.flow = Flow(transport)

    def data_received(self, data: bytes) -> None:
        if self._unfed:
            self._unfed = memoryview(bytes(self._unfed) + data)
        elif len(data) <= self.body_left:
            self.feed(data)
        elif len(data) <= _SMALL_BYTES and self._feeder.is_free:
            self.calls = 1
            self.feed(data)
            self._feeder.spend(self.calls)
        else:
            self._unfed = memoryview(data)
            self._feeder.put(self)
            if self._unfed:
                self.hold()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unfed = _NOTHING
        super().connection_lost(exc)

    # uvicorn's

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._waits_for_answer and not self.pipeline:
            self._waits_for_answer = False
            self._feeder.put(self)

    def hold(self) -> None:
        """Read nothing more of the connection for now."""
        self.flow.held = True
        self.flow.pause_reading()

    def feed_next(self) -> bool:
        """Parse the next piece, and the rest of the body where that is plain; whether there is more to be parsed now."""
        self.calls = 0
        if self.is_over:
            self._unfed = _NOTHING
        elif self.pipeline:
            self._waits_for_answer = True
            return False
        if self._unfed:
            self.feed(self._next(self._piece_bytes))
            few = self.calls <= _FEW_CALLS
            self._piece_bytes = min(2 * self._piece_bytes, _LARGEST_BYTES) if few else _PIECE_BYTES
        if self._unfed and self.body_left and not self.is_over:
            self.feed(self._next(self.body_left))
        if self._unfed:
            return True
        self._go_on()
        return False

    def _next(self, size: int) -> bytes:
        piece, self._unfed = self._unfed[:size], self._unfed[size:]  # nothing is copied of what waits
        return bytes(piece)

    def _go_on(self) -> None:
        """Read on, unless uvicorn waits: for its app to take a body of which more is to come, or for an answer."""
        if self.flow.held and not self.is_over:
            self.flow.held = False
            cycle: Any = self.cycle  # none before the first request
            if not self.pipeline and not (cycle and cycle.more_body and len(cycle.body) > HIGH_WATER_LIMIT):
                self.flow.resume_reading()
