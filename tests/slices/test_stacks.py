import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from serving.slices import stacks

pytestmark = pytest.mark.http

LONG_S = 30  # a busy machine; a process that writes takes milliseconds
REGISTERED = "from serving.slices import stacks; stacks.register()"
# PyDLL keeps the GIL: no other thread of the process ever runs again.
IN_C = """
import ctypes
def waits_in_c():
    print("hangs now", flush=True)
    while True:
        ctypes.PyDLL(None).sleep(1000)
waits_in_c()
"""
IN_PYTHON = """
def turns_in_python():
    print("hangs now", flush=True)
    while True:
        pass
turns_in_python()
"""
BUSY = """
import threading
def deep(left):
    return left and deep(left - 1)
def calls():
    while True:
        for depth in range(50):
            deep(depth)
        for made in [eval("lambda: 1") for _ in range(5)]:
            made()
for _ in range(3):
    threading.Thread(target=calls, daemon=True).start()
print("hangs now", flush=True)
threading.Event().wait()
"""
FORKED = """
import os, signal
def waits():
    print(os.getpid(), "is there", flush=True)
    signal.pause()
if os.fork() == 0:
    while True:
        waits()
print("hangs now", flush=True)
os.wait()
"""


@contextmanager
def running(script: str, log: Path) -> Iterator[psutil.Process]:
    with log.open("wb") as output, subprocess.Popen([sys.executable, "-c", script], stdout=output) as process:
        try:
            while b"hangs now" not in log.read_bytes():
                assert process.poll() is None
            yield psutil.Process(process.pid)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("script", "where"), [(IN_C, "in waits_in_c"), (IN_PYTHON, "in turns_in_python")], ids=["c", "python"]
)
def test_a_process_that_hangs_shows_where_and_its_last_lines_and_lives_on(
    script: str, where: str, tmp_path: Path
) -> None:
    with running(REGISTERED + script, tmp_path / "log") as process:
        for _ in range(2):
            told = stacks.read({process.pid: "EngineCore"}, LONG_S)
            assert told.startswith(f"== EngineCore (pid {process.pid}), which ")
            assert told.count(where) == 1
            assert told.endswith(f"== {tmp_path / 'log'}\nhangs now\n")
        assert process.is_running()
        assert process.status() != psutil.STATUS_ZOMBIE


def test_a_process_whose_threads_run_lives_on_however_often_it_is_asked(tmp_path: Path) -> None:
    """As a start that is only late does. Of signals it died, of one in twenty."""
    with running(REGISTERED + BUSY, tmp_path / "log") as process:
        for _ in range(60):
            assert "in calls" in stacks.read({process.pid: "EngineCore"}, LONG_S)
        assert process.status() != psutil.STATUS_ZOMBIE


def test_a_process_without_a_handler_is_not_signalled_which_would_end_it(tmp_path: Path) -> None:
    with running(IN_PYTHON, tmp_path / "log") as process:
        told = stacks.read({process.pid: "worker"}, LONG_S)
        assert "it has not registered, so it writes no stacks" in told
        assert "hangs now" in told
        assert process.status() != psutil.STATUS_ZOMBIE


def test_a_stopped_process_is_called_stopped(tmp_path: Path) -> None:
    with running(REGISTERED + IN_PYTHON, tmp_path / "log") as process:
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            pass
        told = stacks.read({process.pid: "worker"}, 0.1)
        assert f"worker (pid {process.pid}), which is stopped: it wrote no stacks in time" in told


def test_a_fork_writes_its_own_stacks(tmp_path: Path) -> None:
    with running(REGISTERED + FORKED, tmp_path / "log") as parent:
        while not (children := parent.children()):
            pass
        child = children[0].pid
        while f"{child} is there\n" not in (tmp_path / "log").read_text():
            pass
        assert stacks.is_registered(child)
        told = stacks.read({parent.pid: "parent", child: "child"}, LONG_S)
        os.kill(child, signal.SIGKILL)
    of_parent, _, of_child = told.partition("== child")
    assert "waits" not in of_parent
    assert "in waits" in of_child


def test_a_process_that_is_gone_is_no_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert "is gone: it has not registered" in stacks.read({process.pid: "worker"}, LONG_S)


async def test_tasks_show_what_they_wait_for_through_all_that_they_called() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner()

    task = asyncio.create_task(outer(), name="the one that hangs")
    await asyncio.sleep(0)
    told = stacks.tasks(asyncio.get_running_loop())
    task.cancel()
    _, _, of_task = told.partition("the one that hangs\n")
    functions = [line.rpartition(".")[2] for line in of_task.splitlines()]
    assert functions[:3] == ["outer", "inner", "wait"]


def test_only_the_end_of_a_log_is_kept_from_the_beginning_of_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(10_000)))
    last = stacks.last_lines(log)
    assert len(last) <= 8 << 10
    assert last.startswith("line ")
    assert last.endswith("line 9999\n")
    log.write_text("short")
    assert stacks.last_lines(log) == "short"


def test_reports_are_bounded_in_size_and_number(tmp_path: Path) -> None:
    for second in range(15):
        path = stacks.write_report(tmp_path, "slice-0", "x" * (2 << 20), at=second)
        os.utime(path, (second, second))
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert len(kept) == 10
    assert kept[-1] == "stacks-slice-0-19700101-000014.txt"
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {1 << 20}
