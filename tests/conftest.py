import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from support.leases import Leases

hypothesis.settings.register_profile("project", deadline=None)  # the machine may be busy with more than this
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="module")
def short_directory() -> Iterator[Path]:
    """A folder with a short path: Ray's sockets live below it, and a socket's path ends at 107 bytes."""
    parent = Path(tempfile.mkdtemp(prefix="svt"))
    yield parent / "sim"
    shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture(scope="session")
def leases() -> "Iterator[Leases]":
    """The run's cluster, for whoever borrows it."""
    from support.leases import Leases  # it imports Ray

    parent = Path(tempfile.mkdtemp(prefix="svt"))
    made = Leases(parent)
    yield made
    made.down()
    shutil.rmtree(parent, ignore_errors=True)
    print(f"\n{made.clusters} clusters and {made.hosts} hosts were started and lent {made.times} times")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that borrow slices come last, the same slices one after the other: the fewest hosts are started.

    Such a module says in BORROWS what it borrows; the order is for speed alone.
    """
    items.sort(key=lambda item: getattr(getattr(item, "module", None), "BORROWS", ""))
