"""vLLM's own parsers and converters of messages and responses, taken over in the middle of an answer. No engine is started."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.recorded import MESSAGES, RESPONSES, ask, events_of

from serving.config import load
from serving.engine import resume, steps
from serving.engine.protocol import CONTINUED, TELLS_TOKENS, TOKENS_EVENT
from serving.planning import plan
from serving.router.forwarding.steps import StepTranscript
from serving.simulation import stand_in
from serving.simulation.cluster import cache_directory

pytestmark = pytest.mark.engine

LLAMA = Path(__file__).parents[2] / "deployments" / "llama.yaml"
PROMPT = [3, 70, 90, 4]
TALK = [{"role": "user", "content": "Hello"}]
ANSWER = "<think>A host is a machine</think>It carries some chips, and é is a letter"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    spec = load(LLAMA).services["llama"].models[0]
    resume._teach_detokenizer()
    found = AutoTokenizer.from_pretrained(stand_in.ensure(plan(spec).shape, cache_directory()))
    found.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return found


class Engine:
    """Gives the same tokens to every prompt, from where it stands, `at_once` in a step."""

    def __init__(self, tokenizer: Any, ids: list[int], at_once: int = 1) -> None:
        self.renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)
        text = SimpleNamespace(model_type="llama")
        size = len(tokenizer)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: size, hf_text_config=text)
        self._tokenizer, self._ids, self._at_once = tokenizer, ids, at_once

    async def generate(self, engine_input: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        from vllm.outputs import CompletionOutput, RequestOutput
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        prompt = engine_input["prompt_token_ids"]
        made = SimpleNamespace(
            request_id="", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=params
        )
        detokenizer = IncrementalDetokenizer.from_new_request(self._tokenizer, made)
        start = len(prompt) - len(PROMPT)
        ids = self._ids[start : start + params.max_tokens]
        for at in range(0, len(ids), self._at_once):
            piece = ids[at : at + self._at_once]
            stop = detokenizer.update(piece, stop_terminated=False)
            over = bool(stop) or at + self._at_once >= len(ids)
            text = detokenizer.get_next_output_text(finished=over, delta=True)
            finish = "stop" if stop else "length" if over else None
            output = CompletionOutput(0, text, piece, None, None, finish_reason=finish, stop_reason=stop)
            yield RequestOutput(request_id, None, prompt, None, [output], over, num_cached_tokens=0)
            if over:
                return


def params_of(fields: dict[str, Any], name: str) -> Any:
    from vllm.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=fields[name],
        stop=fields.get("stop_sequences") or [],
        skip_special_tokens=False,
        extra_args=fields.get("vllm_xargs"),
    )


def _parser(parses: bool) -> Any:
    from vllm.parser.parser_manager import ParserManager

    if not parses:
        return None
    return ParserManager.get_parser(
        tool_parser_name=None, reasoning_parser_name="deepseek_r1", enable_auto_tools=False, model_name="x"
    )


async def messages(engine: Engine, body: bytes, parses: bool) -> list[bytes]:
    """A message's stream, as vLLM's server would send it for a rendered prompt."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    serving: Any = object.__new__(AnthropicServingMessages)
    serving.__dict__ |= {
        "engine_client": engine,
        "renderer": engine.renderer,
        "model_config": engine.model_config,
        "parser_cls": _parser(parses),
        "response_role": "assistant",
        "enable_force_include_usage": False,
        "enable_log_outputs": False,
        "enable_prompt_tokens_details": False,
        "enable_per_request_metrics": False,
        "request_logger": None,
        "system_fingerprint": None,
        "stop_reason_map": {"stop": "end_turn", "length": "max_tokens"},
    }
    fields = json.loads(body)
    metadata = SimpleNamespace(final_usage_info=None)

    async def create(chat: Any, _: Any = None) -> Any:
        outputs = serving.engine_client.generate(
            {"prompt_token_ids": PROMPT}, params_of(fields, "max_tokens"), "x"
        )
        return serving.chat_completion_stream_generator(
            chat, outputs, "chatcmpl-x", "m", [], engine.renderer.get_tokenizer(), metadata
        )

    serving.create_chat_completion = create
    steps.install(SimpleNamespace(anthropic_serving_messages=serving))
    usage = {"include_usage": True, "continuous_usage_stats": True}
    chat = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": TALK, "stream": True, "stream_options": usage}
    )

    async def kept_json() -> Any:
        return fields

    generator = await serving.create_chat_completion(chat, SimpleNamespace(json=kept_json))
    stream = [text async for text in serving.message_stream_converter(generator)]
    return [event for text in stream for event in events_of(text.encode())]


