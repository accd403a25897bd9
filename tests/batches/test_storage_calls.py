"""Calls of a storage that hangs: nobody waits for them for ever, and they leave places for others."""

import asyncio
import threading

import pytest
from support.servers import PATIENCE_S

from serving.batches.storage_calls import StorageCalls
from serving.errors import StorageError

pytestmark = pytest.mark.unit


async def answers(calls: StorageCalls) -> None:
    """Once the calls that hung have ended."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                assert await calls.call("a", len, "xyz") == 3
            except StorageError:
                await asyncio.sleep(0.01)
            else:
                break


async def test_a_call_that_hangs_is_an_error_and_those_of_other_names_go_on() -> None:
    """Reading a bucket that hung took the threads of everything else that the store's process does."""
    calls, answered = StorageCalls(answer_s=0.01), threading.Event()
    try:
        for _ in range(4):
            with pytest.raises(StorageError, match="no answer for"):
                await calls.call("a", answered.wait, 60)
        begun = threading.active_count()
        for _ in range(100):
            with pytest.raises(StorageError, match="earlier calls"):
                await calls.call("a", answered.wait, 60)
        assert threading.active_count() <= begun
        assert await StorageCalls().call("b", len, "xy") == 2
    finally:
        answered.set()
    calls._answer_s = 30
    await answers(calls)


async def test_what_a_call_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await StorageCalls().call("a", divmod, 1, 0)


async def test_calls_that_nobody_waits_for_any_more_are_bounded_too() -> None:
    calls, began, answered = StorageCalls(), threading.Semaphore(0), threading.Event()

    def hang() -> None:
        began.release()
        assert answered.wait(60)

    tasks = [asyncio.create_task(calls.call("a", hang)) for _ in range(4)]
    try:
        for _ in tasks:
            assert await asyncio.to_thread(began.acquire, timeout=30)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        with pytest.raises(StorageError, match="earlier calls"):
            await calls.call("a", hang)
    finally:
        answered.set()
    await answers(calls)


async def test_a_call_without_a_thread_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def used_up(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = StorageCalls(answer_s=30)
    monkeypatch.setattr(threading.Thread, "start", used_up)
    for _ in range(100):
        with pytest.raises(StorageError, match="can't start new thread"):
            await calls.call("a", len, "x")
    monkeypatch.undo()
    assert await calls.call("a", len, "x") == 1
