"""Ports that nobody else takes: of a simulation's head, and single ones for a YAML's front door."""

import contextlib
import random
import socket
from typing import NamedTuple, Self

# All are below the ports that the kernel hands out to anybody, of which Ray alone takes hundreds. Each simulation has a
# range for its head and Serve's servers; single ports are for a YAML's front door.
_FIRST_PORT, _PORTS, _PORT_RANGES = 12000, 100, 180
_SINGLE_PORTS = (30_000, 32_700)


class Ports(NamedTuple):
    """Ports of a simulation's head, by range: random ports would meet once in some hundred simulations."""

    control_store: int
    ray_client: int
    haproxy_metrics: int
    haproxy_stats: int
    fallback_http: int
    fallback_grpc: int
    first_router: int
    last_router: int

    @classmethod
    def of(cls, simulation: str) -> Self:
        """Those of a simulation, by its id."""
        first = _FIRST_PORT + int(simulation, 16) % _PORT_RANGES * _PORTS
        return cls._make([*range(first, first + 7), first + _PORTS - 1])


def free_port() -> int:
    """A port for a server that starts later; the kernel hands it to nobody meanwhile."""
    while not is_free(port := random.randint(*_SINGLE_PORTS)):
        continue
    return port


def is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("", port))
        return True
    return False
