"""Starts compile processes, follows their events and ends them with everything they started."""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import environment
from serving.compiler.records import Built, Compiled, Job
from serving.errors import CompileError

# The engine once it is built, or a program's place in its ledger with its state: lowering, compiling, or what became of it.
Event = Built | tuple[int, str]
OnEvent = Callable[[Event], None]
_ENGINE = ("vllm", "tpu_inference", "jax")
_TAIL_LINES = 3  # of a dead process's log
# What would make a process another kind of host, or change what it compiles.
_UNSET = (environment.HOST, "XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_MULTIHOST_BACKEND", "MODEL_IMPL_TYPE")
_ENVIRONMENT = {
    environment.COMPILER: "1",
    "JAX_PLATFORMS": "cpu",  # the topology's chips are no backend
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",  # Ray forwards what is in /tmp/tpu_logs as the log of every TPU host of this machine
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MULTIPROCESS_DP": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # several compile; libtpu would let one process at a time, for it holds no chip
    "VLLM_DISABLE_COMPILE_CACHE": "1",  # tpu-inference's, of programs that no process without a TPU can read
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",  # torchax leaves compiling to JAX; from torch 2.13 dynamo refuses to stand aside
}


@dataclass(frozen=True)
class Outcome:
    """What a process reported until it ended or its time was up; `built` is None where the engine can't be built."""

    built: Built | None
    compiled: tuple[Compiled, ...]
    reason: str = ""


class Running:
    """The processes of one command, so that all of them can be ended from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._ended = False

    def add(self, group: int) -> None:
        """Note a process group; it is ended at once where all were ended."""
        with self._lock:
            self._groups.add(group)
            if self._ended:
                _kill(group)

    def remove(self, group: int) -> None:
        """End a group, which may have ended by itself."""
        _kill(group)
        with self._lock:
            self._groups.discard(group)

    def end(self) -> None:
        """End all groups, and those that are yet to come."""
        with self._lock:
            self._ended = True
            for group in self._groups:
                _kill(group)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run(job: Job, log: Path, on_event: OnEvent, *, limit_s: float, running: Running) -> Outcome:
    """One process for a job. `limit_s` is the time for each of its steps: to build, and to compile a program."""
    built: Built | None = None
    compiled: list[Compiled] = []
    reason = ""
    began: int | None = None
    with _started(job, log, running) as (process, events):
        try:
            for event in _events(events, limit_s):
                match event["event"]:
                    case "built":
                        built = Built.of(event["engine"])
                        on_event(built)
                    case "lowering" | "compiling":
                        began = event["program"]
                        on_event((began, event["event"]))
                    case "done":
                        entry = Compiled.of(event["program"])
                        compiled.append(entry)
                        began = None
                        on_event((entry.index, f"{entry.outcome} in {entry.lower_s + entry.compile_s:.0f} s"))
                    case "unbuildable":
                        reason = event["reason"]
            process.wait()
            if process.returncode and not reason:
                reason = _last_words(process.returncode, log)
                compiled += [Compiled(began, "died", reason)] if began is not None else []
        except TimeoutError:
            reason = f"not done within {limit_s:g} s; --timeout raises the limit"
            compiled += [Compiled(began, "timed out", reason)] if began is not None else []
    return Outcome(built, tuple(compiled), reason)


@contextmanager
def _started(job: Job, log: Path, running: Running) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    reader, writer = os.pipe()
    variables = {name: value for name, value in os.environ.items() if name not in _UNSET}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "serving.compiler.worker", str(writer), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(writer,),
            start_new_session=True,
            env=variables | _ENVIRONMENT,
        )
    os.close(writer)
    running.add(process.pid)
    try:
        assert process.stdin is not None  # noqa: S101  asked for above
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(job.plain()).encode())
        yield process, reader
    finally:
        running.remove(process.pid)
        process.wait()
        os.close(reader)


def _events(descriptor: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """Events as they come, until the pipe is closed; raises TimeoutError where the next one takes too long."""
    rest = b""
    deadline = time.monotonic() + limit_s
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
            deadline = time.monotonic() + limit_s


def _last_words(status: int, log: Path) -> str:
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-_TAIL_LINES:]
    return f"the compile process ended with {how}: {' | '.join(lines)}"


def check_installed() -> None:
    """Raises CompileError where the engine that would be compiled is not installed."""
    missing = [name for name in _ENGINE if importlib.util.find_spec(name) is None]
    if missing:
        raise CompileError(f"{', '.join(missing)}: not installed; `make install` brings the engine")
