"""A server that answers every chat at once with events made beforehand: what the load client's ceiling is measured against.

python -m benchmarks.instant        # prints its port; ends with its input
"""

import asyncio
import json
import sys
import threading

import httptools
import uvloop

_EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": " slice"}, "finish_reason": null}]}\n\n'
_LAST = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class _Instant(asyncio.Protocol):
    """One connection; events go out one write each, as an engine sends them, and wait for a client that reads none."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._paused, self._waiting = False, 0
        self._begin()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._waiting:
            left, self._waiting = self._waiting, 0
            self._write(left)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        tokens = json.loads(self._body).get("max_tokens", 1)
        self._transport.write(_HEAD)
        self._write(tokens)
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def _write(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if self._paused and left:
            self._waiting = left
        elif left:
            self._transport.write(_chunk(_EVENT))
            asyncio.get_running_loop().call_soon(self._write, left - 1)
        else:
            self._transport.write(_chunk(_LAST + b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def serve() -> None:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Instant, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    threading.Thread(
        target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(ended.set)), daemon=True
    ).start()
    await ended.wait()


if __name__ == "__main__":
    uvloop.run(serve())