async def responses(engine: Engine, body: bytes, parses: bool) -> list[bytes]:
    """A response's stream, the same way."""
    from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
    from vllm.entrypoints.openai.responses.context import SimpleContext
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    serving: Any = object.__new__(OpenAIServingResponses)
    parser = _parser(parses)
    serving.__dict__ |= {
        "engine_client": engine,
        "renderer": engine.renderer,
        "model_config": engine.model_config,
        "parser": parser,
        "use_harmony": False,
        "enable_auto_tools": False,
        "enable_log_outputs": False,
        "request_logger": None,
    }
    steps.install(SimpleNamespace(openai_serving_responses=serving))
    request = ResponsesRequest.model_validate_json(body)
    tokenizer = engine.renderer.get_tokenizer()
    context = SimpleContext(response_parser=parser(tokenizer, None) if parser else None)
    params = params_of(json.loads(body), "max_output_tokens")

    async def contexts() -> AsyncIterator[Any]:
        async for output in serving.engine_client.generate({"prompt_token_ids": PROMPT}, params, "x"):
            context.append_output(output)
            yield context

    stream = serving.responses_stream_generator(request, params, contexts(), context, "m", tokenizer, None)
    texts = [text async for text in _convert_stream_to_sse_events(stream)]
    return [event for text in texts for event in events_of(text.encode())]


SERVERS = {MESSAGES: messages, RESPONSES: responses}
ASKS = {
    "message": ask(MESSAGES, messages=TALK, max_tokens=100),
    "message with a bound": ask(MESSAGES, messages=TALK, max_tokens=11),
    "message with a stop sequence": ask(MESSAGES, messages=TALK, max_tokens=100, stop_sequences=["some ch"]),
    "response": ask(RESPONSES, input="Hello", store=False, max_output_tokens=100),
    "response as Codex asks": ask(
        RESPONSES, input="Hello", store=False, max_output_tokens=11, include=["reasoning.encrypted_content"]
    ),
    "response with a bound": ask(RESPONSES, input="Hello", store=False, max_output_tokens=11),
}


def merged(events: list[bytes]) -> list[dict[str, Any]]:
    """Events without names that are made up anew each time, and with neighbouring pieces of one text as one."""
    bodies: list[dict[str, Any]] = []
    for event in events:
        name, data = event.decode().split("\ndata: ")
        body = _plain(json.loads(data))
        assert name == f"event: {body['type']}"
        last = bodies[-1] if bodies else {}
        if "delta" in body["type"] and last.get("type") == body["type"]:
            old, new = last.get("delta"), body["delta"]
            if isinstance(new, str):
                last["delta"] = old + new
                continue
            if "type" in new and new["type"] == old["type"]:
                last["delta"] = {
                    key: value if key == "type" else old[key] + value for key, value in new.items()
                }
                continue
        bodies.append(body)
    return bodies


def _plain(found: Any) -> Any:
    if isinstance(found, dict):
        left_out = ("id", "item_id", "created_at", "sequence_number", "signature")
        return {name: _plain(value) for name, value in found.items() if name not in left_out}
    return [_plain(each) for each in found] if isinstance(found, list) else found


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("parses", [True, False])
@pytest.mark.parametrize("name", ASKS)
async def test_wherever_a_stream_is_cut_its_client_has_one_answer(
    tokenizer: Any, name: str, parses: bool, at_once: int
) -> None:
    asked = ASKS[name]
    serve = SERVERS[asked.path]
    ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    engine = Engine(tokenizer, ids, at_once)
    plain = await serve(engine, asked.body, parses)
    whole = merged(plain)
    assert ("thinking" in str(whole) or "reasoning_text" in str(whole)) is parses
    told = await serve(engine, StepTranscript(asked).body, parses)
    transcript = StepTranscript(asked)
    shown = b"".join(map(transcript.take, told))
    assert merged(events_of(shown)) == whole
    assert len(events_of(shown)) == len(plain)
    for cut in range(len(told)):
        transcript = StepTranscript(asked)
        shown = b"".join(map(transcript.take, told[:cut]))
        assert transcript.resume() == ""
        shown += b"".join(map(transcript.take, await serve(engine, transcript.body, parses)))
        assert transcript.done, cut
        assert merged(events_of(shown)) == whole, cut
        if asked.path == RESPONSES:
            bodies = [json.loads(event.split(b"\ndata: ")[1]) for event in events_of(shown)]
            assert [body["sequence_number"] for body in bodies] == list(range(len(bodies))), cut
            opened = {body["item"]["id"] for body in bodies if body["type"] == "response.output_item.added"}
            assert {body["item_id"] for body in bodies if "item_id" in body} == opened, cut
            assert len({body["response"]["id"] for body in bodies if "response" in body}) == 1, cut


