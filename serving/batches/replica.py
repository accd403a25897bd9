"""The Serve replica that owns the service's database: one, on the head where the database is a file there."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray
from ray import serve

from serving.batches.desk import Desk
from serving.batches.lifecycle import State
from serving.batches.service import Batches
from serving.config import BatchSpec, StoreSpec
from serving.database.database import Database
from serving.database.owner import Owner
from serving.metering.service import Metering
from serving.state.gcs import Store
from serving.state.records import BatchRecord, UsageRecord

logger = logging.getLogger("ray.serve")

_TOLD_S = 1.0
_USAGE_TOLD_S = 5.0
_MOST_TOLD = 50


class StoreReplica:
    """Files and batches, and what keys have used."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, store: StoreSpec, batch: BatchSpec, models: Sequence[str], most_line_bytes: int
    ) -> None:
        address = ray.get_runtime_context().gcs_address
        self._application = serve.get_replica_context().app_name
        owner = hashlib.sha256(f"{address}/{self._application}".encode()).hexdigest()

        def batches(database: Database, store: StoreSpec) -> Batches:
            self._batches = Batches(database, store, batch, models, most_line_bytes, owner=owner)
            return self._batches

        def metering(database: Database, _: StoreSpec) -> Metering:
            self._metering = Metering(database)
            return self._metering

        self._owner = Owner(store, [batches, metering], ray.util.get_node_ip_address())
        await self._owner.start()
        self._records = Store(address)
        self._telling = [
            asyncio.create_task(self._tell(self._tell_batches, _TOLD_S)),
            asyncio.create_task(self._tell(self._tell_usage, _USAGE_TOLD_S)),
        ]

    def reconfigure(self, settings: Mapping[str, Any]) -> None:
        """Nothing changes while it runs: another version is another replica."""

    async def place(self) -> tuple[str, str]:
        """Where routers ask, and the token that they show."""
        return self._owner.place()

    def check_health(self) -> None:
        if not self._owner.is_well:
            raise RuntimeError("the store's HTTP server has ended")

    async def __del__(self) -> None:
        if hasattr(self, "_telling"):
            for task in self._telling:
                task.cancel()
            await asyncio.wait(self._telling)
            await asyncio.to_thread(self._records.delete_kept, self._application)
        await self._owner.close()

    async def _tell(self, tell: Callable[[], Awaitable[None]], every_s: float) -> None:
        """Say in Ray's store what the page and the terminal show."""
        while True:
            try:
                await tell()
            except Exception:
                logger.exception("what the page shows of the store is not told; the next beat tries again")
            await asyncio.sleep(every_s)

    async def _tell_batches(self) -> None:
        records = batch_records(self._batches.desk, time.time(), self._application)
        await asyncio.to_thread(self._records.put_batches, self._application, records)

    async def _tell_usage(self) -> None:
        records = usage_records(await self._metering.today(), time.time(), self._application)
        await asyncio.to_thread(self._records.put_usage, self._application, records)


def batch_records(desk: Desk, at: float, application: str) -> list[BatchRecord]:
    """Rows of batches that are not over, as records; the oldest, for one record of the store has a limit."""
    return [
        BatchRecord(
            name=batch.id,
            state=State(batch.state).shown,
            total=batch.total,
            completed=batch.completed,
            failed=batch.failed,
            created=batch.created_s,
            at=at,
            application=application,
            why=desk.why(batch.id),
        )
        for batch in list(desk.owned.values())[:_MOST_TOLD]
    ]


def usage_records(rows: Any, at: float, application: str) -> list[UsageRecord]:
    """Sums of keys on one day, as records; those who used most, for one record of the store has a limit."""
    most = sorted(rows, key=lambda row: (row.dollars, row.prompt_tokens + row.output_tokens), reverse=True)
    return [
        UsageRecord(
            key=row.key,
            day=row.day,
            requests=int(row.requests),
            prompt_tokens=int(row.prompt_tokens),
            cached_tokens=int(row.cached_tokens),
            output_tokens=int(row.output_tokens),
            dollars=float(row.dollars),
            at=at,
            application=application,
        )
        for row in most[:_MOST_TOLD]
    ]
