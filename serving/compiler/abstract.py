"""tpu-inference on arrays that have a shape, a type and a sharding, and no bytes.

Whatever the runner would put on its devices stays a description: weights, cache, inputs. A model is loaded while JAX traces, so
that what loading does to weights (fusing, padding, quantising) is done to their descriptions. The names patched are private to
tpu-inference 0.26 and JAX 0.10; docs/contributing/upstream.md lists them. A process that was patched compiles, and does nothing
else.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from jax._src.pallas.mosaic import tpu_info
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference import utils
from tpu_inference.layers.common import utils as layer_utils
from tpu_inference.models.common import model_loader
from tpu_inference.models.jax.utils import weight_utils
from tpu_inference.models.jax.utils.qwix import qwix_utils
from tpu_inference.platforms.tpu_platform import TpuPlatform
from tpu_inference.runner import compilation_manager, kv_cache, kv_cache_manager, tpu_runner
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig
from vllm.model_executor.models import registry

from serving.errors import CompileError

# It takes a list of pictures' embeddings, which tpu-inference's models lay side by side before their jitted function takes them.
_MERGER = "input_embeddings_merger"
# As tpu_info names the chips: tpu-inference chooses the format of fp8 caches by it.
_CHIP_NAMES = {"v4": "V4", "v5e": "V5E", "v5p": "V5P", "v6e": "V6E", "v7x": "V7X"}


def described(array: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def install(devices: list[Any], generation: str) -> None:
    """Make this process's tpu-inference see `devices`, those of a topology, and hold nothing on them."""
    host = jax.devices("cpu")

    def seen(backend: str | None = None) -> list[Any]:
        return host if backend == "cpu" else devices

    jax.devices = seen  # kernels choose their block sizes by the kind of the first device
    jax.local_devices = lambda *_args, **_options: devices
    tpu_info.get_device_kind = lambda: devices[0].device_kind  # the size of VMEM hangs on it
    tpu_info.get_num_device_cores = lambda: devices[0].num_cores
    TpuPlatform.get_device_name = classmethod(lambda _cls, _device=0: f"TPU {_CHIP_NAMES[generation]}")
    utils.hbm_usage_bytes = lambda some: [(0, 1)] * len(some)
    utils.hbm_usage_gb = lambda _some: []
    for module in (utils, compilation_manager, tpu_runner):
        module.device_array = _device_array
    kv_cache._get_kv_cache_allocator = _cache_allocator  # noqa: SLF001
    vars(kv_cache_manager)["jax"] = _JaxOfStates()
    model_loader._get_nnx_model = _nnx_model  # noqa: SLF001
    for config in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
        config.__post_init__ = _flat(config.__post_init__)


def _flat(original: Callable[..., None]) -> Callable[..., None]:
    """Gemma 4's config as vLLM 0.26 reads it, and the image's transformers 5.14 has it: sizes of global layers beside the others.

    transformers 5.23 moves them into a config for each layer, and refuses to tell any for the whole model.
    """

    def post_init(self: Any, **keywords: Any) -> None:
        sizes = {"global_head_dim": 512, "num_global_key_value_heads": None}
        sizes |= {name: keywords.pop(name) for name in sizes.keys() & keywords.keys()}
        original(self, **{**keywords, "per_layer_config": {}})
        for name, value in sizes.items():
            setattr(self, name, value)

    return post_init


def _put(tree: Any, sharding: Any, **_options: Any) -> Any:
    return jax.tree_util.tree_map(lambda leaf: described(leaf, sharding), tree)


def _device_array(mesh: Any, tree: Any, sharding: Any = None, **_options: Any) -> Any:
    return _put(tree, sharding or NamedSharding(mesh, PartitionSpec(None)))


def _cache_allocator(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], Any]:
    return lambda: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


class _JaxOfStates:
    """Stands for `jax` where states of linear attention are allocated by a jitted function without arguments."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def jit(self, function: Callable[[], Any], *, out_shardings: Any) -> Callable[[], Any]:
        return lambda: _put(jax.eval_shape(function), out_shardings)


class _Placed:
    """Where a model that is loaded while JAX traces puts its weights: tracers to their shardings."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self._where: dict[int, tuple[Any, Any]] = {}  # the tracer too, or its id would be another's

    def put(
        self,
        tree: Any,
        sharding: Any,
        *,
        layout: Any = None,
        source_mesh: Any = None,  # noqa: ARG002
    ) -> Any:
        """Stands for `general_device_put`."""

        def place(leaf: Any) -> Any:
            leaf = jnp.asarray(leaf)
            self._where[id(leaf)] = (leaf, Format(layout, sharding) if layout is not None else sharding)
            return leaf

        return jax.tree_util.tree_map(place, tree)

    def shard_put(self, array: Any, shardings: Any, mesh: Any = None) -> Any:
        """Stands for `shard_put` of tpu-inference's own models."""
        if isinstance(shardings, NamedSharding):
            return self.put(array, shardings)
        spec = shardings if isinstance(shardings, PartitionSpec) else PartitionSpec(*(shardings or ()))
        return self.put(array, NamedSharding(mesh or self.mesh, spec))

    def of(self, leaf: Any) -> Any:
        """The sharding of a leaf; None where it was not put anywhere."""
        return self._where.get(id(leaf), (None, None))[1]


