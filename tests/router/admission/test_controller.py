"""Admission through HTTP: the router's app on a real server, in front of an engine that does as it is told."""

import asyncio
import hashlib
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.doors import LateDoor
from support.servers import PATIENCE_S, asgi_server, until

from serving.config import ModelSpec, RouterSpec
from serving.errors import ConfigError
from serving.metrics.recorder import Recorder
from serving.metrics.table import NO_KEY
from serving.planning import Plan, plan
from serving.router.admission import accounts
from serving.router.admission.controller import AdmissionController
from serving.router.admission.meter import Meter
from serving.router.admission.shares import KeyUse
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.http.api import Api
from serving.router.http.auth import Key, KeyFile, new
from serving.router.http.bodies import BodyReader
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.journal import Journal
from serving.router.telemetry.record import RequestRecord
from serving.state.records import Demand, SliceRecord, SliceState, Snapshot
from serving.status.document import Status, status
from serving.status.rates import Rates

pytestmark = pytest.mark.http

MODEL = "llama"
CHAT = "/v1/chat/completions"
USAGE = {"prompt_tokens": 30, "total_tokens": 100, "completion_tokens": 70}
SERVING = SliceRecord("a", MODEL, SliceState.SERVING, "serving", "v6e 2x4")


@dataclass
class Engine:
    """Answers with what it was sent; a request that says `hold` is answered once `free` is set."""

    free: threading.Event = field(default_factory=threading.Event)
    holding: int = 0
    most: int = 0
    order: list[str] = field(default_factory=list)

    async def answer(self, request: Request) -> Response:
        fields = await request.json()
        self.order.append(str(fields.get("user")))
        if fields.get("hold"):
            self.holding += 1
            self.most = max(self.most, self.holding)
            while not self.free.is_set() and not await request.is_disconnected():  # noqa: ASYNC110  set by a thread
                await asyncio.sleep(0.005)
            self.holding -= 1
        if fields.get("fail"):
            return JSONResponse({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, 400)
        if fields.get("endless"):
            piece = b"data: " + b"x" * 65536 + b"\n\n"
            return StreamingResponse(itertools.repeat(piece), media_type="text/event-stream")
        if fields.get("stream"):
            said = (
                b', "usage": {"prompt_tokens": 30, "completion_tokens": 70}' if fields.get("usage") else b""
            )
            events = [b'data: {"choices": []}\n\n'] * 4 + [b'data: {"choices": []' + said + b"}\n\n"]
            return StreamingResponse(iter([*events, b"data: [DONE]\n\n"]), media_type="text/event-stream")
        return JSONResponse({"headers": dict(request.headers), "usage": USAGE})


def planned(**changes: Any) -> Plan:
    spec = {
        "name": MODEL,
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
        "engine": {"max_num_seqs": 2, "max_model_len": 2048},
    }
    return plan(ModelSpec.model_validate(spec | changes))


@dataclass
class Front:
    """The router's app; what the board says is set from the test."""

    client: httpx.Client
    address: str
    upstream: str
    engine: Engine
    table: SliceTable
    gate: AdmissionController
    records: list[RequestRecord]

    def post(self, key: str = "", **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self.client.post(CHAT, json={"model": MODEL, **fields}, headers=headers)

    def count(self, what: str) -> int:
        return self.gate.counts(MODEL)[what]

    def idle(self) -> bool:
        return not any(self.count(what) for what in ("held", "in_flight"))


@contextmanager
def fronted(
    keys: KeyFile | None = None,
    *,
    serves: bool = True,
    beat_s: float = 0.02,
    spec: Any = None,
    clock: Callable[[], float] = time.monotonic,
    **changes: Any,
) -> Iterator[Front]:
    one = planned(**changes)
    engine = Engine()
    table = SliceTable({MODEL: 1}, {MODEL: "v6e 2x4"})
    made: list[AdmissionController] = []
    records: list[RequestRecord] = []
    upstream: list[str] = []
    door = LateDoor()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if serves:
            table.update([replaced(upstream[0])], 0.0)
        relay = Dispatcher(table)
        gate = AdmissionController(
            RouterSpec.model_validate(spec or {}), [one], table, keys or KeyFile(None), clock
        )
        made.append(gate)
        beating = asyncio.create_task(gate.run(beat_s))
        journal = Journal(Recorder("default"), records.append)
        api = Api([one], table, relay, gate, journal, nothing_seen, no_metrics)
        door.answer = api.inference.relay
        app.mount("/", api.app())
        yield
        beating.cancel()
        await relay.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    with asgi_server(Starlette(routes=[Route("/{path:path}", engine.answer, methods=["POST"])])) as address:
        upstream.append(address)
        with (
            asgi_server(app, **door.options) as found,
            httpx.Client(base_url=found, timeout=PATIENCE_S) as client,
        ):
            front = Front(client, found, address, engine, table, made[0], records)
            yield front
            engine.free.set()
            until(front.idle, "nothing held and nothing in flight")


def nothing_seen() -> Status:
    return status(Snapshot(), Rates(), 0.0)


async def no_metrics() -> str:
    return "# nothing\n"


def replaced(address: str, **more: Any) -> SliceRecord:
    return SliceRecord(**{**vars(SERVING), "address": address, "pool": planned().pool, **more})


def id_of(keys: KeyFile) -> str:
    return keys.ring.keys[0].sha256[:12]


def key_file(tmp_path: Path, **limits: float) -> tuple[str, KeyFile]:
    key, line = new("batch", **limits)
    path = tmp_path / "keys.yaml"
    path.write_text(line)
    return key, KeyFile(path)


def error_of(response: httpx.Response, status: int, code: str) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code
    return str(error["message"])


def in_threads(*calls: Callable[[], httpx.Response]) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result() for done in [pool.submit(call) for call in calls]]


def test_a_key_lets_in_and_goes_no_further_than_the_router(tmp_path: Path) -> None:
    key, keys = key_file(tmp_path)
    with fronted(keys) as front:
        answer = front.post()
        assert "No API key was sent" in error_of(answer, 401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "not one of" in error_of(front.post("sk-other"), 401, "invalid_api_key")
        told = front.post(key).json()["headers"]
        assert "authorization" not in told
        anthropic = front.client.post("/v1/messages", json={"model": MODEL}, headers={"x-api-key": key})
        assert anthropic.is_success
        assert "x-api-key" not in anthropic.json()["headers"]
        assert front.client.get("/v1/models").is_success
        assert front.engine.order == ["None", "None"]


def test_a_record_says_how_many_answers_a_request_gets_side_by_side() -> None:
    with fronted() as front:
        front.engine.free.set()
        front.post(n=3)
        until(lambda: front.records, "the request is written out")
        assert front.records[0].sequences == 3


def test_what_is_refused_behind_the_key_is_counted_for_it(tmp_path: Path) -> None:
    key, keys = key_file(tmp_path)
    with fronted(keys, spec={"max_body_bytes": 1024}) as front:
        front.post()
        for content in (b"{", b'{"model": "other"}', b" " * 2000, b'{"model": "llama", "n": 1000}'):
            headers = {"authorization": f"Bearer {key}"}
            assert front.client.post(CHAT, content=content, headers=headers).is_client_error
        until(lambda: len(front.records) == 5, "every request is written out")
        assert [record.key for record in front.records] == [NO_KEY] + 4 * [id_of(keys)]


def test_new_keys_are_in_force_without_a_restart(tmp_path: Path) -> None:
    old, keys = key_file(tmp_path)
    with fronted(keys) as front:
        assert front.post(old).is_success
        fresh, line = new("batch")
        (tmp_path / "keys.yaml").write_text(line)
        until(lambda: front.post(fresh).is_success, "the new key lets in")
        assert front.post(old).status_code == 401


def test_the_status_can_be_kept_behind_a_key(tmp_path: Path) -> None:
    key, keys = key_file(tmp_path)
    with pytest.raises(ConfigError, match=r"router\.keys_file"):
        AdmissionController(RouterSpec(private_status=True), [planned()], SliceTable({}, {}), KeyFile(None))
    with fronted(keys, spec={"private_status": True}) as front:
        assert front.client.get("/").is_success
        shown = {"authorization": f"Bearer {key}"}
        for path in ("/status.json", "/metrics"):
            assert front.client.get(path).status_code == 401
            assert front.client.get(path, headers=shown).is_success


def test_a_key_s_limit_is_told_with_every_answer_and_when_it_is_over(tmp_path: Path) -> None:
    import openai

    key, keys = key_file(tmp_path, requests_per_minute=2)
    with fronted(keys) as front:
        assert front.post(key).headers["x-ratelimit-remaining-requests"] == "1"
        assert front.post(key, stream=True).headers["x-ratelimit-remaining-requests"] == "0"
        over = front.post(key)
        assert "used its 2 requests a minute" in error_of(over, 429, "rate_limit_exceeded")
        assert 25 <= int(over.headers["retry-after"]) <= 30
        assert over.headers["x-ratelimit-limit-requests"] == "2"
        client = openai.OpenAI(base_url=f"{front.address}/v1", api_key=key, max_retries=0)
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model=MODEL, messages=[])
        assert [front.count(what) for what in ("arrived", "refused")] == [
            2,
            0,
        ]  # no slice more would change it


@pytest.mark.parametrize(
    ("fields", "used"),
    [
        ({}, 100),
        ({"stream": True, "usage": True}, 100),
        ({"stream": True}, 6 + 66 / 4),
        ({"fail": True}, 0),
    ],
)
def test_tokens_are_those_the_answer_says_else_an_event_each(
    tmp_path: Path, fields: dict[str, Any], used: float
) -> None:
    key, keys = key_file(tmp_path, tokens_per_minute=60_000)
    with fronted(keys, clock=lambda: 1.0) as front:  # nothing flows in meanwhile
        front.post(key, max_tokens=5000, **fields)
        until(front.idle, "the request is over")
        left = int(front.post(key, max_tokens=1).headers["x-ratelimit-remaining-tokens"])
    assert 60_000 - left - used == pytest.approx(15, abs=15)  # the second request's own


@pytest.mark.parametrize(("chars", "least", "most"), [(40, 0, 60), (8000, 2000, 2060), (100_000, 4096, 4130)])
def test_a_prompt_that_an_engine_reads_and_refuses_counts_for_the_limit(
    tmp_path: Path, chars: int, least: float, most: float
) -> None:
    """A text of 16 MB took a slice's tokenizer 16 s, and cost its key nothing."""
    key, keys = key_file(tmp_path, tokens_per_minute=60_000)
    with fronted(keys, clock=lambda: 1.0, engine={"max_model_len": 4096}) as front:
        answer = front.post(
            key, max_tokens=10, fail=True, messages=[{"role": "user", "content": "x" * chars}]
        )
        assert answer.is_client_error
        until(front.idle, "the request is over")
        left = int(front.post(key, max_tokens=1).headers["x-ratelimit-remaining-tokens"])
    assert least <= 60_000 - left <= most


@pytest.mark.parametrize(("chars", "least", "most"), [(100, 100, 140), (80_000, 2500, 2550)])
def test_a_prompt_that_an_engine_cuts_counts_by_what_its_tokenizer_read(
    tmp_path: Path, chars: int, least: float, most: float
) -> None:
    """With `truncate_prompt_tokens: 1` a megabyte was one token. This engine says 100 of any request."""
    key, keys = key_file(tmp_path, tokens_per_minute=60_000)
    cut = {"messages": [{"role": "user", "content": "x" * chars}], "truncate_prompt_tokens": 1}
    with fronted(keys, clock=lambda: 1.0) as front:
        assert front.post(key, max_tokens=10, **cut).is_success
        until(front.idle, "the request is over")
        left = int(front.post(key, max_tokens=1).headers["x-ratelimit-remaining-tokens"])
    assert least <= 60_000 - left <= most


def test_requests_beyond_a_slice_s_seats_wait_in_the_router_and_all_are_answered() -> None:
    with fronted() as front:
        with ThreadPoolExecutor(5) as pool:
            calls = [pool.submit(front.post, hold=True) for _ in range(5)]
            until(lambda: front.count("held") == 3, "three wait")
            until(lambda: front.engine.holding == 2, "two run")
            front.engine.free.set()
            assert all(call.result().is_success for call in calls)
        assert front.engine.most == 2
        assert front.count("arrived") == 5


def test_a_request_for_a_model_without_a_slice_is_held_until_one_serves() -> None:
    with fronted(serves=False) as front, ThreadPoolExecutor(1) as pool:
        call = pool.submit(front.post)
        until(lambda: front.count("held") == 1, "it waits")
        front.table.update([replaced(front.upstream)], 0.0)
        assert call.result().is_success


def test_a_held_request_is_refused_at_its_deadline_with_the_time_to_come_back() -> None:
    with fronted(serves=False, queue={"wait_s": 0.2}) as front:
        answer = front.post()
        assert "waits for a free v6e 2x4 slice" in error_of(answer, 503, "no_slice_ready")
        assert int(answer.headers["retry-after"]) >= 1
        until(lambda: front.records, "the request is written out")
        (record,) = front.records
        assert record.queued_s >= 0.2
        assert not record.admitted_s


def test_a_revoked_key_gets_no_turn_and_what_has_begun_goes_on(tmp_path: Path) -> None:
    (loud, quiet), path = [new("loud"), new("quiet")], tmp_path / "keys.yaml"
    path.write_text(f"{loud[1]}\n{quiet[1]}\n")
    with fronted(KeyFile(path)) as front, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(front.post, loud[0], hold=True) for _ in range(2)]
        until(lambda: front.engine.holding == 2, "two run")
        waiting = pool.submit(front.post, loud[0])
        until(lambda: front.count("held") == 1, "one waits")
        path.write_text(f"{quiet[1]}\n")
        refused = waiting.result(60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        front.engine.free.set()
        assert all(answer.result(60).is_success for answer in running)
        assert front.post(quiet[0]).is_success


def test_a_body_that_was_read_while_its_key_was_revoked_gets_no_seat(tmp_path: Path) -> None:
    (key, line), path = new("slow"), tmp_path / "keys.yaml"
    path.write_text(line)
    body = json.dumps({"model": MODEL}).encode()
    with fronted(KeyFile(path)) as front:
        address = front.address.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=60) as client:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
            until(lambda: front.gate.bodies.held_bytes, "the body is being read")
            path.write_text("[]\n")
            until(lambda: front.post(key).status_code == 401, "the key is revoked")
            client.sendall(body[5:])
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 401 ")


