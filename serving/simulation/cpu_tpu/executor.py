"""tpu-inference's Ray executor on a machine that carries many hosts."""

import os

import ray
from tpu_inference.executors.ray_distributed_executor_v2 import RayDistributedExecutorV2

from serving.simulation.cpu_tpu import waiting

waiting.install()


class SimulatedRayExecutor(RayDistributedExecutorV2):  # type: ignore[misc]
    """Joins Ray as its own host: where several Ray nodes share a machine, a driver would join the head instead."""

    def _init_executor(self) -> None:
        if not ray.is_initialized():
            ray.init(os.environ["RAY_ADDRESS"], _node_ip_address=os.environ["VLLM_HOST_IP"])
        super()._init_executor()
