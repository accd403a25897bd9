"""Networks of simulated hosts: namespaces of their own on a bridge, or addresses on the loopback that all share.

On a shared loopback a process that dials `localhost` for a neighbour finds it, which no two TPU VMs do. Namespaces show
that. They need root and Debian's iproute2; elsewhere the loopback has to do, and the code above is the same.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from serving.errors import SimulationError

LOOPBACK, NAMESPACES = "loopback", "namespaces"
NETWORKS = (NAMESPACES, LOOPBACK)
_HOSTS_FILES = Path("/etc/netns")  # where `ip netns exec` finds a namespace's own /etc/hosts
_CABLE = "eth0"


class Network(Protocol):
    """Addresses of a simulation's hosts, and how a process gets onto a host's network.

    `subnet` (1 to 254) is a slice's number and `host` one of its hosts, from 0.
    """

    head_ip: str

    def up(self) -> None: ...

    def ip(self, subnet: int, host: int) -> str: ...

    def add(self, subnet: int, host: int) -> None: ...

    def command(self, subnet: int, host: int) -> list[str]: ...

    def cut(self, subnet: int, host: int) -> None: ...

    def remove(self, subnet: int, host: int) -> None: ...

    def down(self) -> None: ...


HOSTS_A_SUBNET = 250
_SUBNETS = range(1, 255)


def free_subnet(taken: Iterable[tuple[int, int]], hosts: int) -> int:
    """The first subnet of a slice of so many hosts; raises SimulationError where there is no room for it.

    `taken` are first subnet and hosts of the slices that there are.
    """
    used = {number for first, count in taken for number in _subnets(first, count)}
    for subnet in _SUBNETS:
        wanted = _subnets(subnet, hosts)
        if wanted[-1] in _SUBNETS and used.isdisjoint(wanted):
            return subnet
    raise SimulationError(
        f"a simulation has room for {len(_SUBNETS)} slices, of {HOSTS_A_SUBNET} hosts each; start fewer, or others with --name"
    )


def _subnets(first: int, hosts: int) -> range:
    return range(first, first + (hosts - 1) // HOSTS_A_SUBNET + 1)


def _number(subnet: int, host: int) -> str:
    """The last two numbers of a host's address; a slice of more than HOSTS_A_SUBNET goes on in the next subnet."""
    return f"{subnet + host // HOSTS_A_SUBNET}.{host % HOSTS_A_SUBNET + 1}"


class Loopback:
    """An address of 127.77/16 a host."""

    head_ip = "127.77.0.1"

    def up(self) -> None:
        """Linux answers on every address of 127/8."""

    def ip(self, subnet: int, host: int) -> str:
        return f"127.77.{_number(subnet, host)}"

    def add(self, subnet: int, host: int) -> None:
        """As with `up`."""

    def command(self, subnet: int, host: int) -> list[str]:  # noqa: ARG002
        return []

    def cut(self, subnet: int, host: int) -> None:  # noqa: ARG002
        raise SimulationError(
            "hosts of this simulation share the machine's loopback and have no cable to cut; namespaces need root and "
            "iproute2 (--network namespaces)"
        )

    def remove(self, subnet: int, host: int) -> None:
        """Nothing was made."""

    def down(self) -> None:
        """Nothing was made."""


class Namespaces:
    """A network namespace a host, each with a cable to one bridge; the head is on the bridge itself.

    Addresses are of 100.64/10, which no public host has: a /16 a simulation, by its id.
    """

    def __init__(self, simulation: str) -> None:
        self._id = simulation
        self._bridge = f"sv{simulation}"  # 14 of the 15 characters that Linux takes
        self._prefix = f"100.{64 + int(simulation, 16) % 64}"
        self.head_ip = f"{self._prefix}.0.1"

    def free(self) -> bool:
        """Whether no interface of this machine has an address of this simulation's network."""
        interfaces = json.loads(_ip("-json", "address"))
        addresses = [address["local"] for entry in interfaces for address in entry.get("addr_info", ())]
        return not any(address.startswith(f"{self._prefix}.") for address in addresses)

    def up(self) -> None:
        """Make the bridge, with the head's address."""
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.head_ip}/16", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    def ip(self, subnet: int, host: int) -> str:
        return f"{self._prefix}.{_number(subnet, host)}"

    def add(self, subnet: int, host: int) -> None:
        """A namespace with a cable; one that is there already, with its cable cut or not, is made anew."""
        self.remove(subnet, host)
        name, address = self._name(subnet, host), self.ip(subnet, host)
        _ip("netns", "add", name)
        files = _HOSTS_FILES / name
        files.mkdir(parents=True, exist_ok=True)
        # Gloo dials what a host's own name resolves to.
        (files / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        near = self._near(subnet, host)
        _ip("link", "add", near, "type", "veth", "peer", "name", _CABLE, "netns", name)
        _ip("link", "set", near, "master", self._bridge, "up")
        _ip("-netns", name, "address", "add", f"{address}/16", "dev", _CABLE)
        _ip("-netns", name, "link", "set", "lo", "up")
        _ip("-netns", name, "link", "set", _CABLE, "up")

    def command(self, subnet: int, host: int) -> list[str]:
        return ["ip", "netns", "exec", self._name(subnet, host)]

    def cut(self, subnet: int, host: int) -> None:
        """Take the host's cable away: no packet comes or goes, and no connection is told."""
        _ip("-netns", self._name(subnet, host), "link", "set", _CABLE, "down")

    def remove(self, subnet: int, host: int) -> None:
        name = self._name(subnet, host)
        if name in _namespaces():
            _ip("netns", "delete", name)
        # The kernel takes both ends away with the namespace, but late: what a killed process had open stays for a while.
        if Path("/sys/class/net", self._near(subnet, host)).exists():
            with contextlib.suppress(SimulationError):  # it does so at this moment
                _ip("link", "delete", self._near(subnet, host))
        shutil.rmtree(_HOSTS_FILES / name, ignore_errors=True)

    def down(self) -> None:
        """Remove every namespace and the bridge; the processes in them have ended."""
        for name in _namespaces():
            if name.startswith(f"{self._bridge}-"):
                _ip("netns", "delete", name)
                shutil.rmtree(_HOSTS_FILES / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            _HOSTS_FILES.rmdir()
        if Path("/sys/class/net", self._bridge).exists():
            _ip("link", "delete", self._bridge)

    def _near(self, subnet: int, host: int) -> str:
        """The bridge's end of a host's cable."""
        return f"sv{self._id[:6]}{subnet:02x}{host:x}"

    def _name(self, subnet: int, host: int) -> str:
        return f"{self._bridge}-{subnet}-{host}"


def best() -> str:
    """Namespaces where this user may make them."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return LOOPBACK
    trial = f"sv-trial-{os.getpid()}"
    try:
        _ip("netns", "add", trial)
        try:
            _ip("netns", "exec", trial, "true")
        finally:  # a container may make namespaces and not mount their /sys
            _ip("netns", "delete", trial)
    except SimulationError:
        return LOOPBACK
    return NAMESPACES


def network(kind: str, simulation: str) -> Network:
    if kind not in NETWORKS:
        raise SimulationError(f"no network is named {kind!r}; there are {', '.join(NETWORKS)}")
    return Namespaces(simulation) if kind == NAMESPACES else Loopback()


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


def _ip(*words: str) -> str:
    """Run iproute2's `ip`; raises SimulationError with its own words."""
    try:
        return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = error.strerror if isinstance(error, OSError) else error.stderr.strip()
        raise SimulationError(
            f"`ip {' '.join(words)}` failed: {why}; networks of their own need root and iproute2, --network loopback does not"
        ) from None
