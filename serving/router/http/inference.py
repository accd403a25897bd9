"""Requests for inference: each is read as far as its routing needs, and forwarded to a slice of its model as it came.

vLLM knows what the fields mean. A request comes here from the router's door, from the ASGI app, or from a batch.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from serving.engine import known_faults
from serving.errors import BadRequestError, ServingError
from serving.planning import Plan
from serving.router.admission.controller import AdmissionController
from serving.router.admission.seat import Answer
from serving.router.admission.visit import RefusedError, Visit
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.forwarding.response import Forwarding
from serving.router.forwarding.seat import Seat
from serving.router.http import responses, seed
from serving.router.http.auth import Key
from serving.router.http.conversations import Conversations
from serving.router.http.cors import Cors
from serving.router.http.downstream import Downstream, OverAsgi, add_headers, respond
from serving.router.http.envelope import exchange_of, path_of
from serving.router.http.errors import error_response
from serving.router.http.isolation import FIELD, salt, salted
from serving.router.http.parsing import Parsing
from serving.router.http.paths import answer_to, refusal
from serving.router.http.protocol import InferenceRequest
from serving.router.http.response_store import ResponseStore
from serving.router.http.responses import Keeping
from serving.router.http.routes import ROUTES, Route
from serving.router.http.validation import (
    Checked,
    Estimate,
    check,
    check_encoding,
    form,
    is_form,
    kept,
    parse,
)
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.journal import Journal
from serving.router.telemetry.record import RequestRecord

logger = logging.getLogger("ray.serve")

_IGNORED = b"x-ignored-parameters"  # the header that names what of a request had no effect


class _Read(NamedTuple):
    """A body that was read: what goes to the slice, and what the router looks at of it. `ignored`: what no engine heeds."""

    model: str
    body: bytes
    kept: dict[str, Any]
    checked: Checked
    ignored: list[str]


class Inference:
    """Answers requests for the models of one service."""

    def __init__(
        self,
        plans: Sequence[Plan],
        table: SliceTable,
        dispatcher: Dispatcher,
        admission: AdmissionController,
        journal: Journal,
        store: ResponseStore | None = None,
    ) -> None:
        """`plans` has one plan per pool, the preferred pool of each model first. `store`: of responses, where the YAML names one."""
        self._plans = {plan.model.name: plan for plan in reversed(plans)}  # the plan of the preferred pool
        self._hosts = {
            name: max(plan.slice.hosts for plan in plans if plan.model.name == name) for name in self._plans
        }
        self._fits = {name: [plan.fit for plan in plans if plan.model.name == name] for name in self._plans}
        self._table = table
        self._dispatcher = dispatcher
        self._admission = admission
        self._journal = journal
        self._parsing = Parsing()
        self.cors = Cors(admission.spec.cors)
        self.conversations = Conversations(admission, self._parsing, store)

    async def forward(self, request: Request) -> Any:
        """Forward a request to a slice of the model that its body names."""
        record = self._journal.begin(path_of(request.scope), request.headers)
        exchange_of(request.scope).record = record
        visit, inference, estimate = await self._accept(request, record)
        return OverAsgi(partial(self._carry, visit, inference, estimate, record))

    def relay(self, request: Request, client: Downstream) -> Awaitable[None]:
        """The same outside of any ASGI app, from the request's headers to the answer's end. Cancelled where the client goes."""
        if self.cors:
            add_headers(client, partial(self.cors.headers, request.scope["headers"]))
        return self._relayed(request, client, self._accept)

    def fill(self, request: Request, sha256: str, client: Downstream, times: int = 0) -> Awaitable[None]:
        """Answer a request that the key of this hash left here, if there is a free seat for it.

        `times`: how often it has been given up for other requests.
        """
        return self._relayed(request, client, partial(self._accept_left, sha256, times))

    async def _relayed(
        self,
        request: Request,
        client: Downstream,
        accept: Callable[[Request, RequestRecord], Awaitable[tuple[Visit, InferenceRequest, Estimate]]],
    ) -> None:
        path = path_of(request.scope)
        record = self._journal.begin(path, request.headers)
        try:
            visit, inference, estimate = await accept(request, record)
            await self._carry(visit, inference, estimate, record, client)
        except RefusedError as refused:
            respond(client, refused.response)
        except ServingError as error:
            record.failed(error)
            respond(client, answer_to(error, path))
            # Its frames have the request's body, and some of them the error: nothing but a garbage collection would end such a
            # circle.
            error.__traceback__ = None
        except ClientDisconnect:
            record.cancelled()
        except asyncio.CancelledError:
            record.cancelled()
            raise
        except Exception:
            logger.exception("unhandled error on POST %s, request %s", path, record.request_id)
            internal = ServingError("Internal error.")
            record.failed(internal)
            if not client.started:  # else the server cuts the connection: the answer must not look complete
                respond(client, error_response(internal))
        finally:
            record.end()

    async def _accept(
        self, request: Request, record: RequestRecord
    ) -> tuple[Visit, InferenceRequest, Estimate]:
        """Settle whose request it is and whether it may come, then read and check it.

        Raises ServingError, RefusedError and ClientDisconnect. What comes back is to be carried, which ends the visit.
        """
        try:
            if record.path not in ROUTES:
                raise refusal(request)
            visit = self._admission.arrive(request.headers.raw)
        except ServingError:
            await self._admission.hold_up_strangers()
            raise
        record.key = visit.account.key.id
        if visit.refusal:
            record.failed(visit.refusal.error)
            await self._admission.hold_up(visit)
            over = await self._admission.bodies.drop(request, visit, time.monotonic())
            raise self._admission.refused(visit, body_is_over=over)
        try:
            inference, estimate = await self._read(request, record, visit)
            if visit.fills and inference.streams:
                raise BadRequestError("A request for free seats only has no stream; leave out stream.")  # noqa: TRY301
        except BaseException:
            self._admission.leave(visit)
            raise
        return visit, inference, estimate

    async def _accept_left(
        self, sha256: str, times: int, request: Request, record: RequestRecord
    ) -> tuple[Visit, InferenceRequest, Estimate]:
        visit = self._admission.fill(sha256, times)
        record.key = visit.account.key.id
        try:
            return visit, *await self._read(request, record, visit)
        except BaseException:
            self._admission.leave(visit)
            raise

    async def _read(
        self, request: Request, record: RequestRecord, visit: Visit
    ) -> tuple[InferenceRequest, Estimate]:
        route = ROUTES[record.path]
        key, owner = visit.account.key, visit.owner
        body = await self._admission.bodies.read(request, visit, time.monotonic())
        keeping: Keeping | None = None
        fields: dict[str, Any] | None = None
        check_encoding(request.headers)
        as_form = is_form(request.headers, route)
        if route.path == responses.PATH:
            fields = await self._parsing.run(partial(parse, body), len(body), owner)
            record.model = self._table.resolve(fields.get("model"))
            record.asked(body)
            fields, whole = await self.conversations.with_items(visit, fields, body)
            whole, keeping = await self.conversations.following(visit, fields, whole)
            if whole is not body:  # with what came before it is read as if its client had sent it
                body, fields = whole, None

        def looked_at() -> _Read:
            if as_form:
                return self._looked_at(route, form(request.headers, body), body, record, key)
            return self._looked_at(route, parse(body) if fields is None else fields, body, record, key)

        read = await self._parsing.run(looked_at, len(body), owner)
        estimate = self._admission.estimate(visit, read.model, read.checked)
        inference = InferenceRequest.of(request, read.model, route.path, read.body, read.kept)
        ignored = tuple(sorted(read.ignored))
        inference = replace(inference, ignored=ignored, keeping=keeping, fills=visit.fills, key=key.id)
        if route.form:  # speech
            inference = inference.apart(os.urandom(4).hex())
        return inference, estimate

    def _looked_at(
        self, route: Route, fields: dict[str, Any], body: bytes, record: RequestRecord, key: Key
    ) -> _Read:
        """What is to be known of a body, all of it at once: that of a large one is found out beside the event loop."""
        model = self._table.resolve(fields.get("model"))
        record.model = model
        record.asked(body)
        checked = check(route, fields, body, self._plans[model], self._admission.spec)
        known_faults.refuse(fields, self._hosts[model])
        known_faults.refuse_too_large(fields, self._fits[model])
        generates = checked.work.generates
        ignored = known_faults.without_effect(fields) if generates else []
        if generates and seed.seeded(route, fields):
            fields = seed.without(fields, self._admission.spec.seed)
            body = to_json(fields)
            ignored.append("seed")
        if self._admission.spec.keys.isolated_cache:
            body = salted(route.path, body, fields, key)
            fields = {**fields, FIELD: salt(key, fields.get(FIELD) or "")}
        return _Read(model, body, kept(fields), checked, ignored)

    def _carry(
        self,
        visit: Visit,
        inference: InferenceRequest,
        estimate: Estimate,
        record: RequestRecord,
        client: Downstream,
    ) -> Awaitable[None]:
        """Answer an accepted request, once it is admitted."""
        answer: Answer = Forwarding(self._dispatcher, inference, record).run
        if inference.ignored:
            answer = partial(_telling, inference.ignored, answer)
        if inference.keeping:
            answer = partial(self.conversations.keep, answer, inference.keeping)
        return self._admission.admit(visit, inference, estimate, record, client, answer)


async def _telling(ignored: Sequence[str], answer: Answer, client: Downstream, seat: Seat) -> None:
    """Answer, and say which of the request's parameters had no effect."""
    header = _IGNORED, ", ".join(ignored).encode()
    add_headers(client, lambda: (header,))
    await answer(client, seat)
