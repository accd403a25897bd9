"""The Serve replica that owns the service's database: one, on the head where the database is a file there."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray

from serving.batches.service import Batches
from serving.config import BatchSpec, StoreSpec
from serving.database.owner import Owner


class StoreReplica:
    """Files and batches."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, store: StoreSpec, batch: BatchSpec, models: Sequence[str], most_line_bytes: int
    ) -> None:
        makers = [partial(Batches, spec=batch, models=models, most_line_bytes=most_line_bytes)]
        self._owner = Owner(store, makers, ray.util.get_node_ip_address())
        await self._owner.start()

    def reconfigure(self, settings: Mapping[str, Any]) -> None:
        """Nothing changes while it runs: another version is another replica."""

    async def place(self) -> tuple[str, str]:
        """Where routers ask, and the token that they show."""
        return self._owner.place()

    def check_health(self) -> None:
        if not self._owner.is_well:
            raise RuntimeError("the store's HTTP server has ended")

    async def __del__(self) -> None:
        await self._owner.close()
