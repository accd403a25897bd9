import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from support.doors import LateDoor
from support.servers import asgi_server

from serving.config import ModelSpec, RouterSpec
from serving.metrics.recorder import Recorder
from serving.planning import Plan, plan
from serving.router.admission.controller import AdmissionController
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.http.api import Api
from serving.router.http.auth import KeyFile
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.journal import Journal
from serving.state.records import SliceRecord, SliceState, Snapshot
from serving.status.document import Status, status
from serving.status.rates import Rates

pytestmark = pytest.mark.http

LLAMA, QWEN = "llama", "qwen"
CHAT = "/v1/chat/completions"


def planned(name: str, model: str) -> Plan:
    slice_ = {"generation": "v6e", "topology": "2x4", "hosts": 2}
    spec = {"name": name, "model": model, "slice": slice_, "queue": {"wait_s": 0}}
    return plan(ModelSpec.model_validate(spec))


PLANS = [planned(LLAMA, "meta-llama/Llama-3.1-8B-Instruct"), planned(QWEN, "Qwen/Qwen3-8B")]


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    """An engine that says what it was asked."""

    async def echo(request: Request) -> JSONResponse:
        fields = {"path": request.url.path, "body": (await request.body()).decode("latin-1")}
        return JSONResponse(fields, headers={"seen-id": request.headers["x-request-id"]})

    with asgi_server(Starlette(routes=[Route("/{path:path}", echo, methods=["POST"])])) as address:
        yield address


async def no_metrics() -> str:
    return ""


def app_of(
    plans: list[Plan], entries: list[SliceRecord], prefix: str = "/", door: LateDoor | None = None
) -> FastAPI:
    table = SliceTable(
        {one.model.name: 1 for one in plans}, {one.model.name: str(one.slice) for one in plans}
    )
    table.update(entries, 0.0)
    window = Rates()
    window.observe(entries, [], 0.0)

    def seen() -> Status:
        return status(Snapshot(tuple(entries), wanted=tuple(table.wanted(0.0))), window, 0.0)

    @asynccontextmanager
    async def lifespan(outer: FastAPI) -> AsyncIterator[None]:
        relay = Dispatcher(table)
        gate = AdmissionController(RouterSpec(), plans, table, KeyFile(None))
        api = Api(plans, table, relay, gate, Journal(Recorder("default")), seen, no_metrics)
        if door:
            door.answer = api.inference.relay
        inner = api.app()
        if prefix == "/":
            outer.router.default = inner  # not mounted: a mount takes no path with a line break
        else:
            outer.mount(prefix, inner)
        yield
        await relay.close()

    return FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)


@pytest.fixture(scope="module", params=[False, True], ids=["asgi", "door"])
def address(upstream: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A service of two models: one slice serves llama, none serves qwen."""
    entry = SliceRecord(
        "a",
        LLAMA,
        SliceState.SERVING,
        "serving",
        "v6e 2x4",
        address=upstream,
        max_model_len=512,
        simulated=True,
    )
    door = LateDoor() if request.param else None
    with asgi_server(app_of(PLANS, [entry], door=door), **(door.options if door else {})) as found:
        yield found


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The error of a response in the one shape that OpenAI clients parse."""
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["code"] == code
    return error


def test_models_are_listed_with_what_serves_them(address: str) -> None:
    listed = httpx.get(f"{address}/v1/models").json()
    assert listed["object"] == "list"
    llama, qwen = listed["data"]
    assert (
        llama.items()
        >= {
            "id": LLAMA,
            "object": "model",
            "owned_by": "tpu-serving",
            "root": "meta-llama/Llama-3.1-8B-Instruct",
            "parent": None,
            "max_model_len": 512,
            "slice": "v6e 2x4 (2 hosts x 4 chips)",
            "parallel": {"tensor": 8, "pipeline": 1},
            "slices_ready": 1,
            "simulated": True,
        }.items()
    )
    assert (qwen["id"], qwen["slices_ready"], qwen["max_model_len"]) == (QWEN, 0, None)
    assert httpx.get(f"{address}/v1/models/{LLAMA}").json() == llama


def test_the_openai_client_reads_models_and_errors(address: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0)
    assert [model.id for model in client.models.list()] == [LLAMA, QWEN]
    assert client.models.retrieve(LLAMA).id == LLAMA
    messages: Any = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=messages)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.InternalServerError) as waiting:
        client.chat.completions.create(model=QWEN, messages=messages)
    assert waiting.value.code == "no_slice_ready"


def test_a_model_id_with_a_slash_is_one_id() -> None:
    with asgi_server(app_of([planned("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")], [])) as found:
        assert httpx.get(f"{found}/v1/models/Qwen/Qwen3-8B").json()["id"] == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/v1/audio/transcriptions"])
