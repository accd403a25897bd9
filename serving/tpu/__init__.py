"""What the hardware is: generations, topologies, and the names the outside gives them. Pure."""

from serving.tpu.generations import GENERATIONS
from serving.tpu.slices import (
    POD_TYPE_LABEL,
    POOL_LABEL,
    SLICE_LABEL,
    TOPOLOGY_LABEL,
    WORKER_LABEL,
    Slice,
    every_slice,
    pool_label,
    resolve,
    serves_pool,
)

__all__ = [
    "GENERATIONS",
    "POD_TYPE_LABEL",
    "POOL_LABEL",
    "SLICE_LABEL",
    "TOPOLOGY_LABEL",
    "WORKER_LABEL",
    "Slice",
    "every_slice",
    "pool_label",
    "resolve",
    "serves_pool",
]
