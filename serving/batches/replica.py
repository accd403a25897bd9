"""The Serve replica that owns the service's database: one, on the head where the database is a file there."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve

from serving.batches.lifecycle import State
from serving.batches.service import Batches
from serving.config import BatchSpec, StoreSpec
from serving.database.database import Database
from serving.database.owner import Owner
from serving.metering.service import Metering
from serving.state.gcs import Store
from serving.state.records import BatchRecord

logger = logging.getLogger("ray.serve")

_TOLD_S = 1.0
_MOST_TOLD = 50


class StoreReplica:
    """Files and batches, and what keys have used."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, store: StoreSpec, batch: BatchSpec, models: Sequence[str], most_line_bytes: int
    ) -> None:
        def batches(database: Database, store: StoreSpec) -> Batches:
            self._batches = Batches(database, store, batch, models, most_line_bytes)
            return self._batches

        def metering(database: Database, _: StoreSpec) -> Metering:
            return Metering(database)

        self._owner = Owner(store, [batches, metering], ray.util.get_node_ip_address())
        await self._owner.start()
        self._application = serve.get_replica_context().app_name
        self._records = Store(ray.get_runtime_context().gcs_address)
        self._telling = asyncio.create_task(self._tell())

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
            self._telling.cancel()
            await asyncio.to_thread(self._records.delete_batches, self._application)
        await self._owner.close()

    async def _tell(self) -> None:
        """Say in Ray's store how far batches are, for the page and the terminal."""
        while True:
            try:
                records = told(self._batches.desk.owned.values(), time.time(), self._application)
                await asyncio.to_thread(self._records.put_batches, self._application, records)
            except Exception:
                logger.exception("how far batches are is not told; the next beat tries again")
            await asyncio.sleep(_TOLD_S)


def told(batches: Any, at: float, application: str) -> list[BatchRecord]:
    """Rows of batches that are not over, as records; the oldest, for one record of the store has a limit."""
    return [
        BatchRecord(
            name=batch.id,
            state=State(batch.state).told,
            total=batch.total,
            completed=batch.completed,
            failed=batch.failed,
            created=batch.created_s,
            at=at,
            application=application,
        )
        for batch in list(batches)[:_MOST_TOLD]
    ]
