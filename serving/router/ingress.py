"""The HTTP front: OpenAI's surface by model name, each request relayed to a slice of that model.

It reads from a body what it needs to route and forwards the body as it came; what the fields mean is vLLM's business.
"""

import asyncio
import logging
import time
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import from_json
from ray import serve
from starlette.exceptions import HTTPException

from serving.errors import BadRequestError, MethodError, ServingError, UnknownModelError, UnknownPathError
from serving.planning import Plan
from serving.router.relay import Relay
from serving.router.table import SliceTable
from serving.slices import board

logger = logging.getLogger("ray.serve")

_ANY_METHOD = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD"]
_GET_PATHS = ("/v1/models", "/health", "/openapi.json")
# vLLM's app also has routes that steer the engine itself.
_NOT_FORWARDED = ("/scale_elastic_ep", "/is_scaling_elastic_ep")


@serve.ingress()
class Router:
    """One router replica: a table of slices kept from the board, and a relay."""

    async def __init__(self, plans: list[Plan], *_slices: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        """`_slices`: the deployments of the slices; that they are bound here is what makes Serve run them."""
        self._plans = {plan.model.name: plan for plan in plans}
        self._started = int(time.time())
        self._table = SliceTable(
            {name: plan.model.replicas.min for name, plan in self._plans.items()},
            {name: str(plan.slice) for name, plan in self._plans.items()},
        )
        self._reader = board.Reader()
        self._relay = Relay(self._table)
        await self._read_board()
        self._reading = asyncio.create_task(self._follow_board())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the app once this replica is made."""
        app = FastAPI(
            title="tpu-serving", description="OpenAI-compatible inference on TPU slices.", docs_url=None
        )
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/v1/models/{name:path}", self.model)
        app.add_api_route("/health", self.health)
        app.add_api_route("/{path:path}", self.forward, methods=_ANY_METHOD, include_in_schema=False)
        app.add_exception_handler(ServingError, _on_serving_error)
        app.add_exception_handler(HTTPException, _on_http_error)
        app.add_exception_handler(Exception, _on_bug)
        return app

    async def models(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._plans]})

    async def model(self, name: str) -> JSONResponse:
        return JSONResponse(self._card(self._table.resolve(name)))

    async def health(self) -> Response:
        """200 while every model has a slice that serves, else 503 naming the first that has none."""
        for name in self._plans:
            self._table.choose(name)
        return Response(status_code=HTTPStatus.OK)

    async def forward(self, request: Request, path: str) -> Any:
        """Every POST endpoint of vLLM's app, to a slice of the model that the body names."""
        if request.method != "POST":
            raise _refusal(request.method, f"/{path}")
        if f"/{path}" in _NOT_FORWARDED:
            raise UnknownPathError(f"There is no /{path} here.")
        body = await request.body()
        fields = await _fields(request, body)
        return self._relay.answer(request, self._table.resolve(fields.get("model")), body)

    def _card(self, name: str) -> dict[str, Any]:
        plan = self._plans[name]
        entries = self._table.entries(name)
        serving = [entry for entry in entries if entry.serves]
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "tpu-serving",
            "root": plan.model.model,
            "max_model_len": serving[0].max_model_len if serving else None,
            "slice": str(plan.slice),
            "parallel": {"tensor": plan.tensor, "pipeline": plan.pipeline},
            "slices_ready": len(serving),
            "simulated": any(entry.simulated for entry in entries),
        }

    async def __del__(self) -> None:
        self._reading.cancel()
        for name in self._plans:
            await asyncio.to_thread(board.unwant, name)

    async def _follow_board(self) -> None:
        while True:
            await asyncio.sleep(board.BEAT_S)
            try:
                await self._read_board()
            except Exception:
                # The table stays as it was: slices go on answering while the head restarts.
                logger.exception("the board can't be read; routing by the last view of it")

    async def _read_board(self) -> None:
        found = await asyncio.to_thread(board.read)
        now_s = time.monotonic()
        entries, forgotten = self._reader.live(found, now_s)
        self._table.update(entries, now_s)
        await asyncio.to_thread(_write_board, self._table.wanted(now_s), forgotten)


def _write_board(wanted: list[board.Wanted], forgotten: list[str]) -> None:
    for one in wanted:
        board.want(one)
    for replica in forgotten:
        board.delete(replica)


async def _fields(request: Request, body: bytes) -> dict[str, Any]:
    """The fields of a JSON or form body; raises BadRequestError."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        async with request.form() as form:
            return dict(form)
    if not body:
        raise BadRequestError("The request has no body; a JSON object is needed.")
    try:
        fields = from_json(body)
    except ValueError as error:
        raise BadRequestError(f"The request body is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise BadRequestError(f"The request body is a JSON {type(fields).__name__}; an object is needed.")
    return fields


def _refusal(method: str, path: str) -> ServingError:
    if method == "GET" and not path.startswith("/v1/"):
        return UnknownPathError(f"There is no {path} here.")
    takes = "GET" if path in _GET_PATHS else "POST"
    return MethodError(f"{path} takes {takes}, not {method}.")


async def _on_serving_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServingError)  # noqa: S101  that is what it is registered for
    body = error.openai_body()
    if isinstance(error, UnknownModelError):
        body["error"]["param"] = "model"
    return JSONResponse(body, status_code=error.status)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    known: ServingError = UnknownPathError(f"There is no {request.url.path} here.")
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        known = _refusal(request.method, request.url.path)
    return JSONResponse(known.openai_body(), status_code=known.status)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    logger.error("unhandled error on %s %s", request.method, request.url.path, exc_info=error)
    return JSONResponse(
        ServingError("Internal error.").openai_body(), status_code=HTTPStatus.INTERNAL_SERVER_ERROR
    )
