"""The page at `/`: a few files that the router serves as they are. No build step, no other host.

The page shows the status document as text, never as HTML. Its headers tell the browser to run and load only files of
this service, and to send to this service alone.
"""

import hashlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

_SCRIPT = "text/javascript; charset=utf-8"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", _SCRIPT),
    "/page/chat.js": ("chat.js", _SCRIPT),
    "/page/draw.js": ("draw.js", _SCRIPT),
    "/page/key.js": ("key.js", _SCRIPT),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PATHS = tuple(_FILES)
_POLICY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cache-Control": "no-cache",  # browsers keep the page but check its ETag: a new router may bring a new page
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def routes() -> list[tuple[str, Callable[[Request], Awaitable[Response]]]]:
    """Each path of the page, with the handler that answers it."""
    return [(path, _answer(*file)) for path, file in _FILES.items()]


def _answer(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    body = (resources.files(__package__) / name).read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {**_POLICY, "ETag": etag}

    async def answer(request: Request) -> Response:
        known = (
            tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")
        )
        if etag in known:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(body, media_type=media_type, headers=headers)

    return answer
