"""Requests of one kind, each with another text, that end every engine they reach."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.two_engines import COMPLETIONS, Pair, deadly_prompts, hang_up, pair

from serving.config import FailoverSpec
from serving.errors import PoisonousKindError
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.forwarding.suspects import (
    PACE_S,
    REFUSED_S,
    Flight,
    Suspects,
    fingerprint,
    kind_of,
    whose,
)
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.state.records import Suspicion

DIED = 10.0
POISON = {"max_tokens": 4, "top_p": 0.5}


def request(key: str = "", path: str = COMPLETIONS, **fields: Any) -> InferenceRequest:
    body = json.dumps(fields).encode()
    return InferenceRequest("llama", path, body, {}, key=key)


def end_a_slice(suspects: Suspects, name: str, replica: str, at: float) -> None:
    """The suspect ends the slice that it is tried on."""
    suspects.tried(name, replica, at)
    assert suspects.died(replica, [Flight(name, "llama", at)], at + 1, at - 5) == [name]
    suspects.of_kind(name, "kind")


def after_one() -> Suspects:
    suspects = Suspects()
    suspects.died("a", [Flight("first", "llama", DIED)], DIED, DIED - 5)
    end_a_slice(suspects, "first", "b", DIED + 2)
    return suspects


@pytest.mark.unit
def test_texts_and_large_numbers_make_no_other_kind_and_key_path_and_parameters_do() -> None:
    one = kind_of(request("me", prompt="a", n=2, seed=12345, temperature=0.1))
    assert kind_of(request("me", seed=99999, temperature=0.7, prompt="b", n=2)) == one
    others = (
        request("you", prompt="a", n=2, seed=12345, temperature=0.1),
        request("me", prompt="a", n=1, seed=12345, temperature=0.1),
        request("me", prompt="a", n=2, seed=12345, temperature=0.1, echo=True),
        request("me", "/v1/chat/completions", prompt="a", n=2, seed=12345, temperature=0.1),
    )
    assert len({one, *map(kind_of, others)}) == 5
    assert kind_of(InferenceRequest("llama", "/v1/audio", b"--a form", {}))


@pytest.mark.unit
def test_who_is_of_the_kind_of_a_guilty_request_is_suspected_from_the_start_and_tried_one_at_a_time() -> None:
    suspects = after_one()
    for name in ("second", "third"):
        suspects.blame(name, "kind", "llama", DIED + 10)
        assert suspects.suspects(name, DIED + 10)
        assert suspects.heard_in_s(name, DIED + 10) == 0
    suspects.tried("second", "c", DIED + 12)
    assert suspects.on_trial("third")
    assert not suspects.on_trial("a stranger")


@pytest.mark.unit
def test_after_two_of_a_kind_the_next_is_tried_a_minute_later_and_then_after_twice_as_long() -> None:
    suspects = after_one()
    assert suspects.paced_s("kind", DIED + 10) == 0
    suspects.blame("second", "kind", "llama", DIED + 10)
    suspects.blame("third", "kind", "llama", DIED + 10)
    end_a_slice(suspects, "second", "c", DIED + 12)
    assert suspects.paced("third", DIED + 13) == PACE_S
    assert not suspects.suspects("third", DIED + 13)
    assert suspects.paced_s("kind", DIED + 13 + PACE_S) == 0
    suspects.blame("fourth", "kind", "llama", DIED + 80)
    end_a_slice(suspects, "fourth", "d", DIED + 80)
    assert suspects.paced_s("kind", DIED + 81) == suspects.paced_s("kind", DIED - 3600) == 2 * PACE_S


@pytest.mark.unit
def test_one_answer_of_a_kind_frees_all_of_it_on_every_router() -> None:
    first, second, third = after_one(), Suspects(), Suspects()
    for router in (second, third):
        router.take([first.ours], DIED + 4)
        assert router.kinds == {"kind"}
    first.blame("innocent", "kind", "llama", DIED + 5)
    first.sound("kind")
    assert not first.suspects("innocent", DIED + 6)
    for router in (second, third):
        router.take([first.ours, after_one().ours], DIED + 7)
        assert router.is_guilty("first")
        assert not router.kinds
    first.take([after_one().ours], DIED + 8)  # a router that has not heard of it yet
    assert not first.kinds
    first.of_kind("first", "kind")
    assert not first.kinds
    first.take([], DIED + 7 + REFUSED_S)
    assert not first


@pytest.mark.unit
def test_lines_of_a_kind_that_ends_slices_among_answers_are_tried_one_at_a_time_after_the_second() -> None:
    """Each deadly line of a batch ended two slices, for the other lines were answered."""
    asked = request(prompt="a")
    line, other = replace(asked, fills=True), replace(asked, fills=True, key="you")
    suspects = Suspects()
    for number, at in enumerate((DIED, DIED + 20, DIED + 200)):
        suspects.take([{f"{number}": guilty(asked, at)}], at)
        suspects.sound(kind_of(asked))
        assert (suspects.kind(asked), suspects.kind(other)) == ("", "")
        assert suspects.kind(line) == (kind_of(line) if number else "")
    suspects.blame("line", kind_of(line), "llama", DIED + 201)
    assert suspects.suspects("line", DIED + 201)
    suspects.sound(kind_of(asked))  # a line that was answered clears itself alone
    assert suspects.suspects("line", DIED + 201)
    assert suspects.paced_s(kind_of(line), DIED + 201) == 2 * PACE_S - 1
    later = Suspects()  # a router that starts
    later.take([suspects.ours], DIED + 202)
    assert (later.kind(asked), later.kind(line)) == ("", kind_of(line))
    later.take([], DIED + 201 + REFUSED_S)
    assert not later.kind(line)


def of_a_key(at: float, number: int, key: str = "me") -> dict[str, Suspicion]:
    """Somebody's request is found guilty, of a kind of its own that others of the key were answered in."""
    asked = request(key, prompt="a", n=number)
    return {f"{number}": replace(guilty(asked, at), answered=True, replica=f"slice {number}")}


