"""Whether a slice is to go for wrong tokens: routers and slices that start say so of it, and it says so of others.

A slice serves on where too many are out for that already: of a change of all hosts each slice would say that the others are wrong.
"""

import asyncio
import contextlib
import logging

from serving.engine.first_answer import wrong_at_start
from serving.errors import WrongTokensError
from serving.slices.quarantine import may_be_taken_out
from serving.state.gcs import Store
from serving.state.publisher import Publisher
from serving.state.records import Peer, Snapshot

logger = logging.getLogger("ray.serve")


class WrongTokens:
    """What is said of one slice's tokens."""

    def __init__(self, store: Store, record: Publisher) -> None:
        self._store = store
        self._record = record
        self._overruled = False  # it was found wrong, and told so

    def verdict(self) -> str:
        """Why the slice is to go; empty where nobody said so, or too many have gone for that. Asks the store, and blocks."""
        own = self._record.record
        reason = self._store.verdict(own.replica)
        if not reason:
            return ""
        if self._may_go(self._store.read(own.application)):
            return reason
        self._tell_overruled(reason)
        return ""

    async def compare_first_answer(self, peer: Peer) -> None:
        """Raises WrongTokensError where two slices that serve this engine answer a fixed prompt otherwise than `peer`, this one."""
        own = self._record.record
        try:
            snapshot = await asyncio.to_thread(self._store.read, own.application)
        except Exception:  # the head restarts: no reason to give up minutes of loading
            logger.exception("%s: its first answer is compared with nobody's", own.model)
            return
        same = [
            entry
            for entry in snapshot.slices
            if entry.serves and (entry.deployment, entry.version) == (own.deployment, own.version)
        ]
        peers = {entry.replica: entry.peer for entry in sorted(same, key=lambda entry: entry.running)}
        found = await wrong_at_start(own.model, own.replica, {**peers, own.replica: peer})
        if found is None:
            return
        slices = {entry.replica: entry.slice for entry in [*same, own]}
        others = " and ".join(slices[replica] for replica in found.others)
        reason = f"it answers a fixed prompt otherwise than slices {others}, twice"
        if found.replica == own.replica:
            if self._may_go(snapshot):
                raise WrongTokensError(f"slice {own.slice} gives wrong tokens: {reason}")
            self._tell_overruled(reason)
            return
        with contextlib.suppress(Exception):  # as above; the next slice that starts finds the same
            await asyncio.to_thread(self._store.put_verdict, found.replica, reason)

    def _may_go(self, snapshot: Snapshot) -> bool:
        own = self._record.record
        return may_be_taken_out(own, snapshot.slice_failures, snapshot.slices, self._store.now())

    def _tell_overruled(self, reason: str) -> None:
        own = self._record.record
        if not self._overruled:
            logger.error(
                "%s on slice %s serves on though %s: too many slices are out for that already",
                own.model,
                own.slice,
                reason,
            )
        self._overruled = True
