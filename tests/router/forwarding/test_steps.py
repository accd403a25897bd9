"""Messages and Responses, cut between any two events: what the client has in the end is what one engine would have given."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recorded import MESSAGES, RESPONSES, ask, events_of, record

from serving.engine.protocol import CONTINUED, CONTINUED_FINISH, TELLS_TOKENS, TOKENS_EVENT
from serving.router.forwarding.steps import StepTranscript, transcript_of
from serving.router.http.protocol import InferenceRequest
from serving.router.http.validation import kept

pytestmark = pytest.mark.unit

TALK: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "unused", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "unused", "parameters": {"type": "object"}}
STOP = " wood"

ASKS: dict[str, InferenceRequest] = {
    "a message": ask(MESSAGES, messages=TALK, max_tokens=12),
    "a message to its end": ask(MESSAGES, messages=TALK, max_tokens=500),
    "a message with tools at hand": ask(MESSAGES, messages=TALK, max_tokens=9, tools=[TOOL]),
    "a message of blocks": ask(
        MESSAGES,
        system=[{"type": "text", "text": "Be brief"}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        max_tokens=9,
    ),
    "a response": ask(RESPONSES, input="Hello", max_output_tokens=12),
    "a response as Codex asks": ask(
        RESPONSES, input="Hello", max_output_tokens=9, include=["reasoning.encrypted_content"]
    ),
    "a response to its end": ask(RESPONSES, input=TALK, instructions="Be brief"),
    "a response with tools at hand": ask(RESPONSES, input="Hello", max_output_tokens=9, tools=[FUNCTION]),
}


def played(asked: InferenceRequest, cuts: list[int]) -> bytes:
    """The client's bytes where the n-th slice dies after so many of its events."""
    transcript = StepTranscript(asked)
    shown = b""
    created = 1000
    for cut in [*cuts, None]:
        for event in events_of(record(asked, transcript.body, created=created))[:cut]:
            shown += transcript.take(event)
        if transcript.done:
            return shown
        assert transcript.ending() == b""
        assert transcript.resume() == ""
        created += 1
    raise AssertionError("the last slice does not die")


def undisturbed(asked: InferenceRequest) -> bytes:
    return record(asked, asked.body, created=1000)


def places(events: int) -> list[int]:
    """Where to cut so many events: everywhere near both ends, now and then between."""
    return [at for at in range(events + 1) if at < 8 or at > events - 8 or at % 29 == 0]


def alike(stream: bytes) -> list[dict[str, Any]]:
    """Events whose ids stand for the order in which they came, and whose times are gone."""
    names: dict[str, str] = {}
    text = re.sub(
        r'"(?:resp|msg|chatcmpl)[_-](?:resp_)?[\d_]+"',
        lambda found: names.setdefault(found[0], f'"id {len(names)}"'),
        re.sub(r'"created_at":\d+', '"created_at":0', stream.decode()),
    )
    events = [event.decode().split("\ndata: ") for event in events_of(text.encode())]
    bodies: list[dict[str, Any]] = [json.loads(data) for _, data in events]
    assert [name for name, _ in events] == [f"event: {body['type']}" for body in bodies]
    return bodies


@pytest.mark.parametrize("name", ASKS)
def test_nothing_shows_that_tokens_were_asked_for(name: str) -> None:
    asked = ASKS[name]
    assert TOKENS_EVENT in record(asked, StepTranscript(asked).body, created=1000)
    assert played(asked, []) == undisturbed(asked)


@pytest.mark.parametrize("name", ASKS)
def test_wherever_a_stream_breaks_its_client_has_one_answer(name: str) -> None:
    asked = ASKS[name]
    expected = alike(undisturbed(asked))
    for cut in places(len(events_of(record(asked, StepTranscript(asked).body, created=1000)))):
        assert alike(played(asked, [cut])) == expected, cut


def test_a_response_that_is_incomplete_is_at_its_end() -> None:
    """So OpenAI calls one that ran out of tokens, which vLLM 0.26 calls completed."""
    asked = ASKS["a response"]
    transcript = StepTranscript(asked)
    events = record(asked, transcript.body, created=1000)
    shown = transcript.take(events.replace(b"response.completed", b"response.incomplete"))
    assert transcript.done
    assert shown == undisturbed(asked).replace(b"response.completed", b"response.incomplete")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=4), st.sampled_from(list(ASKS)), st.integers(1, 20))
def test_however_often_it_breaks(cuts: list[int], name: str, most: int) -> None:
    asked = ask(ASKS[name].path, **{**ASKS[name].fields, "max_tokens": most, "max_output_tokens": most})
    assert alike(played(asked, cuts)) == alike(undisturbed(asked))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_events_come_in_pieces_of_any_size(data: st.DataObject) -> None:
    asked = ASKS[data.draw(st.sampled_from(list(ASKS)))]
    transcript = StepTranscript(asked)
    events, shown = events_of(record(asked, transcript.body, created=1000)), b""
    while events:
        some = data.draw(st.integers(1, len(events)))
        shown += transcript.take(b"".join(events[:some]))
        del events[:some]
    assert shown == undisturbed(asked)
    assert transcript.done


def test_events_of_a_message_s_later_slice_go_on_byte_for_byte() -> None:
    asked = ASKS["a message to its end"]
    whole = undisturbed(asked)
    events = len(events_of(record(asked, StepTranscript(asked).body, created=1000)))
    for cut in places(events)[5:]:  # the message's start, with its id, is with the client
        assert played(asked, [cut]) == whole, cut


