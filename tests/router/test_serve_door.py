"""The door in the server that Ray Serve starts: Serve's own function, its options and uvicorn; only the replica is a stand-in."""

import asyncio
import inspect
import logging
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.serve._private import replica
from ray.serve.config import HTTPOptions
from starlette.requests import Request
from support.servers import PATIENCE_S

from serving.errors import ConfigError
from serving.router import direct_door, serve_door
from serving.router.http.door import Relay
from serving.router.http.downstream import Downstream
from serving.simulation.ports import free_port

PATH = "/v1/completions"


class Counts:
    """What Serve's replica counts requests with."""

    def __init__(self) -> None:
        self.open = 0
        self.recorded: list[dict[str, Any]] = []

    def inc_num_ongoing_requests(self, metadata: Any) -> None:
        assert metadata.is_direct_ingress
        assert metadata.protocol == replica.RequestProtocol.HTTP
        self.open += 1

    def dec_num_ongoing_requests(self, metadata: Any) -> None:
        assert metadata.is_direct_ingress
        self.open -= 1

    def record_request_metrics(self, **fields: Any) -> None:
        self.recorded.append(fields)


class Replica:
    """A replica as far as its HTTP server goes."""

    def __init__(self, prefix: str = "/") -> None:
        self._route_prefix = prefix
        self._metrics_manager = Counts()
        self._shutting_down = False
        self.asked: list[str] = []
        self.headers: dict[bytes, bytes] = {}

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG002  as ASGI has it
        self.asked.append(scope["path"])
        self.headers = dict(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class Held:
    """Answers with an event at once and the rest when it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def answer(self, request: Request, client: Downstream) -> None:
        await request.body()
        client.start(200, [(b"content-type", b"text/event-stream")])
        client.write(b"data: 1\n\n")
        await self.go.wait()
        client.write(b"data: 2\n\n")
        client.end()


Answer = Callable[[Request, Downstream], Awaitable[None]]


async def started(
    one: Replica, answer: Answer, shared: socket.socket | None = None, **options: Any
) -> tuple[asyncio.Task[None], Any, str]:
    """Serve's server of a replica whose user's class has installed the door."""
    serve_door.install(Relay(answer), shared)
    address = f"http://127.0.0.1:{free_port()}"
    made = HTTPOptions(host="127.0.0.1", port=int(address.rpartition(":")[2]), **options)
    task, server = await replica.start_asgi_http_server(
        one.asgi, made, event_loop=asyncio.get_running_loop(), enable_so_reuseport=False
    )
    while not server.started or len(server.servers) < (2 if shared else 1):  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.01)
    return task, server, address


@pytest.fixture(autouse=True)
def serve_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test installs goes with it."""
    monkeypatch.setattr(replica, "start_asgi_http_server", replica.start_asgi_http_server)


@pytest.mark.unit
def test_this_version_of_ray_has_what_the_door_needs() -> None:
    assert inspect.iscoroutinefunction(replica.start_asgi_http_server)
    counts = inspect.getsource(replica.create_replica_metrics_manager)
    for name in ("inc_num_ongoing_requests", "dec_num_ongoing_requests", "record_request_metrics"):
        assert callable(getattr(replica.ReplicaMetricsManager, name))
    assert "ReplicaMetricsManager" in counts
    source = inspect.getsource(replica)
    assert "await start_asgi_http_server(\n                    self._direct_ingress_asgi," in source
    assert "self._route_prefix" in source


@pytest.mark.http
async def test_an_open_stream_counts_and_ends_whole_though_the_server_is_to_exit() -> None:
    one, held = Replica("/llm"), Held()
    task, server, address = await started(one, held.answer)
    async with httpx.AsyncClient() as client:
        async with client.stream("POST", f"{address}/llm{PATH}", content=b"{}") as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"data: 1\n\n"
            assert one._metrics_manager.open == 1
            server.should_exit = True
            while any(listener.is_serving() for listener in server.servers):  # noqa: ASYNC110  as above
                await asyncio.sleep(0.01)
            assert not task.done()
            held.go.set()
            assert [piece async for piece in pieces] == [b"data: 2\n\n"]
        await asyncio.wait_for(task, 10)
        with pytest.raises(httpx.ConnectError):
            await client.post(f"{address}/llm{PATH}", content=b"{}")
    assert one._metrics_manager.open == 0
    (recorded,) = one._metrics_manager.recorded
    assert (recorded["route"], recorded["is_error"]) == (f"/llm{PATH}", False)


@pytest.mark.http
@pytest.mark.parametrize("headers", [{}, {"x-request-disconnect-disabled": "?1"}])
async def test_a_client_that_goes_is_counted_no_more_whatever_it_asks_for(headers: dict[str, str]) -> None:
    one, held = Replica(), Held()
    task, server, address = await started(one, held.answer)
    async with (
        httpx.AsyncClient(headers=headers) as client,
        client.stream("POST", address + PATH, content=b"{}") as answer,
    ):
        await anext(answer.aiter_raw())
        assert one._metrics_manager.open == 1
    while one._metrics_manager.open:  # noqa: ASYNC110  nothing tells
        await asyncio.sleep(0.01)
    assert one._metrics_manager.recorded[0]["exception_type"] == "CancelledError"
    server.should_exit = True
    await asyncio.wait_for(task, 10)


@pytest.mark.http
async def test_serve_gets_what_is_its_own() -> None:
    one, held = Replica(), Held()
    held.go.set()
    task, server, address = await started(one, held.answer)
    async with httpx.AsyncClient() as client:
        for path in ("/-/healthz", "/v1/models", "/metrics"):
            assert (await client.get(address + path)).text == "ok"
        assert (await client.post(address + PATH, content=b"{}")).text == "data: 1\n\ndata: 2\n\n"
        own = await client.post(address + PATH, headers={"x-request-timeout-seconds": "5"}, content=b"{}")
        assert own.text == "ok"
    assert one.asked == ["/-/healthz", "/v1/models", "/metrics", PATH]
    server.should_exit = True
    await asyncio.wait_for(task, 10)


@pytest.mark.http
async def test_serve_gets_no_header_that_it_can_t_decode() -> None:
    """It decodes ids and times, and an id in Latin-1 was a 500."""
    one = Replica()
    task, server, address = await started(one, Held().answer)
    sent = {b"x-request-id": b"caf\xe9", b"x-request-timeout-seconds": b"\xff", b"a": "café".encode()}
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{address}/v1/models", headers=list(sent.items()))).text == "ok"
    assert sent.items() & one.headers.items() == {(b"a", "café".encode())}
    server.should_exit = True
    await asyncio.wait_for(task, 10)


@pytest.mark.http
@pytest.mark.parametrize("lacks", ["_metrics_manager", "_route_prefix"])
async def test_where_ray_has_not_what_the_door_needs_serve_answers_all(
    lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = Replica()
    delattr(one, lacks)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        task, server, address = await started(one, Held().answer)
    assert "takes several times the CPU" in caplog.text
    async with httpx.AsyncClient() as client:
        assert (await client.post(address + PATH, content=b"{}")).text == "ok"
    server.should_exit = True
    await asyncio.wait_for(task, 10)


@pytest.mark.http
async def test_a_timeout_of_serve_s_is_kept_by_serve() -> None:
    one = Replica()
    task, server, address = await started(one, Held().answer, request_timeout_s=5)
    async with httpx.AsyncClient() as client:
        assert (await client.post(address + PATH, content=b"{}")).text == "ok"
    server.should_exit = True
    await asyncio.wait_for(task, 10)


@pytest.mark.unit
def test_a_ray_without_the_function_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(replica, "start_asgi_http_server")
    with caplog.at_level(logging.WARNING, "ray.serve"):
        serve_door.install(Relay(SimpleNamespace))  # type: ignore[arg-type]  # never called
    assert "has no start_asgi_http_server" in caplog.text


async def at_once(request: Request, client: Downstream) -> None:
    await request.body()
    client.start(200, [(b"content-length", b"2")])
    client.end(b"ok")


@pytest.mark.http
async def test_routers_share_a_port_and_one_leaves_it_without_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    stays, leaves = Replica(), Replica()
    servers = []
    for one in (stays, leaves):
        with monkeypatch.context() as fresh:
            fresh.setattr(replica, "start_asgi_http_server", replica.start_asgi_http_server)
            shared = direct_door.bind("127.0.0.1", int(address.rpartition(":")[2]))
            servers.append(await started(one, at_once, shared))
    left = asyncio.Event()

    async def ask() -> None:
        """Each request on a connection of its own, until some have come after the router has left."""
        after = 0
        async with httpx.AsyncClient(headers={"connection": "close"}) as client:
            while after < 10:
                answer = await client.post(f"{address}{PATH}", content=b"{}")
                assert answer.status_code == 200
                after += left.is_set()

    asking = [asyncio.create_task(ask()) for _ in range(8)]
    try:
        while not (leaves._metrics_manager.recorded and stays._metrics_manager.recorded):  # noqa: ASYNC110  as above
            await asyncio.sleep(0.01)
        leaves._shutting_down = True
        task, server, _ = servers[1]
        server.should_exit = True
        await asyncio.wait_for(task, 30)
        left.set()
        answered = len(leaves._metrics_manager.recorded)
        await asyncio.wait_for(asyncio.gather(*asking), 30)
        assert len(leaves._metrics_manager.recorded) == answered
    finally:
        for one in asking:
            one.cancel()
        servers[0][1].should_exit = True
        await asyncio.wait_for(servers[0][0], 30)


class Connection(asyncio.Protocol):
    """One that is counted and says nothing."""

    transport: asyncio.Transport

    def __init__(self, made: "list[Connection]") -> None:
        self._made = made

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of a stream
        self.transport = transport
        self._made.append(self)


@pytest.mark.http
async def test_a_crowd_of_connections_is_taken_a_few_in_a_turn_of_the_loop() -> None:
    made: list[Connection] = []
    bound = direct_door.bind("127.0.0.1", 0)
    listener = direct_door.Listener(bound, lambda: Connection(made))
    crowd = [socket.create_connection(bound.getsockname()) for _ in range(100)]  # the kernel takes them
    try:
        most = before = 0
        async with asyncio.timeout(PATIENCE_S):
            while len(made) < len(crowd):
                await asyncio.sleep(0)
                most, before = max(most, len(made) - before), len(made)
        assert 1 < most < 50
    finally:
        listener.close()
        for client in crowd:
            client.close()
        for connection in made:
            connection.transport.abort()
        await asyncio.sleep(0)


@pytest.mark.http
async def test_a_router_that_leaves_ends_connections_with_their_answers() -> None:
    one = Replica()
    task, server, address = await started(one, at_once)
    async with httpx.AsyncClient() as client:
        assert "connection" not in (await client.post(f"{address}{PATH}", content=b"{}")).headers
        one._shutting_down = True
        assert (await client.post(f"{address}{PATH}", content=b"{}")).headers["connection"] == "close"
    server.should_exit = True
    await asyncio.wait_for(task, 30)


@pytest.mark.http
def test_a_port_that_another_service_has_is_refused_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="set another"):
        direct_door.bind("127.0.0.1", taken.getsockname()[1])
