"""Other people's routers and servers: each in an environment of its own, made on first use from the pins in peers/.

The environments are kept beside the stand-in models (~/.cache/tpu-serving/bench). A peer that can't be installed or does
not answer raises PeerError; the bench names it in its tables with the reason.
"""

import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks import accounting
from serving.simulation.cluster import cache_directory
from serving.simulation.ports import free_port

_PINS = Path(__file__).parent / "peers"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_POLL_S = 0.2
# Nothing that a shell may have set for another Ray, Serve or vLLM.
_NOT_INHERITED = ("RAY_", "VLLM_", "SERVING_", "PYTHONPATH")


KEY = f"sk-{secrets.token_hex(24)}"  # of this run


class PeerError(Exception):
    """Why a peer has no figures."""


@dataclass(frozen=True)
class Peer:
    """A router to put in front of engines. `command` gets their addresses, the model, a port and a folder."""

    name: str
    pins: str
    command: Callable[[Sequence[str], str, int, Path], list[str]]
    environment: tuple[tuple[str, str], ...] = ()


def _smg(engines: Sequence[str], _: str, port: int, __: Path) -> list[str]:
    return [
        *("smg", "launch", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"),
        *("--prometheus-port", str(free_port()), "--worker-urls", *engines),
    ]


def _vllm_router(engines: Sequence[str], _: str, port: int, __: Path) -> list[str]:
    return [
        *("vllm-router", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
        *("--prometheus-port", str(free_port()), "--worker-urls", *engines),
    ]


def _litellm(engines: Sequence[str], model: str, port: int, folder: Path) -> list[str]:
    each = [
        {
            "model_name": model,
            "litellm_params": {"model": f"openai/{model}", "api_base": f"{engine}/v1", "api_key": "none"},
        }
        for engine in engines
    ]
    config = folder / "litellm.yaml"
    settings = {"master_key": KEY}  # it does not start without
    config.write_text(json.dumps({"model_list": each, "general_settings": settings}))  # JSON is YAML
    return ["litellm", "--host", "127.0.0.1", "--port", str(port), "--config", str(config)]


ROUTERS = (
    Peer("smg", "smg.txt", _smg),
    Peer("vllm-router", "vllm-router.txt", _vllm_router),
    Peer(
        "litellm",
        "litellm.txt",
        _litellm,
        (
            ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
            ("HF_HUB_OFFLINE", "1"),  # it would look for a tokenizer to count with, at the first stream
        ),
    ),
)


def version(peer: Peer) -> str:
    """The pin of the peer itself."""
    pins = (line.split("==") for line in _packages(_PINS / peer.pins))
    return next(pin for name, pin in pins if name == peer.name)


def environment(pins: str) -> Path:
    """The environment with these pins, made if it is not there; raises PeerError with pip's last words."""
    wanted = _PINS / pins
    key = hashlib.sha256("\n".join([*_packages(wanted), sys.version]).encode()).hexdigest()[:8]
    home = cache_directory() / "bench" / f"{wanted.stem}-{key}"
    done = home / "installed"
    if done.exists():
        return home
    _run([sys.executable, "-m", "venv", "--clear", str(home)])
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    pip += ["--only-binary", ":all:", "--disable-pip-version-check"]
    # torch's CPU build is not on PyPI: from where pip is set up to find it, else from PyTorch's own index.
    for torch in (line for line in _packages(wanted) if line.startswith("torch==")):
        try:
            _run([*pip, torch])
        except PeerError:
            _run([*pip, "--index-url", _TORCH_INDEX, torch])
    _run([*pip, "-r", str(wanted)])
    done.touch()
    return home


def _packages(pins: Path) -> list[str]:
    return [line for line in pins.read_text().splitlines() if line and not line.startswith("#")]


@contextmanager
def started(
    name: str,
    home: Path,
    command: Sequence[str],
    port: int,
    *,
    log: Path,
    tag: str,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 60,
    ready: Callable[[str], bool] | None = None,
) -> Iterator[str]:
    """A peer's process, up and answering, in the environment `home`; yields its address. Every process of it ends with the block.

    Raises PeerError where it does not answer. `tag` is what its processes are found by.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_INHERITED)}
    process: subprocess.Popen[bytes] | None = None
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(home / "bin" / command[0]), *command[1:]],
                env=inherited
                | {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
                | {accounting.TAG: tag, "SPT_NOENV": "1"}
                | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + timeout_s
        while not (ready or answers)(address):
            if process.poll() is not None:
                raise PeerError(f"{name} ended at once: {_last_words(log)}")
            if time.monotonic() > deadline:
                raise PeerError(f"{name} does not answer within {timeout_s:.0f} s: {_last_words(log)}")
            time.sleep(_POLL_S)
        yield address
    finally:
        accounting.end(tag)
        if process:
            process.wait()


def chats(model: str) -> Callable[[str], bool]:
    """Whether a chat with this model is answered: a router may be up before it knows its engines."""

    def ready(address: str) -> bool:
        body = {"model": model, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}
        try:
            answer = httpx.post(
                f"{address}/v1/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {KEY}"},
                timeout=20,
            )
        except httpx.TransportError:
            return False
        return answer.is_success

    return ready


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=2).is_success
    except httpx.TransportError:
        return False


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said
        raise PeerError(f"{' '.join(command[:4])} failed: {(errors or ['no output'])[-1][:200]}")


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-2:])[:300] or "it said nothing"
