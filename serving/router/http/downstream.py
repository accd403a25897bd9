"""The client's side of one answer: what forwarding and admission write to.

Two servers carry it: the door's own protocol (serving.router.http.door), and any ASGI server, through OverAsgi. A client that
goes away cancels the task that answers it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serving.asgi import disconnected

Headers = Iterable[tuple[bytes, bytes]]


class Source(Protocol):
    """What an answer comes from, as far as a slow client holds it up."""

    def pause(self) -> None:
        """The client does not take what it was sent: send nothing more."""

    def resume(self) -> None:
        """The client has taken everything."""


class Downstream(Protocol):
    """One answer on its way to a client. Nothing here waits; `source` is told when the client is slow.

    `more_headers` are added to the answer's own when it starts.
    """

    source: Source | None
    more_headers: Callable[[], Headers] | None

    @property
    def started(self) -> bool:
        """Whether the answer has its status."""

    @property
    def paused(self) -> bool:
        """Whether the client has not yet taken what it was sent."""

    def start(self, status: int, headers: Headers) -> None:
        """Status and headers, which go out with the first piece. Without a content-length the body is sent in chunks."""

    def write(self, data: bytes) -> None:
        """A piece of the body."""

    def end(self, data: bytes = b"") -> None:
        """The answer is complete with this last piece."""

    def cut(self) -> None:
        """The client does not read: end the answer as it stands, and with it whoever makes it."""


class PassesOn:
    """A Downstream before another: what a subclass does not do itself, `client` does."""

    def __init__(self, client: Downstream) -> None:
        self.client = client

    @property
    def source(self) -> Source | None:
        return self.client.source

    @source.setter
    def source(self, source: Source | None) -> None:
        self.client.source = source

    @property
    def more_headers(self) -> Callable[[], Headers] | None:
        return self.client.more_headers

    @more_headers.setter
    def more_headers(self, more_headers: Callable[[], Headers] | None) -> None:
        self.client.more_headers = more_headers

    @property
    def started(self) -> bool:
        return self.client.started

    @property
    def paused(self) -> bool:
        return self.client.paused

    def start(self, status: int, headers: Headers) -> None:
        self.client.start(status, headers)

    def write(self, data: bytes) -> None:
        self.client.write(data)

    def end(self, data: bytes = b"") -> None:
        self.client.end(data)

    def cut(self) -> None:
        self.client.cut()


def add_headers(client: Downstream, headers: Callable[[], Headers]) -> None:
    """Add to `more_headers`."""
    before = client.more_headers
    client.more_headers = lambda: [*(before() if before else ()), *headers()]


def respond(client: Downstream, response: Response) -> None:
    """Send a response that is whole already."""
    client.start(response.status_code, response.raw_headers)
    client.end(bytes(response.body))


class OverAsgi(Response):
    """An ASGI response whose `work` writes to a Downstream. It ends soon after its client has gone."""

    def __init__(self, work: Callable[[Downstream], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  as ASGI has it
        client = _AsgiDownstream()
        working = asyncio.ensure_future(self._work(client))
        gone = asyncio.ensure_future(disconnected(receive))
        working.add_done_callback(lambda _: client.wake())
        gone.add_done_callback(lambda _: working.cancel())
        try:
            while not working.done() or client.messages:
                await client.woken()
                messages, client.messages = client.messages, []
                for message in messages:
                    await send(message)
                client.taken()
            if not (gone.done() and working.cancelled()):
                await working
        except asyncio.CancelledError:
            if not client.was_cut or client.sending.uncancel():
                raise
            # The server sees an answer without an end, and closes the connection.
        finally:
            working.cancel()
            gone.cancel()
            await asyncio.gather(working, gone, return_exceptions=True)


class _AsgiDownstream:
    """Messages that wait until the ASGI server takes them. Any that waits makes the client a slow one."""

    def __init__(self) -> None:
        self.started = False
        self.source: Source | None = None
        self.more_headers: Callable[[], Headers] | None = None
        self.messages: list[Message] = []
        self.paused = False
        self.was_cut = False
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  a coroutine runs in a task
        self.sending: asyncio.Task[object] = task
        self._something = asyncio.Event()

    def cut(self) -> None:
        if not self.was_cut:
            self.was_cut = True
            self.sending.cancel()

    def start(self, status: int, headers: Headers) -> None:
        self.started = True
        added = self.more_headers() if self.more_headers else ()
        self._send({"type": "http.response.start", "status": status, "headers": [*headers, *added]})

    def write(self, data: bytes) -> None:
        self._send({"type": "http.response.body", "body": data, "more_body": True})
        self.paused = True
        if self.source:
            self.source.pause()

    def end(self, data: bytes = b"") -> None:
        if data:
            self.write(data)
        if self.messages and self.messages[-1]["type"] == "http.response.body":
            self.messages[-1]["more_body"] = False
        else:
            self._send({"type": "http.response.body", "body": b""})

    def wake(self) -> None:
        self._something.set()

    async def woken(self) -> None:
        await self._something.wait()
        self._something.clear()

    def taken(self) -> None:
        """The server has taken every message."""
        if self.paused and not self.messages:
            self.paused = False
            if self.source:
                self.source.resume()

    def _send(self, message: Message) -> None:
        self.messages.append(message)
        self._something.set()
