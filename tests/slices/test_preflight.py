import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from serving.environment import CHIPS
from serving.simulation import chips
from serving.slices import preflight
from serving.slices.preflight import Facts, Needs, problems

GIB = 1 << 30
WELL = Facts({}, disk_bytes=100 * GIB, memory_bytes=64 * GIB, unreached={})
NEEDS = Needs("/models", disk_bytes=16 * GIB, memory_bytes=4 * GIB)


@pytest.mark.unit
def test_a_host_that_has_all_lacks_nothing() -> None:
    assert problems(NEEDS, WELL) == []
    assert problems(NEEDS, dataclasses.replace(WELL, disk_bytes=16 * GIB, memory_bytes=4 * GIB)) == []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        (
            {"holders": {"/dev/vfio/0": "pid 7 (python)"}},
            "its chips are held: /dev/vfio/0 by pid 7 (python); end that process",
        ),
        (
            {"closed": ("/dev/vfio/0",), "user": 1000},
            "its chips can't be opened by user 1000: /dev/vfio/0; see the devices' owner and mode; on GKE set gke.run_as_user: 0",
        ),
        (
            {"disk_bytes": 2 * GIB},
            "2.0 GiB of disk are free under /models, and the weights take 16.0 GiB; free some, or point HF_HOME at a larger disk",
        ),
        (
            {"memory_bytes": GIB // 2},
            "0.5 GiB of memory are available, and an engine's processes take 4.0 GiB; end what uses it, or raise the pod's limit",
        ),
        (
            {"unreached": {"10.0.0.2:700": "timed out"}},
            "it does not reach 10.0.0.2:700 (timed out); see network and firewall between the hosts",
        ),
    ],
)
def test_what_a_host_lacks_is_said_with_numbers_and_with_what_to_change(
    lacks: dict[str, object], said: str
) -> None:
    assert [str(problem) for problem in problems(NEEDS, dataclasses.replace(WELL, **lacks))] == [said]  # type: ignore[arg-type]


@pytest.mark.unit
def test_many_held_chips_are_not_all_listed() -> None:
    holders = {f"/dev/vfio/{chip}": "pid 7 (python)" for chip in range(8)}
    (problem,) = problems(NEEDS, dataclasses.replace(WELL, holders=holders))
    assert "/dev/vfio/2 by pid 7 (python) and 5 more" in problem.said


@pytest.mark.http
def test_a_process_that_holds_a_simulated_chip_is_found_and_a_free_one_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chips.make(tmp_path, 2)
    monkeypatch.setenv(CHIPS, str(tmp_path))
    assert preflight.look(Needs(), until_free_s=60).holders == {}
    holds = "from serving.simulation import chips; chips.hold(); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        held = preflight.look(Needs(), until_free_s=0).holders
        assert held.keys() == {str(tmp_path / "0"), str(tmp_path / "1")}
        assert all(said.startswith(f"pid {holder.pid} (") for said in held.values())
        holder.kill()
    assert preflight.look(Needs(), until_free_s=60).holders == {}


@pytest.mark.http
def test_a_chip_that_this_user_may_not_open_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chips.make(tmp_path, 1)
    (tmp_path / "1").symlink_to(tmp_path / "gone")  # closed to root too, as whom tests may run
    monkeypatch.setenv(CHIPS, str(tmp_path))
    facts = preflight.look(Needs(), until_free_s=0)
    assert (facts.closed, facts.user) == ((str(tmp_path / "1"),), os.getuid())


@pytest.mark.http
def test_a_peer_that_nobody_listens_at_is_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert preflight.look(Needs(peers=(("127.0.0.1", port),)), 0).unreached == {}
    (where,) = preflight.look(Needs(peers=(("127.0.0.1", port),)), 0).unreached
    assert where == f"127.0.0.1:{port}"


@pytest.mark.http
def test_the_disk_is_that_of_a_folder_which_is_not_there_yet(tmp_path: Path) -> None:
    there = os.statvfs(tmp_path)
    assert preflight.free_disk_bytes(str(tmp_path / "not" / "yet")) == pytest.approx(
        there.f_bavail * there.f_frsize, rel=0.2
    )


@pytest.mark.http
def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    whole = preflight.available_memory_bytes(tmp_path)
    assert whole > 0
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 100000\n")
    assert preflight.available_memory_bytes(tmp_path) == 400000
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.available_memory_bytes(tmp_path) == pytest.approx(whole, rel=0.5)
