"""How bodies come off their connections: at a key's own pace."""

import asyncio
import selectors
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi import Request

from serving.config import RouterSpec
from serving.errors import OverloadedError
from serving.router.http.bodies import _MOST_PACED, _UNPACED_BYTES, BodyReader

pytestmark = pytest.mark.unit

PIECE = b"x" * (1 << 16)


@dataclass
class Visit:
    owner: str
    body_bytes: int = 0


def sent(pieces: int) -> Request:
    """A body that is all there: to read a piece of it waits for nothing."""
    left = pieces

    async def receive() -> dict[str, Any]:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": PIECE, "more_body": left > 0}

    return Request({"type": "http", "headers": []}, receive)


class Clock(selectors.SelectSelector):
    """A loop's waiting takes no time and moves its clock: what a busy machine takes beside changes no order."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now_s += timeout or 0.0
        return super().select(0)


def loop() -> asyncio.AbstractEventLoop:
    clock = Clock()
    made = asyncio.SelectorEventLoop(clock)
    made.time = lambda: clock.now_s  # type: ignore[method-assign]
    return made


def order_of_ends(**reading: Any) -> list[str]:
    ended: list[str] = []

    async def read() -> None:
        tasks = [asyncio.create_task(work, name=name) for name, work in reading.items()]
        for task in tasks:
            task.add_done_callback(lambda done: ended.append(done.get_name()))
        await asyncio.gather(*tasks)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(read())
    return ended


def test_a_key_s_large_body_leaves_the_event_loop_to_others() -> None:
    reader = BodyReader(RouterSpec())
    large, small = Visit("a"), Visit("b")
    read = {"large": reader.read(sent(100), large, 0.0), "small": reader.read(sent(2), small, 0.0)}
    assert order_of_ends(**read) == ["small", "large"]
    assert (large.body_bytes, small.body_bytes) == (100 * len(PIECE), 2 * len(PIECE))


def test_the_bodies_of_one_key_share_its_pace() -> None:
    reader = BodyReader(RouterSpec())
    read = {
        "first": reader.read(sent(100), Visit("a"), 0.0),
        "same": reader.read(sent(3), Visit("a"), 0.0),
        "other": reader.read(sent(9), Visit("b"), 0.0),
    }
    assert order_of_ends(**read) == ["other", "same", "first"]


def test_a_body_that_nobody_wants_is_dropped_at_the_same_pace() -> None:
    reader = BodyReader(RouterSpec())
    read = {
        "first": reader.read(sent(100), Visit("a"), 0.0),
        "dropped": reader.drop(sent(3), Visit("a"), 0.0),
        "other": reader.read(sent(9), Visit("b"), 0.0),
    }
    assert order_of_ends(**read) == ["other", "dropped", "first"]


def test_small_bodies_do_not_wait() -> None:
    reader = BodyReader(RouterSpec())
    read = {
        "first": reader.read(sent(100), Visit("a"), 0.0),
        "small": reader.read(sent(1), Visit("a"), 0.0),
        "other": reader.read(sent(9), Visit("b"), 0.0),
    }
    assert order_of_ends(**read) == ["small", "other", "first"]


async def test_what_a_request_brings_from_elsewhere_counts_as_its_body() -> None:
    reader = BodyReader(RouterSpec(max_body_bytes=2 * len(PIECE)), most_bytes=4 * len(PIECE))
    holder = Visit("a")
    await reader.read(sent(1), holder, 0.0)
    await reader.add(holder, len(PIECE))
    assert (holder.body_bytes, reader.held_bytes) == (2 * len(PIECE), 2 * len(PIECE))
    with pytest.raises(OverloadedError):
        await reader.add(holder, len(PIECE))
    reader.forget(holder)
    assert reader.held_bytes == 0


def test_the_pace_of_keys_that_wait_no_more_is_forgotten() -> None:
    bodies = BodyReader(RouterSpec())

    async def add() -> None:
        for number in range(2 * _MOST_PACED):
            await bodies.add(Visit(str(number)), _UNPACED_BYTES + 1)
            await asyncio.sleep(0.002 if number % 100 == 0 else 0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(add())
    assert len(bodies._due_s) <= _MOST_PACED + 1
