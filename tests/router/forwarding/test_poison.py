"""A request that ends every engine it reaches, among others that do not: four simulated engines behind one router."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.two_engines import COMPLETIONS, Pair, deadly_prompts, hang_up, pair

from serving.config import FailoverSpec
from serving.simulation.engine import tokenizer
from serving.simulation.engine.engine import Engine

pytestmark = pytest.mark.http

POISON = {"prompt": "a poisonous prompt", "max_tokens": 4}


@pytest.fixture
def fleet() -> Iterator[Pair]:
    with pair(FailoverSpec(wait_s=20), names="abcd") as four:
        for name in four.engines:
            four.fault(name, die_on="poisonous")
        yield four


def dead(fleet: Pair) -> list[str]:
    return [name for name, (_, engine) in fleet.engines.items() if engine.dead]


def is_refused_as_poisonous(answer: httpx.Response) -> bool:
    return answer.status_code == 500 and answer.json()["error"]["code"] == "request_ends_engines"


def test_a_request_that_ends_engines_takes_two_and_is_then_refused_at_once(fleet: Pair) -> None:
    first = fleet.post(COMPLETIONS, **POISON)
    assert is_refused_as_poisonous(first), first.text
    assert len(dead(fleet)) == 2
    assert all(is_refused_as_poisonous(fleet.post(COMPLETIONS, **POISON)) for _ in range(5))
    assert len(dead(fleet)) == 2
    assert fleet.post(COMPLETIONS, prompt="a good one", max_tokens=4).is_success


@pytest.mark.parametrize("stream", [True, False])
def test_innocent_requests_on_the_same_slices_are_all_answered(fleet: Pair, stream: bool) -> None:
    def innocent(number: int) -> httpx.Response:
        return fleet.post(
            COMPLETIONS, prompt=f"story {number}", max_tokens=60, ignore_eos=True, stream=stream
        )

    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(innocent, number) for number in range(16)]
        poisons = pool.submit(lambda: [fleet.post(COMPLETIONS, **POISON) for _ in range(4)])
        answers += [pool.submit(innocent, number) for number in range(16, 32)]
        assert all(map(is_refused_as_poisonous, poisons.result()))
        for call in answers:
            answer = call.result()
            assert answer.is_success, answer.text
            assert "error" not in answer.text
    assert len(dead(fleet)) == 2


def test_a_request_whose_client_hangs_up_each_time_takes_two_slices(
    fleet: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is nowhere when its slice dies, and nobody else is there who could ask why."""
    deadly = deadly_prompts(monkeypatch)
    answers = [hang_up(fleet, deadly, "a deadly prompt") for _ in range(4)]
    assert len(dead(fleet)) == 2
    assert answers[:2] == [None, None]
    assert [answer["error"]["code"] for answer in answers[2:]] == ["request_ends_engines"] * 2


def test_a_connection_that_a_living_slice_breaks_off_makes_nobody_a_suspect(fleet: Pair) -> None:
    for name in "abc":
        fleet.fault(name, error_rate=1.0)
    assert fleet.post(COMPLETIONS, prompt="a good one", max_tokens=4).is_success
    assert not dead(fleet)
    for name in "abc":
        fleet.fault(name, error_rate=0.0)
    assert fleet.post(COMPLETIONS, **POISON).status_code == 500
    assert len(dead(fleet)) == 2


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_a_stream_that_ends_engines_once_it_has_a_token_takes_three(
    monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """It has a token on every slice, and a token clears whoever one slice died under. Slices say late that they are dead."""
    give, probe, seen = Engine._hand_out, Engine.probe, []

    async def late(engine: Engine) -> None:
        await asyncio.sleep(late_s)
        await probe(engine)

    def die_at_the_second_step(engine: Engine, step: Any, now_s: float) -> None:
        give(engine, step, now_s)
        for request, _ in step.work:
            if "poisonous" in tokenizer.decode(request.prompt):
                if any(request is one for one in seen):
                    engine.die("decode of a poisonous request")
                seen.append(request)

    monkeypatch.setattr(Engine, "_hand_out", die_at_the_second_step)
    monkeypatch.setattr(Engine, "probe", late)
    with pair(FailoverSpec(wait_s=20), names="abcdef") as fleet:
        answer = fleet.post(
            COMPLETIONS, prompt="a poisonous prompt", max_tokens=600, ignore_eos=True, stream=True
        )
        assert "request_ends_engines" in answer.text
        assert len(dead(fleet)) == 3
        assert fleet.post(COMPLETIONS, prompt="a good one", max_tokens=4).is_success
