"""Streams that go on: two simulated engines behind the relay, and one of them ends in the middle of an answer."""

import json
import threading
from typing import Any

import httpx
import pytest
from support.servers import until
from support.simulated_engine import MODEL
from support.two_engines import CHAT, COMPLETIONS, HELLO, Pair, pair

from serving.config import FailoverSpec

pytestmark = pytest.mark.http
LONG = 240  # tokens: on a busy machine a fault comes half a second after it was asked for


def read(pair: Pair, path: str, fields: dict[str, Any], kill_after: int) -> list[bytes]:
    """A stream's events; the engine that gives them ends after so many."""
    events: list[bytes] = []
    with pair.client.stream("POST", pair.address + path, json={"model": MODEL, **fields}) as answer:
        assert answer.status_code == 200
        rest = b""
        for data in answer.iter_raw():
            *whole, rest = (rest + data).split(b"\n\n")
            events += whole
            if len(events) >= kill_after and pair.engines["a"][1].dead is None:
                pair.kill("a")
    return events


def alike(event: bytes) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    del body["id"], body["created"]
    return body


@pytest.mark.parametrize("kill_after", [1, 2, 20])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {**HELLO, "max_tokens": LONG}),
        (
            CHAT,
            {
                **HELLO,
                "max_tokens": LONG,
                "logprobs": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        ),
        (COMPLETIONS, {"prompt": "Once", "max_tokens": LONG, "ignore_eos": True, "logprobs": 1}),
    ],
    ids=["chat", "chat with logprobs and usage", "completions with logprobs"],
)
def test_a_stream_goes_on_word_for_word_where_its_engine_dies(
    path: str, fields: dict[str, Any], kill_after: int
) -> None:
    with pair() as found:
        expected = [
            event
            for event in found.client.post(
                found.engines["b"][0] + path, json={"model": MODEL, "stream": True, **fields}
            ).content.split(b"\n\n")
            if event
        ]
        alone = found.written("b")
        events = read(found, path, {**fields, "stream": True}, kill_after)
        assert found.written("b") > alone
    assert events[-1] == expected[-1] == b"data: [DONE]"
    assert [alike(event) for event in events[:-1]] == [alike(event) for event in expected[:-1]]
    assert len({json.loads(event[6:])["id"] for event in events[:-1]}) == 1


def test_a_whole_answer_is_run_anew() -> None:
    with pair() as found:
        expected = found.post(CHAT, **HELLO, max_tokens=100, n=2).json()["choices"]
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(found.post(CHAT, **HELLO, max_tokens=100, n=2))
        )
        asking.start()
        until(lambda: found.engines["a"][1].scheduler.running, "it runs on a")
        found.kill("a")
        asking.join()
    assert answers[0].json()["choices"] == expected


def test_what_can_t_go_on_ends_with_an_error_event() -> None:
    with pair() as found:
        fields = {**HELLO, "max_tokens": LONG, "n": 2, "stream": True}
        events = read(found, CHAT, fields, 20)
    error = json.loads(events[-2].removeprefix(b"data: "))["error"]
    assert error["code"] == "internal_server_error"
    assert events[-1] == b"data: [DONE]"


def test_switched_off_a_stream_that_breaks_stays_broken() -> None:
    with pair(FailoverSpec(continue_streams=False)) as found:
        events = read(found, CHAT, {**HELLO, "max_tokens": LONG, "stream": True}, 20)
    assert b'"error"' in events[-2]
    assert events[-1] == b"data: [DONE]"


def test_a_stream_leaves_a_slice_that_hangs_and_one_that_is_only_slow_stays() -> None:
    fields = {"model": MODEL, **HELLO, "max_tokens": LONG, "stream": True}
    with pair() as found:
        expected = found.client.post(found.engines["b"][0] + CHAT, json=fields).content.split(b"\n\n")
        for fault, moves in (({"stall_s": 0.8}, False), ({"hang": True}, True)):
            alone, done, at_fault = found.written("b"), b"", False
            with found.client.stream("POST", found.address + CHAT, json=fields) as answer:
                for data in answer.iter_raw():
                    done += data
                    if not at_fault and done.count(b"\n\n") > 60:
                        at_fault = True
                        found.relay.settle(found.table.entries(MODEL))
                        found.fault("a", **fault)
            assert (found.written("b") > alone) is moves
            events = done.split(b"\n\n")
            assert [alike(event) for event in events[:-2]] == [alike(event) for event in expected[:-2]]
        assert found.relay.breaker.left_out(0.0) == {"a"}  # for a second, which the rest of a stream may take
        found.fault("a", hang=False)
        assert found.post(CHAT, **HELLO, max_tokens=2).is_success
