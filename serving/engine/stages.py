"""Pipeline stages on several hosts find one another by address.

tpu-inference 0.26 gives its worker an address of its own and of the stage before it, and both default to `localhost`:
vLLM's RayExecutorV2 passes none (upstream: tpu-inference#3498, vllm#54545). On two VMs stage 1 then dials itself. The
worker also takes the chips of its host for a row, `1,4,1`, where four chips of a VM are a square.
"""

import os
from typing import Any

from serving.environment import HOST_BOUNDS, STAGES


def install() -> None:
    """In a worker of a pipeline over several hosts, give every stage its addresses; elsewhere nothing."""
    if not (hosts := os.environ.get(STAGES, "")):
        return
    from tpu_inference.worker import tpu_worker  # noqa: PLC0415  only a worker of such a pipeline has need of it

    tpu_worker.PPConfig = _addressed(tpu_worker.PPConfig, hosts.split(","), os.environ[HOST_BOUNDS])


def _addressed(config: Any, hosts: list[str], bounds: str) -> Any:
    """PPConfig as the worker makes it, with the addresses of the stage's host and of the one before it."""

    def addressed(vllm_config: Any, rank: int, _ip: str, _previous_ip: str, stages: int) -> Any:
        made = config(vllm_config, rank, hosts[rank], hosts[max(rank - 1, 0)], stages)
        made.default_tpu_chips_per_process_bounds = bounds
        return made

    return addressed
