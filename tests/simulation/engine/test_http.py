"""The HTTP surface of the simulated engine, on a real server, through the clients that people use."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.servers import PATIENCE_S, until
from support.simulated_engine import MODEL, serving

from serving.simulation.engine.engine import Engine
from serving.simulation.engine.physics import Factors

pytestmark = pytest.mark.http

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
}
TOOL = {"type": "function", "function": {"name": "forecast", "parameters": WEATHER}}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Engine]]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def address(server: tuple[str, Engine]) -> str:
    return server[0]


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
    return client.chat.completions.create(**{**asked, **fields})


def post(address: str, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{address}{path}", json=fields, timeout=PATIENCE_S)


def metric(address: str, name: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{address}/metrics").text)
    return sum(s.value for family in families for s in family.samples if s.name == name)


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 12
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens > 0
    assert not chunks[-1].choices


def test_every_chunk_tells_the_usage_so_far_where_that_is_asked(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(client, max_tokens=3, stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [0, 1, 2, 3, 3]


def test_completions_take_texts_and_ids_one_or_several(client: openai.OpenAI, address: str) -> None:
    ids = post(address, "/tokenize", prompt="Once upon a time").json()["tokens"]
    by_text = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8)
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=8)
    both = client.completions.create(model=MODEL, prompt=["Once upon a time", "Twice"], n=2, max_tokens=8)
    assert by_text.choices[0].text == by_ids.choices[0].text == both.choices[0].text
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in both.choices}) == 4
    parts = client.completions.create(model=MODEL, prompt=ids, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in parts) == by_ids.choices[0].text


def test_an_answer_that_broke_off_goes_on_elsewhere_word_for_word(client: openai.OpenAI) -> None:
    fields: Any = {"max_tokens": 30, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    whole = chat(client, **fields)
    said = whole.choices[0].message.content
    ids = [*whole.model_extra["prompt_token_ids"], *whole.choices[0].model_extra["token_ids"][:11]]
    with serving() as (elsewhere, _):
        rest = post(elsewhere, "/v1/completions", prompt=ids, max_tokens=19, ignore_eos=True).json()
        assert said.endswith(rest["choices"][0]["text"])
        begun = said.removesuffix(rest["choices"][0]["text"])
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": begun}]
        options = {"continue_final_message": True, "add_generation_prompt": False, "ignore_eos": True}
        rest = post(elsewhere, "/v1/chat/completions", messages=messages, max_tokens=19, **options).json()
    assert begun + rest["choices"][0]["message"]["content"] == said


def test_logprobs_are_there_for_every_token_and_the_same_each_time(client: openai.OpenAI) -> None:
    once, again = (chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs for _ in range(2))
    assert once == again
    assert len(once.content) == 12
    assert all(
        len(each.top_logprobs) == 3 and each.top_logprobs[0].token == each.token for each in once.content
    )
    streamed = [c.choices[0].logprobs for c in chat(client, logprobs=True, top_logprobs=3, stream=True)]
    assert [row for each in streamed if each for row in each.content] == once.content
    found = client.completions.create(model=MODEL, prompt="Once", max_tokens=4, logprobs=2).choices[0]
    assert found.logprobs
    assert "".join(found.logprobs.tokens or []) == found.text
    assert found.logprobs.text_offset == [len("".join((found.logprobs.tokens or [])[:i])) for i in range(4)]


def test_a_schema_is_answered_with_json(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    found = chat(client, response_format=form, max_tokens=100)
    jsonschema.validate(json.loads(found.choices[0].message.content), WEATHER)
    assert found.choices[0].finish_reason == "stop"
    found = chat(client, response_format={"type": "json_object"}, max_tokens=100)
    assert isinstance(json.loads(found.choices[0].message.content), dict)
    for asked, said in (({"choice": ["yes", "no"]}, "yes"), ({"json": json.dumps({"const": 7})}, "7")):
        found = chat(client, extra_body={"structured_outputs": asked})
        assert found.choices[0].message.content == said


@pytest.mark.parametrize(
    ("choice", "text", "finish"),
    [
        ("required", "Hello", "tool_calls"),
        ("auto", "Use the forecast", "tool_calls"),
        ({"type": "function", "function": {"name": "forecast"}}, "Hello", "stop"),
    ],
)
def test_a_tool_is_called_with_arguments_that_fit(
    client: openai.OpenAI, choice: Any, text: str, finish: str
) -> None:
    fields = {
        "tools": [TOOL],
        "tool_choice": choice,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 100,
    }
    whole = chat(client, **fields).choices[0]
    call = whole.message.tool_calls[0]
    assert (call.function.name, whole.finish_reason, whole.message.content) == ("forecast", finish, None)
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    deltas = [chunk.choices[0] for chunk in chat(client, **fields, stream=True)]
    calls = [each.delta.tool_calls[0] for each in deltas if each.delta.tool_calls]
    assert (calls[0].function.name, calls[0].id is not None) == ("forecast", True)
    assert "".join(each.function.arguments for each in calls) == call.function.arguments
    assert deltas[-1].finish_reason == finish


def test_tools_that_nobody_speaks_of_are_not_called(client: openai.OpenAI) -> None:
    assert chat(client, tools=[TOOL]).choices[0].message.tool_calls is None
    named = [{"role": "user", "content": "forecast"}]
    assert chat(client, tools=[TOOL], tool_choice="none", messages=named).choices[0].message.content


def test_a_model_without_a_tool_parser_refuses_tools_as_vllm_does() -> None:
    named = {"type": "function", "function": {"name": "forecast"}}
    with serving(tool_call_parser=None) as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"tool_choice": named}):
            with pytest.raises(openai.BadRequestError, match="--tool-call-parser to be set"):
                chat(client, tools=[TOOL], **choice)
        assert chat(client, tools=[TOOL], tool_choice="none").choices[0].message.content
        assert chat(client, tools=[TOOL], tool_choice=None).choices[0].message.content


def test_stop_strings_and_several_choices(client: openai.OpenAI) -> None:
    said = chat(client, max_tokens=30).choices[0].message.content
    cut = chat(client, max_tokens=30, stop=[said[20:26]], n=2)
    assert cut.choices[0].message.content == said[:20]
    assert cut.choices[0].model_extra["stop_reason"] == said[20:26]
    assert cut.choices[1].message.content != said[:20]
    streamed = chat(client, max_tokens=5, n=3, stream=True)
    assert {chunk.choices[0].index for chunk in streamed} == {0, 1, 2}


def test_tokens_of_texts_and_conversations(address: str) -> None:
    said = "Grüße, 世界 🎉"
    found = post(address, "/tokenize", prompt=said, return_token_strs=True).json()
    assert "".join(found["token_strs"]) == said
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 2048
    assert post(address, "/detokenize", tokens=found["tokens"]).json() == {"prompt": said}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    chat_ids = post(address, "/tokenize", messages=messages).json()["tokens"]
    answer = post(address, "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True)
    assert answer.json()["prompt_token_ids"] == chat_ids


def test_models_and_health(client: openai.OpenAI, address: str) -> None:
    card = client.models.list().data[0]
    assert (card.id, card.model_extra["max_model_len"], card.model_extra["simulated"]) == (MODEL, 2048, True)
    assert httpx.get(f"{address}/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "words"),
    [
        ("/v1/chat/completions", {"messages": "x"}, 400, "messages", "1 validation error"),
        ("/v1/chat/completions", {"model": "gpt", "messages": [{"role": "user"}]}, 404, "model", "`gpt`"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 4000}, 400, "input_tokens", "2048 tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ("/v1/completions", {"prompt": "x", "n": 0}, 400, None, ""),
        ("/v1/completions", {"prompt": "x", "n": 65}, 400, "n", "at most 64"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt", "non-empty"),
        ("/v1/completions", {"prompt": [-1]}, 400, None, "validation"),
        ("/v1/completions", {"prompt": "x", "echo": True}, 400, "echo", "echo"),
        ("/v1/completions", {"prompt": "x", "stream_options": {}}, 400, "stream_options", "stream=True"),
        (
            "/v1/completions",
            {"prompt": "x", "structured_outputs": {"regex": "a"}},
            400,
            "structured_outputs",
            "regex",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "response_format": {"type": "xml"}},
            400,
            "response_format",
            "xml",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "response_format": {"type": "json_schema"}},
            400,
            "response_format",
            "schema",
        ),
        ("/tokenize", {}, 400, "prompt", "needed"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens.0", "integer"),
    ],
)
def test_what_cannot_be_answered_is_refused_as_vllm_refuses_it(
    address: str, path: str, fields: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    if fields.get("n") == 0:  # vLLM takes it as 1
        assert post(address, path, **fields).is_success
        return
    found = post(address, path, **fields)
    error = found.json()["error"]
    assert (found.status_code, error["code"]) == (status, status)
    assert words in error["message"]
    assert param is None or error["param"] == param


def test_images_unknown_tools_and_contradictions_are_refused(address: str) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert "text only" in post(address, "/v1/chat/completions", messages=image).json()["error"]["message"]
    hello = [{"role": "user", "content": "Hello"}]
    for fields in (
        {"tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "none"}}},
        {"continue_final_message": True},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/no"}}}],
            "tool_choice": "required",
        },
    ):
        assert post(address, "/v1/chat/completions", messages=hello, **fields).status_code == 400


def test_bodies_that_are_no_json_and_paths_that_are_not_there(address: str) -> None:
    url = f"{address}/v1/completions"
    for raw, kind in ((b"{", "application/json"), (b"[]", "application/json"), (b"{}", "text/plain")):
        found = httpx.post(url, content=raw, headers={"content-type": kind})
        assert (found.status_code, found.json()["error"]["type"]) == (400, "Bad Request")
    assert httpx.get(f"{address}/nowhere").content == b'{"detail":"Not Found"}'
    assert httpx.get(url).status_code == 405


def test_metrics_go_by_vllms_names_and_count(client: openai.OpenAI, address: str) -> None:
    written, prompts = (metric(address, f"vllm:{kind}_tokens_total") for kind in ("generation", "prompt"))
    long = "slice " * 400
    for _ in range(2):
        asked = chat(client, messages=[{"role": "user", "content": long}], max_tokens=7)
    assert metric(address, "vllm:generation_tokens_total") - written == 14
    assert metric(address, "vllm:prompt_tokens_total") - prompts == 2 * asked.usage.prompt_tokens
    assert metric(address, "vllm:prefix_cache_hits_total") >= 128
    assert metric(address, "vllm:prefix_cache_queries_total") > 800
    assert metric(address, "vllm:time_to_first_token_seconds_count") > 1
    assert metric(address, "vllm:inter_token_latency_seconds_count") >= 12
    assert metric(address, "vllm:num_requests_running") == 0
    assert metric(address, "vllm:num_requests_waiting") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_nothing_behind(stream: bool) -> None:
    with serving(Factors()) as (address, engine):
        asked = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
        if stream:
            with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=PATIENCE_S) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert engine.scheduler.running
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{address}/v1/completions", json=asked, timeout=httpx.Timeout(PATIENCE_S, read=1))
        until(lambda: not engine.scheduler.running, "the request is cancelled")
        assert engine.scheduler.pool.usage == 0


def test_parts_that_vllm_reads_as_text_are_text(address: str) -> None:
    """Clients send back what a model refused, and what it thought."""
    parts = [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "why"}]
    said = [{"role": "assistant", "content": parts}, {"role": "user", "content": "Hello"}]
    assert post(address, "/v1/chat/completions", messages=said, max_tokens=2).is_success
    said[0]["content"] = [{"type": ["refusal"], "refusal": "no"}]
    assert post(address, "/v1/chat/completions", messages=said, max_tokens=2).status_code == 400


def inject(address: str, **faults: Any) -> httpx.Response:
    return post(address, "/simulator/faults", **faults)


def test_errors_and_refusals_on_demand(address: str) -> None:
    assert inject(address, error_rate=0.6).json()["error_rate"] == 0.6
    assert post(address, "/v1/completions", prompt="x").status_code == 500
    inject(address, error_rate=0.4, refuse=True)
    refused = post(address, "/v1/completions", prompt="x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, 503)
    assert httpx.delete(f"{address}/simulator/faults").json()["refuse"] is False
    assert post(address, "/v1/completions", prompt="x").is_success


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"explode": True}, "there are die, hang"),
        ({"die": 1}, "true or false"),
        ({"slow": True}, "a number"),
        ({"slow": 0}, "above 0"),
        ({"error_rate": 1.5}, "at most 1"),
        ({"stall_s": -1}, "at least 0"),
    ],
)
def test_faults_that_are_none_are_refused_and_change_nothing(
    address: str, faults: dict[str, Any], words: str
) -> None:
    before = httpx.get(f"{address}/simulator/faults").json()
    found = inject(address, **faults)
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]
    assert httpx.get(f"{address}/simulator/faults").json() == before


def test_a_slow_engine_takes_as_many_times_as_long_and_a_stall_happens_once(address: str) -> None:
    def took_s() -> float:
        begun = time.monotonic()
        assert post(address, "/v1/completions", prompt="x", max_tokens=4).is_success
        return time.monotonic() - begun

    inject(address, slow=1000)
    assert took_s() > 0.08  # no bound from above: a floor holds however busy the machine is
    inject(address, slow=1, stall_s=0.15)
    assert took_s() > 0.15
    assert httpx.get(f"{address}/simulator/faults").json()["stall_s"] == 0


def test_a_hanging_engine_answers_neither_requests_nor_probes_until_it_is_freed() -> None:
    with serving() as (address, engine):
        inject(address, hang=True)
        found: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: found.append(post(address, "/v1/completions", prompt="x")))
        asking.start()
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{address}/health", timeout=0.2)
        assert not found
        assert not engine.dead
        inject(address, hang=False)
        asking.join(timeout=PATIENCE_S)
        assert found[0].is_success


def test_a_dying_engine_ends_its_requests_with_an_error_and_takes_no_more() -> None:
    with serving(Factors()) as (address, _):
        url = f"{address}/v1/completions"
        asked = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url, json=asked, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            inject(address, die=True)
            said = [line for line in lines if line]
        assert said[-1] == "data: [DONE]"
        assert json.loads(said[-2].removeprefix("data: "))["error"]["code"] == 500
        assert post(address, "/v1/completions", prompt="x").status_code == 500
        assert httpx.get(f"{address}/health").status_code == 503
