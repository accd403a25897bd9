"""Tensor, pipeline and data sizes from a slice and a model's heads.

The rules are tpu-inference's: tensor parallelism counts JAX devices and may span hosts; a pipeline has one stage or one
a host; copies of the model in a slice share one host; attention heads are cut evenly; KV heads are cut or copied evenly.
"""

from serving.config import ParallelSpec
from serving.errors import PlanError
from serving.planning.cache import attention_data_size
from serving.planning.engine_sizes import EngineSizes
from serving.planning.layout import Layout
from serving.planning.shapes import ModelShape
from serving.tpu import Slice


def derive(
    shape: ModelShape, sizes: EngineSizes, slice_: Slice, parallel: ParallelSpec
) -> tuple[Layout, tuple[str, ...]]:
    """The layout and the reasons for it; raises PlanError with what would work."""
    mesh, why = _as_asked(slice_, parallel) if any(vars(parallel).values()) else _default(shape, slice_)
    if problems := _problems(shape, slice_, *mesh):
        raise PlanError(f"{'; '.join(problems)}; {_what_works(shape, slice_)}")
    tensor, pipeline, data = mesh
    attention_data = attention_data_size(shape, sizes, tensor)
    if tensor % attention_data:
        raise PlanError(f"attn_dp_size={attention_data} does not divide tensor={tensor}")
    layout = Layout(tensor=tensor, pipeline=pipeline, data=data, attention_data=attention_data)
    return layout, (why, *_notes(shape, slice_, layout))


def _as_asked(slice_: Slice, parallel: ParallelSpec) -> tuple[tuple[int, int, int], str]:
    """The sizes the user set; the unset ones fill the slice."""
    data = parallel.data or 1
    tensor = parallel.tensor or slice_.devices // ((parallel.pipeline or 1) * data)
    pipeline = parallel.pipeline or max(slice_.devices // max(tensor * data, 1), 1)
    return (tensor, pipeline, data), f"tensor={tensor}, pipeline={pipeline}, data={data} as asked"


def _default(shape: ModelShape, slice_: Slice) -> tuple[tuple[int, int, int], str]:
    heads = f"{shape.num_attention_heads} attention heads"
    whole, host = slice_.devices, slice_.devices_per_host
    if shape.num_attention_heads % whole and not shape.num_attention_heads % host:
        why = f"pipeline={slice_.hosts}, one stage a host: {heads} do not divide by {whole} devices, by {host} they do"
        return (host, slice_.hosts, 1), why
    return (whole, 1, 1), f"tensor={whole}: {heads} over every device of {slice_}"


def _problems(shape: ModelShape, slice_: Slice, tensor: int, pipeline: int, data: int) -> list[str]:
    problems = []
    if tensor * pipeline * data != slice_.devices:
        sizes = f"tensor={tensor} x pipeline={pipeline}" + (f" x data={data}" if data > 1 else "")
        problems.append(f"{sizes} is {tensor * pipeline * data} devices, {slice_} has {slice_.devices}")
    if pipeline not in (1, slice_.hosts):
        problems.append(f"pipeline={pipeline} must be 1 or the number of hosts, {slice_.hosts}")
    if pipeline > shape.layers:
        problems.append(f"pipeline={pipeline} has more stages than the model's {shape.layers} layers")
    if data > 1 and slice_.hosts > 1:
        problems.append(f"data={data} needs a slice of one host; set replicas for more slices")
    if tensor < 1 or shape.num_attention_heads % tensor:
        problems.append(f"{shape.num_attention_heads} attention heads do not divide by tensor={tensor}")
    kv_heads = shape.num_key_value_heads
    if tensor and kv_heads % tensor and tensor % kv_heads:
        problems.append(f"{kv_heads} KV heads neither divide by tensor={tensor} nor it by them")
    return problems


def _what_works(shape: ModelShape, slice_: Slice) -> str:
    works = [
        f"tensor={slice_.devices // pipeline} pipeline={pipeline}"
        for pipeline in sorted({1, slice_.hosts})
        if not _problems(shape, slice_, slice_.devices // pipeline, pipeline, 1)
    ]
    return f"on {slice_} {' or '.join(works)} works" if works else f"no layout of it works on {slice_}"


def _notes(shape: ModelShape, slice_: Slice, layout: Layout) -> list[str]:
    notes = []
    if layout.pipeline > 1 and slice_.generation in ("v4", "v5p"):
        notes.append(
            f"untried: tpu-inference 0.26 takes a chip of {slice_.generation} for two devices when it makes stages "
            "(tpu_info.py), JAX for one"
        )
    if layout.attention_data > 1:
        notes.append(
            f"attention is shared by requests over {layout.attention_data} devices (attention data parallelism)"
        )
    heads = shape.num_key_value_heads
    if not shape.latent and layout.attention_tensor > heads:
        copies = layout.attention_tensor // heads
        notes.append(f"{heads} KV heads are copied {copies} times to fill tensor={layout.attention_tensor}")
    return notes