def test_every_post_endpoint_of_the_engine_is_reached_by_model_name(address: str, path: str) -> None:
    body = json.dumps({"model": LLAMA, "anything": [1, None]})
    assert httpx.post(address + path, content=body).json() == {"path": path, "body": body}


def test_a_form_is_routed_by_its_model_field(address: str) -> None:
    answer = httpx.post(
        f"{address}/v1/audio/transcriptions", data={"model": LLAMA}, files={"file": ("a.wav", b"\0\xff")}
    )
    assert "\r\n\r\n\0\xff\r\n" in answer.json()["body"]


def test_no_two_speech_requests_have_one_id_at_an_engine(address: str) -> None:
    """vLLM ends all of an id when the client of one hangs up: also those of a retry, and of another key."""
    mine = {"x-request-id": "mine"}
    speech = [
        httpx.post(
            f"{address}/v1/audio/{kind}", data={"model": LLAMA}, files={"file": b"\0"}, headers=mine
        ).headers
        for kind in ("transcriptions", "transcriptions", "translations")
    ]
    assert all(headers["seen-id"].startswith("mine-") for headers in speech)
    assert len({headers["seen-id"] for headers in speech}) == 3
    chat = httpx.post(address + CHAT, json={"model": LLAMA}, headers=mine).headers
    assert chat["seen-id"] == "mine"
    assert {headers["x-request-id"] for headers in (*speech, chat)} == {"mine"}


def test_a_service_below_a_route_prefix_forwards_the_path_without_it(upstream: str) -> None:
    entry = SliceRecord("a", LLAMA, SliceState.SERVING, "serving", "v6e 2x4", address=upstream)
    with asgi_server(app_of(PLANS, [entry], prefix="/llm")) as found:
        assert httpx.post(f"{found}/llm{CHAT}", json={"model": LLAMA}).json()["path"] == CHAT
        assert httpx.get(f"{found}/llm/v1/models").is_success
        answer = httpx.get(f"{found}/llm{CHAT}")
    assert CHAT in refused(answer, 405, "method_not_allowed")["message"]


def test_health_is_bad_while_a_model_has_no_slice(address: str, upstream: str) -> None:
    answer = httpx.get(f"{address}/health")
    assert QWEN in refused(answer, 503, "no_slice_ready")["message"]
    assert int(answer.headers["retry-after"]) > 0
    entry = SliceRecord("a", LLAMA, SliceState.SERVING, "serving", "v6e 2x4", address=upstream)
    with asgi_server(app_of(PLANS[:1], [entry])) as all_well:
        assert httpx.get(f"{all_well}/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no body"),
        (b"{", "not JSON: EOF"),
        (b'{"model": "llama",}', "not JSON"),
        (b'["llama"]', "JSON, but an object is needed"),
        (b'"llama"', "JSON, but an object is needed"),
        (b"null", "JSON, but an object is needed"),
        (b'{"model": "\xff\xfe"}', "not JSON"),
        (b'{"model": "\\ud800"}', "an emoji that was cut in two"),
        (b'{"model": "\\ude00"}', "an emoji that was cut in two"),
        (b"[" * 100_000, "recursion limit"),
        (b'{"a":' * 100_000, "recursion limit"),
        (b'{"model": "llama", "temperature": NaN}', "not JSON"),
        (b'{"model": "llama", "temperature": -Infinity}', "not JSON"),
        (b'{"model": "llama", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
    ],
)
def test_a_body_that_can_not_be_read_is_a_400_that_says_why(address: str, body: bytes, says: str) -> None:
    error = refused(httpx.post(address + CHAT, content=body), 400, "invalid_request")
    assert says in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    "boundary", ["", "; boundary=x", *(f"; boundary=a; charset={name}" for name in ("punycode", "undefined"))]
)
def test_a_form_that_can_not_be_read_is_a_400(address: str, boundary: str) -> None:
    headers = {"content-type": f"multipart/form-data{boundary}"}
    answer = httpx.post(f"{address}/v1/audio/transcriptions", content=b"no form", headers=headers)
    refused(answer, 400, "invalid_request")


@pytest.mark.parametrize(
    "fields", [{}, {"model": 7}, {"model": None}, {"model": [LLAMA]}, {"model": {}}, {"model": "gpt-4"}]
)
def test_a_model_that_is_not_served_is_a_404_that_lists_those_that_are(
    address: str, fields: dict[str, Any]
) -> None:
    error = refused(httpx.post(address + CHAT, json=fields), 404, "model_not_found")
    assert error["param"] == "model"
    assert error["message"].endswith("Models served here: llama, qwen.")


