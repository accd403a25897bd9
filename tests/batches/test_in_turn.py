"""What is done for batches in the background: few at a time, keys in turn."""

import asyncio

import pytest

from serving.batches.in_turn import InTurn
from serving.errors import StorageError

pytestmark = pytest.mark.unit


class Works:
    """Work that ends when it is told to."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[None]] = {}
        self.most = 0

    async def do(self, name: str) -> None:
        ends = self.running[name] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.running))
        try:
            await ends
        finally:
            del self.running[name]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_few_of_thousands_are_under_way_and_all_come_to_their_end() -> None:
    turns, works, done = InTurn(most=3, most_of_key=3), Works(), 0
    for at in range(2000):
        turns.begin(str(at), "key", lambda at=at: works.do(str(at)))  # type: ignore[misc]
    while works.running or not done:
        await settle()
        for ends in works.running.values():
            ends.set_result(None)
            done += 1
        await settle()
    await turns.idle()
    assert (done, works.most) == (2000, 3)


async def test_many_of_one_key_keep_none_of_another() -> None:
    turns, works = InTurn(most=2, most_of_key=2), Works()
    for name in ("a1", "a2", "a3", "b1"):
        turns.begin(name, name[0], lambda name=name: works.do(name))  # type: ignore[misc]
    await settle()
    assert set(works.running) == {"a1", "a2"}
    works.running["a1"].set_result(None)
    await settle()
    assert set(works.running) == {"a2", "b1"}
    turns.begin("b1", "b", lambda: works.do("again"))  # it is under way
    works.running["b1"].set_result(None)
    await settle()
    assert set(works.running) == {"a2", "a3"}
    await turns.close()
    assert not works.running


async def test_a_place_is_free_for_another_key_though_one_would_take_all() -> None:
    turns, works = InTurn(most=3, most_of_key=2), Works()
    for name in ("a1", "a2", "a3"):
        turns.begin(name, "a", lambda name=name: works.do(name))  # type: ignore[misc]
    await settle()
    assert set(works.running) == {"a1", "a2"}
    turns.begin("b1", "b", lambda: works.do("b1"))
    await settle()
    assert set(works.running) == {"a1", "a2", "b1"}
    await turns.close()


async def test_what_fails_makes_room_and_may_begin_again(caplog: pytest.LogCaptureFixture) -> None:
    turns, tries = InTurn(most=1), 0

    async def fail() -> None:
        nonlocal tries
        tries += 1
        raise StorageError("The disk is full.")

    for _ in range(2):
        turns.begin("a", "key", fail)
        await turns.idle()
        await settle()
    assert tries == 2
    assert [record.getMessage() for record in caplog.records] == ["a waits: The disk is full."] * 2
