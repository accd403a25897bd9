"""The router's own door on a test's server, as in a replica of Serve."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request

from serving.router.http.door import Door, Relay
from serving.router.http.downstream import Downstream


class LateDoor:
    """A door whose router is made only once the server's event loop runs; set `answer` then."""

    answer: Callable[[Request, Downstream], Awaitable[None]]

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix

    async def _relay(self, request: Request, client: Downstream) -> None:
        await self.answer(request, client)

    @property
    def options(self) -> dict[str, Any]:
        """uvicorn's."""
        return {"http": partial(Door, Relay(self._relay, self._prefix))}
