"""Wraps every answer: gives it the request's id, and an error the shape that the route's clients parse.

Errors come from this router, from an engine that refuses, and from the libraries around the engine. A client's mistake keeps
the words of the part that found it; an engine's words on its own failure stay in its log.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Iterable
from http import HTTPStatus
from http.client import responses
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import ServingError
from serving.router.http import sse
from serving.router.http.anthropic_models import VERSION
from serving.router.http.cors import Cors
from serving.router.http.engine_words import field, in_our_words
from serving.router.http.errors import anthropic_body, error_response
from serving.router.http.routes import Dialect, dialect_of
from serving.router.telemetry.journal import request_id
from serving.router.telemetry.record import RequestRecord

logger = logging.getLogger("ray.serve")

ID_HEADER = b"x-request-id"
_ANTHROPIC_ID_HEADER = b"request-id"
_ANTHROPIC_VERSION = VERSION.encode()
# The key of the exchange in a request's scope; the surface gives the exchange the request's record.
EXCHANGE = "serving.exchange"
# What a client reads of an engine's 500; other errors keep their own words.
_ENGINE_FAILED = "The engine failed on this request."
_LENGTH_AND_TYPE = (b"content-length", b"content-type")
Headers = Iterable[tuple[bytes, bytes]]


class Envelope:
    """An ASGI app around the router's. It alone ends a request: it writes the record out."""

    def __init__(self, app: ASGIApp, *, returns_id: bool = True, cors: Cors | None = None) -> None:
        """`returns_id`: false where the server puts the id on answers. `cors`: whose pages may ask by a browser."""
        self._app = app
        self._returns_id = returns_id
        self._cors = cors or Cors(())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope, name = with_id(scope)
        path = path_of(scope)
        anthropic = dialect_of(path) is Dialect.ANTHROPIC or any(
            header == _ANTHROPIC_VERSION for header, _ in scope["headers"]
        )
        own = id_headers(name, anthropic=anthropic)[0 if self._returns_id else 1 :]
        own += self._cors.headers(scope["headers"])
        exchange = Exchange(send, Shape(name, anthropic=anthropic), own)
        scope[EXCHANGE] = exchange
        try:
            allowed = self._cors.preflight(scope["method"], scope["headers"])
            if allowed is not None:
                await exchange(
                    {"type": "http.response.start", "status": HTTPStatus.NO_CONTENT, "headers": allowed}
                )
                await exchange({"type": "http.response.body"})
                return
            await self._app(scope, receive, exchange)
        except asyncio.CancelledError:  # Serve looks out for the client too
            if exchange.record:
                exchange.record.cancelled()
            raise
        except Exception:
            logger.exception("unhandled error on %s %s, request %s", scope["method"], path, name.decode())
            error = ServingError("Internal error.")
            if exchange.record:
                exchange.record.failed(error)
            if exchange.started:
                raise  # the server cuts the connection: to the client the answer must not look complete
            await error_response(error)(scope, receive, exchange)
        finally:
            if exchange.record:
                exchange.record.end()


class Exchange:
    """One request's ASGI `send`, and its record once there is one. A good answer has only its headers changed."""

    def __init__(self, send: Send, shape: "Shape", own_headers: Headers) -> None:
        """`own_headers` are put on every answer."""
        self._send = send
        self._shape = shape
        self._own_headers = own_headers
        self.started = False
        self._error: Message | None = None
        self._body = b""
        self.record: RequestRecord | None = None

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            headers = [header for header in message.get("headers", ()) if header[0] != ID_HEADER]
            message = {**message, "headers": [*headers, *self._own_headers]}
            if message["status"] >= HTTPStatus.BAD_REQUEST:
                self._error = message
                return _nothing()
        elif self._error is not None:
            return self._collect(message)
        elif sse.has_error(message.get("body", b"")):
            message = {**message, "body": self._shape.events(message["body"])}
        self.started = True
        return self._send(message)

    async def _collect(self, message: Message) -> None:
        """Collect an error's body, and send it once it is whole."""
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        start, self._error = self._error, None
        assert start is not None  # noqa: S101  `_error` is set before this is called
        headers, body = self._shape.error(start["status"], start["headers"], self._body)
        self.started = True
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


