"""How a checkpoint's weights are stored, and how they lie in HBM.

Formats are those tpu-inference 0.26 loads (tpu_inference/layers/vllm/quantization). A plan refuses any other, which
would be loaded at full size or not at all.
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.errors import PlanError
from serving.planning.checked_config import Keys

# Bytes of one weight with its share of the scales. A scale is a float32 for an fp8 block of 128x128, a byte for 32 mxfp4
# or 16 nvfp4 weights, a bf16 for a group of int4: of 128 weights unless the checkpoint gives another size.
_BYTES_PER_WEIGHT = {
    "float32": 4.0,
    "bf16": 2.0,
    "fp8": 1.0 + 4 / 128**2,
    "int8": 1.0,
    "int4": 0.5 + 2 / 128,
    "fp4": 0.5,  # of a whole row, when experts are given it while they are loaded
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
# Bits of a weight and bytes of a scale in formats whose groups have a size of their own.
_GROUPED = {"int4": (4, 2), "fp4": (4, 4), "fp8": (8, 4), "int8": (8, 4)}
_NVFP4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")  # of modelopt's, as vLLM's ModelOptNvFp4Config has them
# Whose scales tpu-inference's linear layers take, of compressed-tensors (compressed_tensors.py, get_scheme).
_STRATEGIES = {
    "fp8": ("tensor", "channel", "block"),
    "int8": ("tensor", "channel"),
    "int4": ("group",),
    "nvfp4": ("tensor_group",),
}
_NVFP4_GROUP = 16  # weights to a scale; MXFP4 has 32
_BY_METHOD = {
    "fp8": "fp8",
    "mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
    "awq": "int4",
    "auto_awq": "int4",
    "modelopt_fp4": "nvfp4",
    "modelopt": "nvfp4",  # its quant_algo is read
    "compressed-tensors": "",  # config_groups say its format
}


@dataclass(frozen=True)
class Quantization:
    """A format of linear layers; `skipped` are patterns over the names of modules that keep full size.

    `method` is the checkpoint's name for the format, empty where weights are quantised while loading. Embeddings, output
    head, routers and towers keep full size in every format.
    """

    format: str
    skipped: tuple[str, ...] = ()
    method: str = ""
    weight_only: bool = False  # activations keep full size (W4A16, W8A16), as far as the checkpoint says
    blocks: bool = False  # of compressed-tensors: a scale for each block of weights
    no_linear: str = ""  # of compressed-tensors: what keeps tpu-inference from loading linear layers in it
    cache: str = ""  # the format of keys and values that the checkpoint asks for, as modelopt's do
    scales_cache: bool = False  # of compressed-tensors: scales for an fp8 cache, which vLLM's own models heed

    def applies_to(self, module: str) -> bool:
        """Whether the weights of a module, named as in a checkpoint, are in this format."""
        return not any(_matches(pattern, module) for pattern in self.skipped)


def bytes_per_weight(weight_format: str) -> float:
    """Bytes in HBM of a weight in that format; `int4-g32` is int4 in groups of 32."""
    name, _, group = weight_format.partition("-g")
    if not group:
        return _BYTES_PER_WEIGHT[name]
    bits, scale = _GROUPED[name]
    return bits / 8 + scale / int(group)


def read_quantization(config: Any, where: str) -> Quantization | None:
    """What `quantization_config` says; None for a checkpoint at full size."""
    if not config:
        return None
    keys = Keys(config, f"{where} (quantization_config)")
    method = _method(keys)
    if method not in _BY_METHOD:
        raise PlanError(
            f"{where} is quantised with {method}, which tpu-inference does not load; it loads {', '.join(_BY_METHOD)}"
        )
    cache = _cache(keys) if method.startswith("modelopt") else ""
    if method == "modelopt":
        keys = keys.within("quantization") or keys
        if (algorithm := str(keys.get("quant_algo"))).upper() not in _NVFP4_ALGORITHMS:
            raise PlanError(
                f"{where} is quantised by modelopt to {algorithm}, which tpu-inference does not load; of modelopt's it loads NVFP4"
            )
    if (bits := keys.get("bits", keys.get("w_bit", 4))) != 4 and "awq" in method:
        raise PlanError(
            f"{where} is quantised by AWQ to {bits!r} bits; tpu-inference loads AWQ with 4 (layers/vllm/quantization/awq.py)"
        )
    group = keys.get("group_size", keys.get("q_group_size"))
    if "awq" in method and not _is_size(group):
        raise PlanError(
            f"{where} is quantised by AWQ in groups of {group!r}; tpu-inference loads AWQ in groups of a size that its group_size says "
            "(layers/vllm/quantization/awq.py)"
        )
    if method == "fp8":
        _check_fp8(keys, where)
    skipped = (
        keys.entries("modules_to_not_convert")
        or keys.entries("ignored_layers")
        or keys.entries("ignore")
        or keys.entries("exclude_modules")
    )
    for pattern in skipped:
        _checked(str(pattern), where)
    formats = _grouped(_BY_METHOD[method], group)
    names = tuple(map(str, skipped))
    return Quantization(formats, names, method, cache=cache) if formats else _compressed(keys, where, names)


def _method(keys: Keys) -> str:
    """The method's name as vLLM reads it (_normalize_quantization_config); files of modelopt's own give none."""
    producer = keys.get("producer")
    of_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    name = str(keys.get("quant_method", "modelopt" if of_modelopt else None))
    return name.lower().replace("compressed_tensors", "compressed-tensors")


def _cache(keys: Keys) -> str:
    """The format of the cache that vLLM takes from a modelopt checkpoint (get_kv_cache_quant_algo_string); "" for the model's own."""
    places = [place for place in (keys.within("quantization"), keys) if place]
    names = ("kv_cache_scheme", "kv_cache_quant_algo")
    match next((value for name in names for place in places if (value := place.get(name))), None):
        case {"type": "float", "num_bits": 8, "dynamic": False} | "fp8" | "FP8":
            return "fp8"
        case {"type": "float", "num_bits": 4} | "nvfp4" | "NVFP4":
            return "nvfp4"
    return ""


