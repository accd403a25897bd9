"""The chips of a simulated host: files that the process which computes on them keeps open, as libtpu does /dev/vfio/0."""

import os
from pathlib import Path
from typing import IO

from serving.environment import CHIPS

_held: list[IO[bytes]] = []


def make(folder: Path, chips: int) -> None:
    """The chips of a host that starts."""
    folder.mkdir(parents=True, exist_ok=True)
    for chip in range(chips):
        (folder / str(chip)).touch()


def hold() -> None:
    """Keep the chips of this process's host open until the process ends."""
    if folder := os.environ.get(CHIPS):
        _held.extend(chip.open("rb") for chip in sorted(Path(folder).iterdir()))
