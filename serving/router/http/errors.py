"""Errors of the router as answers: whole ones, and events in a stream that has begun."""

import math

from starlette.responses import JSONResponse

from serving.errors import NoSliceError, OverloadedError, Refusal, ServingError
from serving.router.http import sse
from serving.router.http.routes import Dialect, dialect_of

# Of what admission did not see: no slice took a request (the breaker tries one again after 1 to 30 s), or bodies came too fast.
_RETRY_AFTER_S = 5


def error_response(error: ServingError) -> JSONResponse:
    passing = isinstance(error, NoSliceError | OverloadedError)
    headers = {"retry-after": str(_RETRY_AFTER_S)} if passing else None
    return JSONResponse(error.openai_body(), status_code=error.status, headers=headers)


def error_event(path: str, error: ServingError) -> bytes:
    """An error in a stream, as the clients of its route read it."""
    if dialect_of(path) is Dialect.ANTHROPIC:
        said = {"type": "error", "error": {"type": "api_error", "message": error.message}}
        return sse.event(said, "error")
    return sse.event(error.openai_body())


def refusal_response(refusal: Refusal) -> JSONResponse:
    """With the time after which to ask again; where asking again is no use, OpenAI's clients are told so too."""
    response = JSONResponse(refusal.error.openai_body(), status_code=refusal.error.status)
    if refusal.retry_after_s is None:
        response.headers["x-should-retry"] = "false"
    else:
        response.headers["retry-after"] = str(math.ceil(refusal.retry_after_s))
    return response