async def test_the_stop_sequence_that_ended_a_message_is_named(tokenizer: Any) -> None:
    asked = ASKS["message with a stop sequence"]
    engine = Engine(tokenizer, tokenizer.encode(ANSWER, add_special_tokens=False))
    for body in (asked.body, StepTranscript(asked).body):
        stream = await messages(engine, body, parses=False)
        shown = merged([event for event in stream if not event.startswith(TOKENS_EVENT)])
        (delta,) = [event["delta"] for event in shown if event["type"] == "message_delta"]
        assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "some ch"}


@pytest.mark.parametrize("ids", [["a"], [-1], [10**9], [True]])
async def test_what_can_t_be_gone_on_with_is_refused(tokenizer: Any, ids: list[Any]) -> None:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    def error(message: str, **_: Any) -> str:
        return message

    serving = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: len(tokenizer)), create_error_response=error
    )
    fields: dict[str, Any] = {"input": "Hello", "stream": True, "vllm_xargs": {CONTINUED: [7]}}
    assert steps._refusal(serving, ResponsesRequest.model_validate(fields)) is None
    whole = ResponsesRequest.model_validate({**fields, "stream": False})
    assert "goes with a stream" in steps._refusal(serving, whole)
    asked = SimpleNamespace(stream=True, vllm_xargs={CONTINUED: ids}, **{TELLS_TOKENS: True})
    assert "are ids of the model's tokens" in steps._refusal(serving, asked)


async def test_a_client_that_goes_away_ends_the_generators_that_are_run_by_hand() -> None:
    import asyncio
    import gc

    ended: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: ended.append(str(what)))
    part = SimpleNamespace(stop_reason=None, finish_reason=None, token_ids=[1])
    output = SimpleNamespace(outputs=[part], prompt_token_ids=[1])

    async def inner(items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        try:
            async for item in items:
                yield item
        finally:
            ended.append("inner")

    async def outer(items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        try:
            async for item in inner(items):
                yield item
        finally:
            ended.append("outer")

    async def endless() -> AsyncIterator[Any]:
        yield output
        await asyncio.Event().wait()

    async def read() -> None:
        stepped = steps._stepped(steps._Steps(outer), endless(), steps._Story(0), lambda each: each)
        async for _ in stepped:
            pass

    reading = asyncio.create_task(read())
    for _ in range(10):
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    del reading
    gc.collect()
    await asyncio.sleep(0)
    gc.collect()
    assert sorted(ended) == ["inner", "outer"]


async def test_a_generator_that_is_run_by_hand_awaits_the_loop_and_gets_its_errors() -> None:
    import asyncio

    async def made(items: AsyncIterator[str]) -> AsyncIterator[str]:
        yield "first"
        try:
            async for item in items:
                await asyncio.sleep(0)
                yield item.upper()
                yield item.lower()
        except ValueError as error:
            yield str(error)

    run = steps._Steps(made)
    assert [await run.feed(item) for item in (None, "a", "Bc", ValueError("over"))] == [
        ["first"],
        ["A", "a"],
        ["BC", "bc"],
        ["over"],
    ]
    assert run.over

    async def stuck(items: AsyncIterator[str]) -> AsyncIterator[str]:
        async for item in items:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                yield f"{item} is cancelled"
                raise

    run = steps._Steps(stuck)
    assert await run.feed(None) == []
    task = asyncio.create_task(run.feed("a"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
