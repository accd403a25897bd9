"""Networks of simulated hosts, without Ray: who reaches whom, and what is left afterwards."""

import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import until

from serving.errors import SimulationError
from serving.simulation.network import LOOPBACK, NAMESPACES, Loopback, Namespaces, best, network

pytestmark = pytest.mark.http
SERVER = "import socket, sys; server = socket.create_server((sys.argv[1], 7000)); print(flush=True); server.accept()"
CLIENT = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 1)"


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    """Two hosts of one slice."""
    if best() == LOOPBACK:
        pytest.skip("namespaces need root and iproute2")
    while not (
        made := Namespaces(uuid.uuid4().hex[:12])
    ).free():  # there are 64 networks for all who test here
        continue
    try:
        made.up()
        made.add(1, 0)
        made.add(1, 1)
        yield made
    finally:
        made.down()


def reaches(hosts: Namespaces, host: int, address: str) -> bool:
    command = [*hosts.command(1, host), sys.executable, "-c", CLIENT, address]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Listening:
    """A server on a host that takes one connection."""

    def __init__(self, hosts: Namespaces, host: int, address: str) -> None:
        command = [*hosts.command(1, host), sys.executable, "-c", SERVER, address]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def __enter__(self) -> None:
        assert self._process.stdout
        assert self._process.stdout.readline()

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_a_neighbour_is_found_by_its_address_and_not_as_localhost(hosts: Namespaces) -> None:
    with Listening(hosts, 0, "127.0.0.1"):
        assert not reaches(hosts, 1, "127.0.0.1")
    with Listening(hosts, 0, hosts.ip(1, 0)):
        assert reaches(hosts, 1, hosts.ip(1, 0))


def test_the_head_reaches_a_host_and_a_host_the_head(hosts: Namespaces) -> None:
    with Listening(hosts, 0, hosts.ip(1, 0)):
        socket.create_connection((hosts.ip(1, 0), 7000), 5).close()
    with socket.create_server((hosts.head_ip, 7000)):
        assert reaches(hosts, 1, hosts.head_ip)


def test_a_hosts_own_name_is_its_own_address(hosts: Namespaces) -> None:
    ask = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    told = subprocess.run(
        [*hosts.command(1, 1), sys.executable, "-c", ask], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == hosts.ip(1, 1)


def test_a_cut_cable_stops_all_packets_until_the_host_is_made_anew(hosts: Namespaces) -> None:
    hosts.cut(1, 1)
    with socket.create_server((hosts.head_ip, 7000)):
        assert not reaches(hosts, 1, hosts.head_ip)
        hosts.add(1, 1)
        until(lambda: reaches(hosts, 1, hosts.head_ip), "the new cable to carry")


def test_a_host_is_made_anew_while_the_kernel_still_has_something_of_the_old_one(hosts: Namespaces) -> None:
    with Listening(hosts, 0, hosts.ip(1, 0)):  # it keeps the old namespace there
        hosts.add(1, 0)
        with Listening(hosts, 0, hosts.ip(1, 0)):
            assert reaches(hosts, 1, hosts.ip(1, 0))


def test_nothing_is_left_of_a_network_that_ended(hosts: Namespaces) -> None:
    assert not hosts.free()
    hosts.down()
    assert hosts.free()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert hosts.command(1, 0)[-1] not in listed
    hosts.up()
    hosts.down()


def test_on_the_loopback_hosts_have_addresses_and_no_cables() -> None:
    shared = network("loopback", "0")
    assert isinstance(shared, Loopback)
    assert (shared.ip(1, 0), shared.ip(1, 251), shared.command(1, 0)) == ("127.77.1.1", "127.77.2.2", [])
    with pytest.raises(SimulationError, match="have no cable to cut"):
        shared.cut(1, 0)


def test_without_iproute2_a_network_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        SimulationError, match=r"failed: No such file or directory; .* need root and iproute2"
    ):
        Namespaces("0" * 12).up()


def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(
        SimulationError, match=f"no network is named 'wires'; there are {NAMESPACES}, {LOOPBACK}"
    ):
        network("wires", "0")


def test_a_container_that_may_not_enter_namespaces_is_left_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (tmp_path / "ip").write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        f'add) /bin/mkdir {made}/"$3";;\n'
        f'delete) /bin/rmdir {made}/"$3";;\n'
        "*) echo 'mount of /sys failed' >&2; exit 1;;\n"
        "esac\n"
    )
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert best() == LOOPBACK
    assert list(made.iterdir()) == []
