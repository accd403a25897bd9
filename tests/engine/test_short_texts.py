"""The order in which texts are tokenized, on threads that wait for the test."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from serving.engine.short_texts import KeysTexts, ShortestFirst, Text, WaitingTexts, known_by_key, text_chars


def _tokenize_prompt(text: str, *_: Any) -> int:
    return len(text)


class Threads:
    """The thread of all texts, held up until it is told to go on, and the one of short texts."""

    def __init__(self) -> None:
        self.all, self.short = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.texts = ShortestFirst(self.all, self.short)
        self.goes_on = threading.Event()
        self.order: list[str] = []

    def hold(self) -> Future[Any]:
        begun = threading.Event()

        def work() -> None:
            begun.set()
            assert self.goes_on.wait(30)

        held = self.texts.submit(work)
        assert begun.wait(30)
        return held

    def note(self, name: str, text: str) -> Future[Any]:
        """One that the thread of short texts leaves alone: it has another name."""
        return self.texts.submit(lambda _: self.order.append(name), text)


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.goes_on.set()
    threads.all.shutdown()
    threads.short.shutdown()


def waiting(*chars: int, is_short: bool = False) -> WaitingTexts:
    texts = WaitingTexts()
    for count in chars:
        texts.add(Text(lambda: None, count, is_short=is_short))
    return texts


def popped(texts: WaitingTexts, *, is_short: bool = False) -> int | None:
    if text := texts.next(is_short=is_short):
        texts.take(text)
    return text and text.chars


@pytest.mark.unit
def test_the_shortest_text_goes_first_and_of_equals_the_one_that_came_first() -> None:
    texts = waiting(250, 10, 250, 30, 10)
    assert [popped(texts) for _ in range(6)] == [10, 10, 30, 250, 250, None]


@pytest.mark.unit
def test_a_long_text_goes_once_it_was_passed_by_four_times_its_length() -> None:
    texts = waiting(100)
    order = []
    for _ in range(12):
        texts.add(Text(lambda: None, 50, is_short=True))
        order.append(popped(texts))
    assert order == [50] * 8 + [100] + [50] * 3


@pytest.mark.unit
def test_what_passed_one_text_counts_for_no_other() -> None:
    texts = waiting(100, 100)
    order = []
    for _ in range(18):
        texts.add(Text(lambda: None, 50, is_short=True))
        order.append(popped(texts))
    assert order == [*[50] * 8, 100, *[50] * 8, 100]


@pytest.mark.unit
def test_only_short_texts_are_worked_on_beside_others_and_none_twice() -> None:
    texts = waiting(5, 10)
    assert popped(texts, is_short=True) is None
    texts.add(Text(lambda: None, 20, is_short=True))
    assert popped(texts, is_short=True) == 20
    assert [popped(texts) for _ in range(3)] == [5, 10, None]


def came(texts: KeysTexts, key: bytes, *chars: int) -> None:
    for count in chars:
        texts.add(key, Text(partial(str, key), count, is_short=False))


def went(texts: KeysTexts, times: int) -> list[str]:
    """The keys of the texts that go next, and how long those are."""
    gone = (texts.pop(is_short=False) for _ in range(times))
    return [f"{text.work.args[0].decode()} {text.chars}" for text in gone if text]  # type: ignore[attr-defined]


@pytest.mark.unit
def test_a_key_with_many_long_texts_holds_up_another_by_one_of_them() -> None:
    texts = KeysTexts()
    came(texts, b"many", *[100] * 50)
    assert went(texts, 10) == ["many 100"] * 10
    came(texts, b"one", 101)
    came(texts, b"two", 100, 100)
    assert went(texts, 4) == ["many 100", "two 100", "one 101", "many 100"]
    assert went(texts, 3) == ["two 100", "many 100", "many 100"]


@pytest.mark.unit
def test_a_long_text_of_one_key_is_passed_by_as_much_of_all_others_and_no_more() -> None:
    texts = KeysTexts()
    came(texts, b"long", 1000)
    order = []
    for number in range(30):
        came(texts, b"user-%d" % number, 100)
        order += went(texts, 1)
    assert order.index("long 1000") == 9


@pytest.mark.unit
def test_a_key_that_waited_for_nobody_saves_nothing_up() -> None:
    texts = KeysTexts()
    came(texts, b"busy", *[100] * 20)
    went(texts, 19)
    came(texts, b"idle", *[100] * 4)
    came(texts, b"busy", *[100] * 3)
    assert went(texts, 8) == [*["busy 100", "idle 100"] * 4]


@pytest.mark.unit
def test_texts_are_known_by_the_key_that_the_router_names(threads: Threads) -> None:
    async def app(scope: Any, _: Any, __: Any) -> None:
        threads.note(scope["path"], "a" * 250_000)

    async def asks(key: bytes, path: str) -> None:
        scope = {"type": "http", "path": path, "headers": [(b"x-serving-key", key)]}
        await known_by_key(app)(scope, None, None)  # type: ignore[arg-type]

    async def all_ask() -> None:
        many = (asks(b"many", f"many {number}") for number in range(5))
        await asyncio.gather(*many, asks(b"one", "one"))

    threads.hold()
    asyncio.run(all_ask())
    last = threads.note("last", "a" * 300_000)
    threads.goes_on.set()
    last.result(30)
    threads.all.shutdown()
    assert threads.order[:3] == ["many 0", "one", "last"]


@pytest.mark.unit
def test_a_short_chat_is_answered_beside_a_long_text(threads: Threads) -> None:
    held = threads.hold()
    chat = threads.texts.submit(partial(_tokenize_prompt, "hello"))
    assert chat.result(30) == 5
    assert not held.done()


@pytest.mark.unit
def test_a_long_text_or_one_with_media_waits_for_the_thread_of_all(threads: Threads) -> None:
    threads.hold()
    long = threads.texts.submit(partial(_tokenize_prompt, "a" * (1 << 14)))
    media = threads.note("media", "a")
    assert threads.texts.submit(partial(_tokenize_prompt, "hello")).result(30) == 5
    assert not long.done()
    assert not media.done()
    threads.goes_on.set()
    assert long.result(30) == 1 << 14
    assert media.result(30) is None


@pytest.mark.unit
def test_a_text_that_came_last_goes_before_longer_ones(threads: Threads) -> None:
    threads.hold()
    futures = [
        threads.note(name, "a" * chars) for name, chars in (("long", 250_000), ("tools", 40_000), ("chat", 9))
    ]
    threads.goes_on.set()
    for future in futures:
        future.result(30)
    assert threads.order == ["chat", "tools", "long"]


@pytest.mark.unit
def test_an_error_reaches_who_waits_and_what_nobody_waits_for_is_left_out(threads: Threads) -> None:
    threads.hold()
    left = threads.note("left", "a")
    failed = threads.texts.submit(int, "x")
    assert left.cancel()
    threads.goes_on.set()
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result(30)
    assert not threads.order


@pytest.mark.unit
def test_texts_and_tokens_are_counted_at_any_depth_and_the_template_is_not() -> None:
    conversation = [{"role": "user", "content": "12345"}, {"role": "tool", "parts": [("ab",)]}]
    call = partial(
        _tokenize_prompt, conversation, object(), tools=[{"x": "abc"}], chat_template="{{ messages }}"
    )
    assert text_chars(call) == len("user12345toolababc") + len([1, 2, 1, 1, 1])
