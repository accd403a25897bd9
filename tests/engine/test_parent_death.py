"""A killed replica takes EngineCore and what that forks with it, and so do their open files: the chips."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.servers import until

from serving.slices.preflight import chip_holders

pytestmark = pytest.mark.http

# A replica that starts an EngineCore; it opens a chip, forks two schedulers as tpu-inference does, and all of them wait.
REPLICA = """
import multiprocessing, os, sys, time

def scheduler():
    os.write(1, f"scheduler {os.getpid()}\\n".encode())
    time.sleep(600)

def engine_core(chip):
    from serving.engine.parent_death import follow
    follow()
    held = open(chip)
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        context.Process(target=scheduler).start()
    os.write(1, f"core {os.getpid()}\\n".encode())
    time.sleep(600)

if __name__ == "__main__":
    os.environ["SERVING_REPLICA_PID"] = str(os.getpid())
    multiprocessing.get_context("spawn").Process(target=engine_core, args=(sys.argv[1],)).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["replica", "core"])
def test_nothing_of_an_engine_outlives_what_started_it(killed: str, tmp_path: Path) -> None:
    chip, program = tmp_path / "0", tmp_path / "replica.py"
    chip.touch()
    program.write_text(REPLICA)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(program), str(chip)], stdout=subprocess.PIPE, text=True, env=environment
    ) as replica:
        assert replica.stdout
        pids: list[int] = []
        try:
            lines = [replica.stdout.readline().split() for _ in range(3)]
            pids = [int(pid) for _, pid in lines]
            core = next(int(pid) for name, pid in lines if name == "core")
            assert chip_holders([str(chip)])
            os.kill(replica.pid if killed == "replica" else core, signal.SIGKILL)
            until(lambda: not chip_holders([str(chip)]), "the chip is let go")
            until(lambda: not any(map(is_alive, pids)), "every process is gone")
        finally:
            replica.kill()
            for pid in filter(is_alive, pids):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
