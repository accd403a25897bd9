"""For every place where a recorded stream may break: what the client has in the end is what it would have had."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recorded import CHAT, COMPLETIONS, HELLO, ask, events_of, record

from serving.router.forwarding.continuation import Transcript, with_ids
from serving.router.forwarding.steps import transcript_of
from serving.router.http.protocol import InferenceRequest
from serving.router.http.sse import DONE
from serving.router.http.validation import kept

pytestmark = pytest.mark.unit


def played(asked: InferenceRequest, cuts: list[int]) -> bytes:
    """The client's bytes where the n-th slice dies after so many of its events."""
    transcript = Transcript(asked)
    shown = b""
    created = 1000
    for cut in [*cuts, None]:
        if end := transcript.ending():
            return shown + end
        for event in events_of(record(asked, transcript.body, created=created))[:cut]:
            shown += transcript.take(event)
        if transcript.done:
            return shown
        assert transcript.resume() == ""
        created += 1
    raise AssertionError("the last slice does not die")


def undisturbed(asked: InferenceRequest, cuts: Sequence[int] = ()) -> bytes:
    """What the first slice that says anything would have said to the end."""
    silent = next((place for place, cut in enumerate(cuts) if cut), len(cuts))
    return record(asked, asked.body, created=1000 + silent)


ASKS: dict[str, InferenceRequest] = {
    "chat": ask(CHAT, messages=HELLO, max_tokens=12),
    "chat without a limit": ask(CHAT, messages=[{"role": "user", "content": "Be brief"}]),
    "completions": ask(COMPLETIONS, prompt="Once"),
    "completions with null for a limit": ask(COMPLETIONS, prompt="Once", max_tokens=None, ignore_eos=True),
    "a prompt in a list": ask(COMPLETIONS, prompt=["Once"], max_tokens=9),
    "ids": ask(COMPLETIONS, prompt=[600, 700], max_tokens=9),
    "ids in a list": ask(COMPLETIONS, prompt=[[600, 700]], max_tokens=9),
    "ids shown": ask(CHAT, messages=HELLO, max_tokens=9, return_token_ids=True),
    "ids shown of completions": ask(COMPLETIONS, prompt="x", max_tokens=9, return_token_ids=True),
    "ids not shown": ask(CHAT, messages=HELLO, max_tokens=9, return_token_ids=False),
    "logprobs": ask(COMPLETIONS, prompt="x", max_tokens=9, logprobs=2),
    "chat's logprobs": ask(CHAT, messages=HELLO, max_tokens=9, logprobs=True, top_logprobs=2),
    "usage": ask(CHAT, messages=HELLO, max_tokens=9, stream_options={"include_usage": True}),
    "usage of completions": ask(COMPLETIONS, prompt="x", stream_options={"include_usage": True}),
    "usage always": ask(
        CHAT,
        messages=HELLO,
        max_completion_tokens=9,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    "usage always of completions": ask(
        COMPLETIONS, prompt="x", stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "minimum": ask(CHAT, messages=HELLO, min_tokens=30, max_tokens=40),
    "no end": ask(COMPLETIONS, prompt="x", ignore_eos=True, max_tokens=40, seed=3, temperature=0),
    "text alone": ask(CHAT, messages=HELLO, max_tokens=9, modalities=["text"]),
    "tools at hand": ask(CHAT, messages=HELLO, max_tokens=9, tools=[{"function": {"name": "unused"}}]),
}


@pytest.mark.parametrize("name", ASKS)
def test_nothing_shows_that_ids_were_asked_for(name: str) -> None:
    assert played(ASKS[name], []) == undisturbed(ASKS[name])


@pytest.mark.parametrize("name", ASKS)
def test_wherever_a_stream_breaks_the_client_has_the_same_bytes(name: str) -> None:
    whole = undisturbed(ASKS[name])
    for cut in range(len(events_of(whole)) + 1):
        assert played(ASKS[name], [cut]) == undisturbed(ASKS[name], [cut]), cut


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 30), max_size=6),
    st.sampled_from(list(ASKS)),
    st.integers(1, 60),
    st.integers(0, 20),
)
def test_however_often_it_breaks(cuts: list[int], name: str, most: int, least: int) -> None:
    fields = {**ASKS[name].fields, "max_tokens": most, "min_tokens": min(least, most)}
    fields.pop("max_completion_tokens", None)
    asked = ask(ASKS[name].path, **fields)
    assert played(asked, cuts) == undisturbed(asked, cuts)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_stop_string_that_lies_over_the_cut_is_found(data: st.DataObject) -> None:
    whole = text_of(undisturbed(ask(CHAT, messages=HELLO, max_tokens=40, ignore_eos=True)))
    start = data.draw(st.integers(1, len(whole) - 12))
    stop = whole[start : start + data.draw(st.integers(1, 12))]
    keep = data.draw(st.booleans())
    asked = ask(CHAT, messages=HELLO, max_tokens=40, stop=[stop, "nowhere"], include_stop_str_in_output=keep)
    expected = undisturbed(asked)
    assert stop in text_of(expected) or not keep
    cut = data.draw(st.integers(0, len(events_of(expected))))
    assert played(asked, [cut]) == undisturbed(asked, [cut])


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_several_events_at_once_are_as_good_as_one_after_the_other(data: st.DataObject) -> None:
    asked = ASKS[data.draw(st.sampled_from(list(ASKS)))]
    transcript = Transcript(asked)
    events, shown = events_of(record(asked, transcript.body, created=1000)), b""
    while events:
        some = data.draw(st.integers(1, len(events)))
        shown += transcript.take(b"".join(events[:some]))
        del events[:some]
    assert shown == undisturbed(asked)