def _checked(pattern: str, where: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise PlanError(
                f"{where}: its quantization_config skips {pattern!r}, which is no pattern: {error}"
            ) from None


def _check_fp8(keys: Keys, where: str) -> None:
    """What vLLM's Fp8Config refuses."""
    scheme, block = keys.get("activation_scheme", "dynamic"), keys.get("weight_block_size")
    if scheme not in ("static", "dynamic") or (block is not None and scheme == "static"):
        raise PlanError(
            f"{where}: its quantization_config has activation_scheme {scheme!r}; vLLM takes dynamic, and static for weights without blocks"
        )
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))):
        raise PlanError(
            f"{where}: its quantization_config has weight_block_size {block!r}; vLLM takes two numbers, as [128, 128]"
        )


def _compressed(keys: Keys, where: str, skipped: tuple[str, ...]) -> Quantization:
    """The one format of the config's groups."""
    config_groups = keys.get("config_groups", {})
    groups = [
        (weights, group.get("input_activations"))
        for group in (config_groups.values() if isinstance(config_groups, Mapping) else ())
        if isinstance(group, Mapping) and isinstance(weights := group.get("weights"), Mapping)
    ]
    kinds = {f"{weights.get('type')} {weights.get('num_bits')}" for weights, _ in groups}
    names = {"float 8": "fp8", "int 8": "int8", "int 4": "int4", "float 4": "nvfp4"}
    formats = [names.get(kind) for kind in kinds]
    if len(formats) != 1 or not formats[0]:
        raise PlanError(
            f"{where}: its quantization_config gives weights as {sorted(kinds) or 'nothing'}; this plan counts one "
            "format of 8 or 4 bits a checkpoint; give one as engine.hf_overrides.quantization_config"
        )
    weights, activations = groups[0]
    if formats[0] == "nvfp4" and weights.get("group_size") not in (None, _NVFP4_GROUP):
        raise PlanError(
            f"{where}: its linear layers are 4-bit floats in groups of {weights.get('group_size')!r}; of such formats of "
            f"compressed-tensors tpu-inference loads NVFP4, with groups of {_NVFP4_GROUP} (compressed_tensors.py, get_scheme)"
        )
    if formats[0] == "int8" and isinstance(activations, Mapping) and activations.get("dynamic") is False:
        raise PlanError(
            f"{where}: its linear layers are int8 with scales of activations fixed beforehand; tpu-inference loads int8 whose "
            "activations are scaled token by token (compressed_tensors.py, get_scheme)"
        )
    if weights.get("symmetric") is False:
        raise PlanError(
            f"{where}: its linear layers are {formats[0]} with zero points (symmetric: false); tpu-inference loads weights of "
            "compressed-tensors without them (compressed_tensors.py, get_scheme)"
        )
    return Quantization(
        _grouped(formats[0], weights.get("group_size")),
        skipped,
        "compressed-tensors",
        weight_only=not activations,
        blocks=weights.get("strategy") == "block",
        no_linear=_no_linear(formats[0], weights, activations),
        scales_cache=bool(keys.get("kv_cache_scheme")),
    )


def _no_linear(name: str, weights: Mapping[str, Any], activations: Any) -> str:
    """What keeps linear layers in a format from being loaded, as far as the checkpoint says; empty where nothing does."""
    if not activations:
        return "" if name == "nvfp4" else "with activations at full size"
    group = weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if _is_size(group) else "channel" if group == -1 else None)
    if strategy is not None and strategy not in _STRATEGIES[name]:
        return f"with scales by {strategy}"
    if name.startswith("int") and isinstance(activations, Mapping):
        if activations.get("num_bits", 8) != 8:
            return f"with activations of {activations['num_bits']} bits"
        if activations.get("strategy") not in (None, "token") or activations.get("dynamic") is False:
            return "with activations that are not scaled token by token"
    return ""


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _grouped(name: str, group: Any) -> str:
    return f"int4-g{group}" if name == "int4" and _is_size(group) else name


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return (
        fnmatch.fnmatchcase(module, pattern)
        or fnmatch.fnmatchcase(module, f"{pattern}.*")
        or pattern in module.split(".")
    )
