from pathlib import Path

import pytest

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
