"""OpenAI's own client on /v1/responses: with a store of responses, and without."""

import itertools
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from support.fronts import front, router_before
from support.servers import asgi_server
from support.simulated_engine import MODEL, small_plan

from serving.config import RouterSpec
from serving.router.http.auth import KeyFile, new
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.http

COUNT = itertools.count()


def response_of(asked: dict[str, Any]) -> dict[str, Any]:
    """In vLLM's shape; the text tells how many items of input there were."""
    items = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
    text = {"type": "output_text", "text": f"{len(items)} items", "annotations": []}
    message = {
        "type": "message",
        "id": f"msg_{next(COUNT)}",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    return {
        "id": f"resp_{next(COUNT)}",
        "created_at": 0,
        "model": MODEL,
        "object": "response",
        "output": [message],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "background": False,
        "previous_response_id": asked.get("previous_response_id"),
        "status": "completed",
    }


async def answer(request: Request) -> Response:
    asked = await request.json()
    if asked["input"] and asked["input"][-1] == {"role": "user", "content": "fail"}:
        return JSONResponse({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, 400)
    response = response_of(asked)
    if not asked.get("stream"):
        return JSONResponse(response)
    begun = {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}}
    delta = {
        "type": "response.output_text.delta",
        "item_id": "m",
        "output_index": 0,
        "content_index": 0,
        "delta": "x",
    }
    over = {"type": "response.completed", "response": response}
    events = "".join(
        f"event: {fields['type']}\ndata: {json.dumps({**fields, 'sequence_number': at}, separators=(',', ':'))}\n\n"
        for at, fields in enumerate((begun, delta, over))
    )
    return Response(events, media_type="text/event-stream")


@contextmanager
def service(keys: KeyFile | None = None, **spec: Any) -> Iterator[str]:
    """A router before an engine of this module."""
    with asgi_server(Starlette(routes=[Route("/v1/responses", answer, methods=["POST"])])) as upstream:
        record = SliceRecord("a", MODEL, SliceState.SERVING, "serving", "v6e 2x4", address=upstream)
        with router_before([small_plan()], [record], RouterSpec.model_validate(spec), keys) as address:
            yield address


def client(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def test_a_conversation_goes_on_by_the_id_of_its_last_response(tmp_path: Path) -> None:
    with service(responses_store=str(tmp_path / "responses")) as address:
        api = client(address)
        first = api.responses.create(model=MODEL, input="One")
        assert first.output_text == "1 items"
        assert first.previous_response_id is None
        second = api.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
        assert (second.output_text, second.previous_response_id) == ("3 items", first.id)
        events = list(
            api.responses.create(model=MODEL, input="Three", previous_response_id=second.id, stream=True)
        )
        assert [event.type for event in events] == [
            "response.created",
            "response.output_text.delta",
            "response.completed",
        ]
        third: Any = events[-1]
        assert (third.response.output_text, third.response.previous_response_id) == ("5 items", second.id)
        assert api.responses.retrieve(third.response.id).output == third.response.output
        items = api.responses.input_items.list(third.response.id, order="asc").data
        assert [getattr(item, "role", None) for item in items] == [
            "user",
            "assistant",
            "user",
            "assistant",
            "user",
        ]
        api.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(first.id)
        assert (
            api.responses.create(model=MODEL, input="Four", previous_response_id=second.id).output_text
            == "5 items"
        )
        with pytest.raises(openai.BadRequestError, match="background"):
            api.responses.cancel(second.id)


def test_what_is_not_to_be_stored_or_went_wrong_is_not(tmp_path: Path) -> None:
    with service(responses_store=str(tmp_path / "responses")) as address:
        api = client(address)
        unkept = api.responses.create(model=MODEL, input="One", store=False)
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(unkept.id)
        with pytest.raises(openai.BadRequestError, match="no"):
            api.responses.create(model=MODEL, input=[{"role": "user", "content": "fail"}])
        with pytest.raises(openai.BadRequestError, match="not stored here") as refused:
            api.responses.create(model=MODEL, input="Two", previous_response_id=unkept.id)
        assert (refused.value.param, refused.value.code) == (
            "previous_response_id",
            "previous_response_not_found",
        )


def test_a_damaged_store_costs_no_answer_and_says_what_ails_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with service(responses_store=str(tmp_path / "responses")) as address:
        api = client(address)
        first = api.responses.create(model=MODEL, input="One")
        with sqlite3.connect(tmp_path / "responses") as file:
            file.execute("DROP TABLE responses")
        for ask in (
            lambda: api.responses.retrieve(first.id),
            lambda: api.responses.delete(first.id),
            lambda: api.responses.create(model=MODEL, input="Two", previous_response_id=first.id),
        ):
            with pytest.raises(openai.InternalServerError, match="no such table") as away:
                ask()
            assert (away.value.status_code, away.value.code) == (500, "storage_refused")
            assert away.value.response.headers["x-should-retry"] == "false"
        assert api.responses.create(model=MODEL, input="One").output_text == "1 items"
    (told,) = [record for record in caplog.records if "is not kept" in record.message]
    assert "no such table" in told.message
    assert not told.exc_info  # with each response, on a disk that may be full


def said(text: str, **more: Any) -> list[Any]:
    return [{"role": "user", "content": text, **more}]


def test_a_conversation_is_bounded_as_a_body_is(tmp_path: Path) -> None:
    """A follow-up of a hundred bytes would make the router join and send what no client may."""
    with service(responses_store=str(tmp_path / "responses"), max_body_bytes=100_000) as address:
        api = client(address)
        first = api.responses.create(model=MODEL, input=said("a" * 60_000))
        second = api.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
        with pytest.raises(openai.APIStatusError, match="begin a new one") as refused:
            api.responses.create(model=MODEL, input=said("a" * 60_000), previous_response_id=second.id)
        assert refused.value.status_code == 413
        assert len(api.responses.input_items.list(second.id).data) == 3
        assert api.responses.retrieve(second.id).output_text == "3 items"


def test_a_conversation_may_have_as_many_values_as_a_body(tmp_path: Path) -> None:
    wide: Any = said("hello", extra={"more": [[]] * 40_000})
    with service(responses_store=str(tmp_path / "responses")) as address:
        api = client(address)
        first = api.responses.create(model=MODEL, input=wide)
        with pytest.raises(openai.BadRequestError, match="more than 65536 lists and objects"):
            api.responses.create(model=MODEL, input=wide, previous_response_id=first.id)


def test_a_response_is_nobody_else_s(tmp_path: Path) -> None:
    made = [new(name) for name in ("first", "second")]
    ring = KeyFile(None, "\n".join(line for _, line in made))
    with service(ring, responses_store={"path": str(tmp_path / "responses")}) as address:
        own, other = (client(address, key) for key, _ in made)
        found = own.responses.create(model=MODEL, input="One")
        assert own.responses.retrieve(found.id).id == found.id
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(found.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.delete(found.id)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(model=MODEL, input="Two", previous_response_id=found.id)
        with pytest.raises(openai.AuthenticationError):
            client(address, "sk-none").responses.retrieve(found.id)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")],
)
def test_a_service_without_a_store_has_openai_s_own_error(method: str, path: str) -> None:
    with front() as running:
        found = httpx.request(method, f"{running.address}/v1/responses/resp_1{path}")
        assert found.status_code == 404
        error = found.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "response_not_found")
        assert "stores no responses" in error["message"]


def test_other_methods_and_paths_of_a_response_are_named() -> None:
    with front() as running:
        found = httpx.put(f"{running.address}/v1/responses/resp_1")
        assert (found.status_code, found.headers["allow"]) == (405, "GET, DELETE")
        assert httpx.get(f"{running.address}/v1/responses/resp_1/cancel").headers["allow"] == "POST"
        assert (
            httpx.post(f"{running.address}/v1/responses/resp_1/other").json()["error"]["code"]
            == "unknown_path"
        )
        for missing in ("input_tokens", "compact"):
            assert httpx.post(f"{running.address}/v1/responses/{missing}", json={}).status_code == 404
        assert (
            httpx.get(f"{running.address}/v1/responses/resp_1", params={"stream": "true"}).status_code == 400
        )
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            client(running.address).responses.create(model=MODEL, input="Two", previous_response_id="resp_1")


def test_an_item_that_is_only_named_stands_in_the_conversation(tmp_path: Path) -> None:
    """As the AI SDK's openai provider sends the turns before."""
    mine, line = new("mine")
    other, other_line = new("other")
    keys = KeyFile(None, f"{line}\n{other_line}")
    with service(keys, responses_store=str(tmp_path / "responses"), keys_file="/keys") as address:
        api = client(address, mine)
        first = api.responses.create(model=MODEL, input="One")
        named: Any = {"type": "item_reference", "id": first.output[0].id}
        question: Any = {"role": "user", "content": "Two"}
        second = api.responses.create(model=MODEL, input=[named, question])
        assert second.output_text == "2 items"
        items = api.responses.input_items.list(second.id, order="asc").data
        assert getattr(items[0], "id", None) == first.output[0].id
        third = api.responses.create(model=MODEL, input=[question], previous_response_id=second.id)
        assert third.output_text == "4 items"
        with pytest.raises(openai.BadRequestError, match="twice"):
            api.responses.create(model=MODEL, input=[named, named])
        for asker, item in (
            (client(address, other), named),
            (api, {"type": "item_reference", "id": "msg_none"}),
        ):
            with pytest.raises(openai.NotFoundError, match="no stored response") as error:
                asker.responses.create(model=MODEL, input=[item, question])
            assert (error.value.code, error.value.param) == ("item_not_found", "input")
        api.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            api.responses.create(model=MODEL, input=[named, question])


def test_without_a_store_an_item_that_is_only_named_is_refused() -> None:
    with service() as address, pytest.raises(openai.NotFoundError, match=r"router\.responses_store"):
        client(address).responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_1"}])