@pytest.mark.unit
def test_a_key_whose_requests_end_three_slices_with_other_parameters_each_time_has_all_of_them_on_trial() -> (
    None
):
    """Each ended two slices more, for the key's other requests were answered."""
    suspects, mine = Suspects(), request("me", prompt="b")
    suspects.take([of_a_key(DIED, 1), of_a_key(DIED, 2)], DIED)
    assert not suspects.kind(mine)
    suspects.take([of_a_key(DIED + 1, 3)], DIED + 1)
    key = suspects.kind(mine)
    assert key == suspects.kind(request("me", prompt="c", top_p=0.5)) != ""
    assert not suspects.kind(request("you", prompt="b"))
    assert not suspects.kind(request("me", "/v1/chat/completions", prompt="b"))
    suspects.sound(key)
    assert suspects.kind(mine) == key
    assert suspects.paced_s(key, DIED + 1) == 2 * PACE_S
    for name in ("first", "second"):
        suspects.blame(name, key, "llama", DIED + 200)
    suspects.tried("first", "c", DIED + 200)
    assert suspects.on_trial("second")
    suspects.take([], DIED + 2 + REFUSED_S)
    assert not suspects.kind(mine)


@pytest.mark.unit
def test_who_is_guilty_stays_so_where_a_slice_dies_that_had_the_same_request_already() -> None:
    """It was a suspect again, and its next trial ended one slice more."""
    suspects = after_one()
    suspects.died("c", [Flight("first", "llama", DIED + 3)], DIED + 4, DIED)
    suspects.take([], DIED + 5)
    assert suspects.is_guilty("first")


@pytest.mark.unit
@pytest.mark.parametrize("key", ["", "none"])
def test_requests_without_a_key_are_nobody_s(key: str) -> None:
    """Everybody would be on trial for what one client sends."""
    suspects = Suspects()
    suspects.take([of_a_key(DIED, number, key) for number in range(5)], DIED)
    assert not suspects.kind(request(key, prompt="b"))


@pytest.mark.unit
def test_a_key_whose_clients_hang_up_before_their_slices_die_is_on_trial_until_its_next_answer() -> None:
    suspects, mine = Suspects(), request("me", prompt="b")
    for number in range(3):
        assert not suspects.kind(mine)
        gone = [Flight(f"{number}{one}", "llama", DIED, whose=whose(mine)) for one in range(9)]
        suspects.died(f"slice {number}", gone, DIED + 1, DIED - 5)
    key = suspects.kind(mine)
    assert key
    other = Suspects()  # a router that starts
    other.take([suspects.ours], DIED + 2)
    assert other.kind(mine) == key
    suspects.blame("next", key, "llama", DIED + 2)
    suspects.tried("next", "c", DIED + 2)
    suspects.hung_up("next", "c")
    assert suspects.died("c", [Flight("next", "llama", DIED + 2, whose=key)], DIED + 3, DIED) == ["next"]
    assert suspects.kind(mine) == key
    other.sound(key)
    assert not other.kind(mine)
    suspects.take([], DIED + 4)
    suspects.lives("slice 1")
    suspects.take([], DIED + 5)
    assert suspects.kind(mine) == key  # two hung up, and one is guilty
    suspects.lives("slice 2")
    suspects.take([], DIED + 6)
    assert not suspects.kind(mine)


