"""Real HTTP servers for tests: an ASGI app behind uvicorn, and raw sockets for what no decent server does."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvloop

from serving.pinned_tls import Identity
from serving.state.records import Peer

Script = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


# A wait ends a test that hangs and tells nothing of speed: a machine with others' work is several times slower than one without.
PATIENCE_S = 120.0


def until(condition: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait for a condition of another thread; fails with what was waited for. `within_s` only where the time is the claim."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.005)


@contextmanager
def asgi_server(app: Any, port: int = 0, **options: Any) -> Iterator[str]:
    """A real uvicorn in a thread, on the event loop of Ray's workers, with these options of its own; yields its address."""
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, **options))
    thread = threading.Thread(target=lambda: uvloop.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    until(lambda: server.started, "uvicorn is up")
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=PATIENCE_S)
        assert not thread.is_alive()


class RawServers:
    """Servers that do with a connection what a script says; all in one thread with an event loop of its own.

    With `identity` they speak TLS.
    """

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = []

    def start(self, script: Script, *, well: bool = True) -> str:
        """A server that runs `script(request, reader, writer)` for each request; returns its address.

        `well`: asked for its health it says so, as a slice does that broke off one connection and lives.
        """

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while not writer.is_closing() and (request := await _request(reader)):
                    if well and request.startswith(b"GET /health "):
                        writer.write(whole(b""))
                    else:
                        await script(request, reader, writer)
            except ConnectionError:
                pass
            except asyncio.CancelledError:
                writer.transport.abort()  # what nobody reads would keep the connection open
                raise
            finally:
                writer.close()

        starting = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(
                connected, "127.0.0.1", 0, ssl=self._identity.context if self._identity else None
            ),
            self._loop,
        )
        self._servers.append(starting.result())
        scheme = "https" if self._identity else "http"
        return f"{scheme}://127.0.0.1:{self._servers[-1].sockets[0].getsockname()[1]}"

    def peer(self, script: Script, *, well: bool = True) -> Peer:
        """As `start`, with the certificate."""
        return Peer(self.start(script, well=well), self._identity.certificate if self._identity else "")

    def stop(self) -> None:
        async def end_all() -> None:
            for server in self._servers:
                server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def chunk(data: bytes) -> bytes:
    """One HTTP/1.1 chunk."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def whole(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """One answer with its length."""
    lines = [b"HTTP/1.1 " + status, *headers, f"Content-Length: {len(body)}".encode()]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


_NOBODY_S: list[socket.socket] = []


def free_address() -> str:
    """Where nobody listens, and nobody will while this process lives: the port is bound, and no other test's server gets it."""
    _NOBODY_S.append(socket.socket())
    _NOBODY_S[-1].bind(("127.0.0.1", 0))
    return f"http://127.0.0.1:{_NOBODY_S[-1].getsockname()[1]}"


async def _request(reader: asyncio.StreamReader) -> bytes:
    """Head and body of the next request; nothing when the client has closed."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
