"""Usage, as routers tell it and ask for it for their clients, and the keys that they let in.

A router has settled whose request it is: the header `x-serving-key` has the beginning of the key's hash.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, date, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sqlalchemy import Row

from serving import secret
from serving.database.database import Database
from serving.errors import BadRequestError, StorageError
from serving.metering.keys import InForce, KeyTable
from serving.metering.ledger import AMOUNTS, Flush, Ledger

logger = logging.getLogger("ray.serve")

_SWEEP_S = 3600.0
_MOST_DAYS = 366
_READ_S = 1.0
_ASKED_BY = ("start", "end")


class Metering:
    """The part of the database's owner that keeps usage."""

    def __init__(self, database: Database, calendar: Callable[[], float] = time.time) -> None:
        self._calendar = calendar
        self.ledger = Ledger(database)
        self.keys = KeyTable(database)
        self._in_force: InForce | None = None
        self._read_s = 0.0

    def routes(self) -> APIRouter:
        routes = APIRouter()
        routes.add_api_route("/v1/usage", self.usage, methods=["GET"], response_model=None)
        routes.add_api_route("/usage/flush", self.flush, methods=["POST"], response_model=None)
        return routes

    async def start(self) -> None:
        self._sweeping = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        self._sweeping.cancel()

    async def flush(self, request: Request) -> Response:
        fields = await request.json()
        version = fields.pop("keys", None)
        totals = await self.ledger.flush(Flush(**fields), self._calendar())
        answer: dict[str, Any] = {"totals": {key: asdict(total) for key, total in totals.items()}}
        if version is not None and (keys := await self._keys_in_force()).version != version:
            answer["keys"] = asdict(keys)
        return JSONResponse(answer)

    async def usage(self, request: Request) -> Response:
        if other := next((name for name in request.query_params if name not in _ASKED_BY), None):
            raise BadRequestError(
                f"usage is asked for by start and end, the first and the last day: {other[:64]!r} is neither."
            )
        first, last = days(
            request.query_params.get("start"), request.query_params.get("end"), self._calendar()
        )
        rows = await self.ledger.of_key(request.headers[secret.KEY_HEADER], first, last)
        data = [
            {name: getattr(row, name) for name in ("day", "model", "pool", *AMOUNTS)} | {"object": "usage"}
            for row in rows
        ]
        return JSONResponse({"object": "list", "start": first, "end": last, "data": data})

    async def today(self) -> list[Row[Any]]:
        """Sums of each key's rows of today."""
        day = datetime.fromtimestamp(self._calendar(), UTC).date().isoformat()
        return await self.ledger.by(("key", "day"), day, day)

    async def _keys_in_force(self) -> InForce:
        """Read once a second, however many routers ask."""
        now_s = time.monotonic()
        if self._in_force is None or now_s - self._read_s >= _READ_S:
            self._in_force, self._read_s = await self.keys.in_force(self._calendar()), now_s
        return self._in_force

    async def _sweep(self) -> None:
        while True:
            try:
                await self.ledger.sweep(self._calendar())
            except StorageError as error:
                logger.warning("numbers of routers that are gone stay: %s", error.message)
            await asyncio.sleep(_SWEEP_S)


def days(start: str | None, end: str | None, now_s: float) -> tuple[str, str]:
    """The first and the last day that are asked for: this month's up to today where nothing is said. Raises BadRequestError."""
    today = datetime.fromtimestamp(now_s, UTC).date()
    last = _day("end", end) or today
    first = _day("start", start) or min(today, last).replace(day=1)
    if first > last:
        raise BadRequestError(f"start is {first} and end is {last}: start has to come first.")
    if (last - first).days >= _MOST_DAYS:
        raise BadRequestError(f"start and end are more than {_MOST_DAYS} days apart; ask for fewer at once.")
    return first.isoformat(), last.isoformat()


def _day(name: str, value: Any) -> date | None:
    if value is None:
        return None
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise BadRequestError(f"{name} has to be a day of UTC, as 2026-11-22.") from None
