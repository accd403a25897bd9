"""The HTTP surface: OpenAI's by model name, each request forwarded to a slice of that model. Knows nothing of Serve.

It reads from a body what it needs to route, and forwards the body as it came; vLLM knows what the fields mean.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from serving.engine import known_faults
from serving.errors import (
    BadRequestError,
    MethodError,
    NoSliceError,
    OverloadedError,
    ServingError,
    SlowBodyError,
    TooLargeError,
    UnauthorizedError,
    UnknownPathError,
)
from serving.metrics.exposition import CONTENT_TYPE
from serving.planning import Plan
from serving.router.admission.controller import AdmissionController, RefusedError, Visit
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.forwarding.response import Forwarding
from serving.router.forwarding.seat import Seat
from serving.router.http import responses, seed
from serving.router.http.auth import Key
from serving.router.http.conversations import Conversations
from serving.router.http.cors import Cors
from serving.router.http.downstream import Downstream, OverAsgi, add_headers, respond
from serving.router.http.envelope import EXCHANGE, Envelope, Exchange, path_of
from serving.router.http.errors import error_response
from serving.router.http.files_and_batches import FilesAndBatches
from serving.router.http.isolation import salted
from serving.router.http.kept_files import KeptFiles
from serving.router.http.model_list import ModelList
from serving.router.http.openapi import document
from serving.router.http.parsing import Parsing
from serving.router.http.protocol import InferenceRequest
from serving.router.http.response_store import ResponseStore
from serving.router.http.responses import Keeping
from serving.router.http.routes import ROUTES, Route
from serving.router.http.validation import Checked, Estimate, check, form, is_form, kept, parse
from serving.router.http.visits import tells
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.journal import Journal
from serving.router.telemetry.record import RequestRecord
from serving.status import page
from serving.status.document import Status

logger = logging.getLogger("ray.serve")

_GET_PATHS = ("/v1/models", "/health", "/metrics", "/openapi.json", "/status.json", *page.PATHS)
_HEADS = (
    "/v1/models",
    "/v1/models/{name:path}",
    "/health",
    "/status.json",
    "/metrics",
    "/v1/files/{name}/content",
)
_KEPT_PATHS = {"/v1/files": "GET, POST", "/v1/batches": "GET, POST", "/v1/usage": "GET"}
_CLIENT_CLOSED_REQUEST = 499  # nginx's number; no client is left to read it
_Run = Callable[[Downstream, Seat], Awaitable[None]]
_TOLD_AGAIN_S = 0.25  # half a beat, in which nothing new is known
_IGNORED = b"x-ignored-parameters"  # the header that names what of a request had no effect


class _Read(NamedTuple):
    """A body that was read: what goes to the slice, and what the router looks at of it. `ignored`: what no engine heeds."""

    model: str
    body: bytes
    kept: dict[str, Any]
    checked: Checked
    ignored: list[str]


class Api:
    """What clients may ask of the models of one service."""

    def __init__(
        self,
        plans: Sequence[Plan],
        table: SliceTable,
        dispatcher: Dispatcher,
        admission: AdmissionController,
        journal: Journal,
        status: Callable[[], Status],
        metrics: Callable[[], Awaitable[str]],
        store: ResponseStore | None = None,
        kept: KeptFiles | None = None,
    ) -> None:
        """`status` and `metrics` give the pages of the whole service. `store`: of responses, where the YAML names one.

        `kept`: the way to files and batches, where the YAML has a place for them.
        """
        self._plans = {plan.model.name: plan for plan in reversed(plans)}  # the plan of the preferred pool
        self._hosts = {
            name: max(plan.slice.hosts for plan in plans if plan.model.name == name) for name in self._plans
        }
        self._fits = {name: [plan.fit for plan in plans if plan.model.name == name] for name in self._plans}
        self._table = table
        self._dispatcher = dispatcher
        self._admission = admission
        self._journal = journal
        self._status = status
        self._metrics = metrics
        self._parsing = Parsing()
        self._cors = Cors(admission.spec.cors)
        self._conversations = Conversations(admission, self._parsing, store)
        self._files_and_batches = FilesAndBatches(admission, kept)
        self._model_list = ModelList(dict(reversed(self._plans.items())), table, admission)
        self._status_page, self._status_page_s = b"", -math.inf

    def app(self, *, returns_id: bool = True) -> FastAPI:
        """`returns_id`: whether answers get their X-Request-Id here."""
        app = FastAPI(
            title="tpu-serving",
            description="OpenAI-compatible inference on TPU slices.",
            docs_url=None,
            openapi_url=None,  # it would write the document out for each request
        )
        for part in (self._conversations, self._files_and_batches):
            app.include_router(part.router())
        app.add_route("/{path:path}", self.forward, methods=["POST"], include_in_schema=False)
        app.include_router(self._model_list.router())
        app.add_api_route("/health", self.health, response_class=Response)
        app.add_api_route("/status.json", self.status, response_model=Status)
        for path, handler in page.routes():
            app.add_route(path, handler, include_in_schema=False)
        app.add_api_route("/metrics", self.metrics, response_class=PlainTextResponse)
        # FastAPI adds no HEAD to a GET; load balancers probe with it.
        for read in [route for route in app.routes if isinstance(route, APIRoute) and route.path in _HEADS]:
            app.add_api_route(
                read.path, read.endpoint, methods=["HEAD"], response_model=None, include_in_schema=False
            )
        app.add_middleware(Envelope, returns_id=returns_id, cors=self._cors)
        app.openapi = lambda: document(app, list(reversed(self._plans)))  # type: ignore[method-assign]  # as FastAPI says to

        @lru_cache(maxsize=1)
        def written_out(prefix: str) -> bytes:
            servers = {"servers": [{"url": prefix}]} if prefix else {}
            return json.dumps(app.openapi() | servers, ensure_ascii=False, separators=(",", ":")).encode()

        async def openapi(request: Request) -> Response:
            body = written_out(request.scope.get("root_path", "").rstrip("/"))
            return Response(body, media_type="application/json")

        app.add_route("/openapi.json", openapi, include_in_schema=False)
        app.add_exception_handler(ServingError, _on_serving_error)
        app.add_exception_handler(RefusedError, _on_refused)
        app.add_exception_handler(HTTPException, _on_http_error)
        app.add_exception_handler(ClientDisconnect, _on_disconnect)
        return app

    async def health(self, request: Request) -> Response:
        """200 while every model has a slice that serves, else 503 naming the first that has none."""
        for name in self._plans:
            try:
                self._table.choose(name)
            except NoSliceError:
                if tells(self._admission, request):
                    raise
                raise NoSliceError(f"No slice of {name!r} is ready; with an API key this says why.") from None
        return Response(status_code=HTTPStatus.OK)

    async def status(self, request: Request) -> Response:
        """What the page at `/` draws."""
        self._admission.status_is_open_to(request.headers.raw)
        # Of 1,000 slices it takes 7 ms to make, and whoever reaches the door may ask for it.
        if time.monotonic() - self._status_page_s > _TOLD_AGAIN_S:
            self._status_page = self._status().model_dump_json().encode()
            self._status_page_s = time.monotonic()
        return Response(
            self._status_page, media_type="application/json", headers={"cache-control": "no-store"}
        )

    async def metrics(self, request: Request) -> Response:
        """Every metric of the service, its slices' engines included, for Prometheus."""
        self._admission.status_is_open_to(request.headers.raw)
        return Response(await self._metrics(), media_type=CONTENT_TYPE)

    async def forward(self, request: Request) -> Any:
        """Forward a request to a slice of the model that its body names."""
        record = self._journal.begin(path_of(request.scope), request.headers)
        _exchange(request).record = record
        visit, inference, estimate = await self._accept(request, record)
        return OverAsgi(partial(self._carry, visit, inference, estimate, record))

    def relay(self, request: Request, client: Downstream) -> Awaitable[None]:
        """The same outside of any ASGI app, from the request's headers to the answer's end. Cancelled where the client goes."""
        if self._cors:
            add_headers(client, partial(self._cors.headers, request.scope["headers"]))
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
            respond(client, _told(error, path))
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
            if not client.started:  # else the server cuts the connection: the answer must not look complete
                respond(client, error_response(ServingError("Internal error.")))
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
                raise _refusal(request)
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
        as_form = is_form(request.headers, route)
        if route.path == responses.PATH:
            fields = await self._parsing.run(partial(parse, body), len(body), owner)
            record.model, record.question = self._table.resolve(fields.get("model")), body
            fields, whole = await self._conversations.with_items(visit, fields, body)
            whole, keeping = await self._conversations.following(visit, fields, whole)
            if whole is not body:  # with what came before it is read as if its client had sent it
                body, fields = whole, None

        def looked_at() -> _Read:
            if as_form:
                return self._looked_at(route, form(request.headers, body), body, record, key)
            return self._looked_at(route, parse(body) if fields is None else fields, body, record, key)

        read = await self._parsing.run(looked_at, len(body), owner)
        estimate = self._admission.estimate(visit, read.model, read.checked)
        inference = InferenceRequest.of(request, read.model, route.path, read.body, read.kept)
        if read.ignored or keeping or visit.fills:
            ignored = tuple(sorted(read.ignored))
            inference = replace(inference, ignored=ignored, keeping=keeping, fills=visit.fills)
        return inference, estimate

    def _looked_at(
        self, route: Route, fields: dict[str, Any], body: bytes, record: RequestRecord, key: Key
    ) -> _Read:
        """What is to be known of a body, all of it at once: that of a large one is found out beside the event loop."""
        model = self._table.resolve(fields.get("model"))
        record.model = model
        record.question = record.question or body
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
        run: _Run = Forwarding(self._dispatcher, inference, record).run
        if inference.ignored:
            run = partial(_telling, inference.ignored, run)
        if inference.keeping:
            run = partial(self._conversations.keep, run, inference.keeping)
        return self._admission.admit(visit, inference, estimate, record, client, run)


