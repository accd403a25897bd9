"""A request leaves no circle of references behind: its body would wait in one for a garbage collection, past every bound."""

import gc
import json
import socket
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from support.fronts import Front, front
from support.servers import until
from support.simulated_engine import MODEL

from serving.bounded_json import SMALL_BYTES
from serving.router.forwarding.response import Forwarding
from serving.router.forwarding.upstream import SliceResponse
from serving.router.http.door import Exchange
from serving.router.http.protocol import InferenceRequest
from serving.router.telemetry.record import RequestRecord

pytestmark = pytest.mark.http

OF_A_REQUEST = (Exchange, Forwarding, InferenceRequest, RequestRecord, SliceResponse)
PADDING = "x" * (2 * SMALL_BYTES)


@pytest.fixture(scope="module")
def running() -> Iterator[Front]:
    with front(door=True) as found:
        yield found


def sent(running: Front, fields: bytes, of_bytes: int = 0) -> socket.socket:
    host, port = running.address.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=10)
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
    client.sendall(
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (of_bytes or len(fields)) + fields
    )
    return client


def chat(**fields: object) -> bytes:
    messages = [{"role": "user", "content": "Hello"}]
    return json.dumps({"model": MODEL, "messages": messages, "padding": PADDING} | fields).encode()


def answered(running: Front, fields: bytes, status: bytes) -> None:
    with sent(running, fields) as client, client.makefile("rb") as answer:
        assert answer.read().startswith(b"HTTP/1.1 " + status)


def hung_up(running: Front) -> None:
    with sent(running, chat(stream=True, max_tokens=1000)) as client:
        assert client.recv(12) == b"HTTP/1.1 200"


def gone_in_its_body(running: Front) -> None:
    with sent(running, chat(), of_bytes=8 << 20) as client:
        until(lambda: running.gate.bodies.held_bytes > SMALL_BYTES, "it is being read")
        client.close()
    until(lambda: not running.gate.bodies.held_bytes, "it has ended")


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(partial(answered, fields=chat(max_tokens=2), status=b"200"), id="whole"),
        pytest.param(partial(answered, fields=chat(max_tokens=2, stream=True), status=b"200"), id="streamed"),
        pytest.param(partial(answered, fields=chat(n=10**6), status=b"400"), id="refused"),
        pytest.param(partial(answered, fields=b'{"a":[' + b"[]," * 70_000, status=b"400"), id="wide"),
        pytest.param(partial(answered, fields=chat(model="other"), status=b"404"), id="of no model"),
        pytest.param(hung_up, id="hung up"),
        pytest.param(gone_in_its_body, id="gone in its body"),
    ],
)
def test_an_ended_request_is_gone_without_a_garbage_collection(
    running: Front, ask: Callable[[Front], None]
) -> None:
    ask(running)  # imports what is needed
    gc.collect()
    gc.disable()
    before = set(of_requests())  # of other tests
    try:
        ask(running)
        until(lambda: set(of_requests()) <= before, "nothing of the request is left")
    finally:
        gc.enable()


def of_requests() -> list[int]:
    return [id(found) for found in gc.get_objects() if isinstance(found, OF_A_REQUEST)]