def test_a_client_that_leaves_while_it_waits_is_forgotten_at_once_but_for_its_key_and_its_wait(
    tmp_path: Path,
) -> None:
    key, keys = key_file(tmp_path)
    with fronted(keys, serves=False) as front:
        with opened(front, key):
            until(lambda: front.count("held") == 1, "it waits")
        until(lambda: front.count("held") == 0, "nothing is held")
        assert front.engine.order == []
        until(lambda: front.records, "the request is written out")
        (record,) = front.records
        assert (record.outcome, record.key) == ("cancelled", id_of(keys))
        assert record.queued_s > 0


def test_a_quiet_key_is_not_kept_waiting_by_a_loud_one(tmp_path: Path) -> None:
    (loud, loud_line), (quiet, quiet_line) = new("loud"), new("quiet")
    path = tmp_path / "keys.yaml"
    path.write_text(f"{loud_line}\n{quiet_line}")
    with fronted(KeyFile(path)) as front, ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(front.post, loud, hold=True, user="loud") for _ in range(10)]
        until(lambda: front.count("held") == 8, "eight wait")
        calls.append(pool.submit(front.post, quiet, user="quiet"))
        until(lambda: front.count("held") == 9, "nine wait")
        front.engine.free.set()
        assert all(call.result().is_success for call in calls)
        assert front.engine.order.index("quiet") <= 4


