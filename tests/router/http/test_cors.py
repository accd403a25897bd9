"""What a browser asks and reads for a page of another origin."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from support.fronts import front, router_before
from support.servers import asgi_server
from support.simulated_engine import MODEL, small_plan

from serving.config import RouterSpec
from serving.router.http import auth
from serving.state.records import SliceRecord, SliceState

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGE = "https://app.example"
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def crossing(answer: httpx.Response) -> dict[str, str]:
    """The headers that only browsers look at."""
    return {
        name: value
        for name, value in answer.headers.items()
        if name.startswith("access-control-") or name == "vary"
    }


LET_IN = {
    "access-control-allow-origin": PAGE,
    "access-control-expose-headers": "*",
    "vary": "origin",
}


@pytest.fixture(scope="module", params=[True, False], ids=["door", "asgi"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with front(door=request.param, cors=[PAGE, "http://localhost:5173"]) as service:
        yield service.address


@pytest.fixture(scope="module")
def closed() -> Iterator[str]:
    with front() as service:
        yield service.address


@pytest.mark.http
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/models", "/v1/nothing"])
def test_a_preflight_is_answered_with_what_the_page_may_send(address: str, path: str) -> None:
    answer = httpx.options(address + path, headers=PREFLIGHT)
    assert (answer.status_code, answer.content) == (204, b"")
    assert crossing(answer) == {
        **LET_IN,
        "access-control-allow-methods": "GET, HEAD, POST, DELETE",
        "access-control-allow-headers": PREFLIGHT["access-control-request-headers"],
        "access-control-max-age": "7200",
    }


@pytest.mark.http
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", CHAT, 200),
        ("POST", "/v1/chat/completions", {**CHAT, "stream": True}, 200),
        ("POST", "/v1/chat/completions", {**CHAT, "model": "none"}, 404),
        ("POST", "/v1/chat/completions", {**CHAT, "messages": 3}, 400),
        ("POST", "/v1/messages", {**CHAT, "model": "none"}, 404),
        ("POST", "/v1/nothing", CHAT, 404),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/responses/none", None, 404),
        ("OPTIONS", "/v1/models", None, 405),
    ],
)
def test_every_answer_says_whose_pages_may_read_it(
    address: str, method: str, path: str, body: Any, status: int
) -> None:
    for origin, says in (
        (PAGE, LET_IN),
        ("https://elsewhere.example", {"vary": "origin"}),
        ("null", {"vary": "origin"}),
        (None, {"vary": "origin"}),
    ):
        headers = {"origin": origin} if origin else {}
        answer = httpx.request(method, address + path, json=body, headers=headers)
        assert answer.status_code == status
        assert crossing(answer) == says
        assert answer.headers.get_list("x-request-id") == [answer.headers["x-request-id"]]


@pytest.mark.http
@pytest.mark.parametrize("origin", ["https://elsewhere.example", "https://APP.example", "null"])
def test_a_preflight_of_another_page_is_not_let_in(address: str, origin: str) -> None:
    answer = httpx.options(address + "/v1/models", headers={**PREFLIGHT, "origin": origin})
    assert answer.status_code == 405
    assert "router.cors" in answer.json()["error"]["message"]
    assert crossing(answer) == {"vary": "origin"}


@pytest.mark.http
def test_without_origins_no_answer_says_anything_of_them(closed: str) -> None:
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("OPTIONS", "/v1/models")):
        answer = httpx.request(method, closed + path, json=CHAT, headers=PREFLIGHT)
        assert answer.status_code == (405 if method == "OPTIONS" else 200)
        assert crossing(answer) == {}


@pytest.mark.http
def test_limits_and_ignored_parameters_are_told_beside_it() -> None:
    key, line = auth.new("page", requests_per_minute=60)
    headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
    with front(key_file=auth.KeyFile(None, line), cors=["*"], keys_file="/keys.yaml") as service:
        path = service.address + "/v1/chat/completions"
        answer = httpx.post(path, json={**CHAT, "min_p": 0.1}, headers=headers)
        stranger = httpx.post(path, json=CHAT, headers={"origin": PAGE})
    assert (answer.headers["x-ignored-parameters"], answer.headers["x-ratelimit-limit-requests"]) == (
        "min_p",
        "60",
    )
    anybody = {"access-control-allow-origin": "*", "access-control-expose-headers": "*"}
    assert (crossing(answer), crossing(stranger)) == (anybody, anybody)
    assert stranger.status_code == 401


@pytest.mark.http
@pytest.mark.parametrize("cors", [[PAGE], []], ids=["listed", "none"])
def test_an_engine_that_lets_every_page_in_is_not_asked_for_one(cors: list[str]) -> None:
    """vLLM does. No browser takes an answer with two origins, and without router.cors every page could read it."""

    async def answer(_: Request) -> Response:
        return Response("{}", media_type="application/json")

    engine = CORSMiddleware(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])]), ["*"])
    with asgi_server(engine) as address:
        slices = [SliceRecord("a", MODEL, SliceState.SERVING, "serving", "v6e 2x4", address=address)]
        with router_before([small_plan()], slices, RouterSpec.model_validate({"cors": cors})) as service:
            read = httpx.post(f"{service}/v1/chat/completions", json=CHAT, headers={"origin": PAGE})
    assert read.status_code == 200
    assert read.headers.get_list("access-control-allow-origin") == cors


@pytest.mark.unit
@pytest.mark.parametrize(
    "origin",
    [
        "https://app.example",
        "http://localhost:5173",
        "http://[::1]:8080",
        "app://obsidian.md",
        "http://10.0.0.7",
    ],
)
def test_an_origin_is_taken_as_browsers_write_it(origin: str) -> None:
    assert RouterSpec(cors=(origin,)).cors == (origin,)


@pytest.mark.unit
@pytest.mark.parametrize(
    "origin",
    [
        *(
            "",
            "null",
            "app.example",
            "https://app.example/",
            "https://app.example/chat",
            "https://App.example",
        ),
        *(
            "https://*.example",
            "https://app.example:443",
            "http://app.example:80",
            "https://a.example https://b.example",
        ),
        *("https://me@app.example", "https://app.example\r\nx: y"),
    ],
)
def test_what_no_browser_writes_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="as browsers write it"):
        RouterSpec(cors=(origin,))


@pytest.mark.unit
def test_every_page_is_let_in_only_where_keys_are_asked_for() -> None:
    with pytest.raises(ValueError, match=r"cors: \* without keys"):
        RouterSpec(cors=("*",))
    assert RouterSpec(cors=("*",), keys_file="/keys.yaml").cors == ("*",)


_SCRIPT = """
const seen = async (path, init) => {
  try {
    const answer = await fetch(SERVICE + path, init);
    return [answer.status, answer.headers.get("x-request-id"), await answer.text()];
  } catch (error) { return [0, null, String(error)]; }
};
const json = { "content-type": "application/json", authorization: "Bearer k", "x-request-id": "mine" };
window.all = (async () => ({
  models: await seen("/v1/models"),
  stream: await seen("/v1/chat/completions", { method: "POST", headers: json, body: JSON.stringify(BODY) }),
  wrong: await seen("/v1/chat/completions", { method: "POST", headers: json, body: "{" }),
  cookies: await seen("/v1/models", { credentials: "include" }),
}))();
"""


@pytest.mark.browser
def test_a_page_of_a_listed_origin_streams_and_one_of_another_does_not() -> None:
    from support.browser import chromium

    async def page(request: Request) -> Response:
        script = _SCRIPT.replace("SERVICE", json.dumps(request.query_params["at"]))
        return HTMLResponse(
            f"<script>{script.replace('BODY', json.dumps({**CHAT, 'stream': True}))}</script>"
        )

    def read(browser: "Browser", origin: str, service: str) -> dict[str, Any]:
        tab = browser.new_page()
        tab.goto(f"{origin}/?at={service}")
        found: dict[str, Any] = tab.evaluate("() => window.all")
        tab.close()
        return found

    with asgi_server(Starlette(routes=[Route("/", page)])) as origin, chromium() as browser:
        with front(cors=[origin]) as service:
            found = read(browser, origin, service.address)
        with front() as service:
            shut = read(browser, origin, service.address)
    assert found["models"][0] == 200
    assert found["stream"][:2] == [200, "mine"]
    assert found["stream"][2].endswith("data: [DONE]\n\n")
    assert found["wrong"][:2] == [400, "mine"]
    assert found["cookies"][0] == 0
    assert [status for status, _, _ in shut.values()] == [0, 0, 0, 0]
