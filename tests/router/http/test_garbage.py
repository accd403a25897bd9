"""A request leaves no circle of references behind: its body would wait in one for a garbage collection, past every bound."""

import contextlib
import gc
import json
import socket
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from support.fronts import Front, front, router_before
from support.servers import PATIENCE_S, until
from support.simulated_engine import MODEL, small_plan

from serving.bounded_json import SMALL_BYTES
from serving.config import RouterSpec
from serving.router.forwarding.response import Forwarding
from serving.router.forwarding.upstream import SliceResponse
from serving.router.http.door import Exchange
from serving.router.http.protocol import InferenceRequest
from serving.router.telemetry.record import RequestRecord
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.http

OF_A_REQUEST = (Exchange, Forwarding, InferenceRequest, RequestRecord, SliceResponse)
PADDING = "x" * (2 * SMALL_BYTES)


@pytest.fixture(scope="module")
def running() -> Iterator[Front]:
    with front(door=True) as found:
        yield found


def sent(address: str, fields: bytes, of_bytes: int = 0) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
    client.sendall(
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (of_bytes or len(fields)) + fields
    )
    return client


def chat(**fields: object) -> bytes:
    messages = [{"role": "user", "content": "Hello"}]
    return json.dumps({"model": MODEL, "messages": messages, "padding": PADDING} | fields).encode()


def answered(running: Front, fields: bytes, status: bytes) -> None:
    with sent(running.address, fields) as client, client.makefile("rb") as answer:
        assert answer.read().startswith(b"HTTP/1.1 " + status)


def hung_up(running: Front) -> None:
    with sent(running.address, chat(stream=True, max_tokens=1000)) as client:
        assert client.recv(12) == b"HTTP/1.1 200"


def gone_in_its_body(running: Front) -> None:
    with sent(running.address, chat(), of_bytes=8 << 20) as client:
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
    leaves_nothing(partial(ask, running), *OF_A_REQUEST)


def test_a_request_whose_client_goes_before_its_slice_answers_is_gone_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as slice_:
        slice_.settimeout(PATIENCE_S)
        at = f"http://127.0.0.1:{slice_.getsockname()[1]}"
        entry = SliceRecord("a", MODEL, SliceState.SERVING, "serving", "v6e 2x4", address=at)
        with router_before([small_plan()], [entry], RouterSpec()) as address:

            def ask() -> None:
                with sent(address, chat()):
                    asked, _ = slice_.accept()
                    asked.settimeout(PATIENCE_S)
                    assert asked.recv(4) == b"POST"
                with asked, contextlib.suppress(ConnectionResetError):
                    while asked.recv(1 << 16):
                        pass

            leaves_nothing(ask, InferenceRequest)  # records wait to be written together


def leaves_nothing(ask: Callable[[], None], *kinds: type) -> None:
    ask()  # imports what is needed
    gc.collect()
    gc.disable()
    before = there_are(kinds)  # of other tests
    try:
        ask()
        until(lambda: there_are(kinds) <= before, "nothing of the request is left")
    finally:
        gc.enable()


def there_are(kinds: tuple[type, ...]) -> set[int]:
    return {id(found) for found in gc.get_objects() if isinstance(found, kinds)}
