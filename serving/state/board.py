"""What one reader of the store knows of slices: a beat's bytes become a record only where they changed. Pure.

A slice's record is in the store in two parts. The fixed part, its description and state, is read once and whenever its revision
changes. The beat, 60 bytes, names the revision that it goes with, and is read every time.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping

from serving.state.records import BEATING, SliceRecord

_STEP = 50  # beats that are read at once: 0.3 ms


class Board:
    """The slices' records, as the reader's last look found them."""

    def __init__(self) -> None:
        self._fixed: dict[str, tuple[bytes, SliceRecord]] = {}
        self._beats: dict[str, bytes] = {}
        self._records: dict[str, SliceRecord] = {}

    @property
    def slices(self) -> tuple[SliceRecord, ...]:
        return tuple(self._records.values())

    def changed(self, beats: Mapping[str, bytes]) -> list[str]:
        """The slices whose fixed part is to be read: new ones, and those with another revision than known."""
        known = self._fixed
        return [
            replica
            for replica, raw in beats.items()
            if replica not in known or known[replica][0] != raw[1 : raw.index(b",")]
        ]

    def take(self, beats: Mapping[str, bytes], fixed: Mapping[str, bytes]) -> Iterator[None]:
        """Take over every slice's beat, and the fixed parts that were read for `changed`. In steps of 0.3 ms.

        A slice whose fixed part is not there has gone, or comes with the next look. One that another version wrote, with a state that
        this one does not know, is left out.
        """
        for count, (replica, raw) in enumerate(fixed.items(), 1):
            fields = json.loads(raw)
            self._fixed.pop(replica, None)
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self._fixed[replica] = str(fields.pop("revision")).encode(), SliceRecord.of(fields)
            if count % (_STEP // 4) == 0:
                yield
        records: dict[str, SliceRecord] = {}
        there = [replica for replica in beats if replica in self._fixed]
        for start in range(0, len(there), _STEP):
            replicas = there[start : start + _STEP]
            # As one text: a third of the time of a text each.
            loads = json.loads(b"[" + b",".join(beats[replica] for replica in replicas) + b"]")
            for replica, (_, *load) in zip(replicas, loads, strict=True):
                same = replica not in fixed and beats[replica] == self._beats.get(replica)
                records[replica] = self._records[replica] if same else self._fixed[replica][1].beaten(load)
            yield
        self._records = records
        self._beats = {replica: beats[replica] for replica in records}
        self._fixed = {replica: self._fixed[replica] for replica in records}


def fixed_part(record: SliceRecord, revision: int) -> bytes:
    """A record's fixed part, as the store keeps it."""
    fields = {name: value for name, value in vars(record).items() if name not in BEATING}
    return json.dumps({"revision": revision, **fields}).encode()


def beat(record: SliceRecord, revision: int) -> bytes:
    """A record's beat, as the store keeps it."""
    return json.dumps([revision, *record.load], separators=(",", ":")).encode()


def beat_of(raw: bytes) -> int:
    """Which beat it is that `beat` made."""
    _, number, *_ = json.loads(raw)
    return int(number)
