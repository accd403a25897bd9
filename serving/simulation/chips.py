"""The chips of a simulated host: files that the process which computes on them keeps open, as libtpu does /dev/vfio/0.

A chip whose file says so computes wrongly.
"""

import os
import shutil
from pathlib import Path
from typing import IO

from serving.environment import CHIPS

_CORRUPT = b"corrupt"
_held: list[IO[bytes]] = []


def make(folder: Path, chips: int) -> None:
    """The chips of a host that starts, and none of a host that had its name before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for chip in range(chips):
        (folder / str(chip)).write_bytes(b"")


def corrupt(folder: Path) -> None:
    """Have the first chip of a host compute wrongly for engines that start from now on."""
    min(folder.iterdir()).write_bytes(_CORRUPT)


def are_corrupt() -> bool:
    """Whether a chip of this process's host computes wrongly."""
    return any(chip.read_bytes() == _CORRUPT for chip in _here())


def hold() -> None:
    """Keep the chips of this process's host open until the process ends."""
    _held.extend(chip.open("rb") for chip in _here())


def _here() -> list[Path]:
    """The chips of this process's host; an engine that a test starts without a cluster has none."""
    folder = os.environ.get(CHIPS)
    return sorted(Path(folder).iterdir()) if folder else []
