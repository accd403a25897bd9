"""Admission in a running router: whose request it is, the wait for a turn, and what the answer used.

The fast path has no timer and no task: a request whose model has a free seat is admitted in one call. One loop, `run`, does
the rest every beat: it refuses requests that waited too long, and takes over the store's load and changed keys.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus

from serving.config import RouterSpec
from serving.errors import ConfigError
from serving.planning import Plan
from serving.router.admission.queue import AdmissionQueue, Backlog, Outlook, Ticket, Where, seats
from serving.router.admission.rate_limit import Account
from serving.router.http.auth import ANYONE, KeyFile
from serving.router.http.bodies import BodyReader
from serving.router.http.downstream import Downstream, respond
from serving.router.http.errors import refusal_response
from serving.router.http.protocol import InferenceRequest
from serving.router.http.routes import ROUTES
from serving.router.http.validation import BYTES_PER_TOKEN, demand
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.record import RequestRecord
from serving.state.records import Demand, SliceState
from serving.timings import TIMINGS

logger = logging.getLogger("ray.serve")


class AdmissionController:
    """Decides when a request that was read goes to the dispatcher."""

    def __init__(
        self,
        spec: RouterSpec,
        plans: Sequence[Plan],
        table: SliceTable,
        keys: KeyFile,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError where the status is private and there are no keys."""
        if spec.private_status and not keys.ring.required:
            raise ConfigError("router.private_status wants keys; name a file of them in router.keys_file")
        self.bodies = BodyReader(spec)
        self.spec = spec
        self._table = table
        self._keys = keys
        self._clock = clock
        self._most: dict[str, dict[str, int]] = {}  # by model and pool
        for plan in plans:
            self._most.setdefault(plan.model.name, {})[plan.pool] = plan.most_sequences
        self._queues = {plan.model.name: plan.model.queue for plan in plans}
        self._queue = AdmissionQueue(self._queues)
        self._backlog = Backlog()
        self._accounts: dict[str, Account] = {}
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._elsewhere: Mapping[str, int] = {}
        self._routers = 1
        self._set_accounts()
        self.refresh()

    def account(self, headers: Iterable[tuple[bytes, bytes]]) -> Account:
        """Whose request it is; raises UnauthorizedError."""
        return self._accounts[self._keys.ring.holder(headers).name]

    def status_is_open_to(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises UnauthorizedError where the status is private and no key is shown."""
        if self.spec.private_status:
            self._keys.ring.holder(headers)

    async def admit(
        self,
        account: Account,
        request: InferenceRequest,
        record: RequestRecord,
        client: Downstream,
        answer: Callable[[Downstream], Awaitable[None]],
    ) -> None:
        """Have the request answered once it is its turn, or refuse it. Cancelled where the client has gone."""
        tokens, sequences = demand(request.fields, request.body)
        ticket = Ticket(
            model=request.model,
            account=account,
            tokens=tokens,
            seats=sequences if ROUTES[request.path].seat else 0,
            size_bytes=len(request.body),
            since_s=self._clock(),
        )
        if account.limited:
            client.more_headers = lambda: account.headers(self._clock())
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
                await answer(client)
        except asyncio.CancelledError:
            record.cancelled()
            raise
        finally:
            self.leave(ticket, _used_tokens(record, ticket))

    def others(self, demands: Iterable[Demand], router: str) -> None:
        """Take over the other routers' number and load, from the live demands in the store."""
        theirs = [other for other in demands if other.router != router]
        elsewhere: dict[str, int] = {}
        for other in theirs:
            elsewhere[other.model] = elsewhere.get(other.model, 0) + other.in_flight
        self._elsewhere = elsewhere
        routers = 1 + len({other.router for other in theirs})
        if routers != self._routers:
            self._routers = routers
            self._set_accounts()

    def free_seats(self, model: str) -> int:
        """Sequences that the model's slices could still run for this router; negative where too many are open."""
        return self._queue.free_seats(model)

    def counts(self, model: str) -> dict[str, int]:
        """The fields of Demand that admission knows."""
        return self._queue.counts(model)

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
        """Take over what the table says of slices, and refuse requests that waited too long."""
        now_s = self._clock()
        self.bodies.sweep(now_s)
        missing_s = {wanted.model: wanted.missing_for_s for wanted in self._table.wanted(now_s)}
        entries = {model: self._table.entries(model) for model in self._most}
        backlog = self._backlog.observe(entry for of_model in entries.values() for entry in of_model)
        for model, of_model in entries.items():
            outlook = Outlook(
                seats=seats(
                    of_model,
                    self._most[model],
                    backlog,
                    taken=self._queue.seats_taken(model),
                    elsewhere=self._elsewhere.get(model, 0),
                    routers=self._routers,
                ),
                # A slice that was missing for longer than a request may wait is not expected in time.
                coming=any(entry.state is SliceState.STARTING for entry in of_model)
                or missing_s.get(model, 0.0) <= self._queues[model].wait_s,
                why_none=self._table.why_none(model),
            )
            self._wake(self._queue.update(model, outlook, now_s))

    def enter(self, ticket: Ticket) -> None:
        self._wake(self._queue.enter(ticket, ticket.since_s))

    def leave(self, ticket: Ticket, used_tokens: float) -> None:
        ticket.used_tokens = used_tokens
        self._turns.pop(ticket, None)
        self._wake(self._queue.leave(ticket, self._clock()))

    async def turn(self, ticket: Ticket) -> None:
        """Wait until a held request is admitted or refused."""
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        await turn

    def waited_s(self, ticket: Ticket) -> float:
        return self._clock() - ticket.since_s

    def _wake(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            turn = self._turns.pop(ticket, None)
            if turn and not turn.done():
                turn.set_result(None)

    def _refresh_keys(self) -> None:
        try:
            if self._keys.refresh():
                self._set_accounts()
                logger.info("%d API keys are in force", len(self._keys.ring.keys))
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error.message)  # noqa: TRY400  the message says it all

    def _set_accounts(self) -> None:
        """Make one account per key; what a key has used stays used when the file changes."""
        now_s = self._clock()
        accounts = {}
        for key in self._keys.ring.keys or (ANYONE,):
            accounts[key.name] = self._accounts.get(key.name) or Account(key)
            accounts[key.name].set(key, 1 / self._routers, now_s)
        self._accounts = accounts


def _used_tokens(record: RequestRecord, ticket: Ticket) -> float:
    """What the answer says it used; without usage an event counts as a token. An error costs nothing."""
    record.read_usage()
    if not record.status or record.status >= HTTPStatus.BAD_REQUEST:
        return 0.0
    guessed = min(ticket.size_bytes / BYTES_PER_TOKEN, ticket.tokens)  # most of a body may be a picture
    prompt = guessed if record.prompt_tokens is None else record.prompt_tokens
    return prompt + (record.output_tokens or 0)