def text_of(stream: bytes) -> str:
    bodies = [json.loads(event[6:]) for event in events_of(stream) if event != DONE]
    return "".join(c["delta"].get("content", "") for body in bodies for c in body["choices"])


INDIVISIBLE: dict[str, dict[str, Any]] = {
    "several answers": {"n": 2},
    "grammar": {"response_format": {"type": "json_object"}},
    "tool call": {"tools": [{"function": {"name": "f"}}], "tool_choice": "required"},
    "audio": {"modalities": ["text", "audio"]},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "a prompt cut to what is left": {"truncate_prompt_tokens": -1},
}


@pytest.mark.parametrize("why", INDIVISIBLE)
def test_what_can_t_be_continued_says_why_once_it_has_begun_and_is_run_anew_before(why: str) -> None:
    asked = ask(CHAT, messages=HELLO, max_tokens=5, **INDIVISIBLE[why])
    transcript = Transcript(asked)
    assert transcript.resume() == ""
    events = events_of(record(asked, transcript.body, created=1000))
    shown = b"".join(transcript.take(event) for event in events[:4])
    assert transcript.resume()
    assert transcript.ending() == b""
    shown += b"".join(transcript.take(event) for event in events[4:])
    assert transcript.done
    assert shown == undisturbed(asked)


SEVERAL = {"max_tokens": 5, "n": 2, "ignore_eos": True}


@pytest.mark.parametrize(
    "asked",
    [
        ask(CHAT, messages=HELLO, **SEVERAL),
        ask(COMPLETIONS, prompt=["Once", "upon a time"], **SEVERAL),
        ask(CHAT, messages=HELLO, response_format={"type": "json_object"}),
        ask(CHAT, messages=HELLO, tools=INDIVISIBLE["tool call"]["tools"], tool_choice="required"),
    ],
    ids=["answers", "prompts", "grammar", "call"],
)
def test_the_tokens_of_an_answer_that_can_t_be_continued_are_counted(asked: InferenceRequest) -> None:
    """An event holds several where the client reads slowly or the engine drafts; few clients ask for the usage."""
    transcript = Transcript(asked)
    stream = events_of(record(asked, transcript.body, created=1000))
    assert b"".join(map(transcript.take, stream)) == undisturbed(asked)
    told = ask(asked.path, **asked.fields, stream_options={"include_usage": True})
    *_, last, _ = events_of(record(told, told.body, created=1000))
    usage = json.loads(last[6:])["usage"]
    assert transcript.tokens == usage["completion_tokens"] > 1
    assert transcript.prompt_tokens == usage["prompt_tokens"]


