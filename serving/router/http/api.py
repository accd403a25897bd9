"""The HTTP surface: OpenAI's by model name, and the pages that tell how the service is. Knows nothing of Serve."""

import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from serving.errors import NoSliceError, ServingError
from serving.metrics.exposition import CONTENT_TYPE
from serving.planning import Plan
from serving.router.admission.controller import AdmissionController
from serving.router.admission.visit import RefusedError
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.http.envelope import Envelope, exchange_of, path_of
from serving.router.http.files_and_batches import FilesAndBatches
from serving.router.http.inference import Inference
from serving.router.http.kept_files import KeptFiles
from serving.router.http.model_list import ModelList
from serving.router.http.openapi import document
from serving.router.http.paths import answer_to, refusal
from serving.router.http.response_store import ResponseStore
from serving.router.http.visits import check_tells, tells
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.journal import Journal
from serving.status import page
from serving.status.document import Status
from serving.timings import TIMINGS

_HEADS = (
    "/v1/models",
    "/v1/models/{name:path}",
    "/health",
    "/status.json",
    "/metrics",
    "/v1/files/{name}/content",
)
_CLIENT_CLOSED_REQUEST = 499  # nginx's number; no client is left to read it
_TOLD_AGAIN_S = TIMINGS.beat_s / 2  # within half a beat nothing new is known


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
        self._table = table
        self._admission = admission
        self._status = status
        self._metrics = metrics
        self.inference = Inference(plans, table, dispatcher, admission, journal, store)
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
        for part in (self.inference.conversations, self._files_and_batches):
            app.include_router(part.router())
        app.add_route("/{path:path}", self.inference.forward, methods=["POST"], include_in_schema=False)
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
        app.add_middleware(Envelope, returns_id=returns_id, cors=self.inference.cors)
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
        check_tells(self._admission, request)
        # Of 1,000 slices it takes 7 ms to make, and whoever reaches the door may ask for it.
        if time.monotonic() - self._status_page_s > _TOLD_AGAIN_S:
            self._status_page = self._status().model_dump_json().encode()
            self._status_page_s = time.monotonic()
        return Response(
            self._status_page, media_type="application/json", headers={"cache-control": "no-store"}
        )

    async def metrics(self, request: Request) -> Response:
        """Every metric of the service, its slices' engines included, for Prometheus."""
        check_tells(self._admission, request)
        return Response(await self._metrics(), media_type=CONTENT_TYPE)


async def _on_serving_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServingError)  # noqa: S101  the handler is registered for this class
    if record := exchange_of(request.scope).record:
        record.failed(error)
    return answer_to(error, path_of(request.scope))


async def _on_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)  # noqa: S101  the handler is registered for this class
    return error.response


async def _on_http_error(request: Request, _: Exception) -> JSONResponse:
    """Starlette's own refusal: no such route, or another method."""
    return await _on_serving_error(request, refusal(request))


async def _on_disconnect(request: Request, _: Exception) -> Response:
    if record := exchange_of(request.scope).record:
        record.cancelled()
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
