import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving.slices.process_watch import descendants, first_dead

pytestmark = pytest.mark.http

WAITS = [sys.executable, "-c", "input()"]


def descriptors() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def waiting() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(WAITS, stdin=subprocess.PIPE)


async def test_a_killed_process_is_told_of_at_once_and_by_name_though_nobody_has_reaped_it() -> None:
    with waiting() as one, waiting() as other:
        watching = asyncio.create_task(first_dead({one.pid: "one", other.pid: "other"}))
        await asyncio.sleep(0)
        other.kill()
        assert await asyncio.wait_for(watching, 5) == f"other (pid {other.pid}) has ended"
        one.kill()


async def test_a_process_that_ended_before_anybody_looked_is_told_of_too() -> None:
    with waiting() as gone:
        gone.kill()
    assert await first_dead({gone.pid: "gone"}) == f"gone (pid {gone.pid}) has ended"


async def test_a_watch_that_is_given_up_leaves_no_descriptor() -> None:
    before = descriptors()
    with waiting() as one:
        watching = asyncio.create_task(first_dead({one.pid: "one"}))
        await asyncio.sleep(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        one.kill()
    assert descriptors() == before


def test_children_of_children_are_descendants() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as parent:
        while len(descendants(os.getpid())) < 2:
            pass
        assert parent.pid in descendants(os.getpid())
        for pid in descendants(parent.pid):
            os.kill(pid, 9)
        parent.kill()
