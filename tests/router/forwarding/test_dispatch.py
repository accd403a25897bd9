import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from support.doors import LateDoor
from support.servers import (
    PATIENCE_S,
    SSE_HEAD,
    RawServers,
    Script,
    asgi_server,
    chunk,
    free_address,
    until,
    whole,
)

from serving.config import FailoverSpec
from serving.router.forwarding import upstream
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.forwarding.response import Forwarding
from serving.router.forwarding.suspects import Suspects
from serving.router.forwarding.trials import Trials
from serving.router.forwarding.upstream import Health
from serving.router.http.downstream import Downstream, OverAsgi
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.state.records import SliceRecord, SliceState
from serving.timings import Timings

pytestmark = pytest.mark.http

MODEL = "llama"
EVENTS = [b'data: {"token": "caf\xc3\xa9"}\n\n', b'data: {"token": "\\n"}\n\n', b"data: [DONE]\n\n"]


@dataclass
class Front:
    """A relay behind a real HTTP server, and its table."""

    address: str
    table: SliceTable
    state: Any
    entries: list[SliceRecord] = field(default_factory=list)

    def left_out(self, now_s: float = 0.0) -> set[str]:
        """Slices that are left out until some time later than `now_s`."""
        found: set[str] = self.state.relay.breaker.left_out(now_s)
        return found

    def serve(self, *upstreams: str) -> None:
        """Slices a, b, ... at these addresses; a is asked first."""
        self.entries = [
            SliceRecord(replica, MODEL, SliceState.SERVING, "serving", "v6e 2x4", address=address)
            for replica, address in zip("abc", upstreams, strict=False)
        ]
        self.table.update(self.entries, 0.0)

    def lose(self, *, forget: bool = False) -> None:
        """The board says that a is lost, or nothing of it any more."""
        lost, others = replace(self.entries[0], state=SliceState.LOST), self.entries[1:]
        entries = others if forget else [lost, *others]
        self.table.update(entries, 0.0)
        relay: Dispatcher = self.state.relay
        relay._watching.get_loop().call_soon_threadsafe(relay.settle, entries)

    def waits(self, first: bytes) -> bool:
        """Whether the router has what came of the answer, or waits for its headers where nothing did."""
        relay: Dispatcher = self.state.relay
        return bool(relay._streams) if first else bool(relay._asking)

    def post(self, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
        return httpx.post(self.address + path, **({"content": b"{}"} | more))

    def idle(self) -> bool:
        return not any(self.table.in_flight(replica) for replica in "abc")


@pytest.fixture(scope="module", params=[False, True], ids=["asgi", "door"])
def running_front(request: pytest.FixtureRequest) -> Iterator[Front]:
    table = SliceTable({MODEL: 1}, {MODEL: "v6e 2x4"})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.relay = Dispatcher(table, FailoverSpec(retries=2, wait_s=0.3), timings=Timings(connect_s=2))
        yield
        await app.state.relay.close()

    async def forward(request: Request) -> Response:
        body = await request.body()
        return OverAsgi(
            Forwarding(
                app.state.relay, InferenceRequest.of(request, MODEL, request.scope["path"], body, {})
            ).run
        )

    async def answer(asked: Request, client: Downstream) -> None:
        body = await asked.body()
        inference = InferenceRequest.of(asked, MODEL, asked.scope["path"], body, {})
        await Forwarding(app.state.relay, inference).run(client)

    door = LateDoor()
    door.answer = answer
    app = Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])], lifespan=lifespan)
    with asgi_server(app, **(door.options if request.param else {})) as address:
        yield Front(address, table, app.state)


@pytest.fixture
def front(running_front: Front) -> Iterator[Front]:
    """Whatever a test does to its request, the router counts none in flight afterwards."""
    running_front.table.update([], 0.0)
    running_front.state.relay.breaker.keep(set())
    running_front.state.relay.suspects = Suspects(heard_s=0)
    running_front.state.relay.trials = Trials(running_front.state.relay.suspects)
    running_front.state.relay._verdicts.clear()
    running_front.state.relay._dead.clear()
    yield running_front
    until(running_front.idle, "no request counted in flight")


@pytest.fixture
def raw() -> Iterator[RawServers]:
    servers = RawServers()
    yield servers
    servers.stop()


