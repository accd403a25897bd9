import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from support.servers import until

from benchmarks import accounting, peers

pytestmark = pytest.mark.http

PINS = sorted((Path(peers.__file__).parent / "peers").glob("*.txt"))
HOME = Path(sys.prefix)


@pytest.mark.parametrize("pins", PINS, ids=lambda path: path.stem)
def test_every_package_of_a_peer_is_pinned(pins: Path) -> None:
    lines = [line for line in pins.read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all(name and pin for name, _, pin in (line.partition("==") for line in lines))
    # PyPI's builds of these are for CUDA and break transformers beside torch's CPU build.
    assert not {"torchvision", "torchaudio", "torchcodec"} & {line.split("==")[0] for line in lines}


def test_every_router_has_pins_with_its_own_version() -> None:
    assert all(peers.version(peer).count(".") >= 2 for peer in peers.ROUTERS)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("raise SystemExit('no such engine')", "ended at once: no such engine"),
        ("import time; print('loading', flush=True); time.sleep(60)", "does not answer within 1 s: loading"),
    ],
)
def test_a_peer_that_does_not_come_up_is_told_with_its_last_words(
    tmp_path: Path, script: str, why: str
) -> None:
    tag = uuid.uuid4().hex
    with (
        pytest.raises(peers.PeerError, match=f"^smg {why}"),
        peers.started("smg", HOME, ["python", "-c", script], 1, log=tmp_path / "log", tag=tag, timeout_s=1),
    ):
        pass
    assert not accounting.of_bench(tag)


def test_an_environment_that_can_not_be_made_tells_pips_last_error() -> None:
    script = "import sys; print('ERROR: No matching distribution found for smg'); print('bye'); sys.exit(1)"
    with pytest.raises(peers.PeerError, match=r"ERROR: No matching distribution found for smg$"):
        peers._run([sys.executable, "-c", script])


def test_processes_are_found_and_ended_with_what_they_started() -> None:
    tag = uuid.uuid4().hex
    script = f"import subprocess; subprocess.run(['{sys.executable}', '-c', 'import time; time.sleep(60)'])"
    with subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {accounting.TAG: tag}, start_new_session=True
    ):
        until(lambda: len(accounting.of_bench(tag)) == 2, "both run")
        roles = accounting.by_role(accounting.of_bench(tag), "smg")
        assert accounting.pss_bytes(roles)["smg"] > 2**20
        assert accounting.cpu_s(roles)["smg"] >= 0
        accounting.end(tag)
    assert not accounting.of_bench(tag)


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("haproxy -W -f /tmp/haproxy.cfg", "HAProxy"),
        ("ray::ServeReplica:llama:router", "router replica"),
        ("ray::ServeReplica:default:OpenAiIngress", "router replica"),
        ("ray::ServeReplica:llama:llama-3.1-8b-instruct", "engine's replica (HTTP)"),
        ("VLLM::EngineCore", "EngineCore"),
        ("ray::ProxyActor", "Serve's Python proxy"),
        ("ray::ServeController", "Serve controller"),
        ("raylet --java_worker_command=io.ray.runtime.runner.worker.DefaultWorker", "Ray and the rest"),
        ("VLLM::Worker", "engine workers"),
    ],
)
def test_processes_are_told_apart_by_their_command_lines(command: str, role: str) -> None:
    assert accounting.role(command) == role
