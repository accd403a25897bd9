"""The real engine, without Ray: it goes on with its own answers wherever they are cut, and its spans join a trace.

Greedy, a continued answer is what it would have been.
"""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from support.one_engine import MODEL, address_of, started
from support.otlp import Collector, collecting, said
from support.recorded import CHAT, COMPLETIONS, ask, events_of
from support.servers import until

from serving.engine.known_faults import WITHOUT_EFFECT
from serving.router.forwarding.continuation import Transcript
from serving.router.http.protocol import InferenceRequest

pytestmark = pytest.mark.engine

STORY = [{"role": "user", "content": "Tell me a story"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
ASKS: dict[str, InferenceRequest] = {
    "chat": ask(CHAT, messages=STORY, **GREEDY, stream_options=USAGE),
    "chat's logprobs": ask(CHAT, messages=STORY, **GREEDY, logprobs=True, top_logprobs=2),
    "the tokens' logprobs alone": ask(CHAT, messages=STORY, **GREEDY, logprobs=True),
    "completions": ask(COMPLETIONS, prompt="A slice is", **GREEDY, logprobs=1, stream_options=USAGE),
    "ids": ask(COMPLETIONS, prompt=[5, 99, 300], **GREEDY, min_tokens=30, return_token_ids=True),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[str, Collector]]:
    with (
        collecting() as (collector, endpoint),
        started(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_BSP_SCHEDULE_DELAY="200") as (engine, _),
    ):
        yield address_of(engine), collector


@pytest.fixture
def address(engine: tuple[str, Collector]) -> str:
    return engine[0]


def part(address: str, path: str, body: bytes, most: int | None) -> list[bytes]:
    """So many events of an answer; then its client hangs up."""
    events: list[bytes] = []
    headers = {"content-type": "application/json"}
    with httpx.stream("POST", address + path, content=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        rest = b""
        for data in answer.iter_raw():
            rest += data
            *whole, rest = rest.split(b"\n\n")
            events += [event + b"\n\n" for event in whole]
            if most is not None and len(events) >= most:
                break
    return events[:most]


def continued(address: str, asked: InferenceRequest, cuts: list[int]) -> bytes:
    """An answer that broke off so many times, as the relay puts it together: on a busy machine a cut may fall behind its end."""
    transcript, shown = Transcript(asked), b""
    for cut in [*cuts, None]:
        for event in part(address, asked.path, transcript.body, cut):
            shown += transcript.take(event)
            assert not transcript.failed, transcript.engine_error
        if transcript.done:
            break
        if ending := transcript.ending():
            return shown + ending
        assert transcript.resume() == ""
    assert transcript.done
    return shown


def joined(stream: bytes) -> dict[str, Any]:
    """An answer put together: how many tokens make an event depends on how busy the machine is.

    Logprobs of one batch and of another differ in their last bits. vLLM counts `text_offset` within an event by tokens'
    own texts, which for halves of a character are longer than what they add; the simulated engine's are compared.
    """
    bodies = [json.loads(event[6:]) for event in events_of(stream)[:-1]]
    assert len({(body.pop("id"), body.pop("created")) for body in bodies}) == 1
    lists: dict[str, list[Any]] = {}
    last: dict[str, Any] = {}
    text = ""
    for body in bodies:
        last |= {name: body[name] for name in ("model", "object", "usage") if name in body}
        for choice in body["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            last |= {name: choice[name] for name in ("finish_reason", "stop_reason") if name in choice}
            for name, each in [*(choice.get("logprobs") or {}).items(), *choice.items()]:
                if isinstance(each, list) and name != "text_offset":
                    lists.setdefault(name, []).extend(each)
    return {"text": text, **last, **{name: rounded(each) for name, each in lists.items()}}


def rounded(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: rounded(each) for name, each in found.items()}
    if isinstance(found, list):
        return [rounded(each) for each in found]
    return round(found, 2) if isinstance(found, float) else found


@pytest.mark.parametrize("name", ASKS)
def test_nothing_shows_that_ids_were_asked_for(address: str, name: str) -> None:
    asked = ASKS[name]
    plain = b"".join(part(address, asked.path, asked.body, None))
    assert joined(continued(address, asked, [])) == joined(plain)


@pytest.mark.parametrize("name", ASKS)
def test_wherever_it_is_cut_the_answer_is_the_same(address: str, name: str) -> None:
    asked = ASKS[name]
    whole = joined(continued(address, asked, []))
    for cuts in ([1], [2], [9], [25], [7, 6, 5]):
        assert joined(continued(address, asked, cuts)) == whole, cuts


def test_a_stop_string_over_the_cut_is_found(address: str) -> None:
    text = joined(continued(address, ASKS["chat"], []))["text"]
    stop = text[20:27]
    asked = ask(CHAT, messages=STORY, **GREEDY, stop=[stop], stream_options=USAGE)
    whole = continued(address, asked, [])
    assert joined(whole)["text"] == text[: text.index(stop)]
    assert b'"finish_reason":"stop"' in whole
    for cut in range(1, len(events_of(whole)) - 2):
        assert joined(continued(address, asked, [cut])) == joined(whole), cut


@pytest.mark.parametrize("stream", [False, True])
def test_it_gives_the_logprobs_of_the_answer_s_tokens_alone(address: str, *, stream: bool) -> None:
    """tpu-inference 0.26 computes none for `logprobs` 0, and each such request got a 500."""
    asked = {**GREEDY, "max_tokens": 3, "stream": stream}
    chat = httpx.post(address + CHAT, json={**asked, "messages": STORY, "logprobs": True}, timeout=60)
    text = httpx.post(address + COMPLETIONS, json={**asked, "prompt": "A slice", "logprobs": 0}, timeout=60)
    if stream:
        chats, texts = (
            [json.loads(event[6:])["choices"][0]["logprobs"] for event in events_of(answer.content)[:-1]]
            for answer in (chat, text)
        )
    else:
        chats, texts = ([answer.json()["choices"][0]["logprobs"]] for answer in (chat, text))
    tokens = [token for each in chats if each for token in each["content"]]
    assert [token["top_logprobs"] for token in tokens] == [[], [], []]
    assert all(token["logprob"] < 0 for token in tokens)
    values = [value for each in texts for value in each["token_logprobs"]]
    assert len(values) == 3
    assert all(value < 0 for value in values)


def test_ids_that_are_none_are_refused(address: str) -> None:
    fields = {**ASKS["chat"].fields, "vllm_xargs": {"continued_token_ids": ["x"]}}
    answer = httpx.post(address + CHAT, json=fields)
    assert answer.status_code == 400
    assert "continued_token_ids" in answer.json()["error"]["message"]


def test_it_still_does_not_heed_the_parameters_that_are_said_to_have_no_effect(address: str) -> None:
    """Where one of them changes a greedy answer, its row goes."""

    def ids(**fields: Any) -> list[int]:
        asked = {**GREEDY, "prompt": "A slice is", "max_tokens": 8, "return_token_ids": True, **fields}
        answer = httpx.post(f"{address}/v1/completions", json=asked, timeout=60)
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    plain = ids()
    heeded = {
        "presence_penalty": 2,
        "frequency_penalty": 2,
        "repetition_penalty": 2,
        "logit_bias": {str(plain[0]): -100},
        "bad_words": ["a", "e", "s"],
    }
    assert heeded.keys() | {"min_p"} == WITHOUT_EFFECT.keys()
    assert [name for name, value in heeded.items() if ids(**{name: value}) != plain] == []
    assert ids(min_p=1.0, temperature=1.0) != plain  # 1 leaves the likeliest token alone


def test_its_span_is_a_child_of_who_asked(engine: tuple[str, Collector]) -> None:
    """vLLM's own span, as the router's `traceparent` has it."""
    address, collector = engine
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    body = {"model": MODEL, "prompt": "A slice is", "max_tokens": 3, "ignore_eos": True}
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    httpx.post(f"{address}{COMPLETIONS}", json=body, headers=headers, timeout=60).raise_for_status()
    until(lambda: [one for one in collector.spans if one.trace_id.hex() == trace], "the engine's span")
    (span,) = (one for one in collector.spans if one.trace_id.hex() == trace)
    assert (span.name, span.parent_span_id.hex()) == ("llm_request", parent)
    assert said(span)["gen_ai.usage.completion_tokens"] == 3


def test_answers_that_it_is_stopped_in_the_middle_of_are_errors(address: str) -> None:
    """The last test here: this engine answers no more. They ended as if they were complete, with status 200."""
    long = {"model": MODEL, "max_tokens": 1500, "messages": STORY}
    asked = {
        CHAT: {**long, "ignore_eos": True, "stream": True},
        COMPLETIONS: {"model": MODEL, "prompt": "A slice", "max_tokens": 1500, "ignore_eos": True},
        "/v1/messages": {**long, "stream": True},
        "/v1/responses": {"model": MODEL, "input": "A story", "max_output_tokens": 1500, "ignore_eos": True},
    }
    answers: dict[str, tuple[int, bytes]] = {}
    begun = threading.Event()

    def read(path: str) -> None:
        with httpx.stream("POST", address + path, json=asked[path], timeout=60) as answer:
            got = b""
            for data in answer.iter_raw():
                got += data
                if path == CHAT and got.count(b"data: ") > 3:
                    begun.set()
        answers[path] = answer.status_code, got

    reading = [threading.Thread(target=read, args=[path]) for path in asked]
    for thread in reading:
        thread.start()
    assert begun.wait(60)
    core = next(
        child
        for child in psutil.Process().children(recursive=True)
        if "EngineCore" in " ".join(child.cmdline())
    )
    core.terminate()
    for thread in reading:
        thread.join(60)
    assert b'"code": 500' in answers[CHAT][1][-300:]
    assert b"event: error\n" in answers["/v1/messages"][1]
    assert answers[COMPLETIONS][0] == answers["/v1/responses"][0] == 500
