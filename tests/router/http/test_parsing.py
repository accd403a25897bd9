"""Large bodies are parsed and checked one at a time, each key's in turn with others'."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from serving.bounded_json import SMALL_BYTES
from serving.errors import BadRequestError
from serving.router.http.auth import ANYONE
from serving.router.http.parsing import Parsing
from serving.router.http.validation import parse

pytestmark = pytest.mark.unit


def body(number: int) -> bytes:
    return b"%d" % number + b" " * SMALL_BYTES


def fields(parsing: Parsing, data: bytes, owner: str, read: Callable[[bytes], Any] = parse) -> Any:
    return parsing.run(partial(read, data), len(data), owner)


class Slowly:
    """A parser that tells which large bodies it has had, and waits at the first until it may go on."""

    def __init__(self) -> None:
        self.had: list[int] = []
        self.at_once = 0
        self.go_on = threading.Event()

    def __call__(self, data: bytes) -> dict[str, Any]:
        if len(data) < SMALL_BYTES:
            return {"number": int(data)}
        self.at_once += 1
        assert self.at_once == 1
        self.had.append(int(data))
        assert self.go_on.wait(120)
        self.at_once -= 1
        return {"number": int(data)}


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  the parser's thread has no event of this loop
            await asyncio.sleep(0.001)


async def test_a_small_body_waits_for_nobody() -> None:
    slowly = Slowly()
    parsing = Parsing(pauses=0)
    large = asyncio.create_task(fields(parsing, body(1), "a", slowly))
    await until(lambda: slowly.had)
    assert await fields(parsing, b"2", "a", slowly) == {"number": 2}
    slowly.go_on.set()
    assert await large == {"number": 1}


async def test_one_key_s_large_bodies_leave_the_others_their_turn() -> None:
    slowly = Slowly()
    parsing = Parsing(pauses=0)
    reading = [asyncio.create_task(fields(parsing, body(number), "a", slowly)) for number in (1, 2, 3)]
    await until(lambda: slowly.had)
    reading.append(asyncio.create_task(fields(parsing, body(9), "b", slowly)))
    await asyncio.sleep(0)
    slowly.go_on.set()
    assert [found["number"] for found in await asyncio.gather(*reading)] == [1, 2, 3, 9]
    assert slowly.had == [1, 9, 2, 3]


async def test_a_key_s_next_body_waits_for_a_multiple_of_what_the_last_one_took() -> None:
    had = asyncio.Event()
    parsing = Parsing(pauses=1e9)

    def slowly(_: bytes) -> dict[str, Any]:
        return {"sum": sum(range(100_000))}

    assert await fields(parsing, body(1), "a", slowly)
    second = asyncio.create_task(fields(parsing, body(2), "a", slowly))
    second.add_done_callback(lambda _: had.set())
    assert await fields(parsing, body(3), "b", slowly)  # another key does not wait
    assert not had.is_set()
    second.cancel()
    await asyncio.wait([second])


def refused(_: bytes) -> dict[str, Any]:
    raise BadRequestError(str(sum(range(100_000))))


def empty(_: bytes) -> dict[str, Any]:
    return {}


async def test_a_key_s_next_body_waits_longer_after_one_that_was_refused() -> None:
    parsing = Parsing(pauses=0, after_refusal=1e9)
    assert await fields(parsing, body(1), "a", empty) == {}
    with pytest.raises(BadRequestError):
        await fields(parsing, body(2), "a", refused)
    third = asyncio.create_task(fields(parsing, body(3), "a", empty))
    assert await fields(parsing, body(4), "b", empty) == {}  # another key does not wait
    assert not third.done()
    third.cancel()
    await asyncio.wait([third])


async def test_where_there_are_no_keys_a_refused_body_holds_up_nobody_else_s() -> None:
    parsing = Parsing(pauses=0, after_refusal=1e9)
    with pytest.raises(BadRequestError):
        await fields(parsing, body(1), ANYONE.name, refused)
    assert await fields(parsing, body(2), ANYONE.name, empty) == {}


async def test_a_client_that_goes_leaves_the_turn_to_the_next() -> None:
    slowly = Slowly()
    parsing = Parsing(pauses=0)
    reading = [asyncio.create_task(fields(parsing, body(number), "a", slowly)) for number in (1, 2, 3)]
    await until(lambda: slowly.had)
    for gone in reading[:2]:
        gone.cancel()
    await asyncio.wait(reading[:2])
    slowly.go_on.set()
    assert await reading[2] == {"number": 3}
    assert slowly.had == [1, 3]
    await until(lambda: not parsing._turns)  # nothing is kept of a key that has no body here
    assert not parsing._waiting


async def test_what_is_wrong_with_a_large_body_is_raised() -> None:
    with pytest.raises(BadRequestError, match="is not JSON"):
        await fields(Parsing(pauses=0), b"{" + b" " * SMALL_BYTES, "a")
