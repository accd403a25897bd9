"""tpu-inference's own runner for a plan, on a topology of chips that are not there."""

import dataclasses
import functools
import math
import re
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import jax
from jax import dtypes
from jax.experimental import topologies
from tpu_inference.distributed import jax_parallel_state
from tpu_inference.runner.tpu_runner import TPUModelRunner
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.ir import set_default_torch_wrap
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

from serving.compiler import abstract
from serving.compiler.records import Built, Program
from serving.planning import Plan
from serving.planning.fit import RESIDENT_BYTES
from serving.tpu import Slice

_LIBTPU_NAMES = {"v7x": "tpu7x"}
_WORKER = re.compile(r"^worker\d+ ")
_DETAIL = re.compile(r" (\[|GridTHW\().*$")  # what the bucket says too


@dataclass(frozen=True)
class Call:
    """One program's function and the arguments, all abstract, that it is compiled for."""

    program: Program
    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Engine:
    built: Built
    calls: tuple[Call, ...]
    runner: Any

    def resident_bytes(self, call: Call) -> int:
        """Bytes of weights and cache among a call's arguments."""
        return sum(
            device_bytes(part)
            for part in (self.runner.state_leaves, self.runner.kv_caches)
            if any(argument is part for argument in call.arguments)
        )


def devices_of(slice_: Slice, hosts: int) -> list[Any]:
    """JAX's devices of the whole slice, or of one host of it: a pipeline stage is a JAX cluster of its own."""
    topology = slice_.topology if hosts == slice_.hosts else slice_.host_bounds.replace(",", "x")
    axes = [int(axis) for axis in topology.split("x")]
    name = _LIBTPU_NAMES.get(slice_.generation, slice_.generation)
    if slice_.generation in ("v5e", "v6e"):
        axes = axes[:2]
    described = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{name}:{'x'.join(map(str, axes))}",
        chips_per_host_bounds=tuple(int(bound) for bound in slice_.host_bounds.split(",")),
    )
    return list(described.devices)


def build(
    plan: Plan, options: dict[str, Any], devices: list[Any], *, stage: int, blocks: int | None
) -> Engine:
    """The runner of one pipeline stage with weights, cache and ledger; `options` are the engine's, in vLLM's names."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415  it chooses the platform when it is imported

    began = time.monotonic()
    own = {field.name for field in dataclasses.fields(AsyncEngineArgs)}  # the others are the HTTP server's
    config = AsyncEngineArgs(
        **{name: value for name, value in options.items() if name in own}
    ).create_engine_config()
    if blocks is not None:
        config.cache_config.num_gpu_blocks_override = blocks
    config.compilation_config.compilation_time = 0
    # The module itself sets it only with a server that hands activations on.
    vars(jax_parallel_state)["_PP"] = jax_parallel_state.GroupCoordinator(stage, plan.pipeline)
    recorded: list[tuple[Any, ...]] = []
    with (
        set_current_vllm_config(config),
        abstract.recorded(recorded),
        tempfile.TemporaryDirectory() as folder,
    ):
        config.kernel_config.ir_op_priority.set_default()  # both as WorkerBase does
        set_default_torch_wrap(config.compilation_config.ir_enable_torch_wrap)
        _be_alone(config.parallel_config, f"file://{folder}/torch")
        runner = TPUModelRunner(config, devices, stage, stage == 0, stage == plan.pipeline - 1)
        runner.load_model()
        weights = device_bytes(runner.state_leaves)
        share = int(plan.fit.usable_bytes * config.cache_config.gpu_memory_utilization)
        available = (share - weights - RESIDENT_BYTES) * len(devices)
        cache = get_kv_cache_configs(config, [runner.get_kv_cache_spec()], [available])[0]
        runner.initialize_kv_cache(cache)
        if encode := runner.precompile_vision_encoder_fn:
            runner.precompile_vision_encoder_fn = functools.partial(_with_pictures_here, encode)
        runner.compilation_manager.capture_model()
    calls = tuple(
        Call(Program(_name(name), bucket), *_jitted(function, arguments, keywords))
        for name, function, arguments, keywords, bucket in recorded
    )
    built = Built(
        implementation="vllm" if isinstance(runner.state_leaves, dict) else "flax_nnx",
        mesh={axis: size for axis, size in runner.mesh.shape.items() if size > 1},
        weight_bytes=weights,
        cache_bytes=device_bytes(runner.kv_caches),
        cache_blocks=cache.num_blocks,
        block_tokens=config.cache_config.block_size,
        programs=tuple(call.program for call in calls),
        seconds=round(time.monotonic() - began, 1),
    )
    return Engine(built, calls, runner)


def _with_pictures_here(precompile: Any, run: Any) -> None:
    """Pictures that an encoder's programs are listed with are arrays, not descriptions: they lie on this machine's CPU."""
    with jax.set_mesh(jax.make_mesh((1,), ("cpu",))):
        precompile(run)


def _be_alone(parallel: Any, address: str) -> None:
    """Make this torch's only process, as TPUWorker does: vLLM's models ask for their place, JAX shares the work out."""
    copies, parallel.data_parallel_size = parallel.data_parallel_size, 1
    try:
        init_distributed_environment(1, 0, address, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    finally:
        parallel.data_parallel_size = copies


def device_bytes(tree: Any) -> int:
    """Bytes of one device's part of abstract arrays."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * _bits(leaf.dtype) // 8
        for leaf in jax.tree_util.tree_leaves(tree)
    )


def _bits(dtype: Any) -> int:
    """Of one element: numpy holds four bits in a byte, a TPU does not. Random keys, which Llama keeps, are of no such type."""
    if jax.numpy.issubdtype(dtype, dtypes.extended):
        return int(dtype.itemsize) * 8
    return int(dtypes.itemsize_bits(dtype))


def _name(name: str) -> str:
    return _DETAIL.sub("", _WORKER.sub("", name)).strip("_")


def _jitted(
    function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The jitted function of what the runner calls, which may be a partial or a plain function around it.

    What has none within the engine runs operation by operation, as vLLM's models do around their encoders and where they put pictures
    among text; here it is one program.
    """
    while isinstance(function, functools.partial):
        arguments, keywords = function.args + arguments, {**function.keywords, **keywords}
        function = function.func
    if not hasattr(function, "lower"):
        held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        jitted = [value for value in held if hasattr(value, "lower")]
        grids = [name for name, value in keywords.items() if isinstance(value, tuple)]  # pictures' sizes
        function = jitted[0] if len(jitted) == 1 else jax.jit(function, static_argnames=grids)
    return function, arguments, keywords
