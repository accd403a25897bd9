import gc
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from support import authorities
from support.tiers import NEEDS, BorrowersFirst, can_match

if TYPE_CHECKING:
    from support.leases import Leases

# No deadline, and no limit on how long inputs take to make: the machine may be busy with more than this, and the first draw of a
# clean checkout reads every character's category and the constants of every module of ours (40 s were seen). The same examples in
# every run, so that a change alone can make a test fail; `--hypothesis-profile=search` looks for new ones.
_UNHURRIED: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("project", **_UNHURRIED, derandomize=True)
hypothesis.settings.register_profile("search", **_UNHURRIED, max_examples=1000)
hypothesis.settings.load_profile("project")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray would write a token to the home of whoever tests
# A package that vLLM's API server imports raises the root logger and its handlers to this level, pytest's too, for the rest of the run.
os.environ["SAGEMAKER_CONTAINER_LOG_LEVEL"] = "WARNING"


@pytest.fixture(scope="module")
def short_directory() -> Iterator[Path]:
    """A folder with a short path: Ray's sockets live below it, and a socket's path ends at 107 bytes."""
    parent = Path(tempfile.mkdtemp(prefix="svt"))
    yield parent / "sim"
    shutil.rmtree(parent, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--begin-within",
        type=float,
        metavar="SECONDS",
        help="after which no further test begins; those left are skipped, and listed as such",
    )


def pytest_configure(config: pytest.Config) -> None:
    within = config.getoption("--begin-within")
    config.stash[_END] = float("inf") if within is None else time.monotonic() + within
    # Who only hands tests out leaves its workers what they may have to find again.
    if config.getoption("dist", "no") == "no":
        authorities.forget()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() >= item.config.stash[_END]:
        pytest.skip(f"the run's time was up before {item.nodeid}")


_END = pytest.StashKey[float]()
_LEASES = pytest.StashKey["Leases"]()


@pytest.fixture(scope="session")
def leases(request: pytest.FixtureRequest) -> "Iterator[Leases]":
    """The run's cluster, for whoever borrows it."""
    from support.leases import Leases  # it imports Ray

    parent = Path(tempfile.mkdtemp(prefix="svt"))
    made = request.config.stash[_LEASES] = Leases(parent)
    yield made
    made.end()
    shutil.rmtree(parent, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if made := config.stash.get(_LEASES, None):
        terminalreporter.line(
            f"lent {made.times} times: {made.clusters} clusters, {made.hosts} hosts started"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Nobody is lent a cluster under which a test failed."""
    report = yield
    if report.failed and (made := item.config.stash.get(_LEASES, None)):
        made.spoilt = True
    return report


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module without a test for `-m` is not imported."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return None if can_match(config.getoption("markexpr"), collection_path.read_text()) else True


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> BorrowersFirst | None:
    return BorrowersFirst(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported here stays to the end: Python need not look for garbage in it, now or after each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clusters, engines and compiles come first, what takes seconds last: workers end at about the same time.

    Modules that borrow the same slices, which they say in BORROWS, follow each other: the fewest hosts are started. The order is for
    speed alone.
    """
    for item in items:
        if not any(item.get_closest_marker(marker) for marker in NEEDS):
            raise pytest.UsageError(f"{item.nodeid} says by no marker what it needs: {', '.join(NEEDS)}")
    items.sort(
        key=lambda item: (not _takes_long(item), getattr(getattr(item, "module", None), "BORROWS", ""))
    )


def _takes_long(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(marker) for marker in ("cluster", "engine", "compiler"))
