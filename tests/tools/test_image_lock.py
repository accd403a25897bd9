from typing import Any

import pytest

from tools.image_lock import requirements

pytestmark = pytest.mark.unit


def package(name: str, *files: str) -> dict[str, Any]:
    """A package of a pylock.toml with these wheels, each with a hash of its own."""
    wheels = [
        {"url": f"https://host/{file}", "hashes": {"sha256": f"{place}" * 64}}
        for place, file in enumerate(files)
    ]
    return {"name": name, "version": "1.0", "wheels": wheels}


def lines(*packages: dict[str, Any]) -> list[str]:
    text = requirements({"packages": list(packages)})
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_the_best_of_several_wheels_is_taken() -> None:
    (line,) = lines(
        package(
            "a",
            "a-1.0-py3-none-any.whl",
            "a-1.0-cp312-cp312-manylinux_2_17_x86_64.whl",
            "a-1.0-cp312-cp312-manylinux_2_28_x86_64.whl",
        )
    )
    assert line == f"a==1.0 --hash=sha256:{'2' * 64}  # a-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"


def test_a_local_version_is_written_as_pip_reads_it() -> None:
    (line,) = lines(package("torch", "torch-1.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl"))
    assert line.endswith("# torch-1.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl")


@pytest.mark.parametrize(
    "file",
    [
        "a-1.0-cp311-cp311-manylinux_2_17_x86_64.whl",
        "a-1.0-cp312-cp312-manylinux_2_17_aarch64.whl",
        "a-1.0-cp312-cp312-manylinux_2_34_x86_64.whl",
        "a-1.0-cp313-abi3-manylinux_2_17_x86_64.whl",
    ],
)
def test_a_package_without_a_fitting_wheel_is_refused(file: str) -> None:
    with pytest.raises(LookupError, match=r"a 1\.0 has no wheel for CPython 3\.12"):
        lines(package("a", file))
