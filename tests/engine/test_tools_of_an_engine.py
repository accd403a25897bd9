"""The real engine with a tool parser, without Ray: tools, and clients behind a router that stores responses."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from support.fronts import router_before
from support.one_engine import MODEL, SPEC, address_of, started

from serving.config import ModelSpec, RouterSpec
from serving.planning import plan
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
COUNT = {"type": "integer", "maximum": 9}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": COUNT},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with started({"tool_call_parser": "llama3_json"}) as (engine, _):
        yield address_of(engine)


def ask(address: str, **fields: Any) -> Any:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Add"}],
        "tools": [ADD],
        "temperature": 0,
    }
    answer = httpx.post(f"{address}{CHAT}", json={**asked, "max_tokens": 200, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_a_model_may_choose_to_call_no_tool(address: str, choice: dict[str, str]) -> None:
    assert ask(address, max_tokens=5, **choice)["content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_model_that_has_to_call_a_tool_does_so_with_arguments_that_fit(address: str, choice: Any) -> None:
    (call, *_) = ask(address, tool_choice=choice)["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"])["a"] <= COUNT["maximum"]


def test_requests_with_grammars_side_by_side_keep_their_own(address: str) -> None:
    """The engine takes masks in the order of its scheduler, which is not that of the requests' ids."""

    def choose(number: int) -> bool:
        choices = [f"alpha {number} " * 2, f"beta {number} " * 2]
        fields = {"tools": None, "structured_outputs": {"choice": choices}, "temperature": 1}
        with_name = {"x-request-id": f"choice-{9 - number}"}  # the last to come is the first by its id
        answer = httpx.post(
            f"{address}{CHAT}",
            json={
                "model": MODEL,
                "messages": [{"role": "user", "content": "Choose"}],
                "max_tokens": 60,
                **fields,
            },
            headers=with_name,
            timeout=60,
        )
        return answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] in choices

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(choose, range(6)))


MISTAKES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"999999": 1}},
    "/v1/completions": {"prompt": "x", "structured_outputs": {"regex": "("}},
    "/v1/responses": {"input": "x", "logit_bias": {"999999": 1}},
    "/v1/messages": {"messages": [{"role": "user", "content": "x " * 3000}], "max_tokens": 4},
}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", MISTAKES)
def test_a_client_s_mistake_is_a_400_and_no_failure_of_its_slice(
    service: str, path: str, streams: bool
) -> None:
    answer = httpx.post(
        f"{service}{path}", json={"model": MODEL, "stream": streams, **MISTAKES[path]}, timeout=60
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "grammar",
    [
        {"json": {"type": "string", "minLength": -1}},
        {"grammar": "root ::= Token(99999999)"},
        {"regex": r"[^\s\S]"},
        {"regex": r"a[^\s\S]"},
        {"json": {"$ref": "#"}},
    ],
    ids=str,
)
def test_a_grammar_that_no_answer_can_follow_is_the_client_s_mistake(
    address: str, grammar: dict[str, Any]
) -> None:
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 20, "structured_outputs": grammar}
    answer = httpx.post(f"{address}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 400, answer.text
    assert "No answer can follow the request's grammar" in answer.json()["error"]["message"]


@pytest.mark.parametrize("asks", [{"ignore_eos": True}, {"min_tokens": 5}], ids=str)
def test_a_grammar_that_ends_before_the_answer_may_is_the_client_s_mistake(
    address: str, asks: dict[str, Any]
) -> None:
    """Routers took slices that gave a 500 for broken, and asked others."""
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 20, "structured_outputs": {"regex": "[12]"}, **asks}
    answer = httpx.post(f"{address}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 400, answer.text
    assert f"leave out {next(iter(asks))}" in answer.json()["error"]["message"]


def test_parameters_that_its_core_can_t_read_do_not_end_an_engine(service: str) -> None:
    """`max_tokens` is worked out after vLLM has looked at `min_tokens`; the core then read no request any more."""
    for min_tokens, status in ((2046, 400), (10**6, 400), (2, 200)):
        sampling = {"min_tokens": min_tokens, "max_tokens": None if status == 400 else 4}
        answer = httpx.post(
            f"{service}/inference/v1/generate",
            json={"model": MODEL, "token_ids": [1, 2, 3], "sampling_params": sampling},
            timeout=60,
        )
        assert answer.status_code == status, answer.text


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router before the engine."""
    spec = RouterSpec.model_validate({"responses_store": str(tmp_path_factory.mktemp("store") / "file")})
    record = SliceRecord("a", MODEL, SliceState.SERVING, "serving", "v6e 1x1", address=address)
    with router_before([plan(ModelSpec.model_validate(SPEC))], [record], spec) as found:
        yield found


def test_openai_s_client_goes_on_from_a_stored_response(service: str) -> None:
    api = openai.OpenAI(base_url=f"{service}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 8, "temperature": 0}
    first = api.responses.create(input="One", **asked)
    second = api.responses.create(input="Two", previous_response_id=first.id, **asked)
    assert second.previous_response_id == first.id
    assert second.usage
    assert first.usage
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    events = list(api.responses.create(input="Three", previous_response_id=second.id, stream=True, **asked))
    last: Any = events[-1]
    assert last.response.previous_response_id == second.id
    assert last.response.usage.input_tokens > second.usage.input_tokens
    assert api.responses.retrieve(last.response.id).output_text == last.response.output_text
    roles = [
        getattr(item, "role", "") for item in api.responses.input_items.list(last.response.id, order="asc")
    ]
    assert roles == ["user", "assistant", "user", "assistant", "user"]


def test_anthropic_s_client_gets_a_message_whole_and_streamed(service: str) -> None:
    import anthropic

    api = anthropic.Anthropic(base_url=service, api_key="none", max_retries=0)
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 8,
        "extra_body": {"temperature": 0},
        "system": "Be short.",
        "messages": [{"role": "user", "content": "Tell me a story"}],
    }
    whole = api.messages.create(**asked)
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "max_tokens")
    assert whole._request_id
    assert whole.usage.input_tokens > 0
    assert whole.usage.output_tokens == 8
    (block,) = whole.content
    assert block.type == "text"
    with api.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == block.text
    assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", 8)


def test_anthropic_s_client_counts_tokens_and_hears_what_was_wrong(service: str) -> None:
    import anthropic

    api = anthropic.Anthropic(base_url=service, api_key="none", max_retries=0)
    talk: list[Any] = [{"role": "user", "content": "Tell me a story"}]
    counted = api.messages.count_tokens(model=MODEL, messages=talk).input_tokens
    read = api.messages.create(model=MODEL, max_tokens=1, messages=talk).usage.input_tokens
    assert counted == read > 0
    with pytest.raises(anthropic.BadRequestError) as refused:
        api.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "nobody", "content": "x"}])  # type: ignore[typeddict-item]  # on purpose
    assert "role" in refused.value.message
    assert refused.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        api.messages.create(model="none", max_tokens=1, messages=talk)
