"""Errors of the router as answers: whole ones, and events in a stream that has begun."""

import json
import math

from starlette.responses import JSONResponse

from serving.errors import NoSliceError, OverloadedError, ServingError
from serving.router.limits import Refusal

# Of what admission did not see: no slice took a request (the breaker tries one again after 1 to 30 s), or bodies came too fast.
_RETRY_AFTER_S = 5


def error_response(error: ServingError) -> JSONResponse:
    passing = isinstance(error, NoSliceError | OverloadedError)
    headers = {"retry-after": str(_RETRY_AFTER_S)} if passing else None
    return JSONResponse(error.openai_body(), status_code=error.status, headers=headers)


def error_event(path: str, error: ServingError) -> bytes:
    """An error in a stream, as the clients of its route read it."""
    if path == "/v1/messages":
        body = {"type": "error", "error": {"type": "api_error", "message": error.message}}
        return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"
    return b"data: " + json.dumps(error.openai_body()).encode() + b"\n\n"


def refusal_response(refusal: Refusal) -> JSONResponse:
    """With the time after which to ask again; where asking again is no use, OpenAI's clients are told so too."""
    response = JSONResponse(refusal.error.openai_body(), status_code=refusal.error.status)
    if refusal.retry_after_s is None:
        response.headers["x-should-retry"] = "false"
    else:
        response.headers["retry-after"] = str(math.ceil(refusal.retry_after_s))
    return response
