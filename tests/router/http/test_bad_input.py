"""Whatever a client sends, it gets a 4xx that says why, nothing stays behind, and the next request is answered."""

import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from support.fronts import Front, front
from support.servers import PATIENCE_S, until
from support.simulated_engine import MODEL, small_plan

from serving.bounded_json import SMALL_BYTES
from serving.config import RouterSpec
from serving.router.http.routes import ROUTES
from serving.router.http.validation import check

pytestmark = pytest.mark.http

CHAT = "/v1/chat/completions"
GOOD = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
JSON = {"content-type": "application/json"}
PLAN = small_plan()


@pytest.fixture(scope="module", params=[False, True], ids=["asgi", "door"])
def running(request: pytest.FixtureRequest) -> Iterator[Front]:
    with front(door=request.param) as found:
        yield found


@pytest.fixture
def hurried(request: pytest.FixtureRequest) -> Iterator[Front]:
    """Another, which waits for no body for long."""
    with front(door=request.node.callspec.params["running"], body_timeout_s=0.3) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Front) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.address, timeout=PATIENCE_S, headers=JSON) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_stays_behind(running: Front, client: httpx.Client) -> Iterator[None]:
    yield
    until(lambda: running.idle, "nothing held and nothing running")
    assert client.post(CHAT, json=GOOD).status_code == 200


def body(**fields: Any) -> bytes:
    return json.dumps(GOOD | fields).encode()


def image(url: str) -> bytes:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    return body(messages=[{"role": "user", "content": parts}])


def anthropic_image(url: str) -> bytes:
    return body(
        messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}]
    )


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        pytest.param(b"", 400, "no body", id="empty"),
        pytest.param(b"{", 400, "not JSON", id="cut off"),
        pytest.param(b"hello", 400, "not JSON", id="no JSON"),
        pytest.param(b"[]", 400, "an object is needed", id="list"),
        pytest.param(b'{"model": "\xff"}', 400, "not JSON", id="invalid UTF-8"),
        pytest.param(body().decode().encode("utf-16"), 400, "send UTF-8", id="UTF-16"),
        pytest.param(b"\xef\xbb\xbf" + body(), 400, "byte order mark", id="a byte order mark"),
        pytest.param(gzip.compress(body()), 400, "packed with gzip", id="gzip"),
        pytest.param(b"\0" * 100, 400, "not JSON", id="zeros"),
        pytest.param(b'{"a":' * 100_000, 400, "recursion limit", id="deep nesting"),
        pytest.param(b'{"model": "llama", "temperature": NaN}', 400, "not JSON", id="NaN"),
        pytest.param(body(temperature=1)[:-1] + b', "temperature": 2}', 400, "duplicate key", id="duplicate"),
        pytest.param(b'{"model": "a", "mod\\u0065l": "llama"}', 400, "duplicate key", id="hidden duplicate"),
        pytest.param(
            b'{"model": "llama", "messages": [{"a": 1, "a": 2}]}', 400, "duplicate", id="inner duplicate"
        ),
        pytest.param(body(messages="Hello"), 400, "", id="messages of the wrong type"),
        pytest.param(body(messages=None), 400, "", id="no messages"),
        pytest.param(body(messages=[[]] * 10), 400, "", id="messages of lists"),
        pytest.param(body(stream="maybe"), 400, "send true or false", id="stream of the wrong type"),
        pytest.param(body(max_tokens=-1), 400, "", id="negative max_tokens"),
        pytest.param(body(max_tokens="100"), 400, "send a whole number", id="max_tokens of the wrong type"),
        pytest.param(body(max_tokens=1 << 80), 400, "", id="max_tokens of 80 bits"),
        pytest.param(body(n=-1), 400, "", id="negative n"),
        pytest.param(body(n=129), 400, "n is 129; at most 128", id="huge n"),
        pytest.param(body(n=10**400), 400, "n is a number of 1329 bits", id="endless n"),
        pytest.param(body(n={"a": 1}), 400, "", id="n of the wrong type"),
        pytest.param(body(n="16384"), 400, "n is '16384'; send a whole number", id="n in a text"),
        pytest.param(body(n=16384.0), 400, "n is 16384; at most 128", id="huge n as JSON has it too"),
        pytest.param(body(stream=1), 400, "stream is 1; send true or false", id="stream as a number"),
        pytest.param(body(best_of=1000), 400, "best_of is 1000", id="huge best_of"),
        pytest.param(body(store=0), 400, "store is 0; send true or false", id="store as a number"),
        pytest.param(body(store="false"), 400, "send true or false", id="store in a text"),
        pytest.param(body(stop=["a"] * 65), 400, "stop has 65 entries", id="many stops"),
        pytest.param(body(stop=["a" * 1025]), 400, "stop has a text of 1025", id="long stop"),
        pytest.param(body(stop={"a": 1}), 400, "", id="stop of the wrong type"),
        pytest.param(image("http://10.0.0.1/a.png"), 400, "is not fetched", id="media by http"),
        pytest.param(image("HTTPS://example.com/a.png"), 400, "fetches from: none", id="media by https"),
        pytest.param(image("file:///etc/passwd"), 400, "is not fetched", id="media by file"),
        pytest.param(image(" http://[::1/"), 400, "is not", id="media by no URL"),
        pytest.param(image("gopher://example.com"), 400, "is not fetched", id="media by gopher"),
        pytest.param(anthropic_image("https://example.com/a"), 400, "is not fetched", id="Anthropic's media"),
    ],
)
def test_a_body_that_makes_no_sense_is_a_4xx_that_says_why(
    client: httpx.Client, content: bytes, status: int, says: str
) -> None:
    answer = client.post(CHAT, content=content)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in answer.text
    assert len(answer.content) < 2000
    assert answer.headers["x-request-id"]