def test_the_ids_of_a_long_prompt_are_not_asked_for_with_each_of_many_answers() -> None:
    fields = {"messages": [{"role": "user", "content": "word " * 10_000}], "max_tokens": 5}
    many, one = ask(CHAT, **fields, n=64), ask(CHAT, **fields)
    assert Transcript(many).body == many.body
    assert Transcript(one).body != one.body


def test_a_later_slice_s_cached_tokens_are_no_more_than_the_prompt_s() -> None:
    """It may have what the slice before wrote in its cache too; clients take cached tokens off the prompt's."""
    asked = ASKS["usage"]
    transcript = Transcript(asked)
    for event in events_of(record(asked, transcript.body, created=1000))[:5]:
        transcript.take(event)
    transcript.resume()
    *_, last, _ = events_of(record(asked, transcript.body, created=1001))
    body = json.loads(last[6:])
    body["usage"]["prompt_tokens_details"] = {"cached_tokens": body["usage"]["prompt_tokens"]}
    usage = json.loads(transcript.take(b"data: " + json.dumps(body).encode() + b"\n\n")[6:])["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] > 0


def test_a_stream_that_says_null_of_its_ids_is_asked_for_with_ids_all_the_same() -> None:
    """As openai's clients write a field that is not set. The last of two such fields would count."""
    body = b'{"prompt":"x","return_token_ids":null}'
    asked = InferenceRequest("m", COMPLETIONS, body, kept(json.loads(body)))
    names = [name for name, _ in json.loads(with_ids(asked), object_pairs_hook=list)]
    assert names.count("return_token_ids") == 1
    assert json.loads(with_ids(asked))["return_token_ids"] is True


def test_a_body_that_is_written_anew_is_no_longer_than_it_was_and_says_the_same() -> None:
    fields = {"prompt": "é日" * 1000, "return_token_ids": False, "seed": 1 << 70, "temperature": 1e-3}
    body = json.dumps(fields, ensure_ascii=False).encode()
    asked = with_ids(InferenceRequest("llama", COMPLETIONS, body, fields))
    assert len(asked) <= len(body)
    assert json.loads(asked) == {**fields, "return_token_ids": True}


def test_a_completion_that_begins_with_its_prompt_is_asked_for_without_ids() -> None:
    """vLLM's completions echo no text where ids are returned."""
    asked = ask(COMPLETIONS, prompt="Once upon", echo=True, max_tokens=5)
    transcript = Transcript(asked)
    assert transcript.body == asked.body
    event = b'data: {"id":"x","choices":[{"index":0,"text":"Once upon a"}]}\n\n'
    assert transcript.take(event) == event
    assert transcript.resume() == "it begins with its prompt"


def test_a_tool_call_that_the_model_chose_can_t_be_continued_once_it_is_written() -> None:
    tool = {"function": {"name": "add", "parameters": {"type": "object"}}}
    asked = ask(CHAT, messages=[{"role": "user", "content": "add"}], tools=[tool], tool_choice="auto")
    transcript = Transcript(asked)
    opening, first, *_ = events_of(record(asked, transcript.body, created=1000))
    transcript.take(opening)
    assert transcript.resume() == ""
    transcript = Transcript(asked)
    transcript.take(opening)
    transcript.take(first)
    assert transcript.resume() == "a tool call is half-way"


def test_a_tool_call_is_shown_without_ids_and_counted_to_its_end() -> None:
    tool = {"function": {"name": "add", "parameters": {"type": "object"}}}
    fields = {"tools": [tool], "tool_choice": "auto", "stream_options": {"include_usage": True}}
    asked = ask(CHAT, messages=[{"role": "user", "content": "add"}], **fields)
    transcript = Transcript(asked)
    stream = record(asked, transcript.body, created=1000)
    assert b'"token_ids":[' in stream
    shown = b"".join(transcript.take(event) for event in events_of(stream))
    assert shown == undisturbed(asked)
    *_, usage, _ = events_of(shown)
    assert transcript.tokens == json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] > 1


