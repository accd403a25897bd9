"""The secret that the processes of one cluster show each other: who asks a slice's own HTTP port for work has to know it.

It comes by the environment, as a pod's secret does, and goes nowhere else: no log, record or page has it. An empty or unset
variable means that slices ask nobody.
"""

import hmac
import json
import os
import secrets
from collections.abc import Iterable
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

VARIABLE = "SERVING_CLUSTER_SECRET"
# Of a router's request: to the process that keeps files and batches the hash of the API key that asks, to slices its beginning.
KEY_HEADER = "x-serving-key"
_HEADER = "authorization"
_NAME = _HEADER.encode()
_OPEN = "/health"  # what probes ask: it makes no work and tells nothing
_REFUSAL = json.dumps(
    {
        "error": {
            "message": "This is a slice's own port, which answers routers alone; ask the service's address.",
            "type": "invalid_request_error",
            "param": None,
            "code": "not_of_this_cluster",
        }
    }
).encode()
_REFUSAL_HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_REFUSAL)).encode()),
    (b"connection", b"close"),  # a refused body is not read
]
_POLICY_VIOLATION = 1008  # the close code of a WebSocket that may not be opened


def new() -> str:
    """A fresh secret of 256 random bits."""
    return secrets.token_urlsafe(32)


def of_this_process() -> str:
    """The cluster's secret; empty where there is none."""
    return os.environ.get(VARIABLE, "")


def headers(secret: str) -> dict[str, str]:
    """What a request to a slice has to carry."""
    return {_HEADER: f"Bearer {secret}"} if secret else {}


def is_shown(shown: Iterable[tuple[bytes, bytes]], secret: str) -> bool:
    """Whether these headers of a request, with names in lower case, have the secret; where there is none, any have it."""
    if not secret:
        return True
    expected = headers(secret)[_HEADER].encode()
    return any(name == _NAME and hmac.compare_digest(value, expected) for name, value in shown)


class Guard:
    """An ASGI app that lets through who shows the secret, and everybody to /health."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == _OPEN or is_shown(scope["headers"], self._secret):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await send(
                {
                    "type": "http.response.start",
                    "status": HTTPStatus.UNAUTHORIZED,
                    "headers": _REFUSAL_HEADERS,
                }
            )
            await send({"type": "http.response.body", "body": _REFUSAL})


def guarded(app: ASGIApp, secret: str) -> ASGIApp:
    """The app behind the secret; the app itself where there is none."""
    return Guard(app, secret) if secret else app
