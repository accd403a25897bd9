"""The cluster's secret on a slice's own port: of the app that every engine is served by, over real HTTP."""

import logging
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from support.servers import asgi_server
from support.simulated_engine import MODEL, serving

from benchmarks.calibration import plan_of
from benchmarks.simulator import nowhere
from serving import secret
from serving.cli.parser import parser
from serving.config import FailoverSpec
from serving.errors import SliceLostError
from serving.http_server import HttpServer
from serving.metrics.scrape import Scraper
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.forwarding.upstream import SliceResponse
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.record import RequestRecord
from serving.simulation.engine.server import SimulatorServer
from serving.state.records import SliceRecord, SliceState

SECRET = "the-clusters-own"
ALL_PATHS = (
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/simulator/faults"),
    ("POST", "/simulator/faults"),
    ("POST", "/v1/completions"),
    ("POST", "/invocations"),
    ("POST", "/scale_elastic_ep"),
    ("GET", "/health/"),
    ("GET", "/HEALTH"),
    ("GET", "//health"),
    ("GET", "/nowhere"),
)


@pytest.fixture
def cluster_secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(secret.VARIABLE, SECRET)
    return SECRET


@pytest.fixture
async def slice_port(cluster_secret: str) -> AsyncIterator[str]:  # noqa: ARG001  it sets the variable
    """A simulated slice as a replica serves it."""
    server = SimulatorServer(plan_of("llama-8b-v6e-1"), nowhere())
    await server.start()
    yield f"http://127.0.0.1:{server.http.port}"
    server.kill()


@pytest.fixture
def guarded() -> Iterator[str]:
    """A simulated engine's app behind the guard, in a thread of its own."""
    with serving(cluster_secret=SECRET) as (address, _):
        yield address


def entry(address: str) -> SliceRecord:
    return SliceRecord("a", MODEL, SliceState.SERVING, "serving", "v6e 2x4", address=address, slice="slice-0")


@pytest.mark.http
@pytest.mark.parametrize(("method", "path"), ALL_PATHS)
def test_nobody_without_the_secret_gets_past_a_slices_port(guarded: str, method: str, path: str) -> None:
    for shown in ({}, {"authorization": "Bearer wrong"}, {"authorization": SECRET}, {"x-api-key": SECRET}):
        answer = httpx.request(
            method, guarded + path, headers=shown, json={"slow": 3} if method == "POST" else None
        )
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "not_of_this_cluster"
        assert SECRET not in answer.text
    assert httpx.request(method, guarded + path, headers=secret.headers(SECRET)).status_code != 401


@pytest.mark.http
async def test_a_replicas_server_reads_the_secret_from_its_environment(slice_port: str) -> None:
    async with httpx.AsyncClient(base_url=slice_port) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.post("/simulator/faults", json={"die": True})).status_code == 401
        assert (await client.get("/metrics", headers=secret.headers(SECRET))).is_success


@pytest.mark.unit
async def test_a_websocket_without_the_secret_is_not_opened() -> None:
    sent = []

    async def send(message: object) -> None:
        sent.append(message)

    async def never(*_: object) -> None:
        raise AssertionError

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await secret.Guard(never, SECRET)(scope, never, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.http
async def test_a_router_shows_the_secret_and_a_clients_own_key_never_goes_on(
    guarded: str,
    cluster_secret: str,  # noqa: ARG001
) -> None:
    assert (await asked(guarded)).status == 200


@pytest.mark.http
async def test_a_router_with_another_secret_gives_the_client_no_word_on_keys(
    guarded: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(secret.VARIABLE, "another")
    with pytest.raises(SliceLostError), caplog.at_level(logging.ERROR):
        await asked(guarded)
    assert (
        "slice slice-0 of llama refuses this router: SERVING_CLUSTER_SECRET is not the same in both"
        in caplog.text
    )
    assert SECRET not in caplog.text
    assert "another" not in caplog.text


async def asked(address: str) -> SliceResponse:
    """A slice's answer to a router's request."""
    table = SliceTable({MODEL: 1}, {MODEL: "v6e 2x4"})
    table.update([entry(address)], 0.0)
    dispatcher = Dispatcher(table, FailoverSpec(retries=0))
    try:
        body = b'{"prompt": "x", "max_tokens": 1}'
        headers = ((b"content-type", b"application/json"), (b"authorization", b"Bearer a client's"))
        request = InferenceRequest(MODEL, "/v1/completions", body, {"prompt": "x"}, headers=headers)
        stream = await dispatcher.open(request, RequestRecord("/v1/completions", "id"))
        dispatcher.give_back(stream)
        return stream.response
    finally:
        await dispatcher.close()


@pytest.mark.http
async def test_a_scrape_shows_the_secret_to_engines_and_to_no_agent(
    guarded: str, cluster_secret: str
) -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def agent(scope: Scope, _: Receive, send: Send) -> None:
        if scope["type"] == "http":
            seen.append(scope["headers"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    with asgi_server(agent) as agents:

        async def addresses() -> list[str]:
            return [agents]

        scraper = Scraper("default", addresses, lambda: [entry(guarded)])
        page = await scraper.page()
        await scraper.close()
    assert "vllm:num_requests_running{" in page
    assert 'tpu_serving_scrape_sources_unreachable{application="default"} 0\n' in page
    assert cluster_secret not in str(seen)


@pytest.mark.unit
async def test_a_slice_on_the_network_without_a_secret_is_told_of_in_its_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    HttpServer(None, "127.0.0.1")._port.close()
    assert "SERVING_CLUSTER_SECRET" not in caplog.text
    HttpServer(None, "0.0.0.0")._port.close()
    assert "SERVING_CLUSTER_SECRET is not set: this slice's port on 0.0.0.0 answers everybody" in caplog.text


@pytest.mark.unit
def test_a_secret_is_printed_once_and_is_long(capsys: pytest.CaptureFixture[str]) -> None:
    options = parser().parse_args(["secret"])
    made = set()
    for _ in range(2):
        options.run(options)
        made.add(capsys.readouterr().out.strip())
    assert len(made) == 2
    assert min(map(len, made)) >= 43
