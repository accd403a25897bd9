"""Where libtpu is: the package of the `compile` extra, or the folder that `make libtpu` fills.

The folder is not on Python's path, because vLLM takes a machine where it can import libtpu for a TPU host.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

from serving.errors import CompileError

VERSION = "0.0.43.2"  # tpu-inference 0.26 wants 0.0.43; this is its wheel for Python 3.11 and 3.12
FOLDER = Path("~/.cache/tpu-serving") / f"libtpu-{VERSION}"


def library(folder: Path = FOLDER) -> Path:
    """The path of libtpu.so; raises CompileError where there is none, or another version."""
    own = folder.expanduser() / "libtpu" / "libtpu.so"
    if own.exists():
        return own
    package = importlib.util.find_spec("libtpu")
    if package is None or package.origin is None:
        raise CompileError(
            f"libtpu {VERSION}, the TPU's compiler, is not installed: run `make libtpu` (215 MB, into {FOLDER}), or "
            "`pip install 'tpu-serving[compile]'`"
        )
    if (installed := importlib.metadata.version("libtpu")) != VERSION:
        raise CompileError(f"libtpu {installed} is installed, this engine wants {VERSION}: run `make libtpu`")
    return Path(package.origin).parent / "libtpu.so"
