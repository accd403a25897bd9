"""vLLM's HTTP surface in front of a simulated engine: the paths that clients, routers and dashboards use.

Two tasks serve a request: one waits for the engine's tokens, the other for the client to go away. The first to end ends
the other, and a request that nobody reads is cancelled in the engine.
"""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serving.asgi import unless_gone
from serving.errors import SimulationError, SliceLostError
from serving.planning import Plan
from serving.simulation.engine import messages, responses, tokenizer
from serving.simulation.engine.engine import Engine, Stream
from serving.simulation.engine.faults import Faults
from serving.simulation.engine.messages import MessagesReply
from serving.simulation.engine.orders import Order, RequestError
from serving.simulation.engine.replies import Reply
from serving.simulation.engine.requests import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from serving.simulation.engine.responses import ResponsesReply
from serving.simulation.engine.spans import EngineSpans

_MESSAGES = "/v1/messages"
_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
AnyReply = Reply | MessagesReply | ResponsesReply


class EngineApi:
    """The paths of one engine."""

    def __init__(self, plan: Plan, engine: Engine, spans: EngineSpans | None = None) -> None:
        self._plan = plan
        self._engine = engine
        self._spans = spans
        self._seed = int(plan.engine.get("seed") or 0)
        self._created = int(time.time())

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route(_MESSAGES, self.messages, methods=["POST"]),
            Route(f"{_MESSAGES}/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/simulator/faults", self.faults, methods=["GET", "POST", "DELETE"]),
            Route("/simulator/cache", self.cache),
        ]
        handlers = {
            RequestError: _on_request_error,
            HTTPException: _on_http_error,
            SimulationError: _on_refusal,
            Exception: _on_bug,
        }
        return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]

    async def chat(self, request: Request) -> Response:
        body = ChatBody.read(await _fields(request))
        self._check(body.model)
        order = body.to_order(self._plan.fit.max_model_len, self._seed, parses_tools=self._parses_tools)
        return self._answer(request, order)

    async def messages(self, request: Request) -> Response:
        fields = await _fields(request)
        self._check(fields.get("model"))
        length = self._plan.fit.max_model_len
        order = self._as_told(messages.order_of(fields, length, self._seed, parses_tools=self._parses_tools))
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        reply = MessagesReply(order, self._plan.model.name, request_id)
        return self._generated(request, order, reply, request_id)

    async def count_tokens(self, request: Request) -> Response:
        fields = await _fields(request)
        self._check(fields.get("model"))
        count = len(messages.prompt_of(fields))
        return _json({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    async def responses(self, request: Request) -> Response:
        fields = await _fields(request)
        self._check(fields.get("model"))
        length = self._plan.fit.max_model_len
        order = self._as_told(responses.order_of(fields, length, self._seed, parses_tools=self._parses_tools))
        # vLLM gives a response an id of its own, whatever the request's is.
        request_id = uuid.uuid4().hex
        reply = ResponsesReply(order, fields, self._plan.model.name, request_id, int(time.time()))
        return self._generated(request, order, reply, request_id)

    async def completions(self, request: Request) -> Response:
        body = CompletionBody.read(await _fields(request))
        self._check(body.model)
        return self._answer(request, body.to_order(self._plan.fit.max_model_len, self._seed))

    async def models(self, _: Request) -> Response:
        card = {
            "id": self._plan.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._plan.model.model,
            "parent": None,
            "max_model_len": self._plan.fit.max_model_len,
            "permission": [],
            "simulated": True,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(self, request: Request) -> Response:
        body = TokenizeBody.read(await _fields(request))
        self._check(body.model)
        tokens = body.tokens()
        texts = [tokenizer.decode((token,)) for token in tokens] if body.return_token_strs else None
        length = self._plan.fit.max_model_len
        return _json({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": texts})

    async def detokenize(self, request: Request) -> Response:
        body = DetokenizeBody.read(await _fields(request))
        self._check(body.model)
        return _json({"prompt": tokenizer.decode(body.tokens)})

    async def health(self, _: Request) -> Response:
        try:
            await self._engine.probe()
        except SliceLostError:
            return Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE)
        return Response(status_code=HTTPStatus.OK)

    async def metrics(self, _: Request) -> Response:
        return Response(self._engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def faults(self, request: Request) -> Response:
        match request.method:
            case "POST":
                self._engine.inject(await _fields(request))
            case "DELETE":
                self._engine.inject(vars(Faults()))
        return JSONResponse(vars(self._engine.faults))

    async def cache(self, _: Request) -> Response:
        """What a slice says of its prefix cache in its record."""
        return JSONResponse({"age_s": self._engine.cache_age_s(time.monotonic())})

    def _check(self, model: str | None) -> None:
        if self._engine.faults.refuse:
            raise RequestError(
                "The engine refuses requests, as it was told to.",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                kind="ServiceUnavailableError",
            )
        if self._engine.fails_now():
            raise _internal("The engine failed this request, as it was told to.")
        if model and model not in (self._plan.model.name, *self._plan.adapters):
            raise RequestError(
                f"The model `{model}` does not exist.",
                status=HTTPStatus.NOT_FOUND,
                kind="NotFoundError",
                param="model",
            )

    def _answer(self, request: Request, order: Order) -> Response:
        request_id = order.request_id or request.headers.get("x-request-id") or uuid.uuid4().hex
        order = self._as_told(order)
        reply = Reply(order, self._plan.model.name, request_id, int(time.time()))
        return self._generated(request, order, reply, request_id)

    def _as_told(self, order: Order) -> Order:
        """With other words where the engine was told to give wrong ones."""
        if self._engine.faults.corrupt:
            return replace(order, wish=replace(order.wish, seed=order.wish.seed + 1))
        return order

    def _generated(self, request: Request, order: Order, reply: AnyReply, request_id: str) -> Response:
        end_span = self._spans.of(request.headers, request_id) if self._spans else None
        return _Generated(self._engine, order, reply, end_span)

    @property
    def _parses_tools(self) -> bool:
        return bool(self._plan.engine.get("tool_call_parser"))


class _Generated(Response):
    """An ASGI response that sends tokens as they come."""

    def __init__(
        self,
        engine: Engine,
        order: Order,
        reply: AnyReply,
        end_span: Callable[[Stream], None] | None = None,
    ) -> None:
        super().__init__()
        self._end_span = end_span
        self._engine = engine
        self._order = order
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = Stream(self._reply.id)
        try:
            for prompt, answer in self._reply.answers:
                if answer.tokens:  # another engine may have given them all
                    self._engine.submit(stream, prompt, answer.tokens, answer.finish, self._order.cache_salt)
        except SliceLostError as error:
            await _on_request_error(Request(scope), _internal(error.message))(scope, receive, send)
            return
        write = self._stream if self._order.stream else self._whole
        try:
            await unless_gone(write(stream, scope, receive, send), receive)
        finally:
            self._engine.cancel(stream)
            if self._end_span:
                self._end_span(stream)

    async def _stream(self, stream: Stream, _: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": _EVENT_STREAM})
        head = self._reply.opening()
        if self._reply.at_once:
            await send({"type": "http.response.body", "body": head, "more_body": True})
            head = b""
        try:
            while not stream.done:
                await stream.more()
                await send(
                    {"type": "http.response.body", "body": head + self._new_events(stream), "more_body": True}
                )
                head = b""
        except SliceLostError as error:
            end = self._reply.failure(error.message)
            if end is None:
                raise
        else:
            end = head + self._reply.ending()
        await send({"type": "http.response.body", "body": end})

    async def _whole(self, stream: Stream, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while not stream.done:
                await stream.more()
        except SliceLostError as error:
            response = _on_request_error(Request(scope), _internal(error.message))
        else:
            response = _json(self._reply.whole())
        await response(scope, receive, send)

    def _new_events(self, stream: Stream) -> bytes:
        """Events of the tokens written since the last call."""
        events = b""
        for choice in stream.choices:
            if choice.sent < choice.request.written:
                events += self._reply.chunks(choice.index, choice.sent, choice.request.written)
                choice.sent = choice.request.written
        return events


async def _fields(request: Request) -> Any:
    """A JSON body; raises RequestError."""
    if request.headers.get("content-type", "").lower().split(";", 1)[0] != "application/json":
        raise RequestError(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            kind=HTTPStatus.BAD_REQUEST.phrase,
        )
    try:
        fields = json.loads(await request.body())
    except ValueError as error:
        raise RequestError(
            f"1 validation error:\n  {{'type': 'json_invalid', 'msg': 'JSON decode error', 'ctx': {str(error)!r}}}",
            kind=HTTPStatus.BAD_REQUEST.phrase,
        ) from None
    if not isinstance(fields, dict):
        raise RequestError(
            "1 validation error:\n  a JSON object is needed", kind=HTTPStatus.BAD_REQUEST.phrase
        )
    return fields


def _json(body: Any) -> Response:
    """JSON that may hold half characters: a prompt of ids can spell them."""
    raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
    return Response(raw, media_type="application/json")


def _internal(message: str) -> RequestError:
    return RequestError(message, status=HTTPStatus.INTERNAL_SERVER_ERROR, kind="InternalServerError")


def _on_request_error(request: Request, error: RequestError) -> Response:
    body: dict[str, Any] = error.body
    if request.url.path.startswith(_MESSAGES):
        problem = body["error"]
        body = {"type": "error", "error": {"type": problem["type"], "message": problem["message"]}}
    return JSONResponse(body, status_code=error.status)


def _on_refusal(_: Request, error: SimulationError) -> Response:
    return JSONResponse(error.openai_body(), status_code=HTTPStatus.BAD_REQUEST)


def _on_http_error(_: Request, error: HTTPException) -> Response:
    """A path or method that does not exist, in FastAPI's words."""
    return JSONResponse({"detail": error.detail}, status_code=error.status_code, headers=error.headers)


def _on_bug(_: Request, error: Exception) -> Response:
    """Starlette logs the error with its traceback."""
    body = _internal(f"Internal error: {type(error).__name__}").body
    return JSONResponse(body, HTTPStatus.INTERNAL_SERVER_ERROR)
