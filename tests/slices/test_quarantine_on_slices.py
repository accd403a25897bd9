"""A slice whose chips somebody holds, on three simulated slices."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from support.leases import Leases
from support.service import Service, service

from serving.cli.main import main

pytestmark = pytest.mark.cluster
BORROWS = "one chip, 3"


@contextmanager
def held(running: Service, slice_: str) -> Iterator[int]:
    """A process, given by its pid, that holds the chips of a slice's only host."""
    folder = running.cluster.directory / "chips" / f"{slice_}-0"
    script = f"kept = open({str(folder / '0')!r}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        yield holder.pid
        holder.kill()


@pytest.mark.slow
def test_a_slice_whose_chips_are_held_is_left_out_and_let_go_by_a_command(
    leases: Leases, capsys: pytest.CaptureFixture[str]
) -> None:
    one_chip = {"generation": "v6e", "topology": "1x1"}
    with service(leases, slices=3, engine="simulated", slice=one_chip, replicas=2) as running:
        used = {entry.slice for entry in running.serving()}
        (spare,) = {status.name for status in running.cluster.status()} - used
        with held(running, spare) as holder:
            running.cluster.kill_slice(min(used))  # the spare is all that is left
            (quarantined,) = running.until(
                lambda: httpx.get(f"{running.address}/status.json").json()["quarantined"], "a quarantine"
            )
            assert quarantined["slice"] == spare
            assert quarantined["failures"] == 2
            assert not quarantined["engine_only"]
            assert f"its chips are held: {running.cluster.directory}" in quarantined["reason"]
            assert f"by pid {holder} (" in quarantined["reason"]
            running.until(lambda: "PENDING" in running.groups(), "the replica to wait for another slice")
        address = running.cluster.address
        capsys.readouterr()
        assert main(["slices", "release", spare, "--address", address]) == 0
        (host,) = running.cluster._slices[spare].ips
        assert capsys.readouterr().out.startswith(f"{spare}: released; 2 failures on {host}, ")
        assert spare in {entry.slice for entry in running.until_serving(2)}
        assert httpx.get(f"{running.address}/status.json").json()["quarantined"] == []
        assert main(["slices", "release", spare, "--address", address]) == 1
        assert "no failure is known of slice" in capsys.readouterr().err
