"""Short texts are tokenized before long ones, and beside them; API keys have equal shares of the time that this takes.

vLLM 0.26 renders chat templates and tokenizes in one thread, in the order in which requests came. Eight texts of 250 KB held up
all short chats behind them: for a second on idle cores, for half a minute on busy ones. Here the shortest text goes first, and
short ones have a thread of their own besides.

Of one key, a long text is not passed for ever: it goes once the texts that passed it come to some times its own length. Of several
keys, the text goes first that would end first if each key had a thread of its own, as slow as there are keys (self-clocked fair
queueing, Golestani 1994): a key with a hundred long texts holds up another's by one of them.
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from serving import secret

# 4,096 tokens of English, about 20 ms of a free core.
_SHORT_CHARS = 1 << 14
_MOST_PASSED = 4
# What a text costs beside its characters.
_LEAST_CHARS = 1 << 9
# vLLM's functions that may run in two threads. Its processors of media may not.
_BESIDE = ("_tokenize_prompt", "safe_apply_chat_template")
_KEY_HEADER = secret.KEY_HEADER.encode()
_key: ContextVar[bytes] = ContextVar("key", default=b"")  # of the request that a task answers


def known_by_key(app: ASGIApp) -> ASGIApp:
    """The app, whose requests' texts are known by the API key that a router names."""

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _key.set(next((value for name, value in scope["headers"] if name == _KEY_HEADER), b""))
        await app(scope, receive, send)

    return noting


def install(renderer: Any) -> None:
    """Teach this to vLLM's renderer, whose functions hold its executor."""
    from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin  # noqa: PLC0415  only a process that serves loads vLLM

    shared = isinstance(renderer.tokenizer, ThreadSafeHFTokenizerMixin)
    beside = ThreadPoolExecutor(1, "short-texts") if shared else None
    executor = renderer._executor  # noqa: SLF001  nothing public is in between
    executor.submit = ShortestFirst(executor, beside).submit


class Text:
    """Work on a text of so many characters. `is_short`: the thread for short texts may do it. `taken`: a thread does it."""

    __slots__ = ("chars", "is_short", "taken", "work")

    def __init__(self, work: Callable[[], None], chars: int, *, is_short: bool) -> None:
        self.work = work
        self.chars = chars
        self.is_short = is_short
        self.taken = False


class WaitingTexts:
    """Texts of one key that wait, and which is next. Pure."""

    def __init__(self) -> None:
        # By `is_short`, the shortest first, and of two the one that came first.
        self._by_length: dict[bool, list[tuple[int, int, Text]]] = {True: [], False: []}
        self._by_arrival: deque[Text] = deque()
        self._count = 0
        self._passed = 0  # characters of those that passed the oldest

    def __bool__(self) -> bool:
        return bool(self._by_arrival)

    def add(self, text: Text) -> None:
        self._count += 1
        heapq.heappush(self._by_length[text.is_short], (text.chars, self._count, text))
        self._by_arrival.append(text)

    def next(self, *, is_short: bool) -> Text | None:
        """The next text, or the next short one; None where none waits."""
        heads = [entry for entry in (self._head(True), None if is_short else self._head(False)) if entry]
        if not heads:
            return None
        oldest, shortest = self._by_arrival[0], min(heads)[2]
        goes_at_last = not is_short and self._passed >= _MOST_PASSED * oldest.chars
        return oldest if goes_at_last else shortest

    def take(self, text: Text) -> None:
        """A thread does this one."""
        text.taken = True
        self._passed += text.chars
        while self._by_arrival and self._by_arrival[0].taken:
            self._by_arrival.popleft()
            self._passed = 0

    def _head(self, is_short: bool) -> tuple[int, int, Text] | None:
        heap = self._by_length[is_short]
        while heap and heap[0][2].taken:
            heapq.heappop(heap)
        return heap[0] if heap else None


class KeysTexts:
    """Texts that wait by their keys, and which is next. Pure.

    Times are virtual, in characters: as if each key had a thread of its own.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, WaitingTexts] = {}  # the key that went last stands last
        self._since: dict[bytes, int] = {}  # when a key's next text could begin
        self._now = 0  # when the last text that went would have ended

    def add(self, key: bytes, text: Text) -> None:
        if key not in self._waiting:
            self._waiting[key] = WaitingTexts()
            self._since[key] = self._now
        self._waiting[key].add(text)

    def pop(self, *, is_short: bool) -> Text | None:
        """The next text, or the next short one; None where none waits."""
        heads = [
            (self._since[key] + text.chars, key, text)
            for key, texts in self._waiting.items()
            if (text := texts.next(is_short=is_short))
        ]
        if not heads:
            return None
        # Of two that would end at once the one whose key has waited longer.
        ends, key, text = min(heads, key=lambda head: head[0])
        self._now = max(self._now, ends)
        texts = self._waiting.pop(key)
        texts.take(text)
        del self._since[key]
        if texts:
            self._waiting[key], self._since[key] = texts, ends
        return text


class ShortestFirst:
    """Gives its executors' threads the next text each time that one is free."""

    def __init__(self, executor: Executor, beside: Executor | None) -> None:
        """`beside`: for short texts alone; None where texts may not be worked on side by side."""
        self._submit = executor.submit
        self._beside = beside
        self._texts = KeysTexts()
        self._lock = threading.Lock()

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """As of every executor."""
        future: Future[Any] = Future()
        call = partial(work, *arguments, **options)
        chars = _LEAST_CHARS + text_chars(call)
        is_short = chars <= _SHORT_CHARS and getattr(call.func, "__name__", "") in _BESIDE
        with self._lock:
            self._texts.add(_key.get(), Text(partial(_answer, future, call), chars, is_short=is_short))
        self._submit(self._work, is_short=False)
        if is_short and self._beside:
            self._beside.submit(self._work, is_short=True)
        return future

    def _work(self, *, is_short: bool) -> None:
        """Do what is next. The other thread may have done it: each short text is announced to both."""
        with self._lock:
            text = self._texts.pop(is_short=is_short)
        if text:
            text.work()


def _answer(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001  whoever waits has it
        future.set_exception(error)


def text_chars(call: partial[Any]) -> int:
    """The characters of a call's arguments, and the tokens: of plain data at any depth. The template is the server's own."""
    chars = 0
    todo: list[Any] = [
        *call.args,
        *(value for name, value in call.keywords.items() if name != "chat_template"),
    ]
    while todo:
        item = todo.pop()
        if isinstance(item, str | bytes):
            chars += len(item)
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list | tuple):
            chars += len(item)
            todo += item
    return chars
