"""What the folders promise: pure modules load without a cluster, a clock or a socket, and one place writes the environment."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
(PURE,) = (contract for contract in CONTRACTS if contract["name"].startswith("Pure:"))
FORBIDDEN = [*PURE["forbidden_modules"], "threading", "subprocess"]
# What pure modules may use, with all that these load themselves.
ALLOWED = (
    "pydantic",
    "pydantic.dataclasses",
    "yaml",
    "jiter",
    "hashlib",
    "json",
    "secrets",
    "statistics",
    "difflib",
)
LOAD = f"""
import importlib, pkgutil, sys
for name in {ALLOWED}:
    importlib.import_module(name)
import pydantic
type("Warm", (pydantic.BaseModel,), {{"__annotations__": {{"x": int}}}})(x=1)
for name in {FORBIDDEN}:
    sys.modules[name] = None
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), name + "."):
        importlib.import_module(found.name)
"""


def test_every_pure_module_loads_where_nothing_impure_can_be_imported() -> None:
    command = [sys.executable, "-c", LOAD, *PURE["source_modules"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_module_that_calls_itself_pure_stands_in_the_contract() -> None:
    beyond = [
        name for name, text in _docstrings() if re.search(r"\bPure[.;:]|\bPure,", text) and not _listed(name)
    ]
    assert not beyond


def _docstrings() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "serving").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.get_docstring(ast.parse(path.read_text())) or ""


def _listed(name: str) -> bool:
    return any(f"{name}.".startswith(f"{pure}.") for pure in PURE["source_modules"])


def test_the_environment_is_written_in_one_place() -> None:
    writers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "serving").rglob("*.py")
        if any(map(_writes_the_environment, ast.walk(ast.parse(path.read_text()))))
    }
    assert writers == {"serving/environment.py"}


def _writes_the_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        return any("os.environ" in ast.unparse(target) for target in targets)
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return called in {"os.putenv", "os.environ.update", "os.environ.pop", "os.environ.setdefault"}


def test_production_code_imports_nothing_of_the_simulation() -> None:
    importers = {
        path.relative_to(ROOT / "serving").parts[0]
        for path in (ROOT / "serving").rglob("*.py")
        if "serving.simulation" in path.read_text() and "simulation" not in path.parts
    }
    assert importers <= {"app.py", "cli", "compiler"}