class Shape:
    """The errors of one request, as the clients of its route parse them."""

    def __init__(self, name: bytes, *, anthropic: bool) -> None:
        """`name` is the request's id."""
        self._name = name
        self._anthropic = anthropic

    def error(self, status: int, headers: Headers, body: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """An error's headers and body, made from those of any origin. The answer to a client that left has no body."""
        if body:
            error = error_object(body, status)
            fields = _anthropic(error["message"], status, self._name) if self._anthropic else {"error": error}
            body = json.dumps(fields).encode()
        kept = [header for header in headers if header[0] not in _LENGTH_AND_TYPE]
        length = (b"content-length", b"%d" % len(body))
        return [*kept, length, (b"content-type", b"application/json")], body

    def events(self, data: bytes) -> bytes:
        """Events of a stream with the errors among them in the route's own shape; the others stay."""
        return b"".join(
            [self._event(event) if event.startswith(sse.ERROR) else event for event in sse.split(data)]
        )

    def _event(self, failed: bytes) -> bytes:
        error = error_object(failed.removeprefix(sse.DATA), HTTPStatus.INTERNAL_SERVER_ERROR)
        if not self._anthropic:
            return sse.event({"error": error})
        return sse.event(_anthropic(error["message"], HTTPStatus.INTERNAL_SERVER_ERROR, self._name), "error")


def error_object(body: bytes, status: int) -> dict[str, Any]:
    """OpenAI's error object, made from an error's body."""
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    error = fields.get("error", fields) if isinstance(fields, dict) else {}
    error = error if isinstance(error, dict) else {"message": error}
    kind, code = error.get("type"), error.get("code")
    ours = isinstance(code, str) and code != ""
    if isinstance(code, int) and code in responses:
        status = code  # an engine's code is the status, in a stream the only one
    message = error.get("message") or error.get("detail")
    if not isinstance(message, str) or (status == HTTPStatus.INTERNAL_SERVER_ERROR and not ours):
        message = _ENGINE_FAILED if status >= HTTPStatus.INTERNAL_SERVER_ERROR else _phrase(status)
    if not ours:
        kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else ServingError.kind
    return {
        "message": in_our_words(message),
        "type": kind,
        "param": error.get("param") if ours else field(error.get("param")),
        "code": code if ours else _code(status),
    }


def _anthropic(message: str, status: int, name: bytes) -> dict[str, Any]:
    return {**anthropic_body(message, status), "request_id": name.decode("ascii")}


def id_headers(name: bytes, *, anthropic: bool) -> tuple[tuple[bytes, bytes], ...]:
    """An answer's headers with the request's id: ours, and the one that Anthropic's clients look for."""
    return ((ID_HEADER, name), (_ANTHROPIC_ID_HEADER, name)) if anthropic else ((ID_HEADER, name),)


def exchange_of(scope: Scope) -> Exchange:
    """The exchange of a request that came through the envelope."""
    exchange: Exchange = scope[EXCHANGE]
    return exchange


def path_of(scope: Scope) -> str:
    """The path below the application's route prefix."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def with_id(scope: Scope) -> tuple[Scope, bytes]:
    """The request under its id: the client's where it is valid, else a new one. The engine gets the same id."""
    given = next((value for name, value in scope["headers"] if name == ID_HEADER), None)
    name = request_id(given.decode("latin-1") if given is not None else None).encode("ascii")
    if name == given:
        return scope, name
    headers = [header for header in scope["headers"] if header[0] != ID_HEADER]
    return {**scope, "headers": [*headers, (ID_HEADER, name)]}, name


def _phrase(status: int) -> str:
    return f"{responses.get(status, 'Error')}."


def _code(status: int) -> str:
    return responses.get(status, "error").lower().replace(" ", "_")


async def _nothing() -> None:
    """Sends nothing yet: an error goes out once it is whole."""