def test_what_is_not_read_is_not_counted_either() -> None:
    asked = ask(COMPLETIONS, prompt="x", max_tokens=9, use_beam_search=True)
    transcript = Transcript(asked)
    for event in events_of(record(asked, asked.body, created=1000)):
        assert transcript.take(event) == event
    assert transcript.tokens == 0


def test_a_model_that_hides_its_thoughts_is_not_watched_for_silence() -> None:
    assert Transcript(ask(CHAT, messages=HELLO)).speaks
    assert not Transcript(ask(CHAT, messages=HELLO, include_reasoning=False)).speaks


def test_a_parser_s_silent_events_are_not_shown_but_count() -> None:
    asked = ask(CHAT, messages=HELLO)
    transcript = Transcript(asked)
    head = b'data: {"id":"x","object":"o","created":1,"model":"m","choices":[{"index":0,"delta":'
    transcript.take(head + b'{"role":"assistant","content":""},"finish_reason":null}]}\n\n')
    silent = head + b'{},"logprobs":null,"finish_reason":null,"token_ids":[7,8]}]}\n\n'
    assert transcript.take(silent) == b""
    thought = head + b'{"reasoning":"So"},"logprobs":null,"finish_reason":null,"token_ids":[9]}]}\n\n'
    assert transcript.take(thought) == thought.replace(b"[9]", b"null")
    assert transcript.resume() == ""
    assert json.loads(transcript.body)["vllm_xargs"] == {"continued_token_ids": [7, 8, 9]}


def test_tokens_that_an_engine_hides_can_t_be_continued_from() -> None:
    transcript = Transcript(ask(CHAT, messages=HELLO))
    event = b'data: {"id":"x","object":"o","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null,"token_ids":null}]}\n\n'
    assert transcript.take(event) == event
    assert "does not say" in transcript.resume()


@pytest.mark.parametrize(("code", "failed"), [(500, True), ("internal", True), (400, False)])
def test_an_error_event_is_the_engine_s_failure_unless_it_is_the_client_s_fault(
    code: object, failed: bool
) -> None:
    asked = ask(CHAT, messages=HELLO)
    transcript = Transcript(asked)
    events = events_of(record(asked, transcript.body, created=1000))
    error = b"data: " + json.dumps({"error": {"message": "m", "code": code}}).encode() + b"\n\n"
    shown = transcript.take(b"".join([*events[:3], error, DONE]))
    assert transcript.failed is failed
    assert transcript.done is not failed
    assert shown.endswith(error + DONE) is not failed


@pytest.mark.parametrize("path", ["/v1/embeddings", "/not/served"])
def test_what_is_no_stream_of_tokens_has_no_transcript(path: str) -> None:
    assert transcript_of(ask(path, input="x")) is None
    assert transcript_of(ask(CHAT, stream=False, messages=HELLO)) is None
    assert isinstance(transcript_of(ask(CHAT, messages=HELLO)), Transcript)


def test_a_client_s_own_continuation_is_continued() -> None:
    asked = ask(COMPLETIONS, prompt="x", vllm_xargs={"continued_token_ids": [512], "other": 1}, max_tokens=9)
    whole = undisturbed(asked)
    for cut in range(len(events_of(whole))):
        assert text_of_completions(played(asked, [cut])) == text_of_completions(whole)


def text_of_completions(stream: bytes) -> str:
    bodies = [json.loads(event[6:]) for event in events_of(stream) if event != DONE]
    return "".join(c["text"] for body in bodies for c in body["choices"])
