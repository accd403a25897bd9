import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("project", deadline=None)  # the machine may be busy with more than this
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="module")
def short_directory() -> Iterator[Path]:
    """A folder with a short path: Ray's sockets live below it, and a socket's path ends at 107 bytes."""
    parent = Path(tempfile.mkdtemp(prefix="svt"))
    yield parent / "sim"
    shutil.rmtree(parent, ignore_errors=True)
