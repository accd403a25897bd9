"""What is made of a body that vLLM refuses is small, whatever the body."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, model_validator

from serving.engine import refusals


class Part(BaseModel):
    values: list[int]


class Looked(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def look(cls, fields: Any) -> Any:
        fields.get("a")["b"]
        return fields


class Asked(BaseModel):
    parts: list[Part] | list[str]
    size: float = 0.0
    labels: dict[str, int] | None = None
    anything: dict[str, Any] = {}
    looked: Looked | None = None


def app() -> FastAPI:
    made = FastAPI()

    @made.post("/asked")
    def asked(fields: Asked) -> int:
        return sum(len(part.values) for part in fields.parts if isinstance(part, Part))

    refusals.install(made)
    return made


async def post(app: Any, path: str, fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://slice") as client:
        return await client.post(path, json=fields)


@pytest.mark.unit
async def test_a_list_is_refused_with_its_first_bad_item() -> None:
    """Each item was tried against each type: 40 KB of /v1/responses came to a million errors, and a text of 2 GB."""
    answer = await post(app(), "/asked", {"parts": [{"values": ["a"] * 300}] * 300})
    assert answer.status_code == 422
    assert {tuple(error["loc"][-2:]) for error in answer.json()["detail"]} == {
        ("values", 0),
        ("list[str]", 0),
    }


@pytest.mark.unit
async def test_a_long_mapping_is_refused_before_its_values_are_looked_at() -> None:
    """Each bad value was an error of its own: 3 MB of vllm_xargs took a slice's HTTP process 8 s and 1 GB."""
    names = [f"k{at}" for at in range(2000)]
    answer = await post(app(), "/asked", {"parts": [], "labels": dict.fromkeys(names, "a")})
    assert answer.status_code == 422
    [problem] = answer.json()["detail"]
    assert (problem["loc"], problem["msg"]) == (["body", "labels"], "it has 2000 names; send at most 1024")
    good = {"labels": dict.fromkeys(names[:1024], 1), "anything": dict.fromkeys(names, "a")}
    assert (await post(app(), "/asked", {"parts": [], **good})).json() == 0


@pytest.mark.unit
async def test_an_error_repeats_no_input() -> None:
    answer = await post(app(), "/asked", {"parts": [], "size": "secret"})
    assert answer.status_code == 422
    assert "secret" not in answer.text


@pytest.mark.unit
@pytest.mark.parametrize("looked", [[], "secret", {}, {"a": 1}, {"a": {}}, {"a": ["secret"]}])
async def test_a_field_on_which_a_look_at_it_fails_is_refused(looked: Any) -> None:
    """It was a 500: three of them, and routers take a slice for broken."""
    answer = await post(app(), "/asked", {"parts": [], "looked": looked})
    assert answer.status_code == 422
    assert "secret" not in answer.text


@pytest.mark.unit
async def test_a_good_body_is_taken() -> None:
    assert (await post(app(), "/asked", {"parts": [{"values": [1, 2]}] * 3})).json() == 6


@pytest.mark.engine
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": [{"type": "a"}] * 500}),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}] * 500}]},
        ),
        ("/v1/responses", {"input": "a", "tools": [0] * 500}),
        ("/v1/chat/completions", {"messages": [{"role": 1}] * 500}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [0] * 500}]}),
        ("/v1/embeddings", {"input": [["a"]] * 500}),
        ("/v1/completions", {"prompt": "a", "vllm_xargs": {f"k{at}": None for at in range(2000)}}),
        ("/v1/responses", {"input": "a", "metadata": {f"k{at}": 1 for at in range(2000)}}),
        ("/v1/responses", {"input": "a", "tools": 0}),
        ("/v1/chat/completions/derender", {"generate_response": {}, "chat_request": []}),
        ("/v1/completions/derender", {"generate_responses": [], "completion_request": "a"}),
        (
            "/v1/chat/completions",
            {"messages": [], "tools": [{}], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
    ],
)
async def test_vllm_s_own_routes_say_little_of_a_body_that_they_refuse(path: str, fields: Any) -> None:
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    made = build_app(args, ("generate", "embed"), SimpleNamespace(get_pooling_task=lambda _: "embed"))
    made.state.args = args
    refusals.install(made)
    answer = await post(made, path, {"model": "m", **fields})
    assert answer.status_code == 400
    assert len(answer.content) < 64 << 10
