import os
from pathlib import Path

import pytest

from serving.router.telemetry.rotating_file import RotatingFile, Rotation

pytestmark = pytest.mark.unit
LINE = b"x" * 9 + b"\n"
SMALL = Rotation(most_bytes=20, files=2, most_files=4, keep_s=100)


def sizes(path: Path) -> list[int]:
    """Of the file and of the full ones, the newest first."""
    found = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, 10))]
    return [entry.stat().st_size for entry in found if entry.exists()]


def aged(folder: Path, at_s: float) -> None:
    for entry in folder.iterdir():
        os.utime(entry, (at_s, at_s))


def test_a_full_file_is_put_aside_and_no_line_is_lost(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "log", SMALL)
    for number in range(5):
        file.append(b"%09d\n" % number)
    assert sizes(file.path) == [10, 20, 20]
    written = b"".join((tmp_path / name).read_bytes() for name in ("log.2", "log.1", "log"))
    assert written.split() == [b"%09d" % number for number in range(5)]


def test_its_owner_alone_reads_it(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "log", Rotation(most_bytes=4))
    for _ in range(2):
        file.append(b"line\n")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_what_is_young_stays_however_much_is_written_and_the_disk_has_an_end(tmp_path: Path) -> None:
    now_s = 1000.0
    file = RotatingFile(tmp_path / "log", SMALL, clock=lambda: now_s)
    for _ in range(10):
        file.append(LINE)
        aged(tmp_path, now_s)
    with pytest.raises(OSError, match="the oldest is not 100 s old"):
        file.append(LINE)
    assert sizes(file.path) == [20, 20, 20, 20, 20]


def test_what_is_old_goes_and_leaves_as_many_files_as_were_asked_for(tmp_path: Path) -> None:
    now_s = 1000.0
    file = RotatingFile(tmp_path / "log", SMALL, clock=lambda: now_s)
    for _ in range(10):
        file.append(LINE)
        aged(tmp_path, now_s)
    now_s = 1101.0
    file.append(LINE)
    assert sizes(file.path) == [10, 20, 20]
