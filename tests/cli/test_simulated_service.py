"""`serving sim run` as `make serve` calls it, on the example with two models: one slice of two hosts, one of a single chip."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from support.service import ROOT

from serving.simulation.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BIN = Path(sys.executable).parent


@contextmanager
def started(tmp_path: Path, name: str) -> Iterator[tuple["subprocess.Popen[str]", Path, str]]:
    """The command on a copy of the YAML with a free port: its process, what it prints, and the address."""
    port = free_port()
    deployment = tmp_path / "two-models.yaml"
    text = (ROOT / "deployments" / "two-models.yaml").read_text()
    deployment.write_text(text.replace("port: 8000", f"port: {port}"))
    shown = tmp_path / "shown.txt"
    with shown.open("w") as output:
        process = subprocess.Popen(
            [str(BIN / "serving"), "sim", "--name", name, "run", str(deployment)],
            cwd=ROOT,
            env=os.environ | {"COLUMNS": "160"},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield process, shown, f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def tagged(simulation_directory: str) -> list[str]:
    """Command lines of the processes whose environment says they belong to this simulation."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == simulation_directory:
                found.append(" ".join(process.cmdline())[:100])
        except (psutil.Error, OSError):
            continue
    return found


def test_two_models_serve_under_load_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    name = f"trial-{os.getpid()}"
    directory = f"/tmp/tpu-serving-{os.getuid()}/{name}"  # noqa: S108  where the command keeps it
    with started(tmp_path, name) as (process, shown, address):
        deadline = time.monotonic() + 240
        while "ready after" not in shown.read_text():
            assert process.poll() is None, shown.read_text()
            assert time.monotonic() < deadline, shown.read_text()
            time.sleep(0.5)
        text = shown.read_text()
        assert re.findall(r"✓ (.+?): [\d.]+ s", text) == [
            "stand-in model",
            "simulated slices",
            "Serve, slices and engines",
        ]
        assert "curl http" in text
        models = {card["id"]: card for card in httpx.get(f"{address}/v1/models").json()["data"]}
        assert models["qwen3-4b"]["slice"] == "v6e 1x1 (1 host x 1 chip)"
        for model in ("llama-3.1-8b-instruct", "qwen3-4b"):
            fields = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            answer = httpx.post(f"{address}/v1/chat/completions", json=fields, timeout=60)
            assert answer.json()["model"] == model, answer.text
        assert len(tagged(directory)) > 10
        load(address)
    assert tagged(directory) == []
    assert not Path(directory).exists()
    assert "ending every process" in shown.read_text()


def load(address: str) -> None:
    shown = subprocess.run(
        [str(BIN / "locust"), "-f", str(ROOT / "loadtest" / "locustfile.py"), "--headless"]
        + [
            "-u",
            "4",
            "-r",
            "4",
            "-t",
            "15s",
            "--host",
            address,
            "ShortChat",
        ],  # others ask for more than the stand-in takes
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert re.search(r"TTFT", shown.stderr + shown.stdout)
