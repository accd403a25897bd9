"""Many requests at once: a few begin in each turn of the event loop, those of each key in turn."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from serving.router.http.starts import Starts

pytestmark = pytest.mark.unit


async def begun(starts: Starts, owners: str, also: Callable[[str], None] = lambda _: None) -> list[str]:
    """What began in each turn of the loop, of requests that came in one, each of the owner that is its letter."""
    turns = [""]

    def begin(owner: str) -> None:
        turns[-1] += owner
        also(owner)

    for owner in owners:
        starts.put(partial(begin, owner), partial(str, owner))
    while sum(map(len, turns)) < len(owners):
        turns.append("")
        await asyncio.sleep(0)
    return [turn for turn in turns if turn]


async def test_few_begin_in_a_turn_and_all_in_the_end() -> None:
    assert await begun(Starts(most=2), "aaaaa") == ["aa", "aa", "a"]


async def test_who_comes_last_with_one_request_waits_for_no_crowd() -> None:
    turns = await begun(Starts(most=4), "a" * 200 + "b")
    assert turns[:3] == ["aaaa", "ab", "aa"]


async def test_turns_are_shorter_while_a_crowd_waits() -> None:
    turns = await begun(Starts(most=4), "a" * 80)
    assert [len(turn) for turn in turns] == [4] + [2] * 6 + [4] * 16


async def test_owners_begin_in_turn() -> None:
    assert await begun(Starts(most=3), "aaaaaabbbc") == ["aaa", "abc", "aba", "b"]


async def test_a_free_loop_begins_at_once_and_asks_for_no_owner() -> None:
    starts, began = Starts(most=1), asyncio.Event()
    for _ in range(3):
        starts.put(began.set, pytest.fail)
        assert began.is_set()
        began.clear()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_request_that_can_not_begin_holds_up_no_other() -> None:
    starts, began = Starts(most=1), asyncio.Event()
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))

    def fails() -> None:
        raise ValueError

    starts.put(lambda: None, str)
    starts.put(fails, str)
    starts.put(began.set, str)
    await asyncio.wait_for(began.wait(), 30)
    assert len(failures) == 1
