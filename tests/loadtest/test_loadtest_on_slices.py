import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from serving.simulation.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def test_simulated_slices_are_loaded_and_judged_and_nothing_stays(tmp_path: Path) -> None:
    port = str(free_port())
    deployment = tmp_path / "llama.yaml"
    written = (ROOT / "deployments" / "llama.yaml").read_text()
    deployment.write_text(written.replace("port: 8000", f"port: {port}"))
    limits = tmp_path / "limits.yaml"
    limits.write_text(
        "slo: {ttft_ms: 5000, itl_ms: 500}\nthresholds: {failures: 0, goodput: 0.9, tokens_per_s: 1}"
    )
    report = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "loadtest/simulated.py", deployment, "--name", f"loadtest-{port}", "--html", report]
        + ["--rate", "4", "-t", "5s", "--thresholds", limits],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"held +tokens_per_s", done.stdout)
    assert "held: goodput" in report.read_text()
    left = [
        process for process in psutil.process_iter(["cmdline"]) if f"loadtest-{port}" in str(process.info)
    ]
    assert not left
