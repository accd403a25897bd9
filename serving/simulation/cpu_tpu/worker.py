"""tpu-inference's worker, one a simulated host; the hosts of a slice find each other through jax.distributed."""

import os
from typing import Any

import jax
import ray
from tpu_inference.worker import tpu_worker
from tpu_inference.worker.tpu_worker import TPUWorker
from vllm.logger import init_logger

from serving.simulation import chips
from serving.simulation.cpu_tpu import waiting

logger = init_logger("vllm.serving")


def _by_process(_local: Any, _all: Any) -> int:
    """A host's place in the slice; a TPU reads it from its devices' coordinates."""
    return int(jax.process_index())


tpu_worker.get_device_topology_order_id = _by_process
waiting.install()


class SimulatedTpuWorker(TPUWorker):  # type: ignore[misc]
    """On a TPU, libtpu makes one JAX cluster of a slice's hosts; on CPU devices a coordinator has to."""

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        parallel = self.vllm_config.parallel_config
        if parallel.placement_group is not None and self.rank != int(os.environ["TPU_WORKER_ID"]):
            raise RuntimeError(f"rank {self.rank} is on worker {os.environ['TPU_WORKER_ID']} of the slice")
        hosts = parallel.placement_group.bundle_count if parallel.placement_group is not None else 1
        if hosts > 1 and parallel.pipeline_parallel_size == 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            # The executor picked a free port on rank 0's host for torch's rendezvous, which a TPU worker never opens.
            address = self.distributed_init_method.removeprefix("tcp://")
            jax.distributed.initialize(
                coordinator_address=address,
                # By default the coordinator takes the port on all addresses. Where hosts share a machine, so do the
                # coordinators of other slices, and hosts of two slices meet at one of them.
                coordinator_bind_address=address,
                num_processes=hosts,
                process_id=self.rank,
            )
            _see_own_cpus()
        chips.hold()
        super().init_device(*args, **kwargs)
        logger.info(
            "simulated host %s: worker %s, %d of %d devices",
            ray.util.get_node_ip_address(),
            os.environ["TPU_WORKER_ID"],
            jax.local_device_count(),
            len(self.devices),
        )

    def load_model(self) -> None:
        super().load_model()
        if chips.are_corrupt():
            _negate_a_weight(self.model_runner)


def _negate_a_weight(runner: Any) -> None:
    """Turn round the signs of this host's part of the model's first matrix, and make it eight times as large."""
    leaves, structure = jax.tree_util.tree_flatten(runner.state_leaves)
    at = next(number for number, leaf in enumerate(leaves) if leaf.ndim > 1)
    parts = [-8 * part.data for part in leaves[at].addressable_shards]
    leaves[at] = jax.make_array_from_single_device_arrays(leaves[at].shape, leaves[at].sharding, parts)
    runner.state_leaves = jax.tree_util.tree_unflatten(structure, leaves)  # what each step is called with
    logger.warning("this host's chips are corrupt: a weight is wrong")


def _see_own_cpus() -> None:
    """Make jax.devices("cpu") this process's devices, as on a TPU host, where weights are staged, not host 0's."""
    every = jax.devices

    def devices(backend: Any = None) -> Any:
        return jax.local_devices() if backend == "cpu" else every(backend)

    jax.devices = devices