@pytest.mark.http
def test_clients_of_a_key_that_hang_up_each_time_with_another_text_take_five_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each took one, without end: what hung up can't be tried again, and nobody asks it a second time."""
    deadly = deadly_prompts(monkeypatch)
    with pair(FailoverSpec(wait_s=20), names="abcdefgh", key="me") as fleet:
        answers = [hang_up(fleet, deadly, f"a deadly prompt {number}") for number in range(8)]
        refused = [answer["error"]["code"] for answer in answers if answer]
        assert refused == ["such_requests_end_engines"] * 3
        assert dead(fleet) == 5


def is_refused(answer: httpx.Response) -> bool:
    return answer.status_code == 500 and answer.json()["error"]["code"] == "request_ends_engines"


def dead(fleet: Pair) -> int:
    return sum(engine.dead is not None for _, engine in fleet.engines.values())


@pytest.mark.http
def test_deadly_requests_of_one_kind_each_with_another_text_take_three_slices_and_nobody_else_sees_it() -> (
    None
):
    with pair(FailoverSpec(wait_s=20), names="abcdef") as fleet:
        for name in fleet.engines:
            fleet.fault(name, die_on="poisonous")
        with ThreadPoolExecutor(8) as pool:
            innocents = [
                pool.submit(fleet.post, COMPLETIONS, prompt=f"story {number}", max_tokens=60, ignore_eos=True)
                for number in range(24)
            ]
            answers = [
                fleet.post(COMPLETIONS, prompt=f"a poisonous prompt {number}", **POISON)
                for number in range(6)
            ]
            assert all(call.result().is_success for call in innocents)
        assert all(map(is_refused, answers[:2])), [answer.text for answer in answers]
        assert {answer.status_code for answer in answers[2:]} == {503}
        assert {answer.json()["error"]["code"] for answer in answers[2:]} == {"such_requests_end_engines"}
        assert answers[-1].headers["retry-after"]
        assert dead(fleet) == 3
        assert fleet.post(COMPLETIONS, prompt="a good one", max_tokens=4).is_success


@pytest.mark.unit
async def test_a_line_of_a_batch_waits_where_others_are_refused() -> None:
    """A refusal would be its result for good, and nearly all lines of a batch are of one kind."""
    dispatcher = Dispatcher(SliceTable({"llama": 1}, {"llama": "v6e 2x4"}))
    asked = request(prompt="a")
    suspects, now = dispatcher.suspects, dispatcher.now()
    suspects.take([{"one": guilty(asked, now), "two": guilty(asked, now)}], now)
    with pytest.raises(PoisonousKindError, match="is tried in 60 s"):
        dispatcher.look_at_kind(asked)
    line = replace(asked, fills=True)
    dispatcher.look_at_kind(line)
    dispatcher.refuse_guilty(line)
    assert suspects.suspects(fingerprint(line), now)
    assert not dispatcher.trials.open_to(fingerprint(line))
    with pytest.raises(PoisonousKindError):  # a client's request that waits for its trial
        dispatcher.refuse_guilty(asked)
    dispatcher.trials.now = lambda: now + PACE_S
    suspects.blame(fingerprint(line), kind_of(line), "llama", now)
    assert dispatcher.trials.open_to(fingerprint(line))
    await dispatcher.close()


def guilty(asked: InferenceRequest, at: float) -> Suspicion:
    return Suspicion(at, guilty=True, model="llama", ran_s=1.0, replica="a", kind=kind_of(asked))


@pytest.mark.http
def test_a_kind_that_is_answered_too_is_not_held_up() -> None:
    with pair(FailoverSpec(wait_s=20), names="abcd") as fleet:
        for name in fleet.engines:
            fleet.fault(name, die_on="poisonous")
        assert is_refused(fleet.post(COMPLETIONS, prompt="a poisonous prompt", **POISON))
        assert fleet.relay.suspects.kinds
        assert fleet.post(COMPLETIONS, prompt="a good one", **POISON).is_success
        assert not fleet.relay.suspects.kinds
        with ThreadPoolExecutor(8) as pool:
            calls = [
                pool.submit(fleet.post, COMPLETIONS, prompt=f"good {number}", **POISON)
                for number in range(16)
            ]
            assert all(call.result().is_success for call in calls)
        assert dead(fleet) == 2
