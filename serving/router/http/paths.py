"""Which paths there are beside those of models, what each takes, and what is said to who asks for another."""

from fastapi import Request
from starlette.responses import JSONResponse

from serving.errors import (
    MethodError,
    OverloadedError,
    ServingError,
    SlowBodyError,
    TooLargeError,
    UnauthorizedError,
    UnknownPathError,
)
from serving.router.http import responses
from serving.router.http.envelope import path_of
from serving.router.http.errors import error_response
from serving.router.http.routes import ROUTES
from serving.status import page

_GET_PATHS = ("/v1/models", "/health", "/metrics", "/openapi.json", "/status.json", *page.PATHS)
_KEPT_PATHS = {"/v1/files": "GET, POST", "/v1/batches": "GET, POST", "/v1/usage": "GET"}
# Where a response's name would stand, OpenAI has paths that this service lacks.
_NO_RESPONSES = ("input_tokens", "compact")


def _takes(path: str) -> str:
    """The methods that a path takes; empty where there is no such path."""
    if path in ROUTES:
        return "POST"
    if path.startswith(f"{responses.PATH}/"):
        name, _, what = path.removeprefix(f"{responses.PATH}/").partition("/")
        if name in _NO_RESPONSES:
            return ""
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


def refusal(request: Request) -> ServingError:
    """Why a request that nothing answers is refused: its method, or its path, with the path that may be meant."""
    path, takes = path_of(request.scope), _takes(path_of(request.scope))
    if takes and request.method not in takes.split(", "):
        asks_for_a_page = request.method == "OPTIONS" and "origin" in request.headers
        why = " Pages of other origins are let in by router.cors." if asks_for_a_page else ""
        return MethodError(f"{path} takes {takes}, not {request.method}.{why}")
    meant = path.rstrip("/"), f"/v1{path}", path.removeprefix("/v1")
    near = next((known for known in meant if known in ROUTES or known in _GET_PATHS), None)
    return UnknownPathError(f"There is no {path} here{f'; {near} is' if near else ''}.")


def answer_to(error: ServingError, path: str) -> JSONResponse:
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
