"""Admission in a running router: whose request it is, the wait for a turn, and what the answer used.

A request is a visit: it begins with its headers, which say whose it is, and counts for its key until it is over. The fast path
has no timer and no task: a request whose model has a free seat is admitted in one call. One loop, `run`, does the rest every
beat: it refuses requests that waited too long, ends answers that nobody reads, and takes over the store's load and changed keys.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from serving.batches.lines import FREE_SEATS
from serving.config import RouterSpec
from serving.errors import ConfigError, GaveWayError, Refusal, ServingError
from serving.planning import Plan
from serving.router.admission.accounts import Accounts
from serving.router.admission.budget import Budget
from serving.router.admission.meter import Meter, Tokens
from serving.router.admission.queue import AdmissionQueue, Backlog, Outlook, Ticket, Where, capacity, seats
from serving.router.admission.rate_limit import Refusals
from serving.router.admission.seat import AdmittedSeat, Answer, FillsSeat
from serving.router.admission.shares import Book, Lease
from serving.router.admission.slow_reader import Reader
from serving.router.admission.usage import Filled, Usage, used_tokens
from serving.router.admission.visit import RefusedError, Visit
from serving.router.forwarding.seat import Preemptible
from serving.router.http.auth import KeyFile
from serving.router.http.bodies import BodyReader
from serving.router.http.downstream import Downstream, add_headers, respond
from serving.router.http.errors import refusal_response
from serving.router.http.protocol import InferenceRequest
from serving.router.http.validation import Checked, Estimate
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.record import RequestRecord
from serving.state.records import Demand, SliceState
from serving.timings import TIMINGS

logger = logging.getLogger("ray.serve")

_GAVE_WAY = "The seat of this request was wanted before it was answered; ask again."
_FREE_SEATS = FREE_SEATS.encode()
# Of the tokens that a prompt was taken for by its bytes so many count, however few the engine says: 32 bytes a token.
_LEAST_USED = 1 / 8
# After so long between two of its beats others may have taken this router for gone: what they read of it is up to a beat old.
_TAKEN_FOR_GONE_S = TIMINGS.stale_s - TIMINGS.beat_s


class AdmissionController:
    """Decides who may come, and when a request that was read goes to the dispatcher."""

    def __init__(
        self,
        spec: RouterSpec,
        plans: Sequence[Plan],
        table: SliceTable,
        keys: KeyFile,
        clock: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
        meter: Meter | None = None,
    ) -> None:
        """`meter` adds up what keys use, where there is a store.

        Raises ConfigError where the status is private and there are no keys.
        """
        if spec.private_status and not keys.ring.required:
            raise ConfigError("router.private_status wants keys; name a file of them in router.keys_file")
        if spec.keys.isolated_cache and not keys.ring.required:
            raise ConfigError(
                "router.keys.isolated_cache wants keys; name a file of them in router.keys_file"
            )
        self.bodies = BodyReader(spec)
        self.spec = spec
        self._table = table
        self._keys = keys
        self._accounts = Accounts(keys, meter, clock())
        self._clock = clock
        self.calendar = calendar
        self._meter = meter
        self._most: dict[str, dict[str, int]] = {}  # by model and pool
        for plan in plans:
            self._most.setdefault(plan.model.name, {})[plan.pool] = plan.most_sequences
        self._queues = {plan.model.name: plan.model.queue for plan in plans}
        self._queue = AdmissionQueue(self._queues, spec.preemption)
        self._backlog = Backlog()
        self._filled = {plan.model.name: Filled() for plan in plans}
        # Of a budget that the store has said nothing of.
        self.hear: Callable[[Budget], Awaitable[None]] = _hear_nothing
        # Who was refused what no record is made of; by the beginning of the key's hash.
        self.tell_refused: Callable[[str, ServingError], None] = lambda *_: None
        self.batches_scale = False
        self.spare = 0.0  # the share of a model's seats that requests that fill leave free
        self._rates: Mapping[str, float] = {}
        self._expected = dict.fromkeys(self._filled, 0.0)
        self._refreshed_s = clock()
        self._lost_s = math.inf  # since when nobody has been heard of, after this process stood still
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._longest = {plan.model.name: plan.fit.max_model_len for plan in plans}
        self._usage = Usage()
        self._strangers = Refusals()
        self._leases = {model: Lease() for model in self._most}
        self._others: Sequence[Demand] = ()
        self._readers: set[Reader] = set()
        self.refresh()

    def arrive(self, headers: Iterable[tuple[bytes, bytes]], *, costs: bool = True) -> Visit:
        """Settle from its headers whose request it is and whether it may come now; raises UnauthorizedError.

        What `costs` nothing may come when the key's budget is used up, and asks for no seat.
        """
        now_s = self._clock()
        if now_s - self._refreshed_s >= _TAKEN_FOR_GONE_S:
            self.refresh()  # this process stood still: what came meanwhile is read before the next beat
        account = self._accounts.arriving(headers, now_s, self.calendar())
        over = account.budget.refusal(self.calendar()) if account.budget and costs else None
        fills = costs and any(name == _FREE_SEATS and value for name, value in headers)
        return Visit(account, over or account.arrive(now_s), now_s, fills=fills)

    def whose(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The name of the key that a request shows; empty for all who show none of this service's."""
        return self._accounts.whose(headers)

    def fill(self, sha256: str, times: int = 0) -> Visit:
        """A line of a batch that a key left here; raises UnauthorizedError where the key is revoked.

        `times`: how often it has made room for other requests.
        """
        return Visit(self._accounts.of_line(sha256), None, self._clock(), fills=True, times=times)

    def room(self, model: str, spare: float) -> int:
        """Seats of a model for requests that fill; `spare`: the share of all seats that stays free of them."""
        return self._queue.room(model, spare)

    def filling(self, model: str) -> int:
        return self._queue.filling(model)

    def leave(self, visit: Visit) -> None:
        """End a visit and forget its body; a second call changes nothing."""
        self.bodies.forget(visit)
        visit.leave(self._clock())

    async def hold_up(self, visit: Visit) -> None:
        """Wait before a refusal, the longer the more of the key's requests are refused: they must not fill the event loop."""
        await asyncio.sleep(visit.account.refusals.delay_s(self._clock()))

    async def hold_up_strangers(self) -> None:
        """The same for all who have shown no key, or have asked for nothing that there is."""
        await asyncio.sleep(self.delay_of_stranger_s())

    def delay_of_stranger_s(self) -> float:
        """Count one more refusal of nobody's key; the time to keep it back."""
        return self._strangers.delay_s(self._clock())

    def refused(self, visit: Visit, *, body_is_over: bool) -> RefusedError:
        """The answer to a request that may not come now."""
        assert visit.refusal is not None  # noqa: S101  the caller has asked
        response = refusal_response(visit.refusal)
        if not body_is_over:
            response.headers["connection"] = "close"  # the rest of the body is not read
        if visit.account.limited:
            response.raw_headers.extend(visit.account.headers(self._clock()))
        return RefusedError(response)

    def status_is_open_to(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises UnauthorizedError where the status is private and no key is shown."""
        if self.spec.private_status:
            self._keys.ring.holder(headers)

    def estimate(self, visit: Visit, model: str, checked: Checked) -> Estimate:
        """What a request may use, by its own fields and the answers that its key got of late."""
        longest = self._longest[model]
        left_out = self._usage.output_tokens(visit.account.key.name, model, longest)
        return Estimate.of(checked, left_out, longest)

    async def admit(
        self,
        visit: Visit,
        request: InferenceRequest,
        estimate: Estimate,
        record: RequestRecord,
        client: Downstream,
        answer: Answer,
    ) -> None:
        """Have the request answered once it is its turn, or refuse it; ends the visit. Cancelled where the client has gone."""
        account, model = visit.account, request.model
        if account.budget and not account.budget.known:
            try:
                await self.hear(account.budget)
            except BaseException:
                self.leave(visit)
                raise
        record.sequences = estimate.work.sequences
        ticket = Ticket(
            model=model,
            account=account,
            tokens=estimate.tokens,
            # More sequences than a slice runs at once take turns on it.
            seats=min(estimate.work.sequences, max(self._most[model].values())),
            size_bytes=len(request.body),
            since_s=self._clock(),
            fills=visit.fills,
            spare=self.spare,
            times=visit.times,
        )
        if self._meter and account.budget:
            seconds = self._usage.seconds(model, estimate.most_output_tokens)
            ticket.most_tokens = estimate.most_tokens
            ticket.dollars = self._meter.dollars(model, ticket.seats, seconds)
        if account.limited:
            add_headers(client, lambda: account.headers(self._clock()))
        reader = Reader(client, record, self._clock())
        seat = AdmittedSeat(self, ticket, record)
        filled: FillsSeat | None = None
        self.enter(ticket)
        try:
            try:
                if ticket.where is Where.HELD:
                    await self.turn(ticket)
            finally:
                record.waited(self.waited_s(ticket))
            if ticket.refusal:
                record.failed(ticket.refusal.error)
                respond(client, refusal_response(ticket.refusal))
            else:
                record.admitted()
                self._readers.add(reader)
                if ticket.fills:
                    client = filled = FillsSeat(client, record)
                    self.runs(ticket, filled)
                await answer(client, seat)
        except asyncio.CancelledError:
            record.cancelled()
            if not (filled and filled.gave_way()):
                raise
            respond(client, refusal_response(Refusal(GaveWayError(_GAVE_WAY), 1.0)))
        finally:
            self._readers.discard(reader)
            self._end(visit, ticket, estimate, record)

    def budgets(self, visit: Visit) -> dict[str, dict[str, float | str]]:
        """The budgets of a visitor's key, and what of them is used."""
        return visit.account.budget.state(self.calendar()) if visit.account.budget else {}

    def others(self, demands: Iterable[Demand], router: str) -> Iterator[None]:
        """Take over what the other routers say, from the live demands in the store; `router` is this one.

        Once a beat, in steps between which requests may go on.
        """
        now_s, at_s = self._clock(), self.calendar()
        self._others = [other for other in demands if other.router != router]
        self._lost_s = math.inf
        if self._meter:
            self._meter.share(1 + len({other.router for other in self._others}))
        for model, lease in self._leases.items():
            books = {
                other.router: Book(other.seats, other.seats_wanted, other.seats_leased)
                for other in self._others
                if other.model == model
            }
            # What only fills is no reason to lease a seat that another router's requests wait for.
            taken, wanted = self._queue.seats_needed(model), self._queue.seats_wanted(model)
            lease.beat(capacity(self._table.entries(model), self._most[model]), router, taken, wanted, books)
        yield from self._accounts.others(self._others, router, now_s, at_s)

    def key_uses(self) -> dict[str, Sequence[float]]:
        """What limited keys that are used have in this router, for the other routers; by the beginning of a key's hash."""
        return self._accounts.uses(self._clock())

    def free_seats(self, model: str) -> int:
        """Sequences that the model's slices could still run for this router; negative where too many are open."""
        return self._queue.free_seats(model)

    def counts(self, model: str) -> dict[str, Any]:
        """The fields of Demand that admission knows."""
        return {
            **self._queue.counts(model),
            "seats": self._queue.seats_needed(model),
            "seats_wanted": self._queue.seats_wanted(model),
            "waiting": self._queue.waiting(model),
            # Those that still fill seats which this router has given up are nobody else's yet.
            "seats_leased": max(self._leases[model].most or 0, self._queue.seats_taken(model)),
            **self._batch_counts(model),
        }

    def expect(self, rates: Mapping[str, float]) -> None:
        """Lines of batches a second, by model, that slices are to be ordered for."""
        self._rates = rates

    def _batch_counts(self, model: str) -> dict[str, float]:
        filled = self._filled[model]
        if self.batches_scale:
            return {"expected": round(self._expected[model], 3), "filled": filled.lines}
        return {
            "filling": self._queue.filling(model),
            "filled_prompt_tokens": filled.prompt_tokens,
            "filled_output_tokens": filled.output_tokens,
        }

    async def run(self, beat_s: float = TIMINGS.beat_s) -> None:
        """Refresh every beat, until cancelled."""
        while True:
            await asyncio.sleep(beat_s)
            try:
                self.refresh()
                if self._keys.behind:
                    await asyncio.to_thread(self._keys.read_ahead)
                self._refresh_keys()
            except Exception:
                logger.exception("admission was not refreshed; the next beat tries again")

    def refresh(self) -> None:
        """Take over what the table says of slices, refuse requests that waited too long, and end answers that nobody reads."""
        now_s = self._clock()
        if self._others and now_s - self._refreshed_s >= _TAKEN_FOR_GONE_S:
            self._lost(now_s)
        elif now_s - self._lost_s > TIMINGS.stale_s:
            self._regained()
        for model, rate in self._rates.items():
            self._expected[model] += rate * (now_s - self._refreshed_s)
        self._refreshed_s = now_s
        self._table.at(now_s)
        self.bodies.sweep(now_s)
        for reader in tuple(self._readers):
            reader.look(now_s)
        missing_s = {wanted.model: wanted.missing_for_s for wanted in self._table.wanted(now_s)}
        entries = {model: self._table.entries(model) for model in self._most}
        backlog = self._backlog.observe(entry for of_model in entries.values() for entry in of_model)
        for model, of_model in entries.items():
            most = capacity(of_model, self._most[model])
            shared = any(other.model == model for other in self._others)
            leased = min(most, self._leases[model].most or 0) if shared else most
            outlook = Outlook(
                seats=seats(of_model, leased, backlog, taken=self._queue.seats_taken(model)),
                # A slice that was missing for longer than a request may wait is not expected in time.
                coming=any(entry.state is SliceState.STARTING for entry in of_model)
                or missing_s.get(model, 0.0) <= self._queues[model].wait_s,
                why_none=self._table.why_none(model),
                serves=most > 0,
            )
            self._wake(self._queue.update(model, outlook, now_s))
            self._preempt(model)
            if self._leases[model].most is not None:
                self._preempt_for_others(model, leased)

    def _lost(self, now_s: float) -> None:
        """Others may have taken this router for gone: it has nothing more to give until it has heard of them again."""
        self._lost_s = now_s
        for lease in self._leases.values():
            lease.lost()
        self._accounts.lost(now_s)

    def _regained(self) -> None:
        """The store is away, for all: without its seats this router would refuse everybody until the head is back."""
        self._lost_s = math.inf
        for lease in self._leases.values():
            lease.regained()
        self._accounts.regained()

    def enter(self, ticket: Ticket) -> None:
        if budget := ticket.account.budget:
            # Others of the key may have come since the request's headers did.
            if refusal := budget.refusal(self.calendar()):
                ticket.where, ticket.refusal = Where.REFUSED, refusal
                return
            ticket.budget = budget
            budget.begin(ticket.most_tokens, ticket.dollars)
        self._wake(self._queue.enter(ticket, ticket.since_s))
        self._preempt(ticket.model)

    def runs(self, ticket: Ticket, stream: Preemptible) -> None:
        """An admitted request could be told to make room from now on."""
        self._queue.runs(ticket, stream)
        self._preempt(ticket.model)

    def stops(self, ticket: Ticket) -> None:
        """It could no more."""
        self._queue.stops(ticket)

    def pause(self, ticket: Ticket) -> None:
        """Take the seats of a request that makes room. Its `turn` comes like that of any held request."""
        self._wake(self._queue.pause(ticket, self._clock()))
        self._preempt(ticket.model)

    def _end(self, visit: Visit, ticket: Ticket, estimate: Estimate, record: RequestRecord) -> None:
        """A request that entered is over, however it went."""
        now_s = self._clock()
        if ticket.begun:
            ended_s = time.monotonic()
            longest = self._longest[ticket.model]
            prompt, written = used_tokens(record, estimate, self._usage, longest, now_s=ended_s)
            # An engine reads what it refuses, or cuts (`truncate_prompt_tokens`): a megabyte of text takes its only tokenizer a second.
            reads = min(estimate.prompt_tokens, longest * estimate.work.prompts) if record.leases else 0.0
            used = prompt + written
            ticket.used_tokens = max(used, estimate.prompt_tokens * _LEAST_USED) if used else reads
            # What gave way is counted when it is answered.
            gave_way = ticket.fills and ticket.makes_room and record.outcome == "cancelled"
            if self._meter and record.leases and not gave_way:
                self._meter.add(
                    ticket.account.key.id,
                    ticket.model,
                    record.on_slices,
                    ticket.seats,
                    # A slice that goes on with another's answer has read that too, and may have it in its cache.
                    Tokens(round(prompt), min(record.cached_tokens or 0, round(prompt)), round(written)),
                    ended_s,
                    self.calendar(),
                )
            self._usage.learn(ticket.account.key.name, record, estimate.work)
            if ticket.fills and not gave_way:
                self._filled[ticket.model].add(record)
        if ticket.budget:
            ticket.budget.end(ticket.most_tokens, ticket.dollars)
        self._turns.pop(ticket, None)
        self._wake(self._queue.leave(ticket, now_s))
        self._preempt(ticket.model)
        self.leave(visit)

    async def turn(self, ticket: Ticket) -> None:
        """Wait until a held request is admitted or refused; as often as is liked, by one task."""
        turn = self._turns.get(ticket)
        if turn is None or turn.done():
            turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        await turn

    def waited_s(self, ticket: Ticket) -> float:
        return self._clock() - ticket.since_s

    def _wake(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            turn = self._turns.pop(ticket, None)
            if turn and not turn.done():
                turn.set_result(None)

    def _preempt(self, model: str) -> None:
        """Have requests make room for those of higher priority that wait."""
        for stream in self._queue.preempt(model):
            stream.preempt()

    def _preempt_for_others(self, model: str, leased: int) -> None:
        """Have requests beyond this router's lease make room for those of higher priority that wait in other routers."""
        if (over := self._queue.seats_taken(model) - leased) <= 0:
            return
        waiting: Counter[int] = Counter()
        for other in self._others:
            if other.model == model:
                waiting.update(dict(other.waiting))  # type: ignore[arg-type]  # JSON has lists
        for stream in self._queue.preempt_for_others(model, sorted(waiting.items(), reverse=True), over):
            stream.preempt()

    def _refresh_keys(self) -> None:
        try:
            if self._accounts.refresh(self._clock()):
                logger.info("%d API keys are in force", len(self._keys.ring.keys))
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error.message)  # noqa: TRY400  the message says it all


async def _hear_nothing(_: Budget) -> None:
    """Where nobody knows."""