def test_an_unknown_model_is_not_found(address: str) -> None:
    refused(httpx.get(f"{address}/v1/models/gpt-4"), 404, "model_not_found")
    assert httpx.get(f"{address}/v1/models/").json() == httpx.get(f"{address}/v1/models").json()


@pytest.mark.parametrize(
    "path", ["/v1/models", f"/v1/models/{LLAMA}", "/health", "/metrics", "/status.json", "/"]
)
def test_head_gets_what_get_does_without_the_body(address: str, path: str) -> None:
    head, got = (httpx.request(method, address + path) for method in ("HEAD", "GET"))
    assert head.status_code == got.status_code < 504
    assert (head.headers.get("content-type"), head.content) == (got.headers.get("content-type"), b"")


@pytest.mark.parametrize(
    ("method", "path", "takes"),
    [
        ("GET", CHAT, "POST"),
        ("DELETE", CHAT, "POST"),
        ("OPTIONS", CHAT, "POST"),
        ("TRACE", CHAT, "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/models", "GET, HEAD"),
        ("POST", f"/v1/models/{LLAMA}", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_answered_with_the_right_one(
    address: str, method: str, path: str, takes: str
) -> None:
    answer = httpx.request(method, address + path, content=b'{"model": "llama"}')
    error = refused(answer, 405, "method_not_allowed")
    assert error["message"] == f"{path} takes {takes}, not {method}."
    assert answer.headers["allow"] == takes


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/load"),
        ("GET", "/v1/nothing"),
        ("DELETE", "/v1/nothing/7"),
        ("POST", "/sleep"),
        ("POST", "/simulator/faults"),
        ("GET", "/v1/models/a%0Ab"),
        ("POST", "/v1/completions%0A"),
    ],
)
def test_a_path_that_is_not_served_is_not_found(address: str, method: str, path: str) -> None:
    error = refused(httpx.request(method, address + path), 404, "unknown_path")
    assert error["message"] == f"There is no {unquote(path)} here."


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
def test_a_base_url_that_is_a_little_wrong_is_told_the_right_path(
    address: str, path: str, meant: str
) -> None:
    error = refused(httpx.post(address + path, json={"model": LLAMA}), 404, "unknown_path")
    assert error["message"] == f"There is no {path} here; {meant} is."


async def test_a_client_that_leaves_while_it_sends_is_no_error_of_ours(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with httpx.AsyncClient() as client:  # the server has seen the end of the first by then
        assert (await client.get(f"{address}/v1/models")).is_success
    assert not caplog.records


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/v1/./chat/completions",
        "/v1/x/../chat/completions",
        "/V1/chat/completions",
        "/v1/chat/completions;a=b",
        "/v1/chat%2Fcompletions/",
        "/v1/chat/completions%00",
        "/v1/load_lora_adapter",
        "/sleep",
        "/collective_rpc",
        "/server_info",
    ],
)
def test_a_path_that_has_no_row_reaches_no_engine_however_it_is_written(address: str, path: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    connection = HTTPConnection(host, int(port), timeout=20)  # sends a path as it is
    connection.request("POST", path, json.dumps({"model": LLAMA}), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 404
    assert json.loads(answer.read())["error"]["code"] == "unknown_path"
    connection.close()


def test_headers_that_steer_an_engine_stay_at_the_router() -> None:
    steering = {
        "X-data-parallel-rank": "1",
        "Endpoint-Load-Metrics-Format": "TEXT",
        "X-Amzn-SageMaker-Adapter-Identifier": "other",
        "X-Other": "a",
    }
    request = SimpleNamespace(headers=Headers(headers=steering), scope={})
    assert InferenceRequest.of(request, LLAMA, CHAT, b"", {}).headers == ((b"x-other", b"a"),)


@pytest.mark.parametrize("encoding", ["gzip", "BR", "deflate", "identity, gzip"])
def test_a_packed_body_is_refused_by_the_name_of_its_packing(address: str, encoding: str) -> None:
    packed = gzip.compress(json.dumps({"model": LLAMA}).encode() * 1000)
    answer = httpx.post(address + CHAT, content=packed, headers={"content-encoding": encoding})
    says = refused(answer, 400, "invalid_request")["message"]
    assert repr(encoding) in says
    assert "identity" in says


def test_a_form_goes_to_the_routes_that_take_one(address: str) -> None:
    answer = httpx.post(address + CHAT, data={"model": LLAMA, "n": "100"}, files={"file": ("a", b"b")})
    assert "takes a JSON body" in refused(answer, 400, "invalid_request")["message"]
    many = httpx.post(
        f"{address}/v1/audio/transcriptions",
        data={"model": LLAMA, "n": "100000"},
        files={"file": ("a", b"b")},
    )
    assert "n is 100000" in refused(many, 400, "invalid_request")["message"]