def test_a_body_of_50_mb_is_read_to_its_end_and_refused() -> None:
    """A client in the middle of sending would hear of a broken connection and nothing else."""
    with (
        front() as patient,
        httpx.Client(base_url=patient.address, timeout=PATIENCE_S, headers=JSON) as client,
    ):
        answer = client.post(CHAT, content=b" " * (50 << 20))
        assert answer.status_code == 413
        assert "larger than 33554432 bytes" in answer.json()["error"]["message"]
        assert client.post(CHAT, json=GOOD).status_code == 200


def prompt_tokens(fields: dict[str, Any]) -> float:
    return check(ROUTES[CHAT], fields, json.dumps(fields).encode(), PLAN, RouterSpec()).prompt_tokens


def test_media_in_a_request_are_not_counted_as_text() -> None:
    url = "data:image/png;base64," + "A" * (1 << 20)
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": "A" * (1 << 20), "format": "wav"}},
    ):
        fields = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 10}
        assert 10 < prompt_tokens(fields) < 100
    for part in (
        {"type": "text", "text": "data: " + "word " * 10_000},
        {"type": "document", "source": {"type": "text", "data": "word " * 10_000}},
    ):
        fields = {"messages": [{"role": "user", "content": [part]}]}
        assert prompt_tokens(fields) > 10_000
    spoken = {"model": "whisper", "prompt": "a word"}
    route = ROUTES["/v1/audio/transcriptions"]
    assert check(route, spoken, b"--boundary" + b"\0" * (1 << 20), PLAN, RouterSpec()).prompt_tokens < 10


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": [1] * 2049}, "prompt has 2049 tokens; the context of this model is 2048"),
        ({"prompt": [[1], [1] * 2049]}, "prompt has 2049 tokens"),
        ({"prompt": "a" * (2048 * 128 + 1)}, "no text of that length fits"),
        ({"prompt": ["a"] * 2000, "n": 3}, "makes 6000 sequences"),
    ],
)
def test_a_prompt_that_can_not_fit_is_refused_before_the_engine(
    client: httpx.Client, fields: dict[str, Any], says: str
) -> None:
    answer = client.post("/v1/completions", json={"model": MODEL, **fields})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


