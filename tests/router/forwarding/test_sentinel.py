"""Greedy answers that are asked again of other slices: three simulated engines behind one router."""

from typing import Any

import pytest
from support.servers import until
from support.two_engines import CHAT, COMPLETIONS, HELLO, MODEL, Pair, pair

from serving.router.telemetry.record import Checks

pytestmark = pytest.mark.http

GREEDY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


def seats(running: Pair, free: int = 8) -> None:
    running.relay.sentinel.settle(running.engines.keys(), lambda _: free)


def checks(running: Pair) -> Checks:
    return running.relay.sentinel.counts.get(MODEL, Checks())


def told(running: Pair) -> list[tuple[str, str]]:
    return [(entry.replica, reason) for entry, reason in running.relay.sentinel.wrong]


@pytest.mark.parametrize("wrong", ["a", "b"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [(COMPLETIONS, GREEDY), (CHAT, {**HELLO, "temperature": 0, "max_tokens": 8})],
    ids=["completions", "chat"],
)
def test_the_slice_that_differs_from_two_others_is_found(
    path: str, fields: dict[str, Any], stream: bool, wrong: str
) -> None:
    """The client's answer comes of a; a or b, which is asked first, is the wrong one."""
    with pair(names="abc", sentinel=1.0) as running:
        seats(running)
        running.fault(wrong, corrupt=True)
        assert running.post(path, **fields, stream=stream).is_success
        until(lambda: told(running), "the wrong slice to be found")
        ((replica, reason),) = told(running)
        assert replica == wrong
        assert reason.startswith("it gave other tokens than slices ")
        until(
            lambda: checks(running) == Checks(looked=1, differed=1, wrong=1),
            "it to be counted",
        )
        others = set("abc") - {wrong}
        assert running.relay.sentinel.ledger.differed == {frozenset((wrong, other)): 1 for other in others}


def test_slices_that_agree_cost_one_more_answer_and_nobody_is_told_of() -> None:
    with pair(names="abc", sentinel=1.0) as running:
        seats(running)
        assert running.post(COMPLETIONS, **GREEDY).is_success
        until(lambda: checks(running) == Checks(looked=1), "an answer to be compared")
        assert (running.written("a"), running.written("b"), running.written("c")) == (8, 8, 0)
        assert told(running) == []


def test_of_two_slices_nobody_knows_which_is_wrong() -> None:
    with pair(names="ab", sentinel=1.0) as running:
        seats(running)
        running.fault("a", corrupt=True)
        running.post(COMPLETIONS, **GREEDY)
        until(
            lambda: checks(running) == Checks(looked=1, differed=1),
            "the difference to be counted",
        )
        assert told(running) == []


@pytest.mark.parametrize(
    ("free", "fields"),
    [(0, GREEDY), (8, {**GREEDY, "temperature": 0.5})],
    ids=["no free seat", "not greedy"],
)
def test_no_slice_is_asked_again(free: int, fields: dict[str, Any]) -> None:
    with pair(names="abc", sentinel=1.0) as running:
        seats(running, free)
        running.post(COMPLETIONS, **fields)
        looking = running.relay.sentinel._looking
        until(lambda: looking is None or looking.done(), "the look to be over")
        assert (running.written("b"), running.written("c")) == (0, 0)
        assert checks(running) == Checks()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("ids", [True, None])
@pytest.mark.parametrize(
    ("path", "fields"), [(COMPLETIONS, GREEDY), (CHAT, {**HELLO, "temperature": 0, "max_tokens": 8})]
)
def test_the_client_s_answer_is_byte_for_byte_what_it_is_without(
    path: str, fields: dict[str, Any], stream: bool, ids: bool | None
) -> None:
    asked = {**fields, "stream": stream, "request_id": "same", "return_token_ids": ids}
    answers = []
    for share in (0.0, 1.0):
        with pair(names="ab", sentinel=share) as running:
            seats(running)
            text = running.post(path, **asked).text
            answers.append([part for part in text.split(",") if not part.startswith('"created"')])
    assert answers[0] == answers[1]
