import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from serving.router.http import sse
from serving.router.http.envelope import Envelope, error_object

pytestmark = pytest.mark.unit


def enveloped(
    *sent: Message,
    path: str = "/v1/chat/completions",
    asked: bytes | None = None,
    fails: bool = False,
    returns_id: bool = True,
) -> tuple[Message, bytes, bytes]:
    """Start, body, and the id that the app was given, of an app that sends these messages."""
    seen: list[bytes] = []

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        seen.append(dict(scope["headers"])[b"x-request-id"])
        for message in sent:
            await send(message)
        if fails:
            raise RuntimeError("secret of the house")

    async def receive() -> Message:
        raise AssertionError

    out: list[Message] = []

    async def send(message: Message) -> None:
        out.append(message)

    headers = [] if asked is None else [(b"x-request-id", asked)]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(Envelope(app, returns_id=returns_id)(scope, receive, send))
    return out[0], b"".join(message["body"] for message in out[1:]), seen[0]


def answer(status: int, body: bytes, *more: tuple[bytes, bytes]) -> tuple[Message, ...]:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode()), *more]
    return (
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": body[:3], "more_body": True},
        {"type": "http.response.body", "body": body[3:]},
    )


def test_an_answer_that_went_well_gets_its_id_and_nothing_else() -> None:
    start, body, given = enveloped(*answer(200, b'{"error": "no"}'), asked=b"job-7")
    assert (body, given) == (b'{"error": "no"}', b"job-7")
    assert start["headers"] == [*answer(200, body)[0]["headers"], (b"x-request-id", b"job-7")]


def test_where_the_server_names_answers_it_is_not_done_twice() -> None:
    start, _, given = enveloped(*answer(200, b"fine"), asked=b"job-7", returns_id=False)
    assert given == b"job-7"
    assert start["headers"] == answer(200, b"fine")[0]["headers"]


@pytest.mark.parametrize("returns_id", [True, False])
def test_anthropic_s_clients_find_the_id_under_their_own_name(returns_id: bool) -> None:
    start, _, _ = enveloped(*answer(200, b"fine"), path="/v1/messages", asked=b"job-7", returns_id=returns_id)
    headers = dict(start["headers"])
    assert headers[b"request-id"] == b"job-7"
    assert (b"x-request-id" in headers) is returns_id


@pytest.mark.parametrize("asked", [None, b"", b"x" * 129, b"a\x00b", b"caf\xe9"])
def test_a_request_without_a_usable_id_gets_one(asked: bytes | None) -> None:
    start, _, given = enveloped(*answer(200, b"fine", (b"x-request-id", b"the engine's")), asked=asked)
    assert len(given) >= 16
    assert [value for name, value in start["headers"] if name == b"x-request-id"] == [given]


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (  # vLLM's
            400,
            {"error": {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}},
            ("too long", "invalid_request_error", "prompt", "bad_request"),
        ),
        (  # FastAPI's
            405,
            {"detail": "Method Not Allowed"},
            ("Method Not Allowed", "invalid_request_error", None, "method_not_allowed"),
        ),
        (
            422,
            {"detail": [{"loc": ["body"], "msg": "no"}]},
            ("Unprocessable Entity.", "invalid_request_error", None, "unprocessable_entity"),
        ),
        (
            500,
            {
                "error": {
                    "message": "KeyError: 'secret of the house'",
                    "type": "InternalServerError",
                    "code": 500,
                }
            },
            ("The engine failed on this request.", "server_error", None, "internal_server_error"),
        ),
        (
            501,
            {"error": {"message": "The model does not support Embeddings API", "type": "x", "code": 501}},
            ("The model does not support Embeddings API", "server_error", None, "not_implemented"),
        ),
        (  # ours
            503,
            {"error": {"message": "busy", "type": "server_error", "param": None, "code": "overloaded"}},
            ("busy", "server_error", None, "overloaded"),
        ),
        (400, {"error": "just words"}, ("just words", "invalid_request_error", None, "bad_request")),
        (400, ["a list"], ("Bad Request.", "invalid_request_error", None, "bad_request")),
    ],
)
def test_errors_of_all_origins_have_one_shape(
    status: int, body: Any, error: tuple[str, str, str | None, str]
) -> None:
    start, said, _ = enveloped(*answer(status, json.dumps(body).encode(), (b"retry-after", b"7")))
    fields = json.loads(said)
    assert tuple(fields["error"][name] for name in ("message", "type", "param", "code")) == error
    assert set(fields) == {"error"}
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == str(len(said)).encode()
    assert headers[b"retry-after"] == b"7"


def test_an_error_that_is_no_json_is_told_by_its_status() -> None:
    assert error_object(b"<html>", 502)["message"] == "The engine failed on this request."
    assert error_object(b"\xff", 404)["message"] == "Not Found."
    assert error_object(b"{}", 499)["code"] == "error"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_on_anthropic_s_route_have_its_shape(status: int, kind: str) -> None:
    body = json.dumps({"error": {"message": "why", "type": "x", "param": None, "code": "ours"}}).encode()
    _, said, given = enveloped(*answer(status, body), path="/v1/messages")
    assert json.loads(said) == {
        "type": "error",
        "error": {"type": kind, "message": "why"},
        "request_id": given.decode(),
    }


@pytest.mark.parametrize("before", [b"", b'data: {"a": 1}\n\n'], ids=["alone", "behind an event"])
@pytest.mark.parametrize(
    ("code", "says"),
    [(500, "The engine failed on this request."), (400, "no such token")],
    ids=["its own failure", "the client's"],
)
def test_an_engine_s_own_failure_in_a_stream_is_told_without_its_words(
    code: int, says: str, before: bytes
) -> None:
    words = says if code == 400 else "CUDA at 0x7f3"
    error = {"message": words, "type": "X", "param": None, "code": code}
    event = b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"
    head = answer(200, b"")[0]
    _, said, _ = enveloped(head, {"type": "http.response.body", "body": before + event})
    assert said.startswith(before)
    told_event, end = said.removeprefix(before).removeprefix(b"data: ").split(b"\n\n", 1)
    assert json.loads(told_event)["error"]["message"] == says
    assert end == b"data: [DONE]\n\n"


def test_an_error_event_in_an_anthropic_stream_is_anthropic_s() -> None:
    event = b'data: {"error": {"message": "lost", "type": "server_error", "param": null, "code": "slice_lost"}}\n\n'
    head = {"type": "http.response.start", "status": 200, "headers": []}
    _, said, _ = enveloped(head, {"type": "http.response.body", "body": event}, path="/v1/messages")
    assert said.startswith(
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"lost"}'
    )
    assert said.endswith(b"}\n\n")
    assert sse.body(enveloped(head, {"type": "http.response.body", "body": event})[1]) == sse.body(event)


def test_a_bug_is_told_without_its_words_and_logged_with_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "ray.serve"):
        start, said, given = enveloped(fails=True)
    assert start["status"] == 500
    assert json.loads(said)["error"]["message"] == "Internal error."
    assert given.decode() in caplog.text
    assert "secret of the house" in caplog.text
    with pytest.raises(RuntimeError):  # half an answer must not look like a whole one
        enveloped({"type": "http.response.start", "status": 200, "headers": []}, fails=True)
