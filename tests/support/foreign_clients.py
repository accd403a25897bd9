"""Clients that other projects wrote, each in an environment of its own below ~/.cache, with the versions of one table.

They are not in the lock: they want other versions of what the service runs on. An environment is made by the first test that
needs it, and kept.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support import authorities

CACHE = Path("~/.cache/tpu-serving/clients").expanduser()
# What they bring with them is of this day.
UNTIL = "2026-11-20"
PYTHON = {
    "guidellm": ("guidellm==0.8.1",),
    "inference-perf": ("inference-perf==0.7.0",),
    "langchain": ("langchain-tests==1.1.9", "langchain-openai==1.7.3"),
    "litellm": ("litellm==1.106.2",),
    "llama-index": ("llama-index-llms-openai-like==0.8.1",),
}
WANTS = {"inference-perf": "3.12"}  # a client, to a Python other than this one
NODE = ("openai@7.55.0", "ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92")
_INSTALL_S = 900


def python_of(client: str) -> Path:
    """The Python of a client's environment. Skips where the machine has no Python of the version that the client wants."""
    packages = PYTHON[client]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if wanted := WANTS.get(client):
        version = _interpreter(wanted)
    with _environment(client, packages, version) as (folder, missing):
        if missing:
            _installed(
                "https://pypi.org/simple/pip/",
                [sys.executable, "-m", "uv", "venv", "-q", "--python", version, folder],
            )
            into = ["--python", folder / "bin" / "python", "--exclude-newer", UNTIL]
            _installed(
                "https://pypi.org/simple/pip/",
                [sys.executable, "-m", "uv", "pip", "install", "-q", *into, *packages],
            )
    return folder / "bin" / "python"


def node_modules() -> Path:
    """A folder whose scripts find the clients for Node. Skips where there is no Node."""
    if not (npm := shutil.which("npm")) or not shutil.which("node"):
        pytest.skip("no Node here: apt-get install nodejs npm")
    with _environment("node", NODE) as (folder, missing):
        if missing:
            folder.mkdir(parents=True)
            _installed(
                "https://registry.npmjs.org/openai",
                [npm, "install", "--silent", f"--before={UNTIL}", "--prefix", folder, *NODE],
            )
    return folder


def _interpreter(version: str) -> str:
    command = [f"python{version}", "-c", "import sys; print(sys.executable)"]
    chosen = {**os.environ, "PYENV_VERSION": version}  # where pyenv is what stands behind the name
    try:
        return subprocess.run(command, env=chosen, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"no Python {version} here, which the client wants")


@contextmanager
def _environment(client: str, *what: object) -> Iterator[tuple[Path, bool]]:
    """A client's folder, by what is in it, and whether it is still to be made; one process at a time."""
    digest = hashlib.sha256(repr((what, UNTIL)).encode()).hexdigest()[:10]
    folder = CACHE / f"{client}-{digest}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{client}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder.with_suffix(".made")
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            yield folder, True
            made.touch()
        else:
            yield folder, False


def _installed(index: str, command: list[str | Path]) -> None:
    """Run a command that loads packages. Skips where their index can't be reached, and fails for any other reason."""
    with authorities.known():
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
        if done.returncode:
            try:
                httpx.head(index, timeout=20, follow_redirects=True).raise_for_status()
            except httpx.HTTPError as error:
                pytest.skip(f"{index} can't be reached to install the client: {error}")
            pytest.fail(f"{command} failed: {done.stdout}{done.stderr}")
