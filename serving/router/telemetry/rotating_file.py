"""A file that rotates by size, and keeps what it was told for a while, whoever writes how much.

A file is deleted once there are more than `files` and its last line is older than `keep_s`. Whoever fills files faster than
that fills `most_files` of them; then nothing is written until the oldest is old enough. So nobody rotates away what they
did, and the disk has an end. With `router.log_content` it has prompts: its owner alone reads it.
"""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rotation:
    """When a file ends, how many full ones are kept, and for how long at least."""

    most_bytes: int = 64 << 20
    files: int = 4
    most_files: int = 16
    keep_s: float = 24 * 3600


class RotatingFile:
    """PATH has the newest lines, PATH.1 those before, and so on."""

    def __init__(
        self, path: Path, rotation: Rotation = Rotation(), clock: Callable[[], float] = time.time
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._rotation = rotation
        self._clock = clock

    def append(self, text: bytes) -> None:
        """Write all of the text, or nothing and raise OSError: half of a line would spoil the next one."""
        if self.path.exists() and 0 < self.path.stat().st_size > self._rotation.most_bytes - len(text):
            self._rotate()
        # A buffered file would write its buffer again after an error.
        with open(self.path, "ab", buffering=0, opener=_private) as file:
            begun = file.tell()
            if file.write(text) < len(text):
                file.truncate(begun)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _rotate(self) -> None:
        full = self._full()
        old_s = self._clock() - self._rotation.keep_s
        while len(full) >= self._rotation.files and full[-1].stat().st_mtime < old_s:
            full.pop().unlink()
        if len(full) >= self._rotation.most_files:
            raise OSError(
                errno.EDQUOT,
                f"{len(full)} files are full, and the oldest is not {self._rotation.keep_s:g} s old",
            )
        for number, path in reversed(list(enumerate(full, start=1))):
            path.rename(self._numbered(number + 1))
        self.path.rename(self._numbered(1))

    def _full(self) -> list[Path]:
        """Full files, the newest first."""
        full: list[Path] = []
        while (path := self._numbered(len(full) + 1)).exists():
            full.append(path)
        return full

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
