"""What browsers ask before they let a page of another origin speak to this service: `router: {cors: [ORIGIN]}`. Pure.

Keys come in headers that the page sets itself. No cookie counts here, so answers never allow credentials.
"""

from collections.abc import Collection, Iterable

Header = tuple[bytes, bytes]

_ANY = "*"
# Browsers keep it for two hours at most; each answer says anew whether its page may read it.
_KEPT_S = b"7200"
_EXPOSED = (b"access-control-expose-headers", b"*")  # ids, limits and Retry-After are for clients to read


class Cors:
    """The origins whose pages may ask; falsy where there are none."""

    def __init__(self, origins: Collection[str]) -> None:
        self._any = _ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def __bool__(self) -> bool:
        return bool(self._origins)

    def headers(self, asked: Iterable[Header]) -> tuple[Header, ...]:
        """Of an answer to a request with the headers `asked`. Caches keep answers to several origins apart."""
        if self._any:
            return (b"access-control-allow-origin", b"*"), _EXPOSED
        if not self:
            return ()
        varies = (b"vary", b"origin")
        origin = next((value for name, value in asked if name == b"origin"), None)
        if origin not in self._origins:
            return (varies,)
        return varies, (b"access-control-allow-origin", origin), _EXPOSED

    def preflight(self, method: str, asked: Iterable[Header]) -> tuple[Header, ...] | None:
        """What a browser that asks beforehand is told beside `headers`; None of other requests and other origins' pages."""
        if method != "OPTIONS" or not self:
            return None
        headers = dict(asked)
        if b"access-control-request-method" not in headers or not (
            self._any or headers.get(b"origin") in self._origins
        ):
            return None
        # A `*` for headers would leave out Authorization.
        return (
            (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
            (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"")),
            (b"access-control-max-age", _KEPT_S),
        )
