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
from serving.state.records import Peer

logger = logging.getLogger("ray.serve")

# From the decision that a slice goes to the record of its failure, which the next decision counts.
_GOES_S = 30.0


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
        if not self._has_room():
            self._tell_overruled(reason)
            return ""
        return reason if self._goes_alone() else ""

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
        wrong = await wrong_at_start(own.model, own.replica, {**peers, own.replica: peer})
        if wrong is None:
            return
        slices = {entry.replica: entry.slice for entry in [*same, own]}
        others = " and ".join(slices[replica] for replica in wrong.others)
        reason = f"it answers a fixed prompt otherwise than slices {others}, twice"
        if wrong.replica == own.replica:
            goes = False
            with contextlib.suppress(Exception):  # as above
                goes = await asyncio.to_thread(self._goes_alone)
            if goes:
                raise WrongTokensError(f"slice {own.slice} gives wrong tokens: {reason}")
            self._tell_overruled(reason)
            return
        with contextlib.suppress(Exception):  # as above; the next slice that starts finds the same
            await asyncio.to_thread(self._store.put_verdict, wrong.replica, reason)

    def _has_room(self) -> bool:
        """Whether one more slice may be out for wrong tokens."""
        own = self._record.record
        snapshot = self._store.read(own.application)
        return may_be_taken_out(own, snapshot.slice_failures, snapshot.slices, self._store.now())

    def _goes_alone(self) -> bool:
        """Whether there is room, and no other slice of this application and type is about to take it."""
        own, store = self._record.record, self._store
        if not self._has_room():
            return False
        what, now = f"wrong tokens/{own.pod_type}", store.now()
        if not store.claim(own.application, what, own.replica, now, now + _GOES_S):
            return False
        if self._has_room():
            return True
        store.unclaim(own.application, what, own.replica)
        return False

    def _tell_overruled(self, reason: str) -> None:
        own = self._record.record
        if not self._overruled:
            logger.error(
                "%s on slice %s serves on though %s: too many slices are out for that already, or about to go",
                own.model,
                own.slice,
                reason,
            )
        self._overruled = True
