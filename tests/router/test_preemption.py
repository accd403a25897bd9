"""Streams that make room for a better key's requests, over real HTTP: what their clients get, and who pays."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.simulated_engine import MODEL
from support.two_priorities import SEATS, Answer, TwoPriorities, two_priorities

pytestmark = pytest.mark.http

ALL = 2 * SEATS
LONG = 700  # tokens: some seconds


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TwoPriorities]:
    with two_priorities(tmp_path) as found:
        yield found


def story(number: int, tokens: int = LONG, **more: Any) -> dict[str, Any]:
    return {
        "prompt": f"story {number}",
        "max_tokens": tokens,
        "stream_options": {"include_usage": True},
        **more,
    }


def chat(number: int, tokens: int = LONG) -> dict[str, Any]:
    said = [{"role": "user", "content": f"story {number}"}]
    return {"path": "/v1/chat/completions", "messages": said, "max_tokens": tokens, "logprobs": True}


async def until(condition: Any, what: str) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  of another thread
            await asyncio.sleep(0.01)
    assert condition(), what


def running(service: TwoPriorities) -> int:
    return len(service.gate._queue._models[MODEL].running)


def meaning(answer: Answer) -> list[Any]:
    """The answer without what differs between two requests for it."""
    assert answer.status == 200
    assert answer.done
    assert len({event["id"] for event in answer.events}) == 1
    return [
        {name: value for name, value in event.items() if name not in ("id", "created", "system_fingerprint")}
        for event in answer.events
    ]


async def test_a_stream_makes_room_and_its_client_has_every_word(service: TwoPriorities) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        asked = [story(0), story(1), chat(2), chat(3)]
        expected = [await service.ask(client, "low", **fields) for fields in asked]
        service.records.clear()
        lows = [asyncio.create_task(service.ask(client, "low", **fields)) for fields in asked]
        await until(lambda: running(service) == ALL, "all seats are taken by streams")
        high = await service.ask(client, "high", **story(9, 20))
        assert not any(low.done() for low in lows)  # it waited for none of them
        answers = [await low for low in lows]
    assert len(meaning(high)) == 21
    assert sum(answer.comments > 0 for answer in answers) == 1
    assert [meaning(answer) for answer in answers] == [meaning(answer) for answer in expected]
    paused = [record for record in service.records if record.preemptions]
    assert [
        (record.preemptions, record.outcome, record.retries, record.continuations) for record in paused
    ] == [(1, "ok", 0, 0)]
    assert paused[0].paused_s > 0
    assert paused[0].output_tokens == LONG
    assert not service.dispatcher.breaker.left_out(0.0)


async def test_under_load_every_text_is_whole_and_nobody_is_paused_too_often(service: TwoPriorities) -> None:
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        asked = [story(number, 150) if number % 2 else chat(number, 150) for number in range(10)]
        expected = [await service.ask(client, "low", **fields) for fields in asked]
        service.records.clear()
        lows = [asyncio.create_task(service.ask(client, "low", **fields)) for fields in asked]
        highs = []
        for number in range(30):
            await asyncio.sleep(0.05)
            highs.append(asyncio.create_task(service.ask(client, "high", **story(100 + number, 15))))
        assert all([len(meaning(await high)) == 16 for high in highs])
        assert [meaning(await low) for low in lows] == [meaning(answer) for answer in expected]
    assert sum(record.preemptions for record in service.records) > 3
    assert max(record.preemptions for record in service.records) <= 2


async def test_what_cannot_go_on_elsewhere_is_not_paused(service: TwoPriorities) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        fields = story(0, 300, n=2)
        lows = [asyncio.create_task(service.ask(client, "low", **fields)) for _ in range(ALL // 2)]
        await until(lambda: running(service) == ALL // 2, "all seats are taken by streams")
        high = await service.ask(client, "high", **story(9, 5))
        assert all([(await low).comments == 0 for low in lows])
    assert high.done
    assert not any(record.preemptions for record in service.records)


async def test_without_preemption_a_better_request_waits_for_a_seat(tmp_path: Path) -> None:
    with two_priorities(tmp_path, preemption={"most": 0}) as service:
        async with httpx.AsyncClient(timeout=60) as client:
            lows = [
                asyncio.create_task(service.ask(client, "low", **story(number, 200))) for number in range(ALL)
            ]
            await until(lambda: running(service) == ALL, "all seats are taken by streams")
            await service.ask(client, "high", **story(9, 5))
            assert any(low.done() for low in lows)
            assert all([(await low).comments == 0 for low in lows])


async def all_are_paused(service: TwoPriorities, client: httpx.AsyncClient) -> list["asyncio.Task[Answer]"]:
    """Clients of as many streams as there are seats, all paused, and then of those that have the seats."""
    tasks = [asyncio.create_task(service.ask(client, "low", **story(number))) for number in range(ALL)]
    await until(lambda: running(service) == ALL, "all seats are taken by streams")
    highs = [
        asyncio.create_task(service.ask(client, "high", **story(number))) for number in range(4, 4 + ALL)
    ]
    await until(lambda: service.paused() == ALL, "all of the first are paused")
    return [*tasks, *highs]


async def test_clients_that_go_while_they_are_paused_leave_no_seat_taken(service: TwoPriorities) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        tasks = await all_are_paused(service, client)
        for task in tasks[:ALL]:
            task.cancel()
        await until(lambda: service.paused() == 0, "nobody is paused")
        for task in tasks[ALL:-1]:
            task.cancel()
        assert meaning(await tasks[-1])
        await until(lambda: len(service.records) == 2 * ALL, "all requests are recorded")
        gone = [record for record in service.records if record.preemptions]
        assert [record.outcome for record in gone] == ["cancelled"] * ALL
        assert all(record.paused_s > 0 for record in gone)
        await until(lambda: service.idle, "no seat is taken")


async def test_streams_go_on_though_their_slice_is_lost_while_they_are_paused(service: TwoPriorities) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        expected = [(await service.ask(client, "low", **story(number))).text for number in range(ALL)]
        tasks = await all_are_paused(service, client)
        await client.post(f"{service.engines[0][0]}/simulator/faults", json={"die": True})
        answers = [await task for task in tasks]
    assert all(answer.done for answer in answers)
    assert [answer.text for answer in answers[:ALL]] == expected


async def test_a_router_that_ends_leaves_no_paused_stream_behind(tmp_path: Path) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        with two_priorities(tmp_path) as service:
            tasks = await all_are_paused(service, client)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, httpx.TransportError) for error in ended)
    assert [record.outcome for record in service.records] == ["cancelled"] * 2 * ALL


async def test_openais_client_reads_on_over_a_pause(service: TwoPriorities) -> None:
    async with (
        httpx.AsyncClient(timeout=60) as client,
        openai.AsyncOpenAI(
            base_url=f"{service.address}/v1", api_key=service.keys["low"], max_retries=0
        ) as low,
    ):
        lows = [asyncio.create_task(service.ask(client, "low", **story(number))) for number in range(ALL - 1)]
        await until(lambda: running(service) == ALL - 1, "three streams run")
        stream = await low.completions.create(
            model=MODEL, prompt="story 3", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        words = [(await anext(stream)).choices[0].text]
        await until(lambda: running(service) == ALL, "all seats are taken by streams")
        highs = [
            asyncio.create_task(service.ask(client, "high", **story(number, 50)))
            for number in range(4, 4 + ALL)
        ]
        words += [chunk.choices[0].text async for chunk in stream]
        assert all([(await task).done for task in [*lows, *highs]])
        expected = await service.ask(client, "low", prompt="story 3", max_tokens=400)
    assert "".join(words) == expected.text
    assert [record.preemptions for record in service.records].count(1) == ALL
