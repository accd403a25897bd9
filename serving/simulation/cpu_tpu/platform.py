"""tpu-inference's platform where jax.devices() are CPU devices that stand for TPU chips."""

import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

# Pretended HBM of a device. The KV cache is set in blocks, so any size above zero will do; a real chip's 32 GiB would
# be filled, which ends a laptop.
PRETENDED_HBM_BYTES = 1 << 30


def _hbm_usage_bytes(devices: list[Any]) -> list[tuple[int, int]]:
    """(used, limit) per device; a CPU device keeps no statistics."""
    return [(0, PRETENDED_HBM_BYTES)] * len(devices)


def _mesh(shape: tuple[int, ...], names: tuple[str, ...], *, devices: list[Any] | None = None) -> Mesh:
    """Devices in the order of their ids; on a TPU the order is by coordinates on the torus, which CPUs lack."""
    ordered = sorted(devices or jax.devices(), key=lambda device: device.id)
    return Mesh(np.array(ordered).reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape))


def _copying(put: Callable[..., Any]) -> Callable[..., Any]:
    """A device_put that owns its data.

    JAX's CPU backend may use a numpy buffer without a copy, and the runner overwrites its buffers while the step before
    still reads them: wrong tokens in four launches of six. A TPU always copies.
    """

    def general_device_put(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        owned = jax.tree_util.tree_map(
            lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tensor
        )
        return put(owned, *args, **kwargs)

    return general_device_put


def _patch() -> None:
    from tpu_inference import utils  # noqa: PLC0415
    from tpu_inference.layers.common import utils as layer_utils  # noqa: PLC0415
    from tpu_inference.models.common import compiler_options  # noqa: PLC0415

    from serving.simulation.cpu_tpu import attention  # noqa: PLC0415

    utils.hbm_usage_bytes = _hbm_usage_bytes
    utils.make_optimized_mesh = _mesh
    layer_utils.general_device_put = _copying(layer_utils.general_device_put)
    if hasattr(utils, "general_device_put"):
        utils.general_device_put = layer_utils.general_device_put
    # XLA's CPU backend does not know the xla_tpu_* options.
    compiler_options.get_step_fn_compiler_options = lambda: None
    attention.install()


try:
    from tpu_inference.platforms.tpu_platform import TpuPlatform

    _patch()
except AttributeError as error:
    # vLLM's lazy modules turn an AttributeError into a misleading error of their own.
    traceback.print_exc()
    raise ImportError(str(error)) from error


class SimulatedTpuPlatform(TpuPlatform):  # type: ignore[misc]
    """TpuPlatform with the simulated worker and executor."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:  # noqa: ARG003
        return "TPU (simulated)"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        parallel.worker_cls = "serving.simulation.cpu_tpu.worker.SimulatedTpuWorker"
        if getattr(parallel.distributed_executor_backend, "uses_ray", False):
            from serving.simulation.cpu_tpu.executor import SimulatedRayExecutor  # noqa: PLC0415

            parallel.distributed_executor_backend = SimulatedRayExecutor