async def _telling(ignored: Sequence[str], run: _Run, client: Downstream, seat: Seat) -> None:
    """Answer, and say which of the request's parameters had no effect."""
    told = _IGNORED, ", ".join(ignored).encode()
    add_headers(client, lambda: (told,))
    await run(client, seat)


def _takes(path: str) -> str:
    """The methods that a path takes; empty where there is no such path."""
    if path in ROUTES:
        return "POST"
    if path.startswith(f"{responses.PATH}/"):
        _name, _, what = path.removeprefix(f"{responses.PATH}/").partition("/")
        return {"": "GET, DELETE", "input_items": "GET", "cancel": "POST"}.get(what, "")
    if takes := _KEPT_PATHS.get(path.rstrip("/")):
        return takes
    for kind, after in (
        ("/v1/files/", {"": "GET, DELETE", "content": "GET, HEAD"}),
        ("/v1/batches/", {"": "GET", "cancel": "POST"}),
    ):
        if path.startswith(kind):
            return after.get(path.removeprefix(kind).partition("/")[2], "")
    return "GET, HEAD" if path in _GET_PATHS or path.startswith("/v1/models/") else ""


def _refusal(request: Request) -> ServingError:
    path, takes = path_of(request.scope), _takes(path_of(request.scope))
    if takes and request.method not in takes.split(", "):
        asks_for_a_page = request.method == "OPTIONS" and "origin" in request.headers
        why = " Pages of other origins are let in by router.cors." if asks_for_a_page else ""
        return MethodError(f"{path} takes {takes}, not {request.method}.{why}")
    meant = path.rstrip("/"), f"/v1{path}", path.removeprefix("/v1")
    near = next((known for known in meant if known in ROUTES or known in _GET_PATHS), None)
    return UnknownPathError(f"There is no {path} here{f'; {near} is' if near else ''}.")


def _exchange(request: Request) -> Exchange:
    exchange: Exchange = request.scope[EXCHANGE]
    return exchange


async def _on_serving_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServingError)  # noqa: S101  the handler is registered for this class
    if record := _exchange(request).record:
        record.failed(error)
    return _told(error, path_of(request.scope))


def _told(error: ServingError, path: str) -> JSONResponse:
    """An error as an answer, with the headers that belong to it."""
    response = error_response(error)
    match error:
        case MethodError():
            response.headers["allow"] = _takes(path)
        case UnauthorizedError():
            response.headers["www-authenticate"] = "Bearer"
        case TooLargeError() | SlowBodyError() | OverloadedError():
            response.headers["connection"] = "close"  # the rest of the body is not read
    return response


async def _on_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)  # noqa: S101  the handler is registered for this class
    return error.response


async def _on_http_error(request: Request, _: Exception) -> JSONResponse:
    """Starlette's own refusal: no such route, or another method."""
    return await _on_serving_error(request, _refusal(request))


async def _on_disconnect(request: Request, _: Exception) -> Response:
    if record := _exchange(request).record:
        record.cancelled()
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
