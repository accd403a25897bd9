"""The chips of simulated hosts."""

from pathlib import Path

import pytest

from serving.simulation import chips

pytestmark = pytest.mark.unit


def test_a_host_has_its_own_chips_alone_whoever_had_its_name_before(tmp_path: Path) -> None:
    folder = tmp_path / "slice-1-0"
    chips.make(folder, 4)
    chips.corrupt(folder)
    chips.make(folder, 1)
    assert [(chip.name, chip.read_bytes()) for chip in folder.iterdir()] == [("0", b"")]
