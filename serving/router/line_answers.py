"""The answers to lines of batches in one router: each is kept whole, all of them together within bounds."""

import asyncio
import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from serving.errors import BudgetError, GaveWayError, PoisonousRequestError, RateLimitError, TooLargeError
from serving.router.forwarding.dispatch import failed
from serving.router.http.downstream import Headers, Source

# Of one line: vectors and logprobs of many answers have hundreds of megabytes, and a router has many lines at once.
_MOST_ANSWER_BYTES = 32 << 20
_MOST_ANSWERS_BYTES = 256 << 20  # of all lines that a router has; from half of it on no line is started


class LineAnswer:
    """A Downstream that keeps the whole answer. One of more than `most_bytes` is `too_long`, and ends the task that answers.

    So does one that is `given_back`.
    """

    def __init__(
        self, answering: asyncio.Task[Any], answers: "LineAnswers", most_bytes: int = _MOST_ANSWER_BYTES
    ) -> None:
        self.too_long = self.given_back = False
        self.retry_after_s: float | None = None
        self.source: Source | None = None
        self.more_headers: Callable[[], Headers] | None = None
        self.status = 0
        self.over = False
        self.paused = False
        self.size_bytes = 0
        self._answering = answering
        self._answers = answers
        self._most_bytes = most_bytes
        self._pieces: list[bytes] = []

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    @property
    def started(self) -> bool:
        return self.status != 0

    @property
    def gave_way(self) -> bool:
        """Whether a client's request took its seat."""
        return self.status == GaveWayError.status and GaveWayError.code.encode() in self.body

    @property
    def may_do_better(self) -> bool:
        """Whether another slice may answer what one could not."""
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return True
        return failed(self.status) and PoisonousRequestError.code.encode() not in self.body

    @property
    def wait_s(self) -> float | None:
        """For how long the key's budget has nothing left, where that is why."""
        codes = BudgetError.code.encode(), RateLimitError.code.encode()
        over = self.status == HTTPStatus.TOO_MANY_REQUESTS and any(code in self.body for code in codes)
        return self.retry_after_s if over else None

    def start(self, status: int, headers: Headers) -> None:
        self.status = status
        retry_after = next((value for name, value in headers if name == b"retry-after"), b"")
        self.retry_after_s = float(retry_after) if retry_after.isdigit() else None

    def write(self, data: bytes) -> None:
        if self.too_long or self.given_back:
            return
        self._pieces.append(data)
        self.size_bytes += len(data)
        self._answers.grew(self, len(data))
        if self.size_bytes > self._most_bytes and not self.given_back:
            self.too_long = True
            self._end()

    def give_back(self) -> None:
        """Forget what there is of it: other answers want its room."""
        self.given_back = True
        self._end()

    def _end(self) -> None:
        self._pieces.clear()
        self._answers.left(self)
        self._answering.cancel()

    def end(self, data: bytes = b"") -> None:
        if data:
            self.write(data)
        self.over = True

    def cut(self) -> None:
        """Nothing does: this client reads at once."""

    def refuse(self) -> None:
        """Say in the place of an answer that it is too long."""
        error = TooLargeError(
            f"The answer has more than {self._most_bytes >> 20} MiB, the most of a line of a batch; ask for fewer inputs, answers or "
            "logprobs."
        )
        self.status, self.over = int(error.status), True
        self._pieces = [json.dumps(error.openai_body()).encode()]


class LineAnswers:
    """The bytes of all answers to lines in one router. Of too many the longest answer under way is given back."""

    def __init__(self, most_bytes: int = _MOST_ANSWERS_BYTES) -> None:
        self.size_bytes = 0
        self._most_bytes = most_bytes
        self._under_way: set[LineAnswer] = set()

    @property
    def is_half_full(self) -> bool:
        return self.size_bytes > self._most_bytes // 2

    def grew(self, answer: LineAnswer, size_bytes: int) -> None:
        self._under_way.add(answer)
        self.size_bytes += size_bytes
        if self.size_bytes > self._most_bytes:
            max(self._under_way, key=lambda answer: answer.size_bytes).give_back()

    def left(self, answer: LineAnswer) -> None:
        """It is whole, or is not wanted; a second call changes nothing."""
        if answer in self._under_way:
            self._under_way.remove(answer)
            self.size_bytes -= answer.size_bytes

    def kept(self, result: Mapping[str, Any]) -> None:
        """It waits to be brought."""
        self.size_bytes += len(result["body"])

    def brought(self, result: Mapping[str, Any] | None) -> None:
        self.size_bytes -= len(result["body"]) if result else 0
