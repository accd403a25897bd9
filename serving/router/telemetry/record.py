"""The record of one request: the parts it passes fill it in, and the end writes it out once.

Each part reports in one call: admission `waited` and `admitted`, the dispatcher `sent`, `answered`, `passed_on` and `used`, the
part that ends the request `failed`, `cancelled` or `end`. Metrics, log line and spans are made afterwards: they cost nothing
while tokens stream. Times are of the monotonic clock; `arrived_at` is the arrival by the calendar. `carried` are headers
that go on to the slice, so that its spans belong to this request's.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from serving.errors import BadRequestError, NoSliceError, OverloadedError, ServingError, SliceLostError
from serving.metrics.table import NO_KEY, NO_MODEL, NO_POOL
from serving.router.http.routes import ROUTES
from serving.state.records import SliceRecord

# The usage object of vLLM's answers; Anthropic's route and the responses API say input and output.
# No engine counts to ten digits, and a database's numbers end at nineteen.
_USAGE = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,9})\b')
_WRITTEN = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})\b')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d{1,9})\b')
# What Anthropic's route leaves out of the prompt's tokens.
_BESIDE = re.compile(rb'"cache_(?:read|creation)_input_tokens":\s*(\d{1,9})\b')
_USAGE_OBJECT = re.compile(rb'"usage":\s*\{[^{}]*"(?:prompt|input)_tokens":')
_USAGE_BYTES = 4096  # usage stands at a stream's end; only the last event, alone in its chunk, comes after it
_CACHED_BYTES = 512  # a usage object is no longer
_CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True)
class Lease:
    """The slice that a request was handed to, and when; `paused_s`: when it made room there for another."""

    slice: str
    pool: str
    at_s: float
    paused_s: float = 0.0


@dataclass(slots=True)
class RequestRecord:
    """One request from arrival to end."""

    path: str
    request_id: str = ""
    on_end: "Callable[[RequestRecord], None] | None" = None
    trace_id: str = ""
    carried: Mapping[str, str] = field(default_factory=dict)
    span: Any = None
    arrived_s: float = field(default_factory=time.monotonic)
    arrived_at: float = field(default_factory=time.time)
    model: str = NO_MODEL
    key: str = NO_KEY
    sequences: int = 1  # answers that a stream has side by side
    streamed: bool = False
    held_up: bool = False  # whether its client was seen not to read: an engine writes on meanwhile
    status: int = 0
    outcome: str = ""
    code: str = ""
    admitted_s: float = 0.0
    queued_s: float = 0.0
    leases: list[Lease] = field(default_factory=list)
    answered_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    events: int = 0
    sent_bytes: int = 0
    longest_gap_s: float = 0.0
    retries: int = 0
    continuations: int = 0
    preemptions: int = 0
    paused_s: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt's, where the answer says it
    by_events: bool = False  # whether `output_tokens` are a stream's events: an engine that is held up puts many tokens into one
    question: bytes = b""
    answer: list[bytes] | None = None
    _before: bytes = b""
    _tail: bytes = b""
    _usage: bytes = b""
    _resumes: bool = False

    def asked(self, body: bytes) -> None:
        """The client's body is there; it is kept where the answer is."""
        if self.answer is not None and not self.question:
            self.question = body

    def waited(self, queued_s: float) -> None:
        """The request's time in a queue is over, however it ended."""
        self.queued_s = queued_s

    def admitted(self) -> None:
        """Admission let the request in."""
        self.admitted_s = time.monotonic()

    def sent(self, entry: SliceRecord) -> None:
        """The request goes to a slice. Before the first token a second call is a retry, after it a continuation.

        After a pause it is neither.
        """
        if self._resumes:
            self._resumes = False
        elif self.first_s:
            self.continuations += 1
        elif self.leases:
            self.retries += 1
        self.leases.append(Lease(entry.slice, entry.pool, time.monotonic()))

    def preempted(self) -> None:
        """The request makes room for one of higher priority."""
        self.preemptions += 1
        self._resumes = True
        if self.leases:
            self.leases[-1] = replace(self.leases[-1], paused_s=time.monotonic())

    def resumed(self, paused_s: float) -> None:
        """A pause is over, however it ended."""
        self.paused_s += paused_s

    def answered(self, status: int, *, streamed: bool) -> None:
        """The slice's headers are there."""
        self.status, self.streamed, self.answered_s = status, streamed, time.monotonic()

    def passed_on(self, data: bytes, events: int = 0) -> None:
        """Bytes of the answer went to the client. Called for every chunk, so it counts without parsing."""
        now_s = time.monotonic()
        if not self.first_s:
            self.first_s = now_s
        elif now_s - self.last_s > self.longest_gap_s:
            self.longest_gap_s = now_s - self.last_s
        self.last_s = now_s
        self.events += events
        self.sent_bytes += len(data)
        if self.answer is not None:
            self.answer.append(data)
        self._before, self._tail = self._tail, data

    def passed_part_on(self, data: bytes) -> None:
        """The same of a part of a long answer that is no stream: its usage may be in any of them, the last one counts."""
        self.passed_on(data)
        part = self._before[-_USAGE_BYTES:] + data
        if (at := _usage_at(part)) >= 0:
            self._usage = part[at : at + _USAGE_BYTES]

    def used(self, prompt_tokens: int | None, output_tokens: int) -> None:
        """What the answer used, from a part that knows better than the last bytes."""
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens

    def failed(self, error: ServingError) -> None:
        """The request ended, or will end, with this error."""
        self.code = error.code
        if not self.status or self.status < HTTPStatus.BAD_REQUEST:
            self.status = error.status if not self.sent_bytes else self.status
        self.outcome = outcome_of(error)

    def failed_within(self, code: str, *, clients: bool) -> None:
        """A stream that began well ends with an engine's error, by a mistake of the client's or of its own."""
        self.code, self.outcome = code, "client_error" if clients else "error"

    def cancelled(self) -> None:
        """The client went away."""
        if not self.outcome:
            self.outcome, self.status = "cancelled", self.status or _CLIENT_CLOSED_REQUEST

    def end(self) -> None:
        """Write the record out, once."""
        if self.ended_s:
            return
        self.ended_s = time.monotonic()
        self.outcome = self.outcome or outcome_of_status(self.status)
        self.read_usage()
        if self.on_end is not None:
            self.on_end(self)

    @property
    def slice(self) -> str:
        return self.leases[-1].slice if self.leases else ""

    @property
    def on_slices(self) -> list[tuple[str | None, float]]:
        """The pools of its slices, and when each got it; None from the beginning of each pause."""
        stays: list[tuple[str | None, float]] = []
        for lease in self.leases:
            stays.append((lease.pool, lease.at_s))
            if lease.paused_s:
                stays.append((None, lease.paused_s))
        return stays

    @property
    def pool(self) -> str:
        return self.leases[-1].pool if self.leases else NO_POOL

    @property
    def router_s(self) -> float | None:
        """The router's own time until the request was on its way to a slice."""
        return self.leases[0].at_s - self.arrived_s - self.queued_s if self.leases else None

    @property
    def slice_ttft_s(self) -> float | None:
        """The time to first token, from handing the request to the slice that gave it."""
        before = [lease.at_s for lease in self.leases if lease.at_s <= self.first_s]
        return self.first_s - before[-1] if before else None

    @property
    def inter_token_s(self) -> float | None:
        """Per token of one answer, as vLLM counts, pauses left out. Some events hold none: a chat's first, usage, the stream's end."""
        tokens = (self.output_tokens or 0) / self.sequences
        if not self.streamed or tokens < 2:
            return None
        return max(0.0, self.last_s - self.first_s - self.paused_s) / (tokens - 1)

    def read_usage(self) -> None:
        """Look for token counts in the last bytes, where no part has told them."""
        if self._tail and None in (self.prompt_tokens, self.output_tokens, self.cached_tokens):
            self._read_usage()
            self._before = self._tail = b""

    def _read_usage(self) -> None:
        if self.path in ROUTES and ROUTES[self.path].renders:
            return
        if self.streamed:
            tail = (self._before + self._tail)[-_USAGE_BYTES:]
            at = tail.rfind(b'"usage"')
        else:
            tail = self._usage or self._tail
            at = _usage_at(tail)
        if at >= 0 and (prompt := _USAGE.search(tail, at)):
            cached = _CACHED.search(tail, at, at + _CACHED_BYTES)
            self.cached_tokens = int(cached[1]) if cached else 0
            if self.prompt_tokens is None or self.output_tokens is None:
                written = _WRITTEN.search(tail, at)
                beside = _BESIDE.findall(tail, at, at + _CACHED_BYTES)
                self.prompt_tokens = int(prompt[1]) + sum(map(int, beside))
                self.output_tokens = int(written[1]) if written else 0
        elif self.streamed and self.output_tokens is None:
            # Not tokens: the last event ends the stream, and a chat's first event names the role.
            opens = self.path in ROUTES and ROUTES[self.path].opens
            self.output_tokens, self.by_events = max(0, self.events - 1 - opens), True