def test_routers_share_a_key_s_limit(tmp_path: Path) -> None:
    key, keys = key_file(tmp_path, concurrency=2)
    other = Demand("b", MODEL, keys={id_of(keys): KeyUse(open=1, leased=1)})
    with fronted(keys) as front:
        for _ in range(2):
            list(front.gate.others([other, Demand("me", MODEL)], "me"))
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(front.post, key, hold=True)
            until(lambda: front.count("in_flight") == 1, "one runs")
            message = error_of(front.post(key), 429, "rate_limit_exceeded")
            assert "may have 1 at once here (2 in all)" in message
            front.engine.free.set()
            assert call.result().is_success


def test_a_body_that_is_too_large_or_too_slow_is_refused() -> None:
    with fronted(spec={"max_body_bytes": 1024}) as front:
        for content in (b" " * 2000, iter([b" " * 600] * 4)):
            answer = front.client.post(CHAT, content=content)
            assert "larger than 1024 bytes" in error_of(answer, 413, "request_too_large")
            assert answer.headers["connection"] == "close"
        assert front.count("arrived") == 0
        assert front.post().is_success
    with fronted(spec={"body_timeout_s": 0.1}) as front:

        def slowly() -> Iterator[bytes]:
            yield b"{"
            threading.Event().wait(2)  # a busy router looks late at whose time is up
            yield b"}"

        assert "within 0.1 s" in error_of(front.client.post(CHAT, content=slowly()), 408, "request_timeout")
        assert front.count("arrived") == 0


