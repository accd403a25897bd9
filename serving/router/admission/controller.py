"""Admission in a running router: whose request it is, the wait for a turn, and what the answer used.

A request is a visit: it begins with its headers, which say whose it is, and counts for its key until it is over. The fast path
has no timer and no task: a request whose model has a free seat is admitted in one call. One loop, `run`, does the rest every
beat: it refuses requests that waited too long, ends answers that nobody reads, and takes over the store's load and changed keys.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from serving.batches.lines import FREE_SEATS
from serving.config import RouterSpec
from serving.errors import ConfigError, GaveWayError, Refusal, UnreadError
from serving.planning import Plan
from serving.router.admission.budget import Budget
from serving.router.admission.meter import Meter, Tokens
from serving.router.admission.queue import AdmissionQueue, Backlog, Outlook, Ticket, Where, capacity, seats
from serving.router.admission.rate_limit import Account, Refusals
from serving.router.admission.seat import AdmittedSeat, FillsSeat
from serving.router.admission.shares import Book, KeyUse, Lease
from serving.router.admission.usage import Filled, Usage, used_tokens
from serving.router.forwarding.seat import Preemptible, Seat
from serving.router.http.auth import ANYONE, Key, KeyFile
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
# A client that reads nothing for so long gives up its seats; one that reads on and off may take longer, by what it has read.
UNREAD_S = 30.0
_SLOWEST_READER_BYTES_PER_S = 1024
_MOST_BEARERS = 10_000  # whose use is remembered
_FREE_SEATS = FREE_SEATS.encode()


class Visit:
    """One request of a key, from its headers to its end. `refusal`: why it may not come now. `fills`: only a free seat is for it.

    `times`: how often it has made room for other requests.
    """

    def __init__(
        self, account: Account, refusal: Refusal | None, now_s: float, *, fills: bool = False, times: int = 0
    ) -> None:
        self.account = account
        self.fills = fills
        self.times = times
        self.refusal = refusal
        self.owner = account.key.name
        self.body_bytes = 0
        self._since_s = now_s
        self._over = refusal is not None

    def leave(self, now_s: float) -> None:
        """The request is over; a second call changes nothing."""
        if not self._over:
            self._over = True
            self.account.leave(now_s - self._since_s)


class RefusedError(Exception):
    """A request is refused before its body was read; `response` says why, and when to come back."""

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self.response = response


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
        self._clock = clock
        self.calendar = calendar
        self._meter = meter
        self._most: dict[str, dict[str, int]] = {}  # by model and pool
        for plan in plans:
            self._most.setdefault(plan.model.name, {})[plan.pool] = plan.most_sequences
        self._queues = {plan.model.name: plan.model.queue for plan in plans}
        self._queue = AdmissionQueue(self._queues, spec.preemption)
        self._backlog = Backlog()
        self._accounts: dict[str, Account] = {}
        self._bearers: dict[str, Account] = {}  # of those who come with a token
        self._filled = {plan.model.name: Filled() for plan in plans}
        self.hear: Callable[[Budget], Awaitable[None]] = (
            _hear_nothing  # of a budget that the store has said nothing of
        )
        self.batches_scale = False
        self.spare = 0.0  # the share of a model's seats that requests that fill leave free
        self._rates: Mapping[str, float] = {}
        self._expected = dict.fromkeys(self._filled, 0.0)
        self._refreshed_s = clock()
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._longest = {plan.model.name: plan.fit.max_model_len for plan in plans}
        self._usage = Usage()
        self._strangers = Refusals()
        self._leases = {model: Lease() for model in self._most}
        self._others: Sequence[Demand] = ()
        self._router = ""
        self._told: Mapping[
            str, Mapping[str, KeyUse]
        ] = {}  # what other routers say of keys, by key and router
        self._by_id: dict[str, Account] = {}  # accounts with limits
        self._used: dict[str, Account] = {}  # those of them that routers tell each other of now
        self._readers: set[_Reader] = set()
        self._set_accounts()
        self.refresh()

    def arrive(self, headers: Iterable[tuple[bytes, bytes]], *, costs: bool = True) -> Visit:
        """Settle from its headers whose request it is and whether it may come now; raises UnauthorizedError.

        What `costs` nothing may come when the key's budget is used up, and asks for no seat.
        """
        account = self._account(self._keys.ring.holder(headers))
        now_s = self._clock()
        if account.shared:
            account.wake(now_s)
            self._used[account.key.id] = account
        over = account.budget.refusal(self.calendar()) if account.budget and costs else None
        fills = costs and any(name == _FREE_SEATS and value for name, value in headers)
        return Visit(account, over or account.arrive(now_s), now_s, fills=fills)

    def fill(self, sha256: str, times: int = 0) -> Visit:
        """A line of a batch that a key left here; raises UnauthorizedError where the key is revoked.

        `times`: how often it has made room for other requests.

        Its account is apart: it has no limits, and what it uses costs the key's other requests no turn.
        """
        key = self._keys.ring.owner(sha256)
        account = Account(Key.model_construct(name=f"{key.name} (batch)", sha256=sha256))
        account.budget = self._meter.budget(key) if self._meter else None
        account.open += 1
        return Visit(account, None, self._clock(), fills=True, times=times)

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
        await asyncio.sleep(self._strangers.delay_s(self._clock()))

    def refused(self, visit: Visit, *, body_is_over: bool) -> "RefusedError":
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
        left_out = self._usage.output_tokens(visit.account.key.name, model, self._longest[model])
        return Estimate.of(checked, left_out)

    async def admit(
        self,
        visit: Visit,
        request: InferenceRequest,
        estimate: Estimate,
        record: RequestRecord,
        client: Downstream,
        answer: Callable[[Downstream, Seat], Awaitable[None]],
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
            seconds = self._usage.seconds(model, estimate.output_tokens)
            ticket.dollars = self._meter.dollars(model, ticket.seats, seconds)
        if account.limited:
            add_headers(client, lambda: account.headers(self._clock()))
        reader = _Reader(client, record, self._clock())
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

    def others(self, demands: Iterable[Demand], router: str) -> None:
        """Take over what the other routers say, from the live demands in the store; `router` is this one. Once a beat."""
        now_s, at_s = self._clock(), self.calendar()
        self._others = [other for other in demands if other.router != router]
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
        told: defaultdict[str, dict[str, KeyUse]] = defaultdict(dict)
        for other in self._others:
            for key, use in other.keys.items():
                told[key][other.router] = KeyUse.of(use)
        self._router, self._told = router, told
        for key, uses in told.items():
            account = self._by_id.get(key)
            if account and account.is_news(uses):
                account.wake(now_s)
                self._used[key] = account
        self._used = {key: account for key, account in self._used.items() if not account.rests(now_s)}
        for account in self._used.values():
            self._share(account, now_s, at_s)

    def _share(self, account: Account, now_s: float, at_s: float) -> None:
        routers = {other.router for other in self._others}
        account.share(self._router, self._told.get(account.key.id, {}), routers, now_s, at_s)

    def key_uses(self) -> dict[str, Sequence[float]]:
        """What limited keys that are used have in this router, for the other routers; by the beginning of a key's hash."""
        now_s = self._clock()
        return {key: account.use(now_s) for key, account in self._used.items()}

    def _knows(self, account: Account, now_s: float) -> None:
        """Other routers are told of a new account, or of one with other limits, if all of them have a part of it."""
        if account.shared:
            account.wake(now_s)
            self._by_id[account.key.id] = self._used[account.key.id] = account

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
                self._refresh_keys()
            except Exception:
                logger.exception("admission was not refreshed; the next beat tries again")

    def refresh(self) -> None:
        """Take over what the table says of slices, refuse requests that waited too long, and end answers that nobody reads."""
        now_s = self._clock()
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
            self._preempt_for_others(model, leased)

    def enter(self, ticket: Ticket) -> None:
        if budget := ticket.account.budget:
            # Others of the key may have come since the request's headers did.
            if refusal := budget.refusal(self.calendar()):
                ticket.where, ticket.refusal = Where.REFUSED, refusal
                return
            ticket.budget = budget
            budget.begin(ticket.tokens, ticket.dollars)
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
            # An engine reads what it refuses: a megabyte of text takes its only tokenizer a second.
            reads = min(estimate.prompt_tokens, longest * estimate.work.prompts) if record.leases else 0.0
            ticket.used_tokens = prompt + written or reads
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
            ticket.budget.end(ticket.tokens, ticket.dollars)
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
            if self._keys.refresh():
                self._set_accounts()
                logger.info("%d API keys are in force", len(self._keys.ring.keys))
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error.message)  # noqa: TRY400  the message says it all

    def _account(self, key: Key) -> Account:
        if account := self._accounts.get(key.name):
            return account
        now_s = self._clock()
        account = self._bearers.pop(key.name, None)
        if account is None:
            while len(self._bearers) >= _MOST_BEARERS and (
                idle := next((name for name, known in self._bearers.items() if not known.open), None)
            ):
                gone = self._bearers.pop(idle).key.id
                self._by_id.pop(gone, None)
                self._used.pop(gone, None)
                if self._meter:
                    self._meter.forget(gone)
            account = Account(key)
            account.set(key, now_s)
            self._knows(account, now_s)
            if account.shared and self._others:
                self._share(account, now_s, self.calendar())
        elif account.key != key:
            account.set(key, now_s)
            self._knows(account, now_s)
        account.budget = self._meter.budget(key) if self._meter else None
        self._bearers[key.name] = account  # the latest stands last
        return account

    def _set_accounts(self) -> None:
        """Make one account per key; what a key has used stays used when the file changes."""
        now_s = self._clock()
        accounts = {}
        for key in self._keys.ring.keys or (ANYONE,):
            known = self._accounts.get(key.name)
            accounts[key.name] = known or Account(key)
            accounts[key.name].set(key, now_s)
            accounts[key.name].budget = self._meter.budget(key) if self._meter else None
        self._accounts = accounts
        self._by_id, self._used = {}, {}
        for account in (*accounts.values(), *self._bearers.values()):
            self._knows(account, now_s)


async def _hear_nothing(_: Budget) -> None:
    """Where nobody knows."""


class _Reader:
    """How well one answer's client reads. One that does not holds seats for nothing."""

    def __init__(self, client: Downstream, record: RequestRecord, now_s: float) -> None:
        self._client = client
        self._record = record
        self._looked_s = now_s
        self._sent_bytes = 0
        self._behind_s = 0.0
        self._cut = False

    def look(self, now_s: float) -> None:
        """Once a beat: end the answer where its client has kept it waiting for too long."""
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        read, self._sent_bytes = self._record.sent_bytes - self._sent_bytes, self._record.sent_bytes
        waited_s = 0.0
        if self._client.paused:
            waited_s, self._record.held_up = elapsed_s, True
        self._behind_s = max(0.0, self._behind_s + waited_s - read / _SLOWEST_READER_BYTES_PER_S)
        if self._behind_s > UNREAD_S and not self._cut:
            self._cut = True
            self._record.failed(
                UnreadError(f"The client has not read its answer for {self._behind_s:.0f} s.")
            )
            self._client.cut()