def _usage_at(body: bytes) -> int:
    """Where the usage of a whole answer begins; -1 without one. The prompt's ids and logprobs, of any length, may
    follow the usage, with tokens in them that read `usage`.
    """
    at = body.rfind(b'"usage"')
    while at >= 0 and not _USAGE_OBJECT.match(body, at):
        at = body.rfind(b'"usage"', 0, at)
    return at


def outcome_of(error: ServingError) -> str:
    if isinstance(error, NoSliceError):
        return "no_slice"
    if isinstance(error, SliceLostError):
        return "slice_lost"
    if isinstance(error, OverloadedError):
        return "overloaded"
    if isinstance(error, BadRequestError):
        return "client_error"
    return outcome_of_status(error.status)


def outcome_of_status(status: int) -> str:
    if 0 < status < HTTPStatus.BAD_REQUEST:
        return "ok"
    if status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return "refused"
    if status == _CLIENT_CLOSED_REQUEST:
        return "cancelled"
    return "client_error" if 0 < status < HTTPStatus.INTERNAL_SERVER_ERROR else "error"


@dataclass
class Checks:
    """What became of a model's answers that were asked again, since the router's start.

    `looked` answers were compared, `differed` by more than a near-tie; `wrong` slices were found.
    """

    looked: int = 0
    differed: int = 0
    wrong: int = 0
