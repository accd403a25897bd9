"""Clients of files and batches that send slowly, read nothing or send too much: others of the service do not notice."""

import itertools
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from support.batches import filling_router, folder, owner
from support.postgres import postgres
from support.servers import PATIENCE_S, until
from support.simulated_engine import serving

from serving.config import StoreSpec
from serving.router.core import RouterCore
from serving.router.http.auth import KeyFile, new, parse
from serving.router.telemetry.audit_log import AuditLog

pytestmark = pytest.mark.http

_MANY = 110  # more than the connections that aiohttp has for all by default
EVIL, EVIL_LINE = new("evil")
GOOD, GOOD_LINE = new("good")
UPLOAD = "POST /v1/files HTTP/1.1\r\nhost: a\r\ncontent-type: multipart/form-data; boundary=b\r\ncontent-length: 1000000\r\n"


@pytest.fixture
def router(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, RouterCore]]:
    keys = KeyFile(None, f"{EVIL_LINE}\n{GOOD_LINE}")
    with (
        serving() as (upstream, _),
        owner(folder(tmp_path)) as keeper,
        filling_router(keeper.place, upstream, keys=keys, **getattr(request, "param", {})) as made,
    ):
        yield made


def client(address: str, key: str = GOOD) -> httpx.Client:
    return httpx.Client(base_url=address, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S)


def connection(address: str, text: str, key: str = EVIL) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(PATIENCE_S)
    made.connect((host, int(port)))
    made.sendall(f"{text}authorization: Bearer {key}\r\n\r\n".encode())
    return made


def test_silent_uploads_of_one_key_hold_up_nobody(router: tuple[str, RouterCore]) -> None:
    address, core = router
    with ExitStack() as sockets, client(address) as good:
        for _ in range(_MANY):
            sockets.enter_context(connection(address, UPLOAD))
        until(lambda: core._kept._transfers["evil"] == 16, "as many come as may")
        until(lambda: _open(core) == 16, "the others are refused")
        assert good.get("/v1/files").status_code == 200
        assert good.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}).status_code == 200


@pytest.mark.parametrize("router", [{"body_timeout_s": 0.3}], indirect=True)
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_silent_upload_ends(router: tuple[str, RouterCore], path: str) -> None:
    address, core = router
    with connection(address, UPLOAD.replace("/v1/files", path)) as silent:
        assert silent.recv(100).startswith(b"HTTP/1.1 408 ")
    until(lambda: not _open(core), "its visit has ended")
    with client(address) as good:
        assert good.get("/v1/files").status_code == 200


def test_a_body_of_a_batch_is_small(router: tuple[str, RouterCore]) -> None:
    address, _ = router
    pieces = itertools.chain([b'{"a":['], itertools.repeat(b"[]," * 1000, 30), [b"0]}"])
    with client(address, EVIL) as evil:
        answer = evil.post("/v1/batches", content=pieces)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        nested = evil.post("/v1/batches", content=b'{"a":' * 300 + b"1" + b"}" * 300)
        assert nested.status_code == 400


def test_a_form_in_a_charset_that_takes_a_minute_is_refused(tmp_path: Path) -> None:
    field = b'--b\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    slow = field % (b"purpose", b"", b"-" + b"a" * 60_000)
    form = slow + field % (b"file", b'; filename="f"', b"{}") + b"--b--\r\n"
    with owner(folder(tmp_path)) as keeper:
        address, token = keeper.place()
        headers = {
            "authorization": f"Bearer {token}",
            "x-serving-key": "0" * 64,
            "content-type": "multipart/form-data; boundary=b; charset=punycode",
        }
        answer = httpx.post(f"{address}/v1/files", content=form, headers=headers)
        assert (answer.status_code, "UTF-8" in answer.json()["error"]["message"]) == (400, True)
        del headers["content-type"]
        for path in ("/v1/files", "/v1/batches"):
            for limit in ("1".zfill(5000), "1" + "0" * 30):
                assert httpx.get(f"{address}{path}?limit={limit}", headers=headers).status_code == 400


def test_the_store_takes_no_large_body_either(tmp_path: Path) -> None:
    with owner(folder(tmp_path)) as keeper:
        address, token = keeper.place()
        shown = {"authorization": f"Bearer {token}", "x-serving-key": "0" * 64}
        answer = httpx.post(f"{address}/v1/batches", content=b"[" * 100_000, headers=shown)
        assert answer.status_code == 413


