"""`lock/image.txt` from uv's pylock: one line a package, with the hash and the name of the one wheel that the image takes.

`lock/compile-image.sh` calls it. The file name stands in a comment, so that a test sees which Python and system a wheel is
for; pip reads the version and the hash.
"""

import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

PYTHON = (3, 12)
# The newest glibc that a wheel may ask for. libtpu asks for 2.31; Debian 12, the older base of python:3.12-slim, has 2.36.
GLIBC = (2, 31)

_HEAD = """\
# Written by `make lock`: every package of the image, for CPython 3.12 on x86-64 Linux.
# torch and torchvision come from PyTorch's CPU index, everything else from PyPI.
"""


def tags() -> list[Tag]:
    """What the image's Python takes, the best first."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC[1], 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    return [
        *cpython_tags(PYTHON, platforms=platforms),
        *compatible_tags(PYTHON, "cp{}{}".format(*PYTHON), platforms),
    ]


def requirements(pylock: dict[str, Any]) -> str:
    """The requirements file of a parsed pylock.toml; raises LookupError for a package without a fitting wheel."""
    lines = [_line(package) for package in pylock["packages"]]
    return _HEAD + "".join(sorted(lines))


def _line(package: dict[str, Any]) -> str:
    order = {tag: place for place, tag in enumerate(tags())}
    fitting = []
    for wheel in package.get("wheels", []):
        file = wheel["url"].rpartition("/")[2].replace("%2B", "+")
        places = [order[tag] for tag in parse_wheel_filename(file)[3] if tag in order]
        if places:
            fitting.append((min(places), file, wheel["hashes"]["sha256"]))
    if not fitting:
        raise LookupError(
            f"{package['name']} {package['version']} has no wheel for CPython 3.12 on x86-64 Linux"
        )
    _, file, digest = min(fitting)
    return f"{package['name']}=={package['version']} --hash=sha256:{digest}  # {file}\n"


if __name__ == "__main__":
    sys.stdout.write(requirements(tomllib.loads(Path(sys.argv[1]).read_text())))