def test_a_stop_sequence_over_the_cut_ends_the_message_and_is_named() -> None:
    whole = "".join(
        body["delta"].get("text", "")
        for body in alike(undisturbed(ASKS["a message to its end"]))
        if body["type"] == "content_block_delta"
    )
    stop = whole[40:52]
    asked = ask(MESSAGES, messages=TALK, max_tokens=500, stop_sequences=[stop, "nowhere"])
    expected = undisturbed(asked)
    assert {"stop_reason": "stop_sequence", "stop_sequence": stop} in [
        body.get("delta") for body in alike(expected)
    ]
    for cut in range(5, len(events_of(expected)) * 2 + 1):
        assert played(asked, [cut]) == expected, cut


def test_the_prompt_and_the_tokens_are_counted() -> None:
    for asked in ASKS.values():
        transcript = StepTranscript(asked)
        transcript.take(record(asked, transcript.body, created=1000))
        usage = re.findall(rb'"(?:input|output)_tokens":(\d+)', undisturbed(asked))[-2:]
        assert [transcript.prompt_tokens, transcript.tokens] == list(map(int, usage))
        assert len(transcript.token_ids) == transcript.tokens


def test_an_engine_is_told_how_the_answer_ended_where_only_its_last_events_are_missing() -> None:
    asked = ASKS["a message"]
    transcript = StepTranscript(asked)
    events = events_of(record(asked, transcript.body, created=1000))
    transcript.take(b"".join(events[:-4]))
    assert not transcript.done
    assert transcript.resume() == ""
    extra = json.loads(transcript.body)["vllm_xargs"]
    assert (len(extra[CONTINUED]), extra[CONTINUED_FINISH]) == (12, "length")


INDIVISIBLE: dict[str, tuple[str, dict[str, Any]]] = {
    "a message's grammar": (MESSAGES, {"output_config": {"format": {"schema": {"type": "object"}}}}),
    "a message's tool": (MESSAGES, {"tools": [TOOL], "tool_choice": {"type": "any"}}),
    "a response's grammar": (RESPONSES, {"text": {"format": {"type": "json_object"}}}),
    "a response's tool": (RESPONSES, {"tools": [FUNCTION], "tool_choice": "required"}),
    "logprobs": (RESPONSES, {"include": ["message.output_text.logprobs"]}),
    "a tool that the model chose": (
        MESSAGES,
        {"messages": [{"role": "user", "content": "call unused"}], "tools": [TOOL]},
    ),
    "a function that the model chose": (RESPONSES, {"input": "call unused", "tools": [FUNCTION]}),
}


@pytest.mark.parametrize("why", INDIVISIBLE)
def test_what_can_t_go_on_says_why_once_it_has_begun_and_is_run_anew_before(why: str) -> None:
    path, more = INDIVISIBLE[why]
    given = {"messages": TALK} if path == MESSAGES else {"input": "Hello"}
    whole = ask(path, **{**given, "max_tokens": 40, **more})
    # What the router keeps of a request once it is admitted.
    asked = InferenceRequest("llama", path, whole.body, kept(whole.fields))
    transcript = StepTranscript(asked)
    events = events_of(record(asked, transcript.body, created=1000))
    assert transcript.resume() == ""
    at = next(at for at, event in enumerate(events) if b"delta" in event) + 2
    transcript.take(b"".join(events[:at]))
    assert not transcript.movable
    assert transcript.resume() != ""


def test_a_stream_of_an_engine_that_tells_no_tokens_is_passed_on_and_can_t_go_on() -> None:
    for asked in ASKS.values():
        transcript = StepTranscript(asked)
        events = events_of(undisturbed(asked))
        assert b"".join(map(transcript.take, events)) == undisturbed(asked)
        assert transcript.done
        assert not transcript.movable


def test_an_engine_that_begins_anew_in_the_place_of_going_on_has_failed() -> None:
    asked = ASKS["a message"]
    transcript = StepTranscript(asked)
    transcript.take(b"".join(events_of(record(asked, transcript.body, created=1000))[:7]))
    assert transcript.resume() == ""
    assert transcript.take(undisturbed(asked)) == b""
    assert transcript.failed
    assert transcript.resume() == "another slice's engine does not go on with answers"


def test_an_engine_s_error_is_not_shown_and_the_next_slice_goes_on() -> None:
    error = b'event: error\ndata: {"type":"error","error":{"type":"x","message":"4 validation errors"}}\n\n'
    asked = ASKS["a message"]
    for told in (True, False):
        transcript = StepTranscript(asked)
        stream = record(asked, transcript.body if told else asked.body, created=1000)
        shown = transcript.take(b"".join(events_of(stream)[:5]))
        end = b'event: serving.tokens\ndata: {"token_ids":[]}\n\n' if told else b""
        assert b"error" not in transcript.take(error + end)
        assert transcript.failed
        assert bool(transcript.resume()) is not told
        if told:
            shown += transcript.take(record(asked, transcript.body, created=1001))
            assert shown == undisturbed(asked)


def test_a_body_that_names_the_field_itself_is_asked_for_with_it_all_the_same() -> None:
    asked = ask(MESSAGES, messages=TALK, max_tokens=9, **{TELLS_TOKENS: None})
    assert json.loads(StepTranscript(asked).body) == {**asked.fields, TELLS_TOKENS: True}


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_what_is_no_stream_has_no_transcript(path: str) -> None:
    assert isinstance(transcript_of(ask(path)), StepTranscript)
    assert transcript_of(ask(path, stream=False)) is None
