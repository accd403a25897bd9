"""The environment variables that our processes hand to each other, and the one place that writes any.

A simulated host is told so by its environment, as a TPU VM is told its name and worker id by GKE's webhook.
"""

import os
from collections.abc import Mapping

SIMULATION = "SERVING_SIMULATION"
HOST = "SERVING_SIMULATION_HOST"
CACHE = "SERVING_SIMULATION_CACHE"
ENGINE = "SERVING_SIMULATION_ENGINE"  # vllm, or simulated: an engine without a model, only its timing
STARTUP = (
    "SERVING_SIMULATION_STARTUP"  # how long the simulated engine takes to start, as download=20,compile=90
)
CHIPS = "SERVING_SIMULATION_CHIPS"  # a folder with a file a chip, which a simulated host has in place of /dev/vfio
COMPILER = "SERVING_COMPILER"  # of a compile process: it has tpu-inference's platform, and no chips
REPLICA = "SERVING_REPLICA"  # of the engine's processes: whose they are
OWNER = "SERVING_REPLICA_PID"
STAGES = "SERVING_STAGE_HOSTS"  # of a pipeline over several hosts: their addresses by rank, with commas
HOST_BOUNDS = "SERVING_HOST_BOUNDS"  # how a host's chips lie, as libtpu writes it: 2,2,1


def is_simulated() -> bool:
    """Whether this process runs on a simulated TPU host."""
    return HOST in os.environ and os.environ.get("JAX_PLATFORMS") == "cpu"


def write(variables: Mapping[str, str | None]) -> None:
    """Set variables of this process, and so of those it starts; None unsets one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
