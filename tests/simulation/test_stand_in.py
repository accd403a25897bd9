"""The stand-in model where there is no room for it."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.planning.shapes import shape_of
from serving.simulation import stand_in

pytestmark = [pytest.mark.engine, pytest.mark.slow]
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture
def little_room() -> Iterator[None]:
    """No file of this process may have more than a megabyte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("little_room")
def test_a_stand_in_that_finds_no_room_is_told_as_the_disk_s_fault_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"):
        stand_in.ensure(shape_of(LLAMA, None, lambda _: None), tmp_path)
    assert not list((tmp_path / "stand-in").iterdir())
