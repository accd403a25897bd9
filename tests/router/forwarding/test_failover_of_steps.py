"""Messages and Responses that go on: Anthropic's and OpenAI's own clients, and an engine that ends in the middle of an answer."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from support.servers import until
from support.simulated_engine import MODEL
from support.two_engines import Pair, pair
from support.two_priorities import SEATS, TwoPriorities, two_priorities

from serving.engine.protocol import CONTINUED, CONTINUED_FINISH
from serving.state.records import SliceState

pytestmark = pytest.mark.http
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
STORY = "Tell me story 29"  # whose answer is long
TALK: list[Any] = [{"role": "user", "content": STORY}]
LONG = 500  # tokens: on a busy machine a fault comes half a second after it was asked for
ASKS: dict[str, dict[str, Any]] = {
    MESSAGES: {"messages": TALK, "max_tokens": LONG},
    RESPONSES: {"input": STORY, "max_output_tokens": LONG, "ignore_eos": True},
}
LENGTHY = {"const": "word " * LONG}


@pytest.fixture
def two() -> Iterator[Pair]:
    with pair() as found:
        yield found


def message(address: str, at_event: Any = lambda _: None, key: str = "x", **more: Any) -> dict[str, Any]:
    """What Anthropic's client makes of a stream; `at_event` is called with the number of events so far."""
    import anthropic  # it takes two seconds

    with (
        anthropic.Anthropic(api_key=key, base_url=address, max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=LONG, messages=TALK, **more) as stream,
    ):
        text = ""
        for number, event in enumerate(stream):
            at_event(number)
            text += event.text if event.type == "text" else ""
        whole = stream.get_final_message()
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    return whole.model_dump(exclude={"id"})


def response(address: str, at_event: Any = lambda _: None, key: str = "x") -> dict[str, Any]:
    """What OpenAI's client makes of a stream: every event is numbered, and of one response and one item."""
    numbers, names, items = [], set(), set()
    text = ""
    body = {"ignore_eos": True}
    with (
        openai.OpenAI(api_key=key, base_url=f"{address}/v1", max_retries=0) as client,
        client.responses.stream(model=MODEL, input=STORY, max_output_tokens=LONG, extra_body=body) as stream,
    ):
        for number, event in enumerate(stream):
            at_event(number)
            numbers.append(event.sequence_number)
            names |= {event.response.id} if hasattr(event, "response") else set()
            items |= {event.item_id} if hasattr(event, "item_id") else set()
            text += event.delta if event.type == "response.output_text.delta" else ""
        whole = stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert (len(names), len(items)) == (1, 1)
    assert {item.id for item in whole.output} == items
    assert whole.output_text == text
    return {"text": text, "usage": whole.usage, "status": whole.status}


CLIENTS = {MESSAGES: message, RESPONSES: response}


@pytest.mark.parametrize("after", [0, 20])
@pytest.mark.parametrize("path", CLIENTS)
def test_its_client_sees_one_answer_where_an_engine_dies(two: Pair, path: str, after: int) -> None:
    expected = CLIENTS[path](two.engines["b"][0])
    alone = two.written("b")

    def kill(number: int) -> None:
        if number == after:
            two.kill("a")

    assert CLIENTS[path](two.address, kill) == expected
    assert two.engines["a"][1].dead
    assert two.written("b") > alone


@pytest.mark.parametrize("path", CLIENTS)
def test_without_a_death_nothing_differs_from_the_engine_s_own_bytes(two: Pair, path: str) -> None:
    body = {"model": MODEL, "stream": True, **ASKS[path]}
    own = two.client.post(two.engines["b"][0] + path, json=body, headers={"x-request-id": "same"})
    ours = two.client.post(two.address + path, json=body, headers={"x-request-id": "same"})
    if path == MESSAGES:
        assert ours.content == own.content
    assert ours.text.count("\n\n") == own.text.count("\n\n")
    assert [line for line in ours.text.splitlines() if line.startswith("event:")] == [
        line for line in own.text.splitlines() if line.startswith("event:")
    ]


