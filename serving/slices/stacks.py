"""Why a process hangs: the stacks of its threads and the last lines of its logs, asked from outside.

A process that registered has a thread that is asked through a pipe and writes the stack of every thread. It holds the GIL while it
writes, so no frame changes meanwhile. Where it gets no turn, a call in C keeps the GIL, and a signal follows: faulthandler's handler
needs no GIL. It comes second, for it ends a process whose other threads run Python: on frames that change as it reads them, one signal
in twenty was a segmentation fault.

The stacks go into an anonymous file of the process (memfd), which ends with it; whoever asks reads them, and opens the pipe, through
/proc. A process that has not registered gets no signal: it would die of it.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SIGNAL = signal.SIGUSR2  # neither Ray, vLLM, tpu-inference, JAX nor uvicorn's server uses it
_TURN_S = 1.0  # of Timings.stacks_s, in which a thread gets the GIL on a busy machine too
_QUESTION_BYTES = 8  # the length of the file when it was asked
_LOOK_S = 0.02
_QUIET_LOOKS = 3  # without growth after which a process has written all
_MOST_BYTES = 128 << 10  # of one process's stacks
_LAST_BYTES = 8 << 10  # of one log
_MOST_TASKS = 50
_REPORT_BYTES = 1 << 20
_REPORTS = 10
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits in the kernel",
    "T": "is stopped",
    "t": "is traced",
    "Z": "has ended",
}

_files: dict[int, FileIO] = {}  # by pid: a fork has its own


def register() -> None:
    """Have this process, and what it forks, write its stacks when it is asked."""
    if sys.platform != "linux" or os.getpid() in _files:
        return
    if not _files:
        os.register_at_fork(after_in_child=register)
    asked, _ = os.pipe()  # the other end stays open, or the thread would read an end
    file = _files[os.getpid()] = FileIO(os.memfd_create(f"{_name(os.getpid())}{asked}"), "w")
    faulthandler.register(SIGNAL, file)
    threading.Thread(target=_answer, args=(asked, file), name="stacks", daemon=True).start()


def _answer(asked: int, file: FileIO) -> None:
    """Write the stacks whenever that is asked, unless they came meanwhile: by a signal, or for somebody else."""
    while question := os.read(asked, _QUESTION_BYTES):
        if os.fstat(file.fileno()).st_size == int.from_bytes(question):
            faulthandler.dump_traceback(file)


def read(processes: Mapping[int, str], within_s: float) -> str:
    """The stacks of these processes of this host (name by pid), and the last lines of their logs; blocks."""
    began_s = time.monotonic()
    before = {pid: _asked(pid) for pid in processes}
    _wait_until_quiet(before, began_s + min(_TURN_S, within_s))
    silent = {pid: length for pid, length in before.items() if length is not None and _length(pid) == length}
    for pid in silent:
        _signal(pid)
    _wait_until_quiet(silent, began_s + within_s)
    of_processes = [_told(pid, name, before[pid]) for pid, name in processes.items()]
    return "\n\n".join([*of_processes, *(f"== {path}\n{last_lines(path)}" for path in _logs(processes))])


def is_registered(pid: int) -> bool:
    return _file(pid) is not None


def tasks(loop: asyncio.AbstractEventLoop) -> str:
    """What the tasks of an event loop wait for."""
    every = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    shown = [f"{task.get_name()}\n{_awaiting(task.get_coro())}" for task in every[:_MOST_TASKS]]
    return "\n".join([f"== {len(every)} tasks of the replica's event loop", *shown])


def last_lines(path: Path) -> str:
    """The end of a log, from the beginning of a line."""
    with path.open("rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _LAST_BYTES))
        end = log.read()
    _, cut, whole = end.partition(b"\n") if len(end) == _LAST_BYTES else (b"", b"\n", end)
    return (whole if cut else end).decode(errors="replace")


def write_report(folder: Path, name: str, text: str, at: float) -> Path:
    """Write `stacks-NAME-TIME.txt`, cut to its bound, and delete the oldest reports beyond theirs; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"stacks-{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(at))}.txt"
    path.write_bytes(text.encode()[:_REPORT_BYTES])
    reports = sorted(folder.glob("stacks-*.txt"), key=lambda report: report.stat().st_mtime)
    for old in reports[:-_REPORTS]:
        old.unlink(missing_ok=True)
    return path


def _name(pid: int) -> str:
    return f"tpu-serving-stacks-{pid}-"


def _file(pid: int) -> Path | None:
    """The anonymous file of a process that has registered, where its handler is in place."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if f"memfd:{_name(pid)}" in str(descriptor.readlink()):
                    return descriptor if _catches(pid) else None
    return None


def _pipe(file: Path) -> Path:
    """Where the process of this file is asked: the file's name ends with the pipe's number."""
    name, *_ = file.readlink().name.split()
    return file.with_name(name.rpartition("-")[2])


def _catches(pid: int) -> bool:
    (mask,) = _status(pid, "SigCgt")
    return bool(int(mask, 16) >> (SIGNAL - 1) & 1)


def _status(pid: int, key: str) -> list[str]:
    """The words behind a key of /proc/PID/status."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return line.split()[1:]
    return ["0"]


def _asked(pid: int) -> int | None:
    """Ask a process for its stacks; returns the length of its file before, None where it has not registered."""
    file = _file(pid)
    if file is None:
        return None
    with contextlib.suppress(OSError):
        length = file.stat().st_size
        with FileIO(os.open(_pipe(file), os.O_WRONLY | os.O_NONBLOCK), "w") as pipe:
            pipe.write(length.to_bytes(_QUESTION_BYTES))
        return length
    return None


def _signal(pid: int) -> None:
    if is_registered(pid):
        with contextlib.suppress(OSError):
            os.kill(pid, SIGNAL)


def _wait_until_quiet(before: Mapping[int, int | None], until_s: float) -> None:
    waiting = {pid: (length, 0) for pid, length in before.items() if length is not None}
    while waiting and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        for pid, (length, looks) in list(waiting.items()):
            now = _length(pid)
            if now is None or (now == length and looks == _QUIET_LOOKS):
                del waiting[pid]
            elif now == length and now > (before[pid] or 0):
                waiting[pid] = now, looks + 1
            else:
                waiting[pid] = now, 0


def _length(pid: int) -> int | None:
    file = _file(pid)
    with contextlib.suppress(OSError):
        return file.stat().st_size if file else None
    return None


def _told(pid: int, name: str, before: int | None) -> str:
    state = _STATES.get(_status(pid, "State")[0], "is gone")
    head = f"== {name} (pid {pid}), which {state}"
    if before is None:
        return f"{head}: it has not registered, so it writes no stacks"
    text = b""
    with contextlib.suppress(OSError):
        if file := _file(pid):
            with file.open("rb") as stacks:
                stacks.seek(before)
                text = stacks.read(_MOST_BYTES)
    return f"{head}\n{text.decode(errors='replace')}" if text else f"{head}: it wrote no stacks in time"


def _logs(pids: Iterable[int]) -> list[Path]:
    """The files that the processes write their output to, each once."""
    files: dict[Path, None] = {}
    for pid in pids:
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):
                path = Path(f"/proc/{pid}/fd/{descriptor}").readlink()
                if path.is_file():
                    files[path] = None
    return list(files)


def _awaiting(coroutine: Any) -> str:
    """Where a coroutine and those it waits for stand, the innermost last."""
    lines = []
    while coroutine is not None:
        frame: FrameType | None = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        code: CodeType | None = frame.f_code if frame else None
        if frame and code:
            lines.append(f"  {code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return "\n".join(lines)