def test_bodies_on_their_way_have_a_bound_together() -> None:
    come = threading.Event()

    def halted(seconds: float) -> Iterator[bytes]:
        yield b'{"model": "' + MODEL.encode() + b'", "user": "' + b"x" * 600
        come.wait(seconds)
        yield b'"}'

    with fronted() as front, ThreadPoolExecutor(1) as pool:
        front.gate.bodies = BodyReader(RouterSpec(max_body_bytes=1024), most_bytes=1000)
        first = pool.submit(front.client.post, CHAT, content=halted(PATIENCE_S))
        until(lambda: front.gate.bodies.held_bytes > 600, "half a body")
        second = front.client.post(CHAT, content=halted(0.3))
        assert "bytes of request bodies" in error_of(second, 503, "overloaded")
        assert (second.headers["retry-after"], second.headers["connection"]) == ("5", "close")
        come.set()
        assert first.result().is_success
        until(lambda: front.gate.bodies.held_bytes == 0, "no body stays")


def opened(front: Front, key: str = "", **fields: Any) -> socket.socket:
    """A connection that has asked, and reads nothing of the answer."""
    host, port = front.address.removeprefix("http://").split(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect((host, int(port)))
    body = json.dumps({"model": MODEL, **fields}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    made.sendall(head.encode() + body)
    return made


def test_answers_that_nobody_reads_give_up_their_seats() -> None:
    """Two of them take every seat of the slice; thirty seconds later others are answered."""
    ahead_s = 0.0
    with fronted(clock=lambda: time.monotonic() + ahead_s, queue={"wait_s": 600}) as front:
        silent = [opened(front, stream=True, endless=True, n=2) for _ in range(2)]
        until(lambda: front.gate._queue.seats_taken(MODEL) >= 2, "all seats are taken")
        until(
            lambda: any(reader._client.paused for reader in tuple(front.gate._readers)),
            "it blocks",
        )
        answer = front.client.build_request("POST", CHAT, json={"model": MODEL})
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(front.client.send, answer)
            until(lambda: front.count("held") >= 1, "another one waits")
            for _ in range(40):
                ahead_s += 2.0
                if waiting.done():
                    break
                threading.Event().wait(0.1)
            assert waiting.result().is_success
        until(lambda: [record.code for record in front.records].count("answer_not_read") >= 1, "it is told")
        for connection in silent:
            connection.close()


def test_a_client_that_reads_slowly_keeps_its_seat() -> None:
    ahead_s = 0.0
    with fronted(clock=lambda: time.monotonic() + ahead_s) as front:
        slow = opened(front, stream=True, endless=True)
        until(lambda: front.count("in_flight") == 1, "it runs")
        for _ in range(30):
            read = 0
            while read < 1 << 20:
                read += len(slow.recv(65536))
            ahead_s += 2.0
            threading.Event().wait(0.05)
        assert front.count("in_flight") == 1
        slow.close()


def test_a_request_is_counted_for_its_key_before_its_body_is_read(tmp_path: Path) -> None:
    """An unknown model, a body that is no JSON and one that never comes count as requests too."""
    key, keys = key_file(tmp_path, requests_per_minute=3)
    with fronted(keys) as front:
        headers = {"authorization": f"Bearer {key}"}
        front.client.post(CHAT, content=b'{"model": "other"}', headers=headers)
        front.client.post(CHAT, content=b"{", headers=headers)
        assert front.post(key).is_success

        def never() -> Iterator[bytes]:
            yield b"{"
            threading.Event().wait(0.2)
            yield b"}"

        over = front.client.post(CHAT, content=never(), headers=headers)
        assert "used its 3 requests a minute" in error_of(over, 429, "rate_limit_exceeded")
        assert over.headers["x-ratelimit-remaining-requests"] == "0"


def test_a_body_on_its_way_counts_as_a_request_at_once(tmp_path: Path) -> None:
    key, keys = key_file(tmp_path, concurrency=1)
    come = threading.Event()

    def halted() -> Iterator[bytes]:
        yield b'{"model": "llama",'
        come.wait(10)
        yield b'"user": "a"}'

    with fronted(keys) as front, ThreadPoolExecutor(1) as pool:
        headers = {"authorization": f"Bearer {key}"}
        first = pool.submit(front.client.post, CHAT, content=halted(), headers=headers)
        until(lambda: front.gate.bodies.held_bytes, "half a body")
        assert "1 requests under way" in error_of(front.post(key), 429, "rate_limit_exceeded")
        come.set()
        assert first.result().is_success
        until(lambda: front.post(key).is_success, "it has left")


def test_one_key_s_bodies_leave_room_for_another_s(tmp_path: Path) -> None:
    (hog, hog_line), (quiet, quiet_line) = new("hog"), new("quiet")
    path = tmp_path / "keys.yaml"
    path.write_text(f"{hog_line}\n{quiet_line}")
    come = threading.Event()

    def halted() -> Iterator[bytes]:
        yield b'{"model": "llama", "user": "' + b"x" * 800
        come.wait(10)
        yield b'"}'

    def send(key: str) -> httpx.Response:
        return front.client.post(CHAT, content=halted(), headers={"authorization": f"Bearer {key}"})

    with fronted(KeyFile(path)) as front, ThreadPoolExecutor(8) as pool:
        front.gate.bodies = BodyReader(RouterSpec(max_body_bytes=1024), most_bytes=4096)
        hogs = [pool.submit(send, hog) for _ in range(6)]
        until(lambda: sum(done.done() for done in hogs) == 0 or come.is_set(), "they send")
        until(lambda: front.gate.bodies.held_bytes >= 1600, "two bodies are held")
        other = pool.submit(send, quiet)
        until(lambda: front.gate.bodies._of_owner["quiet"], "the other key's body is held")
        come.set()
        assert other.result().is_success
        refused = [done.result() for done in hogs if not done.result().is_success]
        assert len(refused) >= 3
        assert all("of them this key's" in error_of(answer, 503, "overloaded") for answer in refused)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_pays_for_what_was_made_until_then(tmp_path: Path, *, stream: bool) -> None:
    key, keys = key_file(tmp_path, tokens_per_minute=200_000)
    with fronted(keys, clock=lambda: 1.0) as front:
        body = {"max_tokens": 100_000, "user": "x" * 4000, "hold": not stream, "endless": stream}
        if stream:
            headers = {"authorization": f"Bearer {key}"}
            asked = {"model": MODEL, **body, "stream": True}
            with front.client.stream("POST", CHAT, json=asked, headers=headers) as answer:
                for number, _ in enumerate(answer.iter_bytes()):
                    if number > 20:
                        break
        else:
            with opened(front, key, **body):
                until(lambda: front.engine.holding == 1, "it runs")
        until(front.idle, "it is over")
        left = int(front.post(key, max_tokens=1).headers["x-ratelimit-remaining-tokens"])
    assert 1000 < 200_000 - left < 50_000


def test_leaving_max_tokens_out_does_not_let_more_in(tmp_path: Path) -> None:
    key, keys = key_file(tmp_path, tokens_per_minute=10_000)
    with fronted(keys, clock=lambda: 1.0, engine={"max_num_seqs": 512, "max_model_len": 2048}) as front:
        answers = [front.post(key, messages=[], fail=False, user=str(number)) for number in range(150)]
        assert sum(answer.is_success for answer in answers) <= 10_000 / USAGE["total_tokens"] + 1


def test_a_stranger_s_limit_buys_no_slices(tmp_path: Path) -> None:
    key, keys = key_file(tmp_path, requests_per_minute=1)
    with fronted(keys) as front:
        for _ in range(5):
            front.post(key)
        assert [front.count(what) for what in ("arrived", "refused")] == [1, 0]


@pytest.mark.unit
def test_budgets_of_those_whom_nobody_remembers_are_forgotten_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An issuer's tokens name new ones every day, and every budget that is kept is asked about."""

    class Issuer:
        def holder(self, token: bytes) -> Key:
            name = token.decode()
            return Key(name=name, sha256=hashlib.sha256(token).hexdigest(), tokens_per_day=100)

        def owner(self, sha256: str) -> None: ...

    monkeypatch.setattr(accounts, "_MOST_BEARERS", 5)
    meter = Meter("r", {})
    keys = KeyFile(None, bearers=Issuer())
    gate = AdmissionController(
        RouterSpec(), [planned()], SliceTable({MODEL: 1}, {MODEL: "v6e 2x4"}), keys, meter=meter
    )
    for number in range(20):
        visit = gate.arrive([(b"authorization", b"Bearer a.b.%d" % number)])
        assert visit.refusal is None
        gate.leave(visit)
    told = meter.flush(0.0)
    assert told
    assert len(told["asked"]) == 5