def test_a_download_counts_for_its_key_until_it_ends(router: tuple[str, RouterCore]) -> None:
    address, core = router
    with client(address, EVIL) as evil:
        made = evil.post("/v1/files", files={"file": b"x" * (20 << 20)}, data={"purpose": "batch"})
        path = f"/v1/files/{made.json()['id']}/content"
        core._kept._unread_s = 0.5
        with connection(address, f"GET {path} HTTP/1.1\r\nhost: a\r\n") as unread:
            assert unread.recv(15) == b"HTTP/1.1 200 OK"
            until(lambda: not _open(core), "who reads nothing is cut off")
        core._kept._unread_s = PATIENCE_S
        with connection(address, f"GET {path} HTTP/1.1\r\nhost: a\r\n") as gone:
            assert gone.recv(15) == b"HTTP/1.1 200 OK"
            assert _open(core) == 1
        until(lambda: not _open(core), "who hangs up has gone")
        assert evil.get(path).content == b"x" * (20 << 20)
        until(lambda: not _open(core), "who has all of it has gone")


def test_the_name_of_a_file_makes_no_other_path_at_the_store(router: tuple[str, RouterCore]) -> None:
    """`%252Fcontent` read a whole file into the router's memory, past the bound of downloads."""
    address, _ = router
    with client(address) as good:
        name = good.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}).json()["id"]
        for after in ("%252Fcontent", "%3Flimit=1", "%23", "%252e%252e", "%0d%0aa:b", "%ff"):
            answer = good.get(f"/v1/files/{name}{after}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_not_found")
        for path in ("/v1/files/%3F", "/v1/files/%23", "/v1/files/%252e%252e"):
            assert good.get(path).json()["error"]["code"] == "file_not_found"
        assert good.get("/v1/files?limit=1&after=%20%23").status_code == 400


@pytest.mark.parametrize(
    "question",
    [
        "GET /v1/files",
        "GET /v1/usage",
        "GET /v1/files/a/content",
        "HEAD /v1/files/a/content",
        "DELETE /v1/files/a",
    ],
)
def test_the_body_of_a_question_takes_nothing_of_another_key_s_question(
    router: tuple[str, RouterCore], question: str
) -> None:
    """Its length went to the store without it, which took the beginning of the connection's next request for it."""
    address, _ = router
    with client(address) as good:
        with connection(address, f"{question} HTTP/1.1\r\nhost: a\r\ncontent-length: 40\r\n") as evil:
            evil.sendall(b"x" * 40)
            assert evil.recv(9) == b"HTTP/1.1 "
        assert [good.get("/v1/files").status_code for _ in range(3)] == [200, 200, 200]


def test_who_is_refused_where_no_model_answers_is_in_the_audit_log_too(tmp_path: Path) -> None:
    """Of files, batches, usage and the status it said nothing."""
    key, line = new("limited", requests_per_minute=1)
    log = AuditLog(tmp_path / "audit.jsonl")
    with (
        owner(folder(tmp_path)) as keeper,
        filling_router(
            keeper.place, "http://127.0.0.1:9", keys=KeyFile(None, line), audit=log, private_status=True
        ) as (address, _),
        client(address, "sk-wrong") as wrong,
        client(address, key) as limited,
    ):
        for path in (
            "/v1/files",
            "/v1/usage",
            "/v1/batches/a",
            "/v1/responses/a",
            "/status.json",
            "/metrics",
        ):
            assert wrong.get(path).status_code == 401
        assert wrong.get("/v1/models").status_code == 200
        assert [limited.get("/v1/files").status_code for _ in range(3)] == [200, 429, 429]
    told = [json.loads(text) for text in log.path.read_text().splitlines()]
    assert {
        (fields["key"], fields["code"], fields["requests"]) for fields in told if fields["event"] == "refused"
    } == {
        ("none", "invalid_api_key", 6),
        (parse(line, "line").keys[0].id, "rate_limit_exceeded", 2),
    }


def _open(core: RouterCore) -> int:
    """Requests of the hostile key that are under way."""
    return core.admission._accounts._of_keys["evil"].open


@pytest.mark.slow
def test_a_zero_byte_is_in_no_id(tmp_path: Path) -> None:
    """PostgreSQL takes none in a text: a client's was a 507."""
    with postgres() as url, owner(StoreSpec(database=url, files=str(tmp_path))) as keeper:
        address, token = keeper.place()
        shown = {"authorization": f"Bearer {token}", "x-serving-key": "0" * 64}
        with httpx.Client(base_url=address, headers=shown, timeout=PATIENCE_S) as store:
            for path in ("/v1/files/%00", "/v1/batches/%00"):
                assert store.get(path).status_code == 404
            for path in ("/v1/files?after=%00", "/v1/batches?after=%00"):
                assert store.get(path).status_code == 400
            assert store.get("/v1/files?purpose=%00").json()["data"] == []
            asked = {"endpoint": "/v1/embeddings", "completion_window": "1h", "input_file_id": "\0"}
            assert store.post("/v1/batches", json=asked).status_code == 404
