import subprocess
import sys
from pathlib import Path

import pytest

from serving.simulation.host_environment import of_serve
from serving.simulation.ports import Ports

pytestmark = pytest.mark.http
DOCKERFILE = Path(__file__).parent.parent / "Dockerfile"


def test_hadolint_finds_nothing() -> None:
    program = Path(sys.executable).parent / "hadolint"
    ended = subprocess.run([program, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_hadolint_finds_what_is_wrong(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "hadolint"
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(DOCKERFILE.read_text().replace("rm -rf /var/lib/apt/lists/*", "true"))
    ended = subprocess.run([program, wrong], capture_output=True, text=True, check=False)
    assert "DL3009" in ended.stdout


def test_the_image_and_simulated_clusters_look_after_the_door_alike() -> None:
    name = "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"
    period = of_serve(Ports.of("abc"), Path("haproxy"))[name]
    assert f" {name}={period} " in DOCKERFILE.read_text()
