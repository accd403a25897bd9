"""Errors of the router as whole answers, and as events in a stream that has begun."""

import math
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from serving.errors import (
    BudgetError,
    IssuerAwayError,
    NoSliceError,
    NoStoreError,
    OverloadedError,
    PoisonousKindError,
    PoisonousRequestError,
    Refusal,
    ServingError,
    StorageError,
    StoreAwayError,
)
from serving.router.http import sse
from serving.router.http.routes import Dialect, dialect_of

# For errors outside admission: no slice took a request (the breaker tries one again after 1 to 30 s), or too many bodies came.
_RETRY_AFTER_S = 5
# Until a budget is new: Anthropic's clients would sleep for so long, and older ones of OpenAI's ask again at once.
_LONG_S = 60.0
_ANTHROPIC_KINDS: dict[int, str] = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
# OpenAI's and Anthropic's clients ask again after any 5xx without it.
_LASTS = {"x-should-retry": "false"}


def error_response(error: ServingError) -> JSONResponse:
    headers: dict[str, str] = {}
    match error:
        case NoSliceError() | OverloadedError() | StoreAwayError() | IssuerAwayError() | PoisonousKindError():
            headers = {"retry-after": str(_RETRY_AFTER_S)}
        case PoisonousRequestError() | NoStoreError():
            headers = _LASTS
        case StorageError():
            passes = error.status == HTTPStatus.SERVICE_UNAVAILABLE
            headers = {"retry-after": str(_RETRY_AFTER_S)} if passes else _LASTS
    return JSONResponse(error.openai_body(), status_code=error.status, headers=headers)


def error_event(path: str, error: ServingError) -> bytes:
    """An error in a stream, as the clients of its route read it."""
    if dialect_of(path) is Dialect.ANTHROPIC:
        return sse.event(anthropic_body(error.message, error.status), "error")
    return sse.event(error.openai_body())


def anthropic_body(message: str, status: int) -> dict[str, Any]:
    """An error as Anthropic's clients parse it."""
    usual = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(status, usual), "message": message}}


def refusal_response(refusal: Refusal) -> JSONResponse:
    """A refusal with the time after which to ask again. Where asking again soon is no use, a header tells clients."""
    response = JSONResponse(refusal.error.openai_body(), status_code=refusal.error.status)
    again_s = refusal.retry_after_s
    if again_s is not None:
        response.headers["retry-after"] = str(math.ceil(again_s))
    if again_s is None or (isinstance(refusal.error, BudgetError) and again_s > _LONG_S):
        response.headers.update(_LASTS)
    return response
