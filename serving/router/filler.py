"""Fills a router's free seats with lines of batches, and brings back what became of them.

The router takes lines only for seats that are free, and starts one only while the seat is: nothing of a batch ever waits in
front of a client's request. A line whose seat a request waits for is given up and asked again, a few times at most. The process
that keeps batches knows from every question which lines this router has.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message

from serving.config import BatchSpec
from serving.errors import StoreAwayError
from serving.router.admission.controller import AdmissionController
from serving.router.http.inference import Inference
from serving.router.http.kept_files import KeptFiles
from serving.router.line_answers import LineAnswer, LineAnswers
from serving.router.prompt_pace import PromptPace
from serving.router.scheduling.prefix_index import TOKEN_BYTES
from serving.router.scheduling.slice_table import SliceTable
from serving.timings import TIMINGS

logger = logging.getLogger("ray.serve")

_LEAST_S = 0.05  # between two questions
_LAST_S = 3.0  # for the last words to the store, which may end with this router
_MOST_BROUGHT_BYTES = 8 << 20  # of results at once; one alone may be longer
_AHEAD = 32  # lines of a model that are here before their seat is free, at most


@dataclass(frozen=True)
class Line:
    """One line of a batch; `key` is the hash of the API key that made it."""

    batch: str
    line: int
    key: str
    path: str
    body: bytes

    @property
    def held(self) -> tuple[str, int]:
        return self.batch, self.line


class Filler:
    """The batches' lines in one router; `name` is the router's."""

    def __init__(
        self,
        inference: Inference,
        admission: AdmissionController,
        table: SliceTable,
        kept: KeptFiles,
        spec: BatchSpec,
        name: str,
        pace: PromptPace | None = None,
    ) -> None:
        self._inference = inference
        self._admission = admission
        self._table = table
        self._kept = kept
        self._spec = spec
        self._name = name
        self._pace = pace or PromptPace({})
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when it goes off
        self._waiting: dict[str, deque[Line]] = {model: deque() for model in table.shapes}
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._back: list[tuple[str, Line]] = []  # lines that got no seat, until the next step
        self._results: dict[tuple[str, int], dict[str, Any]] = {}
        self._answers = LineAnswers()
        self._given_up: Counter[tuple[str, int]] = Counter()
        self._woken = asyncio.Event()
        self._over = False

    async def run(self) -> None:
        """Until cancelled; then what runs is given up."""
        try:
            while True:
                try:
                    await self.step()
                except StoreAwayError:
                    self._admission.expect({})
                    self._start()  # results stay here until they are taken
                except Exception:
                    logger.exception("batches are not filled in; the next beat tries again")
                await asyncio.sleep(_LEAST_S)
                try:
                    async with asyncio.timeout(TIMINGS.beat_s):
                        await self._woken.wait()
                except TimeoutError:
                    pass
                self._woken.clear()
        finally:
            self._over = True
            if self._timer:
                self._timer.cancel()
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def close(self, last_s: float = _LAST_S) -> None:
        """Bring what is done, and give the rest back; after `run` has ended."""
        try:
            async with asyncio.timeout(last_s):
                await self._bring()
                await self._kept.call("/lines/take", {"router": self._name, "wants": [], "holding": []})
        except (StoreAwayError, TimeoutError):
            logger.warning("the store is away: others take this router's lines once it has been silent")

    async def step(self) -> None:
        """Bring results, ask for lines, start those that have a seat. Raises StoreAwayError."""
        await self._bring()
        back, self._back = self._back, []
        for model, line in back:
            self._waiting[model].appendleft(line)
        wants = [self._want(model) for model in self._waiting]
        holding = [*self._running, *(line.held for lines in self._waiting.values() for line in lines)]
        holding += [held for held in self._results if held not in self._running]
        answer = await self._kept.call(
            "/lines/take",
            {"router": self._name, "wants": [want for want in wants if want["most"]], "holding": holding},
        )
        rates: dict[str, float] = {}
        for name, rate in answer["rates"].items():
            if name not in self._table.shapes and name not in self._table.adapters:
                continue  # of a batch that is older than the YAML, which no longer has the model
            model = self._table.resolve(name)
            rates[model] = rates.get(model, 0.0) + rate
        self._admission.expect(rates)
        self._drop({(batch, line) for batch, line in answer["drop"]})
        for fields in answer["lines"]:
            self._take(fields)
        self._look_at_caches()
        self._start()

    def _want(self, model: str) -> dict[str, Any]:
        room = self._admission.room(model, self._spec.spare)
        running = self._admission.filling(model)
        # Seats that come free before the next question find a line here.
        most = room + min(running + room, _AHEAD) - len(self._waiting[model]) if room or running else 0
        names = [model, *(adapter for adapter, of in self._table.adapters.items() if of == model)]
        return {"names": names, "most": max(0, most)}

    def _take(self, fields: Mapping[str, Any]) -> None:
        model = self._table.resolve(fields["model"])
        line = Line(fields["batch"], fields["line"], fields["key"], fields["path"], fields["body"].encode())
        self._waiting[model].append(line)

    def _start(self) -> None:
        for model, lines in self._waiting.items():
            if not lines:
                continue
            room = self._admission.room(model, self._spec.spare) - self._starting(model)
            while lines and room > 0 and not self._answers.is_half_full:
                if wait_s := self._pace.wait_s(model, time.monotonic()):
                    self._start_in(wait_s)
                    break
                line = lines.popleft()
                room -= 1
                self._pace.started(model, len(line.body) / TOKEN_BYTES, time.monotonic())
                task = self._running[line.held] = asyncio.create_task(self._answer(line, model), name=model)
                task.add_done_callback(partial(self._ended, line))

    def _start_in(self, seconds: float) -> None:
        """Start what may start by then, unless that is done before."""
        now_s = time.monotonic()
        if self._timer and now_s < self._timer_s <= now_s + seconds:
            return
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._start)
        self._timer_s = now_s + seconds

    def _look_at_caches(self) -> None:
        """Of lines caches are taken to have as much as of all prompts until now."""
        for model in (model for model, lines in self._waiting.items() if lines):
            serving = [entry for entry in self._table.entries(model) if entry.serves]
            prompts = sum(entry.prompt_tokens for entry in serving)
            unread = 1 - sum(entry.cached_tokens for entry in serving) / prompts if prompts else 1.0
            self._pace.serve(model, len(serving), unread, asked=self._table.is_asked(model))

    def _starting(self, model: str) -> int:
        """Lines that run and have no seat yet."""
        of_model = sum(1 for task in self._running.values() if task.get_name() == model)
        return max(0, of_model - self._admission.filling(model))

    async def _answer(self, line: Line, model: str) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  a coroutine runs in a task
        answer = LineAnswer(task, self._answers)
        request_id = f"{line.batch}-{line.line}"
        try:
            await self._inference.fill(
                _request(line, request_id), line.key, answer, self._given_up[line.held]
            )
        except asyncio.CancelledError:
            if not (answer.too_long or answer.given_back) or task.uncancel():
                raise
        finally:
            self._answers.left(answer)
        if answer.given_back:
            self._back.append((model, line))
            return
        if answer.too_long:
            answer.refuse()
        if answer.gave_way:
            self._given_up[line.held] += 1
        if not answer.over or answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            self._back.append((model, line))  # its seat is gone, or its slice
            return
        result = self._results[line.held] = {
            "batch": line.batch,
            "line": line.line,
            "status": answer.status,
            "request_id": request_id,
            "body": answer.body.decode("utf-8", "replace"),
            "again": answer.may_do_better,
            "wait_s": answer.wait_s,
        }
        self._answers.kept(result)

    def _ended(self, line: Line, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            logger.error("line %d of %s is given back", line.line, line.batch, exc_info=error)
        self._running.pop(line.held, None)
        if not self._over:
            self._start()
        if line.held in self._results:
            del self._given_up[line.held]
            self._woken.set()

    async def _bring(self) -> None:
        """In parts: answers may have megabytes, and all wait here while the store is away."""
        while results := list(islice(self._results.values(), 1)):
            size = len(results[0]["body"])
            for result in islice(self._results.values(), 1, None):
                if (size := size + len(result["body"])) > _MOST_BROUGHT_BYTES:
                    break
                results.append(result)
            await self._kept.call("/lines/commit", {"results": results})
            for result in results:
                self._answers.brought(self._results.pop((result["batch"], result["line"]), None))

    def _drop(self, dropped: set[tuple[str, int]]) -> None:
        """Stop work on lines of batches that are over."""
        for lines in self._waiting.values():
            for line in [line for line in lines if line.held in dropped]:
                lines.remove(line)
        for held in dropped:
            self._answers.brought(self._results.pop(held, None))
            del self._given_up[held]
            if task := self._running.get(held):
                task.cancel()


def _request(line: Line, request_id: str) -> Request:
    headers = Headers({"content-type": "application/json", "x-request-id": request_id})
    scope = {
        "type": "http",
        "method": "POST",
        "path": line.path,
        "query_string": b"",
        "headers": headers.raw,
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": line.body, "more_body": False}

    return Request(scope, receive)