class Watched:
    """A router's options, which tell the threads in which requests are checked against them."""

    def __init__(self, spec: RouterSpec) -> None:
        self._spec = spec
        self.threads: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "max_n":
            self.threads.append(threading.current_thread().name)
        return getattr(self._spec, name)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_a_large_body_is_checked_beside_the_event_loop_and_a_small_one_on_it(
    running: Front, client: httpx.Client, path: str
) -> None:
    """Many texts took the loop 300 ms, after they had been parsed beside it."""
    watched = Watched(running.gate.spec)
    running.gate.spec = watched  # type: ignore[assignment]
    try:
        for more in ({}, {"metadata": ["a"] * (SMALL_BYTES // 2)}):
            client.post(path, json=GOOD | {"input": "Hello"} | more)
    finally:
        running.gate.spec = watched._spec
    small, large = watched.threads
    assert not small.startswith("parsing")
    assert large.startswith("parsing")


def test_unknown_fields_pass_as_they_do_at_the_engine(client: httpx.Client) -> None:
    """Clients of other ages and makers send fields of their own; OpenAI's and vLLM's servers let them."""
    assert client.post(CHAT, content=body(reasoning_budget=3, metadata={"a": [1]})).status_code == 200


def test_media_within_the_request_passes(client: httpx.Client) -> None:
    answer = client.post(CHAT, content=image("data:image/png;base64,aGVsbG8="))
    assert "is not fetched" not in answer.text


def test_errors_on_anthropic_s_route_are_anthropic_s(client: httpx.Client) -> None:
    error = client.post("/v1/messages", content=b"{").json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


def raw(running: Front, *pieces: bytes, pause_s: float = 0.0, close: bool = False) -> bytes:
    """What comes back for these bytes, sent as they are."""
    host, port = running.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        for piece in pieces:
            with suppress(ConnectionError):  # it is answered and let go already, maybe with bytes unread
                connection.sendall(piece)
            time.sleep(pause_s)
        if close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
                if b"\r\n\r\n" in answer and b"content-length" in answer.lower():
                    break
        except ConnectionResetError:
            pass
        return answer


def head(*lines: bytes) -> bytes:
    return b"\r\n".join([b"POST " + CHAT.encode() + b" HTTP/1.1", b"Host: x", *lines]) + b"\r\n\r\n"


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(
            head(b"Content-Length: 4", b"Transfer-Encoding: chunked") + b"0\r\n\r\n" + SMUGGLED,
            id="both lengths",
        ),
        pytest.param(head(b"Content-Length: 2", b"Content-Length: 40") + b"{}" + SMUGGLED, id="two lengths"),
        pytest.param(head(b"Content-Length: -1"), id="negative length"),
        pytest.param(head(b"Content-Length: 2,2") + b"{}", id="a list of lengths"),
        pytest.param(head(b"Content-Length: 0x2") + b"{}", id="a length in hex"),
        pytest.param(head(b"Transfer-Encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n", id="a chunk of no size"),
        pytest.param(head(b"Content-Length : 2") + b"{}", id="a space before the colon"),
        pytest.param(head(b"X: a\x00b", b"Content-Length: 2") + b"{}", id="a zero in a header"),
        pytest.param(b"POST " + CHAT.encode() + b" HTTP/9.9\r\n\r\n", id="another HTTP"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00", id="TLS"),
    ],
)
def test_requests_that_two_servers_could_read_differently_are_refused_whole(
    running: Front, request_: bytes
) -> None:
    answer = raw(running, request_, close=True)
    assert answer.startswith(b"HTTP/1.1 4"), answer
    assert b'"object": "list"' not in answer  # the request within was not answered
    assert answer.count(b"HTTP/1.1") == 1


def test_a_client_that_sends_too_slowly_is_told_and_let_go(hurried: Front) -> None:
    answer = raw(hurried, head(b"Content-Length: 50"), b"{")
    assert answer.startswith(b"HTTP/1.1 408"), answer
    assert b"connection: close" in answer.lower()


def test_a_client_that_sends_now_and_then_has_no_more_time(hurried: Front) -> None:
    answer = raw(hurried, head(b"Content-Length: 50"), *[b" "] * 6, pause_s=0.1)
    assert answer.startswith(b"HTTP/1.1 408"), answer


def test_a_client_that_hangs_up_half_way_leaves_nothing(running: Front) -> None:
    before = running.gate.counts(MODEL)["arrived"]
    assert raw(running, head(b"Content-Length: 50"), b"{", close=True) == b""
    assert running.gate.counts(MODEL)["arrived"] == before


def test_a_client_that_closes_its_half_after_the_request_leaves_nothing(running: Front) -> None:
    """It can't be told from one that has gone: uvicorn takes the end of input for a disconnect."""
    content = body()
    raw(
        running,
        head(*(f"{k}: {v}".encode() for k, v in JSON.items()), b"Content-Length: %d" % len(content))
        + content,
        close=True,
    )
