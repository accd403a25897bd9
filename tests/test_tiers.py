"""Modules of which a tier has no test are not imported, and no other is left out; those that borrow the cluster share a worker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiers import can_match

TESTS = Path(__file__).parent

QUICK = "not cluster and not engine and not slow"
UNIT = "pytestmark = pytest.mark.unit"
SLOW_CLUSTER = "pytestmark = [pytest.mark.cluster, pytest.mark.slow]"
BOTH = "@pytest.mark.unit\n@pytest.mark.slow\n@pytest.mark.http"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("expression", "modules"),
    [
        ("", {UNIT, SLOW_CLUSTER, BOTH}),
        ("unit and not slow", {UNIT, BOTH}),
        (QUICK, {UNIT, BOTH}),
        ("(cluster or engine) and not slow", {SLOW_CLUSTER}),
        ("slow", {SLOW_CLUSTER, BOTH}),
        ("engine", set()),
    ],
)
def test_a_module_is_left_out_if_the_expression_selects_none_of_its_tests(
    expression: str, modules: set[str]
) -> None:
    assert {module for module in (UNIT, SLOW_CLUSTER, BOTH) if can_match(expression, module)} == modules


@pytest.mark.unit
def test_a_module_whose_markers_stand_elsewhere_is_imported() -> None:
    assert can_match("unit", "from support.somewhere import pytestmark")


@pytest.mark.http
def test_modules_that_borrow_the_cluster_run_on_one_worker_and_first(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from support.tiers import BorrowersFirst\n"
        "def pytest_xdist_make_scheduler(config, log):\n"
        "    return BorrowersFirst(config, log)\n"
    )
    writes = (
        "import os, pathlib, pytest\n"
        "@pytest.mark.parametrize('number', range({count}))\n"
        "def test_it(number):{borrows}\n"
        "    with (pathlib.Path(__file__).parent / os.environ['PYTEST_XDIST_WORKER']).open('a') as log:\n"
        "        log.write('{name} ')\n"
    )
    for name, count in (("a", 9), ("b", 9), ("y", 2), ("z", 2)):
        borrows = "  # leases: Leases" if name in "yz" else ""
        (tmp_path / f"test_{name}.py").write_text(writes.format(count=count, borrows=borrows, name=name))
    subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist=loadfile", f"--rootdir={tmp_path}", tmp_path],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        check=True,
        timeout=300,
    )
    ran = sorted((tmp_path / worker).read_text().split() for worker in ("gw0", "gw1"))
    assert sorted([*ran[0], *ran[1]]) == ["a"] * 9 + ["b"] * 9 + ["y", "y", "z", "z"]
    (of_borrowers,) = (worker for worker in ran if "y" in worker)
    assert of_borrowers[:4] == ["y", "y", "z", "z"]
