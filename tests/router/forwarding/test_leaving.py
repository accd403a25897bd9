"""A slice that leaves by plan: its streams go on elsewhere at once, as far as there are seats."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.servers import until
from support.simulated_engine import MODEL
from support.two_engines import COMPLETIONS, Pair, pair

from serving.config import FailoverSpec
from serving.state.records import SliceState

pytestmark = pytest.mark.http

TOKENS = 800


@pytest.fixture
def two() -> Iterator[Pair]:
    with pair() as found:
        yield found


def text(two: Pair, number: int) -> str:
    fields = {"prompt": f"story {number}", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    answer = two.post(COMPLETIONS, **fields)
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]", answer.text[-300:]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def leave(two: Pair, free_seats: int) -> None:
    """The next look at the store: a drains, and b could run so many sequences more than all that are open."""
    entries = [two.table.entry(name) for name in "ab"]
    a, b = (entry for entry in entries if entry)
    now = [replace(a, state=SliceState.DRAINING), b]
    two.table.update(now, 1.0)
    two.relay._watching.get_loop().call_soon_threadsafe(two.relay.settle, now, lambda _: free_seats)


def begun(two: Pair, pool: ThreadPoolExecutor, streams: int) -> list["Future[str]"]:
    """So many streams on a, each with its first tokens."""
    before = {name: two.table.in_flight(name) for name in "ab"}
    assert before == {"a": 0, "b": 0}
    two.relay.breaker.failed("b", 1e12, broken=True)  # until all of them are on a
    calls = [pool.submit(text, two, number) for number in range(streams)]
    until(
        lambda: len([one for one in two.relay._streams if one.heard_s and one.movable]) == streams,
        "every stream's first tokens",
    )
    two.relay.breaker.keep(set())
    return calls


def test_streams_of_a_slice_that_leaves_go_on_elsewhere_at_once_word_for_word(two: Pair) -> None:
    expected = [text(two, number) for number in range(3)]
    until(lambda: two.table.in_flight("a") == 0, "a idle")
    with ThreadPoolExecutor(3) as pool:
        calls = begun(two, pool, 3)
        leave(two, free_seats=10)
        until(lambda: two.table.in_flight("a") == 0, "a free of streams")
        assert not any(call.done() for call in calls)
        assert [call.result() for call in calls] == expected
    assert two.relay.breaker.left_out(0.0) == set()


def test_a_move_is_no_retry() -> None:
    with pair(FailoverSpec(retries=0)) as two, ThreadPoolExecutor(1) as pool:
        (call,) = begun(two, pool, 1)
        leave(two, free_seats=10)
        assert call.result()
        assert two.written("b") > 0


def test_only_as_many_streams_move_as_there_are_seats(two: Pair) -> None:
    with ThreadPoolExecutor(3) as pool:
        calls = begun(two, pool, 3)
        leave(two, free_seats=-2)  # of the three that are open, one would find a seat
        until(lambda: two.table.in_flight("b") == 1, "one has moved")
        assert two.table.in_flight("a") == 2
        assert all(len(call.result()) > 0 for call in calls)
    assert two.written("a") > 2 * TOKENS


def test_a_stream_that_cannot_go_on_elsewhere_stays_until_it_ends(two: Pair) -> None:
    fields = {
        "prompt": "story",
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
        "n": 2,
        "model": MODEL,
    }
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: two.client.post(two.address + COMPLETIONS, json=fields))
        until(lambda: any(one.heard_s for one in two.relay._streams), "its first tokens")
        leave(two, free_seats=10)
        answer = call.result()
    assert answer.text.endswith("data: [DONE]\n\n")
    assert two.written("b") == 0
