"""Errors of the router as whole answers, and as events in a stream that has begun."""

import math

from starlette.responses import JSONResponse

from serving.errors import (
    IssuerAwayError,
    NoSliceError,
    NoStoreError,
    OverloadedError,
    PoisonousKindError,
    PoisonousRequestError,
    Refusal,
    ServingError,
    StoreAwayError,
)
from serving.router.http import sse
from serving.router.http.routes import Dialect, dialect_of

# For errors outside admission: no slice took a request (the breaker tries one again after 1 to 30 s), or too many bodies came.
_RETRY_AFTER_S = 5
# OpenAI's and Anthropic's clients ask again after any 5xx without it.
_LASTS = {"x-should-retry": "false"}


def error_response(error: ServingError) -> JSONResponse:
    headers: dict[str, str] = {}
    match error:
        case NoSliceError() | OverloadedError() | StoreAwayError() | IssuerAwayError() | PoisonousKindError():
            headers = {"retry-after": str(_RETRY_AFTER_S)}
        case PoisonousRequestError() | NoStoreError():
            headers = _LASTS
    return JSONResponse(error.openai_body(), status_code=error.status, headers=headers)


def error_event(path: str, error: ServingError) -> bytes:
    """An error in a stream, as the clients of its route read it."""
    if dialect_of(path) is Dialect.ANTHROPIC:
        fields = {"type": "error", "error": {"type": "api_error", "message": error.message}}
        return sse.event(fields, "error")
    return sse.event(error.openai_body())


def refusal_response(refusal: Refusal) -> JSONResponse:
    """A refusal with the time after which to ask again. Where asking again is no use, a header tells OpenAI's clients."""
    response = JSONResponse(refusal.error.openai_body(), status_code=refusal.error.status)
    if refusal.retry_after_s is None:
        response.headers.update(_LASTS)
    else:
        response.headers["retry-after"] = str(math.ceil(refusal.retry_after_s))
    return response
