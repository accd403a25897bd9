"""`serving batch run` on real Serve and Ray Data: the run and a slice are killed, and every line has one result."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.batches import line
from support.leases import Leases
from support.service import MODEL, Service, service

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BORROWS = "one chip, 2"
LINES = 1500


@pytest.fixture
def running(leases: Leases) -> Iterator[Service]:
    with service(
        leases,
        slices=2,
        engine="simulated",
        slice={"generation": "v6e", "topology": "1x1"},
        replicas=1,
        router={"replicas": 2},
    ) as started:
        yield started


def begin(running: Service, folder: Path) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).parent / "serving"), "batch", "run", str(folder / "in.jsonl")]
    command += ["-o", str(folder / "out.jsonl"), "--model", MODEL, "--url", running.address]
    environment = {**os.environ, **running.cluster.environment, "RAY_ADDRESS": running.cluster.address}
    with (folder / "stderr").open("w") as stderr:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


def some(running: Service, run: subprocess.Popen[str], folder: Path, more: int) -> None:
    """Wait for results."""
    before = done(folder)
    try:
        running.until(lambda: done(folder) > before + more or run.poll() is not None, "results")
    except AssertionError:
        pytest.fail(f"no results: {(folder / 'stderr').read_text()}")


def done(folder: Path) -> int:
    out = folder / "out.jsonl"
    return len(out.read_bytes().splitlines()) if out.exists() else 0


def test_an_offline_run_that_is_killed_and_interrupted_goes_on_and_has_one_result_a_line(
    running: Service, tmp_path: Path
) -> None:
    texts = [line(f"r{at}", model="another", max_tokens=64) for at in range(LINES)]
    texts[700] = "{"
    (tmp_path / "in.jsonl").write_text("\n".join(texts))

    run = begin(running, tmp_path)
    some(running, run, tmp_path, 50)
    run.kill()
    assert run.wait() == -signal.SIGKILL, (tmp_path / "stderr").read_text()
    before = done(tmp_path)
    assert 50 < before < LINES

    run = begin(running, tmp_path)
    some(running, run, tmp_path, 50)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130
    said = f"{done(tmp_path)} of {LINES} lines have a result; the same command goes on from there."
    assert said in (tmp_path / "stderr").read_text()

    run = begin(running, tmp_path)
    some(running, run, tmp_path, 50)
    running.cluster.kill_slice(running.serving()[0].slice)
    most_bytes = 0
    while run.poll() is None:
        most_bytes = max(most_bytes, psutil.Process(run.pid).memory_info().rss)
        try:
            run.wait(0.5)
        except subprocess.TimeoutExpired:
            continue
    said, _ = run.communicate()
    assert run.returncode == 0, (tmp_path / "stderr").read_text()
    assert f"all {LINES} lines have a result in {tmp_path / 'out.jsonl'}, 1 of them failed" in said
    assert most_bytes < 600 << 20
    rows = [json.loads(row) for row in (tmp_path / "out.jsonl").read_text().splitlines()]
    answered = {row["custom_id"]: row["response"]["status_code"] for row in rows if row["response"]}
    assert answered == {f"r{at}": 200 for at in range(LINES) if at != 700}
    assert len(rows) == LINES