@pytest.mark.parametrize("path", CLIENTS)
def test_streams_of_a_slice_that_leaves_go_on_elsewhere_at_once(two: Pair, path: str) -> None:
    expected = CLIENTS[path](two.engines["b"][0])
    two.relay.breaker.failed("b", 1e12, broken=True)  # until the stream is on a
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(CLIENTS[path], two.address)
        until(lambda: any(stream.heard_s and stream.movable for stream in two.relay._streams), "first tokens")
        two.relay.breaker.keep(set())
        a, b = (entry for name in "ab" if (entry := two.table.entry(name)))
        now = [replace(a, state=SliceState.DRAINING), b]
        two.table.update(now, 1.0)
        two.relay._watching.get_loop().call_soon_threadsafe(two.relay.settle, now, lambda _: 10)
        until(lambda: two.table.in_flight("a") == 0, "a free of streams")
        assert not call.done()
        assert call.result() == expected
    assert two.relay.breaker.left_out(0.0) == set()


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": LENGTHY}}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": LENGTHY}}}),
    ],
)
def test_what_can_t_go_on_ends_with_an_error(path: str, more: dict[str, Any]) -> None:
    with pair() as two:
        body = {"model": MODEL, "stream": True, **ASKS[path], **more}
        shown = b""
        with two.client.stream("POST", two.address + path, json=body) as answer:
            for data in answer.iter_raw():
                shown += data
                if b"delta" in shown and not two.engines["a"][1].dead:
                    two.kill("a")
    last = json.loads(shown.split(b"\n\n")[-2].partition(b"data: ")[2])
    assert "a grammar is half-way through it" in last["error"]["message"]


@pytest.mark.parametrize("path", CLIENTS)
def test_an_engine_that_is_told_of_the_whole_answer_only_ends_it(two: Pair, path: str) -> None:
    """A slice may die between an answer's last token and its last events."""
    engine = two.engines["b"][0]
    asked = {"model": MODEL, "stream": True, **ASKS[path]}
    extra = {CONTINUED: [600, 601], CONTINUED_FINISH: "length"}
    answer = two.client.post(engine + path, json={**asked, "vllm_xargs": extra}).text
    bodies = [json.loads(event.partition("data: ")[2]) for event in answer.split("\n\n") if event]
    assert not any("delta" in body["type"] and "block" in body["type"] for body in bodies)
    assert bodies[-1]["type"] in ("message_stop", "response.completed")
    usage = bodies[-2]["usage"] if path == MESSAGES else bodies[-1]["response"]["usage"]
    assert usage["output_tokens"] == 2
    assert two.written("b") == 0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TwoPriorities]:
    with two_priorities(tmp_path) as found:
        yield found


@pytest.mark.parametrize("path", CLIENTS)
async def test_its_client_passes_over_what_a_paused_stream_says(service: TwoPriorities, path: str) -> None:
    ask = CLIENTS[path]
    low, high = service.keys["low"], service.keys["high"]
    expected = await asyncio.to_thread(ask, service.address, key=low)
    service.records.clear()
    service.slow(20)
    with ThreadPoolExecutor(2 * SEATS + 1) as pool:
        lows = [pool.submit(ask, service.address, key=low) for _ in range(2 * SEATS)]
        until(
            lambda: len(service.gate._queue._models[MODEL].running) == 2 * SEATS,
            "all seats are taken by streams",
        )
        better = pool.submit(ask, service.address, key=high)
        await asyncio.to_thread(until, service.paused, "a stream has made room")
        service.slow(1)
        assert better.result() == expected
        assert [each.result() for each in lows] == [expected] * (2 * SEATS)
    paused = [record for record in service.records if record.preemptions]
    assert paused
    assert all(record.outcome == "ok" and record.paused_s > 0 for record in paused)
