"""An engine that answers every chat at once with events made beforehand: what a client's or a router's own cost is measured against.

python -m benchmarks.instant        # prints its port; ends with its input
"""

import asyncio
import json
import ssl
from dataclasses import dataclass
from typing import Any

import httptools
import uvloop

from benchmarks.children import until_input_ends

_EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": " slice"}, "finish_reason": null}]}\n\n'
_LAST = _EVENT.replace(b"null", b'"length"')
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Script:
    """The events of an answer: one to begin with, and one a token, of which the last is another. `step_s` lies between two."""

    opening: bytes = b""
    token: bytes = _EVENT
    last: bytes = _LAST
    step_s: float = 0.0


class Engine(asyncio.Protocol):
    """One connection; each event is one write, as an engine sends them, and waits for a client that reads none."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of a stream
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
        fields: dict[str, Any] = json.loads(
            self._body or b"{}"
        )  # a router asks a silent slice without a body
        tokens = max(1, fields.get("max_tokens", 1))
        self._transport.write(_HEAD + (_chunk(self._script.opening) if self._script.opening else b""))
        self._write(tokens)
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def _write(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if self._paused:
            self._waiting = left
        elif left > 1:
            self._transport.write(_chunk(self._script.token))
            asyncio.get_running_loop().call_later(self._script.step_s, self._write, left - 1)
        else:
            self._transport.write(_chunk(self._script.last) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serving(
    script: Script = Script(), context: ssl.SSLContext | None = None
) -> tuple[asyncio.Server, int]:
    """A server of such an engine, by TLS where there is a context, and its port."""
    server = await asyncio.get_running_loop().create_server(
        lambda: Engine(script), "127.0.0.1", 0, ssl=context
    )
    return server, server.sockets[0].getsockname()[1]


async def main() -> None:
    """Until standard input ends."""
    _, port = await serving()
    print(port, flush=True)
    await until_input_ends(dict)


if __name__ == "__main__":
    uvloop.run(main())
