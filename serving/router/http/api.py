"""The HTTP surface: OpenAI's by model name, each request forwarded to a slice of that model. Knows nothing of Serve.

It reads from a body what it needs to route, and forwards the body as it came; vLLM knows what the fields mean.
"""

import asyncio
import json
import logging
import math
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from serving.engine import known_faults
from serving.errors import (
    BadRequestError,
    MethodError,
    NoSliceError,
    NoStoreError,
    OverloadedError,
    PreviousResponseError,
    ServingError,
    SlowBodyError,
    TooLargeError,
    UnauthorizedError,
    UnknownPathError,
    UnknownResponseError,
)
from serving.metrics.exposition import CONTENT_TYPE
from serving.planning import Plan
from serving.router.admission.controller import AdmissionController, RefusedError, Visit
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.forwarding.response import Forwarding
from serving.router.forwarding.seat import Seat
from serving.router.http import anthropic_models, responses, seed
from serving.router.http.auth import Key
from serving.router.http.downstream import Downstream, OverAsgi, respond
from serving.router.http.envelope import EXCHANGE, Envelope, Exchange
from serving.router.http.errors import error_response
from serving.router.http.isolation import salted
from serving.router.http.keeper import Keeper
from serving.router.http.kept_files import Download, KeptFiles
from serving.router.http.openapi import document
from serving.router.http.parsing import Parsing
from serving.router.http.protocol import InferenceRequest
from serving.router.http.response_store import ResponseStore
from serving.router.http.responses import Keeping, Kept
from serving.router.http.routes import ROUTES, Route
from serving.router.http.validation import Checked, Estimate, check, form, is_form, kept, parse
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.journal import Journal
from serving.router.telemetry.record import RequestRecord
from serving.status import page
from serving.status.document import Status

logger = logging.getLogger("ray.serve")

