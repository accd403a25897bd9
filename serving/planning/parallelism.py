"""Tensor and pipeline sizes from a slice and a model's heads.

The rules are tpu-inference's: tensor parallelism counts JAX devices and may span hosts; a pipeline has one stage or one
a host; attention heads are cut evenly; KV heads are cut evenly or copied evenly.
"""

from serving.config import ParallelSpec
from serving.errors import PlanError
from serving.planning.shapes import ModelShape
from serving.tpu import Slice


def derive(shape: ModelShape, slice_: Slice, asked: ParallelSpec) -> tuple[int, int, tuple[str, ...]]:
    """Tensor size, pipeline size and the reasons, or PlanError with what would work."""
    tensor, pipeline = asked.tensor, asked.pipeline
    if tensor is None and pipeline is None:
        tensor, pipeline, why = _default(shape, slice_)
    else:
        tensor = tensor or slice_.devices // (pipeline or 1)
        pipeline = pipeline or max(slice_.devices // tensor, 1)
        why = f"tensor={tensor} and pipeline={pipeline} as asked"
    if problems := list(_problems(shape, slice_, tensor, pipeline)):
        raise PlanError(f"{'; '.join(problems)}; {_what_works(shape, slice_)}")
    return tensor, pipeline, (why, *_copies(shape, tensor))


def _default(shape: ModelShape, slice_: Slice) -> tuple[int, int, str]:
    heads = f"{shape.num_attention_heads} attention heads"
    whole, host = slice_.devices, slice_.devices_per_host
    if shape.num_attention_heads % whole and not shape.num_attention_heads % host:
        why = f"pipeline={slice_.hosts}, one stage a host: {heads} do not divide by {whole} devices, by {host} they do"
        return host, slice_.hosts, why
    return whole, 1, f"tensor={whole}: {heads} over every device of {slice_}"


def _problems(shape: ModelShape, slice_: Slice, tensor: int, pipeline: int) -> list[str]:
    problems = []
    if tensor * pipeline != slice_.devices:
        problems.append(
            f"tensor={tensor} x pipeline={pipeline} is {tensor * pipeline} devices, {slice_} has {slice_.devices}"
        )
    if pipeline not in (1, slice_.hosts):
        problems.append(f"pipeline={pipeline} must be 1 or the number of hosts, {slice_.hosts}")
    if pipeline > shape.layers:
        problems.append(f"pipeline={pipeline} has more stages than the model's {shape.layers} layers")
    if shape.num_attention_heads % tensor:
        problems.append(f"{shape.num_attention_heads} attention heads do not divide by tensor={tensor}")
    kv_heads = shape.num_key_value_heads
    if kv_heads % tensor and tensor % kv_heads:
        problems.append(f"{kv_heads} KV heads neither divide by tensor={tensor} nor it by them")
    return problems


def _what_works(shape: ModelShape, slice_: Slice) -> str:
    works = [
        f"tensor={slice_.devices // pipeline} pipeline={pipeline}"
        for pipeline in sorted({1, slice_.hosts})
        if not _problems(shape, slice_, slice_.devices // pipeline, pipeline)
    ]
    return f"on {slice_} {' or '.join(works)} works" if works else f"no layout of it works on {slice_}"


def _copies(shape: ModelShape, tensor: int) -> list[str]:
    if tensor <= shape.num_key_value_heads:
        return []
    copies = tensor // shape.num_key_value_heads
    return [f"{shape.num_key_value_heads} KV heads are copied {copies} times to fill tensor={tensor}"]