@contextmanager
def _loading(placed: _Placed) -> Iterator[None]:
    """Within, tpu-inference's loaders put weights nowhere, and take torch's meta tensors."""
    replacements = (
        (layer_utils.general_device_put, placed.put),
        (layer_utils.cpu_mesh_context, nullcontext),
        (weight_utils.shard_put, placed.shard_put),
    )
    for original, replacement in replacements:
        _replace(original, replacement)
    get_mesh = jax.sharding.get_mesh
    jax.sharding.get_mesh = lambda: placed.mesh  # which JAX does not tell while it traces
    try:
        yield
    finally:
        jax.sharding.get_mesh = get_mesh
        for original, replacement in replacements:
            _replace(replacement, original)


def _replace(original: Any, replacement: Any) -> None:
    """Put a function in another's place wherever a module of tpu-inference has imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tpu_inference"):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, replacement)


def _nnx_model(model_class: Any, vllm_config: Any, rng: Any, mesh: Any, **_options: Any) -> Any:
    """A model of tpu-inference's own in JAX: its parameters as the loader leaves them, without a checkpoint."""
    if model_class.__name__ == "DeepseekV3ForCausalLM":
        raise CompileError(
            "DeepSeek by tpu-inference's own implementation takes its latent projections apart, and makes its rotary table, while it "
            "reads a checkpoint, which this command does not; set engine.model_impl: vllm"
        )
    placed = _Placed(mesh)
    shardings: list[Any] = []

    def create() -> Any:
        return model_class(vllm_config, rng, mesh)

    make = create
    if qwix_utils.apply_qwix_on_abstract_model(vllm_config):
        make = qwix_utils.apply_qwix_quantization(
            vllm_config, create, rng, mesh, apply_to_abstract_model=True
        )

    def load() -> Any:
        model = make()
        if isinstance(model, weight_utils.LoadableWithIterator):
            _fill(model)
            weight_utils.JaxDummyModelLoader._process_weights_after_loading(_Loader(), model)  # noqa: SLF001
        if make is create:
            model = qwix_utils.apply_qwix_quantization(
                vllm_config, model, rng, mesh, apply_to_abstract_model=False
            )
        shardings.extend(placed.of(leaf) for leaf in jax.tree_util.tree_leaves(nnx.state(model)))
        return model

    with jax.set_mesh(mesh), _loading(placed):
        model = nnx.eval_shape(load)
    graph, state = nnx.split(model)
    leaves, tree = jax.tree_util.tree_flatten(state)
    specs = jax.tree_util.tree_leaves(
        nnx.get_partition_spec(state), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    sharded = [
        described(leaf, put or NamedSharding(mesh, _spec(leaf, spec)))
        for leaf, spec, put in zip(
            leaves, (getattr(spec, "value", spec) for spec in specs), shardings, strict=True
        )
    ]
    return nnx.merge(graph, jax.tree_util.tree_unflatten(tree, sharded))


def _spec(leaf: Any, spec: Any) -> PartitionSpec:
    """A parameter's own partition. Axes of one row are left whole, as qwix leaves its scales (update_sharding)."""
    if not isinstance(spec, PartitionSpec):
        return PartitionSpec()
    return PartitionSpec(*(None if size == 1 else axis for axis, size in zip(spec, leaf.shape, strict=False)))


class _Loader:
    """`self` for the part of tpu-inference's dummy loader that goes through the modules."""

    def _process_weights_after_loading(self, module: Any) -> None:
        weight_utils.JaxDummyModelLoader._process_weights_after_loading(self, module)  # noqa: SLF001


def _fill(model: Any) -> None:
    """Take parameters for loaded, and give experts their weights one by one, as a checkpoint has them: JaxDummyModelLoader's
    shapes, without its threads.
    """
    for _, parameter in model.named_parameters():
        parameter.set_metadata("_is_loaded", True)
        if hasattr(parameter, "_weights_to_load"):
            experts, inputs, outputs = parameter.get_value().shape
            weights = jnp.zeros((experts, outputs, inputs), parameter.get_value().dtype)
            parameter._weights_to_load[:] = jnp.vsplit(weights, experts)  # noqa: SLF001
            parameter.set_value(weights)


def install_torch() -> None:
    """The same for vLLM's models, which run through torchax: built on torch's meta device, loaded while JAX traces."""
    _stand_in_torchvision()
    registry._run_in_subprocess = lambda inspect: inspect()  # noqa: SLF001  another process has no stand-in
    from torchax import tensor as torchax_tensor  # noqa: PLC0415
    from torchax.interop import jax_view, torch_view  # noqa: PLC0415
    from torchax.ops import mappings  # noqa: PLC0415
    from tpu_inference.layers.vllm.process_weights import cleanup_sharding  # noqa: PLC0415
    from tpu_inference.models.vllm import vllm_model_wrapper as wrapper  # noqa: PLC0415
    from tpu_inference.models.vllm.experimental import qwen3_vl_patcher  # noqa: PLC0415
    from vllm.model_executor.model_loader.utils import (  # noqa: PLC0415
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: PLC0415

    def t2j(tensor: Any, use_dlpack: bool = False) -> Any:  # noqa: ARG001  its own signature
        return jnp.zeros(tuple(tensor.shape), utils.to_jax_dtype(tensor.dtype))

    def placeholder(tensor: Any) -> Any:
        """What Qwen3-VL adds to layers where a step has no pictures: buffers of torch's, which an engine has on its CPU."""
        return torch_view(t2j(tensor)) if type(tensor) is torch.Tensor else converted(tensor)

    def model_of(vllm_config: Any, model_config: Any) -> Any:
        with set_default_torch_dtype(model_config.dtype):
            with torch.device("meta"):
                model = initialize_model(vllm_config=vllm_config, model_config=model_config)
            process_weights_after_loading(model, model_config, torch.device("cpu"))
        return model.eval()

    load = wrapper.VllmModelWrapper.load_weights

    def load_weights(self: Any, shared_params: Any = None) -> Any:
        placed = _Placed(self.mesh)
        adapters: list[Any] = []
        shardings: list[Any] = []

        def traced() -> Any:
            cleanup_sharding._tensor_is_in_cpu = lambda tensor: not _is_put(tensor, placed)  # noqa: SLF001
            _replace(is_in_cpu, cleanup_sharding._tensor_is_in_cpu)  # noqa: SLF001
            params, manager = load(self, shared_params)
            adapters.append(manager)
            shardings.extend(placed.of(leaf) for leaf in jax.tree_util.tree_leaves(params))
            return params

        is_in_cpu = cleanup_sharding._tensor_is_in_cpu  # noqa: SLF001
        with jax.set_mesh(self.mesh), _loading(placed):
            shapes = jax.eval_shape(traced)
        leaves, tree = jax.tree_util.tree_flatten(shapes)
        whole = NamedSharding(self.mesh, PartitionSpec())
        sharded = [described(leaf, put or whole) for leaf, put in zip(leaves, shardings, strict=True)]
        return jax.tree_util.tree_unflatten(tree, sharded), adapters[0]

    def _is_put(tensor: Any, placed: _Placed) -> bool:
        return not isinstance(tensor, torch.nn.Parameter | torch.Tensor) or (
            hasattr(tensor, "jax") and placed.of(jax_view(tensor)) is not None
        )

    def detach(tensor: Any) -> Any:
        """torch detaches whatever becomes a parameter; torchax would give it another tracer, which nobody has placed."""
        return torchax_tensor.Tensor(tensor.jax(), tensor._env)  # noqa: SLF001

    torchax_tensor.Tensor.detach = detach
    _replace(mappings.t2j, t2j)
    mappings.t2j = t2j
    _replace(utils.t2j, t2j)
    converted = qwen3_vl_patcher._convert_to_torchax_tensor  # noqa: SLF001
    qwen3_vl_patcher._convert_to_torchax_tensor = placeholder  # noqa: SLF001
    wrapper.vllm_get_model = model_of
    wrapper.VllmModelWrapper.load_weights = load_weights


def _stand_in_torchvision() -> None:
    """tpu-inference imports its patches of vision models with every model; without torchvision they can't be imported."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        module = ModuleType(name)
        module.functional = None  # type: ignore[attr-defined]  # imported by name, never called without an image
        sys.modules.setdefault(name, module)


@contextmanager
def recorded(calls: list[tuple[Any, ...]]) -> Iterator[None]:
    """Within, a runner's `capture_model` notes (name, function, arguments, keywords, bucket) and compiles nothing."""

    class Recorder(compilation_manager.CompilationManager):  # type: ignore[misc]
        def _create_dummy_tensor(self, shape: Any, dtype: Any, sharding: Any = None) -> Any:
            sharding = sharding or NamedSharding(self.runner.mesh, PartitionSpec(None))
            return jax.ShapeDtypeStruct(shape, utils.to_jax_dtype(dtype), sharding=sharding)

        def _run_compilation(self, name: str, fn: Any, *args: Any, **options: Any) -> None:
            keywords = {
                key: described(value, None) if isinstance(value, jax.Array) else value
                for key, value in options.pop("call_kwargs", {}).items()
            }
            if hasattr(fn, "lower") and "shared_attention_metadata" in options:
                # vLLM's models take it; the warm-up call passes it where this one does not.
                keywords["shared_attention_metadata"] = options.pop("shared_attention_metadata")
            if name == _MERGER and not hasattr(fn, "lower"):
                fn = jax.jit(fn)
            bucket = {key: int(value) for key, value in options.items() if isinstance(value, (int, bool))}
            for switch in ("aot", "compile_only"):
                bucket.pop(switch, None)
            calls.append((name, fn, args, keywords, bucket))

        def _flush_compilations(self) -> None:
            pass

    original = tpu_runner.CompilationManager
    tpu_runner.CompilationManager = Recorder
    try:
        yield
    finally:
        tpu_runner.CompilationManager = original