_GET_PATHS = ("/v1/models", "/health", "/metrics", "/openapi.json", "/status.json", *page.PATHS)
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
        self._responses = store
        self._kept = kept
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
        self._started = int(time.time())
        self._status_page, self._status_page_s = b"", -math.inf

    def app(self, *, returns_id: bool = True) -> FastAPI:
        """`returns_id`: whether answers get their X-Request-Id here."""
        app = FastAPI(
            title="tpu-serving",
            description="OpenAI-compatible inference on TPU slices.",
            docs_url=None,
            openapi_url=None,  # it would write the document out for each request
        )
        app.add_api_route("/v1/responses/{name}", self.response, methods=["GET"])
        app.add_api_route("/v1/responses/{name}", self.delete_response, methods=["DELETE"])
        app.add_api_route("/v1/responses/{name}/input_items", self.input_items, methods=["GET"])
        app.add_api_route("/v1/responses/{name}/cancel", self.cancel_response, methods=["POST"])
        kept: tuple[tuple[str, Callable[..., Any], str], ...] = (
            ("/v1/files", self.upload_file, "POST"),
            ("/v1/files", self.files, "GET"),
            ("/v1/files/{name}", self.file, "GET"),
            ("/v1/files/{name}", self.delete_file, "DELETE"),
            ("/v1/files/{name}/content", self.file_content, "GET"),
            ("/v1/batches", self.create_batch, "POST"),
            ("/v1/batches", self.batches, "GET"),
            ("/v1/batches/{name}", self.batch, "GET"),
            ("/v1/batches/{name}/cancel", self.cancel_batch, "POST"),
            ("/v1/usage", self.usage, "GET"),
        )
        for path, endpoint, method in kept:
            app.add_api_route(path, endpoint, methods=[method], response_model=None)
        app.add_route("/{path:path}", self.forward, methods=["POST"], include_in_schema=False)
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/v1/models/{name:path}", self.model)
        app.add_api_route("/health", self.health, response_class=Response)
        app.add_api_route("/status.json", self.status, response_model=Status)
        for path, handler in page.routes():
            app.add_route(path, handler, include_in_schema=False)
        app.add_api_route("/metrics", self.metrics, response_class=PlainTextResponse)
        heads: tuple[tuple[str, Callable[..., Any]], ...] = (
            ("/v1/models", self.models),
            ("/v1/models/{name:path}", self.model),
            ("/health", self.health),
            ("/status.json", self.status),
            ("/metrics", self.metrics),
            ("/v1/files/{name}/content", self.file_content),
        )
        for path, endpoint in heads:  # FastAPI adds no HEAD to a GET; load balancers probe with it
            app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
        app.add_middleware(Envelope, returns_id=returns_id)
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

    async def models(self, request: Request) -> JSONResponse:
        """Every model and adapter by the name to ask for, with its slice, how many serve, and whether they are simulated.

        In Anthropic's shape where the request has the header `anthropic-version`.
        """
        names = [*reversed(self._plans), *self._table.adapters]
        if anthropic_models.VERSION in request.headers:
            cards = [self._anthropic_card(request, name) for name in names]
            return JSONResponse(anthropic_models.page(cards, request.query_params))
        card = self._card if self._tells(request) else self._name_card
        return JSONResponse({"object": "list", "data": [card(name) for name in names]})

    async def model(self, request: Request, name: str) -> JSONResponse:
        """The same of one of them."""
        self._table.resolve(name)
        if anthropic_models.VERSION in request.headers:
            return JSONResponse(self._anthropic_card(request, name))
        return JSONResponse(self._card(name) if self._tells(request) else self._name_card(name))

    async def health(self, request: Request) -> Response:
        """200 while every model has a slice that serves, else 503 naming the first that has none."""
        for name in self._plans:
            try:
                self._table.choose(name)
            except NoSliceError:
                if self._tells(request):
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

    async def response(self, request: Request, name: str) -> Response:
        """A response that is stored, for the key that asked for it (`router.responses_store`)."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise BadRequestError("stream: a stored response is given whole; leave it out.")
        return await self._of_stored(request, name, lambda kept: kept.response)

    async def delete_response(self, request: Request, name: str) -> JSONResponse:
        """Forget a stored response."""
        async with self._asked_by(request) as visit:
            if not (self._responses and await self._responses.delete(visit.account.key.sha256, name)):
                raise self._unknown_response()
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: Request, name: str) -> Response:
        """The items that a stored response answers, those of earlier responses among them."""
        return await self._of_stored(
            request, name, lambda kept: responses.listed(kept.items, request.query_params)
        )

    async def cancel_response(self, request: Request, name: str) -> JSONResponse:
        """Always an error: only responses in the background can be cancelled, and none runs there."""
        await self._of_stored(request, name, lambda kept: kept.response)
        raise BadRequestError(
            "Only a response in the background can be cancelled, and this service runs none there."
        )

    async def upload_file(self, request: Request) -> Response:
        """Keep a file of JSON lines for a batch (`store`)."""
        return await self._of_key(request)

    async def files(self, request: Request) -> Response:
        """The key's own files, the newest first."""
        return await self._of_key(request)

    async def file(self, request: Request, name: str) -> Response:  # noqa: ARG002  the path has it
        """One of them."""
        return await self._of_key(request)

    async def delete_file(self, request: Request, name: str) -> Response:  # noqa: ARG002
        """Forget a file, unless a batch still reads it."""
        return await self._of_key(request)

    async def file_content(self, request: Request, name: str) -> Response:  # noqa: ARG002
        """What a file has in it."""
        return await self._of_key(request)

    async def create_batch(self, request: Request) -> Response:
        """Have every line of a file answered when there are free seats."""
        return await self._of_key(request)

    async def batches(self, request: Request) -> Response:
        """The key's own batches, the newest first."""
        return await self._of_key(request)

    async def batch(self, request: Request, name: str) -> Response:  # noqa: ARG002
        """One of them: how far it is, and the files of its results."""
        return await self._of_key(request)

    async def cancel_batch(self, request: Request, name: str) -> Response:  # noqa: ARG002
        """End a batch; the results that there are stay."""
        return await self._of_key(request)

    async def usage(
        self,
        request: Request,
        start: str | None = None,  # noqa: ARG002  the store reads them
        end: str | None = None,  # noqa: ARG002
    ) -> Response:
        """What the key has used by day, model and pool, from the day `start` to `end`, and how far its budgets are."""
        async with self._asked_by(request) as visit:
            if self._kept is None:
                raise NoStoreError("This service adds up no usage (store).")
            answer = await self._kept.ask(
                request, _path(request), visit.account.key.id, visit.owner, self._admission.bodies
            )
            if answer.status_code != HTTPStatus.OK:
                return answer
            budgets = self._admission.budgets(visit)
            return JSONResponse(json.loads(bytes(answer.body)) | {"budgets": budgets})

    async def _of_key(self, request: Request) -> Response:
        """Ask the process that keeps files and batches, for the key that asks here."""
        async with AsyncExitStack() as visiting:
            visit = await visiting.enter_async_context(self._asked_by(request))
            if self._kept is None:
                raise NoStoreError("This service keeps no files and runs no batches (store).")
            key = visit.account.key.sha256
            response = await self._kept.ask(request, _path(request), key, visit.owner, self._admission.bodies)
            if isinstance(response, Download):  # its client is here until all is sent
                response.ending.push_async_callback(visiting.pop_all().aclose)
            return response

    async def forward(self, request: Request) -> Any:
        """Forward a request to a slice of the model that its body names."""
        record = self._journal.begin(_path(request), request.headers)
        _exchange(request).record = record
        visit, inference, estimate = await self._accept(request, record)
        return OverAsgi(partial(self._carry, visit, inference, estimate, record))

    def relay(self, request: Request, client: Downstream) -> Awaitable[None]:
        """The same outside of any ASGI app, from the request's headers to the answer's end. Cancelled where the client goes."""
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
        path = _path(request)
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
            whole, keeping = await self._following(visit, fields, body)
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
            run = partial(self._keep, run, inference.keeping)
        return self._admission.admit(visit, inference, estimate, record, client, run)

    async def _of_stored(self, request: Request, name: str, look: Callable[[Kept], bytes]) -> Response:
        """What `look` finds in a stored response, as JSON."""
        async with self._asked_by(request) as visit:
            if kept := await self._kept_response(visit, name, math.inf):
                found = await self._parsing.run(partial(look, kept), kept.size_bytes, visit.owner)
                return Response(found, media_type="application/json")
        raise self._unknown_response()

    async def _kept_response(self, visit: Visit, name: str, most_bytes: float) -> Kept | None:
        """A stored response, held as a body of the key's is; raises TooLargeError and OverloadedError."""
        sha256 = visit.account.key.sha256
        if self._responses is None or (size_bytes := await self._responses.size_bytes(sha256, name)) is None:
            return None
        if size_bytes > most_bytes:
            raise self._conversation_too_large(size_bytes)
        await self._admission.bodies.add(visit, size_bytes)
        return await self._responses.get(sha256, name)

    @asynccontextmanager
    async def _asked_by(self, request: Request) -> AsyncIterator[Visit]:
        """A request that no slice answers; raises UnauthorizedError and RefusedError."""
        try:
            visit = self._admission.arrive(request.headers.raw, costs=False)
        except ServingError:
            await self._admission.hold_up_strangers()
            raise
        try:
            if visit.refusal:
                await self._admission.hold_up(visit)
                raise self._admission.refused(visit, body_is_over=True)
            yield visit
        finally:
            self._admission.leave(visit)

    def _unknown_response(self) -> UnknownResponseError:
        if self._responses:
            return UnknownResponseError(
                "No response of this id is stored here (none of more than 1 MiB is), or it is another key's."
            )
        return UnknownResponseError("This service stores no responses (router.responses_store).")

    async def _following(
        self, visit: Visit, fields: Mapping[str, Any], body: bytes
    ) -> tuple[bytes, Keeping | None]:
        """The body of /v1/responses with the conversation before it, and what to keep its answer with.

        Raises PreviousResponseError, and for a conversation as for a body of its size.
        """
        before = responses.previous_id(fields)
        most_bytes = self._admission.spec.max_body_bytes
        if before:
            # What a response says of its request, tools and all, is stored with it and not sent again.
            previous = await self._kept_response(visit, before, 2 * most_bytes)
            if previous is None:
                raise PreviousResponseError(
                    "The response of previous_response_id is not stored here (none of more than 1 MiB is), or it is another key's; send the whole "
                    "conversation in input."
                    if self._responses
                    else "This service stores no responses (router.responses_store); send the whole conversation in input."
                )
            join = partial(responses.following, fields, previous)
            body, items = await self._parsing.run(join, len(body) + previous.size_bytes, visit.owner)
            if len(body) > most_bytes:
                raise self._conversation_too_large(len(body))
        elif self._responses:
            items = await self._parsing.run(partial(responses.items, fields), len(body), visit.owner)
        if self._responses is None or fields.get("store") is False:
            return body, None
        return body, Keeping(visit.account.key.sha256, items, before)

    def _conversation_too_large(self, size_bytes: int) -> TooLargeError:
        return TooLargeError(
            f"The conversation of previous_response_id has {size_bytes} bytes with this request, and this service takes "
            f"{self._admission.spec.max_body_bytes} (router.max_body_bytes); begin a new one."
        )

    async def _keep(self, run: _Run, keeping: Keeping, client: Downstream, seat: Seat) -> None:
        """Answer, and keep the response before its client has its end."""
        assert self._responses is not None  # noqa: S101  what is kept has a store
        keeper = Keeper(client, keeping.previous_id)
        await run(keeper, seat)
        if keeper.response:
            try:
                await self._responses.put(keeping, keeper.response)
            except sqlite3.Error:
                logger.exception("router.responses_store: a response is not kept")
        keeper.finish()

    def _tells(self, request: Request) -> bool:
        """Whether this client may know how slices are, and where."""
        try:
            self._admission.status_is_open_to(request.headers.raw)
        except UnauthorizedError:
            return False
        return True

    def _name_card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "tpu-serving"}

    def _anthropic_card(self, request: Request, name: str) -> dict[str, Any]:
        longest = self._card(name)["max_model_len"] if self._tells(request) else None
        return anthropic_models.card(name, self._started, longest)

    def _card(self, name: str) -> dict[str, Any]:
        model = self._table.resolve(name)
        plan = self._plans[model]
        entries = self._table.entries(model)
        serving = [entry for entry in entries if entry.serves]
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "tpu-serving",
            "root": plan.model.model,
            "parent": None if name == model else model,
            "max_model_len": serving[0].max_model_len if serving else None,
            "slice": str(plan.slice),
            "parallel": {"tensor": plan.tensor, "pipeline": plan.pipeline},
            "slices_ready": len(serving),
            "simulated": any(entry.simulated for entry in entries),
        }


async def _telling(ignored: Sequence[str], run: _Run, client: Downstream, seat: Seat) -> None:
    """Answer, and say which of the request's parameters had no effect."""
    more_headers, told = client.more_headers, (_IGNORED, ", ".join(ignored).encode())
    client.more_headers = lambda: [*(more_headers() if more_headers else ()), told]
    await run(client, seat)


def _path(request: Request) -> str:
    """The path below the application's route prefix."""
    return str(request.scope["path"]).removeprefix(request.scope.get("root_path", ""))


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
    path, takes = _path(request), _takes(_path(request))
    if takes and request.method not in takes.split(", "):
        return MethodError(f"{path} takes {takes}, not {request.method}.")
    return UnknownPathError(f"There is no {path} here.")


def _exchange(request: Request) -> Exchange:
    exchange: Exchange = request.scope[EXCHANGE]
    return exchange


async def _on_serving_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServingError)  # noqa: S101  the handler is registered for this class
    if record := _exchange(request).record:
        record.failed(error)
    return _told(error, _path(request))


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
