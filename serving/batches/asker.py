"""Asks a running service for lines of a corpus, into seats that nobody else wants.

It finds out how many lines the service has seats for: with every answer it dares one more, and a refusal tells it to stay with
those that are under way. A line that is refused for want of a seat or a slice is asked again, for as long as it takes.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from serving.batches import corpus, lines
from serving.errors import BudgetError, UnknownModelError

_TRIES = 5  # of a line on which engines fail
_AGAIN_S = 0.5  # and up to twice that
_MOST_WAIT_S = 30.0  # however long the service says
_GONE_S = 300.0  # a service that has answered nothing for so long is gone
_CONNECT_S, _ANSWER_S = 10.0, 3600.0
_FIRST_LINES = 8


@dataclass(frozen=True)
class Asked:
    """What became of a line: its `result` or, where the whole run is to stop, why."""

    number: int
    result: str = ""
    stop: str = ""


class Pace:
    """How many lines are asked at once, in one event loop. Those that were refused rest, and are few beside the others.

    After a refusal none of these is asked again for a while, unless another line is answered meanwhile.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._now = float(min(most, _FIRST_LINES))
        self._asked = 0
        self._resting = 0
        self._again_s = -math.inf
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(self._has_room)
            self._asked += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._changed:
            self._asked -= 1
            self._changed.notify_all()

    async def rest(self, seconds: float) -> None:
        async with self._changed:
            self._now = max(1.0, min(self._now, self._asked - 1))
            self._again_s = time.monotonic() + _AGAIN_S
            self._asked -= 1
            self._resting += 1
            self._changed.notify_all()
        try:
            await asyncio.sleep(seconds)
            while self._asked >= int(self._now) or time.monotonic() < self._again_s:  # noqa: ASYNC110  the clock sets no event
                await asyncio.sleep(_again_s())
        finally:
            self._asked += 1
            self._resting -= 1

    def answered(self) -> None:
        self._now = min(self._most, self._now + 1 / self._now)
        self._again_s = -math.inf

    def _has_room(self) -> bool:
        return self._asked < int(self._now) and self._resting <= self._now / 8


class Asker:
    """Of one process. `most`: lines at once."""

    def __init__(self, url: str, model: str, most: int, key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._most = most
        self._headers = {"content-type": "application/json", lines.FREE_SEATS: "1"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None
        self._stop = ""

    async def ask(self, numbers: Sequence[int], texts: Sequence[bytes]) -> list[Asked]:
        """All of these lines. After one that is to stop the run, no other is asked."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=_ANSWER_S, sock_connect=_CONNECT_S)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=self._headers
            )
            self._pace = Pace(self._most)
            self._heard_s = time.monotonic()
        asked = await asyncio.gather(*map(self._ask, numbers, texts))
        return [line for line in asked if line]

    async def close(self) -> None:
        if self._session:
            await self._session.close()
            self._session = None

    async def _ask(self, number: int, text: bytes) -> Asked | None:
        try:
            line = corpus.read(text, self._model)
        except lines.LineError as error:  # the file has changed since it was looked at
            return Asked(
                number,
                lines.refused(corpus.NAME, number, error.custom_id, error.code, error.message),
            )
        failures, gone_s = 0, math.inf
        async with self._pace:
            while not self._stop:
                try:
                    status, headers, body = await self._post(line)
                    self._heard_s = time.monotonic()
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    if time.monotonic() - self._heard_s >= _GONE_S:
                        return self._stopped(
                            number, f"{self._url} has not answered for {_GONE_S:.0f} s: {error!r}"
                        )
                    await self._pace.rest(_again_s())
                    continue
                if why := _hopeless(status, body):
                    return self._stopped(number, why)
                failures += _failed(status)
                again = _failed(status) and failures < _TRIES
                if _is_of_proxy(status, body):  # it may be this line, for which it does not wait long enough
                    gone_s = min(gone_s, self._heard_s + _GONE_S)
                    again = self._heard_s < gone_s
                if again or _is_for_later(status, headers, body):
                    await self._pace.rest(max(_again_s(), _retry_after_s(status, headers)))
                    continue
                self._pace.answered()
                request_id = headers.get("x-request-id", "")
                answer = lines.answer(body.decode("utf-8", "replace"))
                result = lines.answered(corpus.NAME, number, line.custom_id, status, request_id, answer)
                return Asked(number, result)
        return None

    async def _post(self, line: lines.Asked) -> tuple[int, Mapping[str, str], bytes]:
        assert self._session  # noqa: S101  ask has made it
        data = lines.as_json(line.body).encode()
        async with self._session.post(self._url + line.path, data=data) as response:
            return response.status, response.headers, await response.read()

    def _stopped(self, number: int, why: str) -> Asked:
        self._stop = why
        return Asked(number, stop=why)


def _again_s() -> float:
    return random.uniform(_AGAIN_S, 2 * _AGAIN_S)


def _hopeless(status: int, body: bytes) -> str:
    """Why no other line will fare better: the key is refused, its budget is used up, or the model is gone."""
    over = status == HTTPStatus.TOO_MANY_REQUESTS and BudgetError.code.encode() in body
    gone = status == HTTPStatus.NOT_FOUND and UnknownModelError.code.encode() in body
    return _message(body) if over or gone or status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) else ""


def _is_for_later(status: int, headers: Mapping[str, str], body: bytes) -> bool:
    """Whether there is no seat or slice now, a limit of the key's is reached for the moment, or a proxy has no service yet."""
    if status == HTTPStatus.NOT_FOUND:
        return not body.startswith(b"{")
    again = headers.get("x-should-retry") != "false"
    return status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS) and again


def _is_of_proxy(status: int, body: bytes) -> bool:
    """Whether a proxy's own page says that it has no answer of the service, as load balancers do while one is deployed anew."""
    return status in (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT) and not body.startswith(b"{")


def _failed(status: int) -> bool:
    """Whether a slice may do better than the one that was asked."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.SERVICE_UNAVAILABLE


def _retry_after_s(status: int, headers: Mapping[str, str]) -> float:
    """Of a key's own limits. Free seats come sooner than a queue's end."""
    retry_after = headers.get("retry-after", "")
    waits = status == HTTPStatus.TOO_MANY_REQUESTS and retry_after.isdecimal()
    return min(_MOST_WAIT_S, float(retry_after)) if waits else 0.0


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:1000]
