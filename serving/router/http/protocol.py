"""A client's request for a model: read once, then handed to admission, scheduling and forwarding. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jiter

from serving.router.http.responses import Keeping

# A client's credentials are for the router alone.
_CREDENTIALS = (b"authorization", b"x-api-key", b"cookie")
# vLLM's copy of an engine to go to, SageMaker's adapter and session, and whose request it is: the router says these. For the last vLLM collects all of
# its metrics with each answer, and shows them to the client. Which pages may ask is the router's too (router.cors): told of one, vLLM lets it in.
_KEPT_BACK = frozenset(
    (
        *_CREDENTIALS,
        b"origin",
        b"x-data-parallel-rank",
        b"endpoint-load-metrics-format",
        b"x-serving-key",  # serving.secret.KEY_HEADER
    )
)
_SAGEMAKER = b"x-amzn-sagemaker-"
_ID = b"x-request-id"


@dataclass(slots=True)  # frozen, it would take 2 us more to make, for every answer
class InferenceRequest:
    """A POST for one model. `body` goes to the slice as it came, `headers` without credentials and what steers an engine;
    `fields` are those of the parsed body that the router looks at. `ignored`: parameters of the client that no engine heeds.
    `keeping`: what to keep the answer with. `fills`: only a free seat is for it. `key`: the id of the key that asks.
    """

    model: str
    path: str
    body: bytes
    fields: Mapping[str, Any]
    query: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    ignored: tuple[str, ...] = ()
    keeping: Keeping | None = None
    fills: bool = False
    key: str = ""

    @property
    def streams(self) -> bool:
        return self.fields.get("stream") is True

    def all_fields(self) -> dict[str, Any]:
        """Every field of the body; whole numbers as the router reads them."""
        whole = {name: value for name, value in self.fields.items() if type(value) is int}
        return {**jiter.from_json(self.body), **whole} if self.body else dict(self.fields)

    def apart(self, mark: str) -> Self:
        """The same under an id at its engine that no other request has: `mark` is its own, behind what its client chose.

        Where the client of a speech request hangs up, vLLM ends every request of that id, whichever key's it is.
        """
        headers = tuple(
            [
                (name, b"%b-%b" % (value, mark.encode()) if name == _ID else value)
                for name, value in self.headers
            ]
        )
        return replace(self, headers=headers)

    @classmethod
    def of(cls, request: Any, model: str, path: str, body: bytes, fields: Mapping[str, Any]) -> Self:
        """`request` is Starlette's."""
        raw: Iterable[tuple[bytes, bytes]] = request.headers.raw
        headers = tuple(
            [header for header in raw if header[0] not in _KEPT_BACK and not header[0].startswith(_SAGEMAKER)]
        )
        query = request.scope.get("query_string", b"").decode("utf-8", "surrogateescape")
        return cls(model, path, body, fields, query, headers)