def answering(answer: bytes, *, end: str = "") -> Script:
    """Answer with these bytes; then close as told ("fin" or "rst"), or keep the connection."""

    async def script(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        if end == "rst":
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0"
            )
            await asyncio.sleep(0.02)  # a reset overtakes bytes that the other side has not read
        if end:
            writer.close()

    return script


def recording(answer: bytes) -> tuple[Script, list[bytes]]:
    requests: list[bytes] = []

    async def script(request: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(request)
        writer.write(answer)

    return script, requests


def holding(first: bytes) -> tuple[Script, threading.Event, threading.Event]:
    """Send the first bytes and hold the connection until the router closes it."""
    asked, closed = threading.Event(), threading.Event()

    async def script(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        asked.set()
        await reader.read()
        closed.set()
        writer.close()

    return script, asked, closed


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_stream_arrives_byte_for_byte_however_it_was_cut(front: Front, raw: RawServers) -> None:
    body = b"".join(EVENTS)
    pieces = [body[i : i + 7] for i in range(0, len(body), 7)]
    front.serve(raw.start(answering(SSE_HEAD + b"".join(map(chunk, pieces)) + b"0\r\n\r\n")))
    answer = front.post()
    assert (answer.status_code, answer.content) == (200, body)
    assert answer.headers["content-type"] == "text/event-stream"


def test_a_stream_whose_last_event_has_no_end_still_arrives_whole(front: Front, raw: RawServers) -> None:
    front.serve(raw.start(answering(SSE_HEAD + chunk(b"data: 1\n\ndata: 2") + b"0\r\n\r\n")))
    assert front.post().content == b"data: 1\n\ndata: 2"


def test_an_event_arrives_before_the_next_one_is_made(front: Front, raw: RawServers) -> None:
    more = threading.Event()

    async def script(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(EVENTS[0]))
        await asyncio.to_thread(more.wait, PATIENCE_S)
        writer.write(chunk(EVENTS[1]) + b"0\r\n\r\n")

    front.serve(raw.start(script))
    with httpx.stream("POST", front.address, content=b"{}") as answer:
        received = answer.iter_raw()
        assert next(received) == EVENTS[0]
        assert front.table.in_flight("a") == 1
        more.set()
        assert list(received) == [EVENTS[1]]


def test_a_real_asgi_server_streams_through(front: Front) -> None:
    async def events() -> AsyncIterator[bytes]:
        for event in EVENTS:
            yield event

    async def stream(_: Request) -> Response:
        return StreamingResponse(events(), media_type="text/event-stream", headers={"x-request-id": "7"})

    with asgi_server(Starlette(routes=[Route("/stream", stream, methods=["POST"])])) as upstream:
        front.serve(upstream)
        answer = front.post("/stream")
    assert answer.content == b"".join(EVENTS)
    assert answer.headers["x-request-id"] == "7"
    assert answer.headers.get_list("date", split_commas=False) == [answer.headers["date"]]


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request", b"429 Too Many Requests"])
def test_a_whole_answer_keeps_status_headers_and_bytes(front: Front, raw: RawServers, status: bytes) -> None:
    body = gzip.compress(b'{"text": "x"}' * 1000)
    headers = [b"Content-Encoding: gzip", b"Content-Type: application/json", b"X-A: 1", b"X-A: 2"]
    front.serve(raw.start(answering(whole(body, *headers, status=status))))
    with httpx.stream("POST", front.address, content=b"{}") as answer:
        assert b"".join(answer.iter_raw()) == body
    assert answer.status_code == int(status.split()[0])
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers.get_list("x-a") == ["1", "2"]


def test_a_request_goes_on_as_it_came(front: Front, raw: RawServers) -> None:
    """The router adds whose it is, whatever its client says of that, and leaves out what belongs to the client's connection."""
    script, requests = recording(whole(b"{}"))
    front.serve(raw.start(script))
    host = front.address.removeprefix("http://")
    sent = (
        b"POST /v1/x%20y/../z?a=1&b=%2F HTTP/1.1\r\nHost: service.example\r\nX-Request-Id: caf\xc3\xa9\r\n"
        b"TE: trailers\r\nX-Serving-Key: another\r\nConnection: close\r\nContent-Length: 15\r\n\r\n"
        + b'{ "model":\n"x" }'[:15]
    )
    with socket.create_connection((host.split(":")[0], int(host.split(":")[1]))) as client:
        client.sendall(sent)
        while client.recv(65536):
            pass
    head, _, body = requests[0].partition(b"\r\n\r\n")
    first, *headers = head.split(b"\r\n")
    assert first == b"POST /v1/x%20y/../z?a=1&b=%2F HTTP/1.1"
    assert {(name.lower(), value) for name, value in (line.split(b": ", 1) for line in headers)} == {
        (b"host", b"service.example"),
        (b"x-request-id", b"caf\xc3\xa9"),
        (b"x-serving-key", b"none"),
        (b"content-length", b"15"),
    }
    assert body == b'{ "model":\n"x" }'[:15]


def test_a_redirect_is_followed_by_nobody(front: Front, raw: RawServers) -> None:
    """Followed here, it would lead past the list of what is forwarded; a client knows no slice's address."""
    asked: list[bytes] = []

    async def script(request: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(request.partition(b" HTTP/")[0])
        writer.write(whole(b"", b"Location: /sleep", status=b"307 Temporary Redirect"))

    front.serve(raw.start(script))
    answer = front.post("/v1/completions")
    assert answer.status_code == 503
    assert "location" not in answer.headers
    assert set(asked) == {b"POST /v1/completions"}


def test_connections_to_a_slice_are_used_again(front: Front, raw: RawServers) -> None:
    connections: set[int] = set()

    async def script(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer.get_extra_info("peername")[1])
        writer.write(SSE_HEAD + chunk(EVENTS[0]) + b"0\r\n\r\n")

    front.serve(raw.start(script))
    for _ in range(5):
        front.post()
        until(front.idle, "the request is over")
    assert len(connections) == 1


def test_a_slice_that_takes_no_connection_is_passed_over(front: Front, raw: RawServers) -> None:
    front.serve(free_address(), raw.start(answering(whole(b"from b"))))
    assert front.post().text == "from b"
    assert front.left_out() == {"a"}


def test_a_slice_whose_host_does_not_answer_is_passed_over(front: Front, raw: RawServers) -> None:
    """A full backlog drops SYNs, as a host does that has lost its power."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        front.serve(f"http://127.0.0.1:{silent.getsockname()[1]}", raw.start(answering(whole(b"from b"))))
        assert front.post().text == "from b"
        for filler in fillers:
            filler.close()


def test_no_slice_that_takes_a_connection_is_a_503_to_try_again(front: Front) -> None:
    front.serve(free_address(), free_address())
    answer = front.post()
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert error_of(answer)["code"] == "no_slice_ready"


@pytest.mark.parametrize(
    ("cut", "end"),
    [
        (b"", "fin"),
        (b"", "rst"),
        (chunk(b"data: {half an eve"), "rst"),
        (b"ffff\r\ndata: {ha", "fin"),
    ],
    ids=["closes", "resets", "resets inside an event", "closes inside a chunk"],
)
def test_a_slice_that_dies_while_it_streams_leaves_an_error_event_and_the_end(
    front: Front, raw: RawServers, cut: bytes, end: str
) -> None:
    front.serve(raw.start(answering(SSE_HEAD + chunk(EVENTS[0]) + chunk(EVENTS[1]) + cut, end=end)))
    answer = front.post()
    assert answer.content.startswith(EVENTS[0] + EVENTS[1] + b"data: {")
    last = answer.content.removeprefix(EVENTS[0] + EVENTS[1])
    assert last.endswith(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "slice_lost"


def test_anthropic_s_clients_get_their_own_error_event(front: Front, raw: RawServers) -> None:
    front.serve(raw.start(answering(SSE_HEAD + chunk(EVENTS[0]), end="rst")))
    answer = front.post("/v1/messages")
    kind, _, data = answer.content.removeprefix(EVENTS[0]).partition(b"\n")
    assert kind == b"event: error"
    body = json.loads(data.removeprefix(b"data: "))
    assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")  # as a whole answer's 503


NAMED = b'event: message_start\ndata: {"type":"message_start"}\n\n'
FAILED = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"2 validation errors"}}\n\n'


def failing(events: bytes) -> Script:
    """A stream of vLLM's that ends well for HTTP, though its engine failed."""
    return answering(SSE_HEAD + chunk(events) + b"0\r\n\r\n")


def test_a_named_stream_whose_engine_failed_before_anything_is_asked_of_another(
    front: Front, raw: RawServers
) -> None:
    front.serve(raw.start(failing(FAILED)), raw.start(answering(whole(b"from b"))))
    assert front.post("/v1/messages").text == "from b"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_named_stream_whose_engine_failed_ends_with_the_router_s_error(
    front: Front, raw: RawServers, path: str
) -> None:
    front.serve(raw.start(failing(NAMED + FAILED)))
    answer = front.post(path)
    assert answer.content.startswith(NAMED)
    assert b"validation" not in answer.content
    assert b"was lost before its answer was complete" in answer.content


HALF = [b"", b"HTTP/1.1 200 OK\r\nContent-", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf"]
HALF_IDS = ["before its answer", "inside its headers", "inside its body"]


@pytest.mark.parametrize("end", ["fin", "rst"])
@pytest.mark.parametrize("first", [*HALF, SSE_HEAD], ids=[*HALF_IDS, "before its first event"])
def test_a_slice_that_dies_before_anything_was_sent_is_replaced_by_another(
    front: Front, raw: RawServers, first: bytes, end: str
) -> None:
    front.serve(raw.start(answering(first, end=end)), raw.start(answering(whole(b"from b"))))
    answer = front.post()
    assert (answer.status_code, answer.text) == (200, "from b")
    assert front.left_out() == {"a"}


@pytest.mark.parametrize("end", ["fin", "rst"])
@pytest.mark.parametrize("first", HALF, ids=HALF_IDS)
def test_a_slice_that_dies_alone_before_a_whole_answer_is_a_503_to_try_again(
    front: Front, raw: RawServers, first: bytes, end: str
) -> None:
    front.serve(raw.start(answering(first, end=end)))
    answer = front.post()
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert error_of(answer)["code"] == "no_slice_ready"


@pytest.mark.parametrize("status", [b"500 Internal Server Error", b"503 Service Unavailable"])
def test_an_engine_s_error_is_asked_of_another(front: Front, raw: RawServers, status: bytes) -> None:
    front.serve(raw.start(answering(whole(b"broken", status=status))), raw.start(answering(whole(b"from b"))))
    assert front.post().text == "from b"
    assert front.left_out() == set()


def test_an_error_of_every_engine_reaches_the_client(front: Front, raw: RawServers) -> None:
    script, requests = recording(whole(b"broken", status=b"500 Internal Server Error"))
    front.serve(raw.start(script), raw.start(script))
    answer = front.post()
    assert (answer.status_code, len(requests)) == (500, 3)
    assert answer.text == "broken" or error_of(answer)["code"] == "internal_server_error"


def test_a_request_that_makes_every_engine_fail_takes_no_slice_out(front: Front, raw: RawServers) -> None:
    broken = answering(whole(b"broken", status=b"500 Internal Server Error"))
    front.serve(raw.start(broken), raw.start(broken))
    for _ in range(4):
        assert front.post().status_code == 500
    assert front.left_out() == set()


@pytest.mark.parametrize("status", [b"400 Bad Request", b"404 Not Found", b"429 Too Many Requests", b"501 x"])
def test_a_client_s_own_error_is_not_asked_of_another(front: Front, raw: RawServers, status: bytes) -> None:
    script, requests = recording(whole(b"yours", status=status))
    front.serve(raw.start(script), raw.start(script))
    assert front.post().status_code == int(status.split()[0])
    assert len(requests) == 1


def test_a_slice_that_only_errs_is_left_out_and_tried_again(front: Front, raw: RawServers) -> None:
    broken, requests = recording(whole(b"broken", status=b"500 x"))
    front.serve(raw.start(broken), raw.start(answering(whole(b"from b"))))
    for _ in range(3):
        assert front.post().text == "from b"
    assert front.left_out() == {"a"}
    until(lambda: not front.left_out(time.monotonic()), "it may be tried again")
    assert front.post().text == "from b"
    assert front.post().text == "from b"
    assert len(requests) == 4


@pytest.mark.parametrize(
    "first",
    [SSE_HEAD + chunk(EVENTS[0]), b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf", b""],
    ids=["streaming", "whole", "before its headers"],
)
def test_a_client_that_goes_away_ends_the_request_on_the_slice(
    front: Front, raw: RawServers, first: bytes
) -> None:
    script, asked, closed = holding(first)
    front.serve(raw.start(script))
    host, port = front.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        assert asked.wait(PATIENCE_S)
        if first.startswith(SSE_HEAD):
            client.recv(65536)
        assert front.table.in_flight("a") == 1
    assert closed.wait(PATIENCE_S)


HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf"


@pytest.mark.parametrize("first", [HALF, b""], ids=["half an answer", "before its headers"])
def test_what_a_lost_slice_has_goes_elsewhere_though_its_connections_stand(
    front: Front, raw: RawServers, first: bytes
) -> None:
    script, asked, _ = holding(first)
    front.serve(raw.start(script), raw.start(answering(whole(b"from b"))))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(front.post)
        assert asked.wait(PATIENCE_S)
        until(lambda: front.waits(first), "the router waits")
        front.lose()
        assert call.result().text == "from b"


@pytest.mark.parametrize("first", [HALF, b""], ids=["half an answer", "before its headers"])
def test_what_the_only_slice_has_waits_until_it_is_forgotten(
    front: Front, raw: RawServers, first: bytes
) -> None:
    script, asked, _ = holding(first)
    front.serve(raw.start(script))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(front.post)
        assert asked.wait(PATIENCE_S)
        front.lose()
        with pytest.raises(TimeoutError):
            call.result(0.2)
        front.lose(forget=True)
        assert call.result().status_code == 503


def test_a_stream_that_can_t_go_on_elsewhere_stays_with_a_slice_that_only_says_nothing(
    front: Front, raw: RawServers
) -> None:
    script, asked, _ = holding(SSE_HEAD + chunk(EVENTS[0]))
    front.serve(raw.start(script), raw.start(answering(whole(b"from b"))))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(front.post, "/v1/responses")
        assert asked.wait(PATIENCE_S)
        until(lambda: any(not one.movable for one in front.state.relay._streams), "its first event sent")
        front.lose()
        with pytest.raises(TimeoutError):
            call.result(0.2)
        for stream in front.state.relay._streams:
            stream.heard_s -= 10
        front.lose(forget=True)
        assert "another can't go on" in call.result().text


def test_a_slice_that_fails_one_that_is_silent_and_one_that_is_gone_are_told_apart(
    front: Front, raw: RawServers
) -> None:
    script, _, _ = holding(b"")
    busy = raw.start(answering(whole(b"", status=b"503 Busy")), well=False)
    front.serve(busy, raw.start(script, well=False), free_address())
    relay: Dispatcher = front.state.relay
    found = [
        asyncio.run_coroutine_threadsafe(relay._upstream.health(entry, within_s), relay._watching.get_loop())
        for entry, within_s in zip(front.entries, (PATIENCE_S, 0.3, PATIENCE_S), strict=True)
    ]
    assert [one.result() for one in found] == [Health.FAILING, Health.SILENT, Health.GONE]


def test_a_whole_answer_may_try_a_slice_again_for_as_long_as_it_takes(front: Front, raw: RawServers) -> None:
    go, asked = threading.Event(), threading.Event()

    async def slowly(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await asyncio.to_thread(go.wait, PATIENCE_S)
        writer.write(whole(b"from a"))

    front.serve(raw.start(slowly), raw.start(answering(whole(b"from b"))))
    relay: Dispatcher = front.state.relay
    relay.breaker.failed("a", time.monotonic() - 10, broken=True)
    relay.timing._of("a")._first_s = 0.1
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(front.post)
        assert asked.wait(PATIENCE_S)
        with pytest.raises(TimeoutError):
            call.result(0.3)
        go.set()
        assert call.result().text == "from a"
    assert front.left_out() == set()


async def test_the_kernel_watches_connections_to_hosts_that_may_vanish(raw: RawServers) -> None:
    connections = upstream.Upstream(1)
    entry = SliceRecord(
        "a", MODEL, SliceState.SERVING, "", "v6e 2x4", address=raw.start(answering(whole(b"")))
    )
    request = InferenceRequest(MODEL, "/v1/completions", b"{}", {})
    await (await connections.post(entry, request, b"{}", {})).read()
    made = next(iter(connections._open)).transport.get_extra_info("socket")
    assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    seconds = [
        made.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    ]
    assert seconds[0] + seconds[1] * seconds[2] <= 5
    await connections.close()
