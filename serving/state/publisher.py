"""Writes a replica's record on every change and, from a thread of its own, at every beat."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from serving.state.records import SliceRecord
from serving.timings import TIMINGS, Timings

logger = logging.getLogger("ray.serve")


class SliceStore(Protocol):
    """Where the record goes: the store, or a test's."""

    def put_slice(self, record: SliceRecord) -> None: ...

    def delete_slice(self, record: SliceRecord) -> None: ...

    def now(self) -> float: ...


class Publisher:
    """Keeps one replica's record in the store.

    `load` gives, at each write, the fields that change all the time. `beaten` gets the record at each beat.
    """

    def __init__(
        self,
        store: SliceStore,
        record: SliceRecord,
        load: Callable[[], dict[str, Any]] = dict,
        beaten: Callable[[SliceRecord], None] = lambda _: None,
        timings: Timings = TIMINGS,
    ) -> None:
        self.record = record
        self.load = load
        self._store = store
        self._beaten = beaten
        self._beat_s = timings.beat_s
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.update()
        self._thread = threading.Thread(target=self._beat, name="slice-record", daemon=True)
        self._thread.start()

    def update(self, **changes: Any) -> None:
        """Change fields and write at once; does nothing after `close`.

        Where the store can't be written, the next beat writes the change: no start or leave fails for it.
        """
        with self._lock:
            if self._stopped.is_set():
                return
            fields = {**self._load_at(changes), **changes, "beat": self.record.beat + 1}
            if changes.get("state", self.record.state) is not self.record.state:
                fields["since"] = self._store.now()
            self.record = dataclasses.replace(self.record, **fields)
            try:
                self._store.put_slice(self.record)
            except Exception:
                logger.exception("the slice's record can't be written; the next beat tries again")

    def _load_at(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The load, which may be read from the store; a change is told without it."""
        try:
            return self.load()
        except Exception:
            if not changes:
                raise
            logger.exception("the slice's load can't be read; the next beat tries again")
            return {}

    def close(self) -> None:
        """Stop, and take the record out of the store."""
        self._stopped.set()
        self._thread.join(timeout=2)
        self._store.delete_slice(self.record)

    def _beat(self) -> None:
        while not self._stopped.wait(self._beat_s):
            try:
                self.update()
                self._beaten(self.record)
            except Exception:
                # If the thread ended here, every router would call the slice lost, though it serves.
                logger.exception("the slice's load can't be told; the next beat tries again")
