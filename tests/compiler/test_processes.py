import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.servers import until

from serving.compiler import processes
from serving.compiler.records import Job

pytestmark = pytest.mark.http
LLAMA = str(Path(__file__).parents[2] / "deployments" / "llama-70b-v6e-8.yaml")


def test_a_process_whose_time_is_up_is_ended_and_named(tmp_path: Path) -> None:
    job = Job(LLAMA, "llama-3.3-70b-instruct", "v6e", "/nowhere")
    outcome = processes.run(
        job, tmp_path / "log", lambda _event: None, limit_s=0.01, running=processes.Running()
    )
    assert outcome.built is None
    assert outcome.reason == "not done within 0.01 s; --timeout raises the limit"


def test_a_process_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "missing.yaml"), "m", "v6e", "/nowhere")
    outcome = processes.run(
        job, tmp_path / "log", lambda _event: None, limit_s=120, running=processes.Running()
    )
    assert outcome.built is None
    assert "missing.yaml" in outcome.reason


def test_what_is_ended_before_it_starts_does_not_run_on(tmp_path: Path) -> None:
    running = processes.Running()
    running.end()
    job = Job(LLAMA, "llama-3.3-70b-instruct", "v6e", "/nowhere")
    outcome = processes.run(job, tmp_path / "log", lambda _event: None, limit_s=600, running=running)
    assert "SIGKILL" in outcome.reason


def test_a_killed_command_leaves_no_compile_process(tmp_path: Path) -> None:
    process, endless = tmp_path / "process", tmp_path / "endless.yaml"
    os.mkfifo(endless)  # who reads it waits for ever
    command = f"""
import os, pathlib, threading
from serving.compiler import processes
from serving.compiler.records import Job
class Told(processes.Running):
    def add(self, group):
        pathlib.Path({str(process)!r}).write_text(str(group))
        threading.Timer(0.5, os.kill, (os.getpid(), 9)).start()
job = Job({str(endless)!r}, "llama", "v6e", "/nowhere")
processes.run(job, pathlib.Path({str(tmp_path / "log")!r}), print, limit_s=600, running=Told())
"""
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == -9
    left = Path("/proc") / process.read_text()
    until(lambda: not left.exists(), "the compile process ends")
