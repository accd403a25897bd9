"""The sizes of the engine's mesh from a slice, a model's heads and what the YAML asks.

The rules are tpu-inference's: sizes count JAX devices; tensor parallelism may span hosts; a pipeline has one stage or one a
host; copies of the model in a slice share one host; heads are cut evenly; KV heads are cut or copied evenly. What becomes
of attention data parallelism follows its `ShardingConfigManager.from_vllm_config` (layers/common/sharding.py) step by step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from serving.config import AUTO, ParallelSpec
from serving.errors import PlanError
from serving.planning.architectures import NOT_STAGED
from serving.planning.cache import rows_of_heads
from serving.planning.engine_sizes import EngineSizes
from serving.planning.layout import Layout
from serving.planning.shapes import ModelShape
from serving.planning.weights import MXFP4_BLOCK, experts_lie_whole, uneven
from serving.tpu import Slice

# Kernels that lay tokens beside one another on the lanes count KV heads otherwise; both variables have to be set.
_ON_LANES = ("USE_BATCHED_RPA_KERNEL", "USE_BATCHED_RPA_SEQ_ON_LANE")
COPIES = (2, 4, 8)  # of a model on the devices of one host, where its heads can't be cut over all of them
_EXPERIMENTAL = ("v4", "v5p")  # README of tpu-inference 0.26
_UNTRIED = "tpu-inference lists context parallelism as untested on v6e and v7x (support_matrices)"


@dataclass(frozen=True)
class _Model:
    """What of a model and its engine decides how attention is shared."""

    shape: ModelShape
    sizes: EngineSizes
    rows: float  # see rows_of_heads


def derive(
    shape: ModelShape,
    sizes: EngineSizes,
    slice_: Slice,
    parallel: ParallelSpec,
    environment: Mapping[str, str] | None = None,
) -> tuple[Layout, tuple[str, ...]]:
    """The layout and the reasons for it; raises PlanError with what would work. `environment` is the engine's."""
    on_lanes = all((environment or {}).get(name, "").lower() in ("1", "true") for name in _ON_LANES)
    model = _Model(shape, sizes, rows_of_heads(shape, sizes, on_lanes=on_lanes))
    asked = any(value for name, value in vars(parallel).items() if name != "attention_data")
    layout, why = _as_asked(slice_, parallel) if asked else _default(model, slice_)
    if problems := _problems(model, slice_, layout):
        raise PlanError(f"{'; '.join(problems)}; {_what_works(model, slice_)}")
    wanted = parallel.attention_data or (AUTO if shape.latent else None)
    if wanted is not None:
        layout, shared = _attention_shared(model, layout, None if wanted == AUTO else int(wanted))
        why = f"{why}; {shared}"
    if problems := uneven(shape, model.sizes, layout):
        raise PlanError(f"{'; '.join(problems)}; {_what_works(model, slice_)}")
    return layout, (why, *_notes(model, slice_, layout))


def _as_asked(slice_: Slice, parallel: ParallelSpec) -> tuple[Layout, str]:
    """The sizes the user set; the unset ones fill the slice."""
    data, expert = parallel.data or 1, parallel.expert or 1
    context, prefill = parallel.decode_context or 1, parallel.prefill_context or 1
    beside = data * expert * prefill
    tensor = parallel.tensor or max(slice_.devices // ((parallel.pipeline or 1) * beside), 1)
    pipeline = parallel.pipeline or max(slice_.devices // max(tensor * beside, 1), 1)
    sizes = {"tensor": tensor, "pipeline": pipeline, "data": data}
    sizes |= {name: size for name, size in (("expert", expert), ("prefill_context", prefill)) if size > 1}
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        expert=expert,
        decode_context=context,
        prefill_context=prefill,
        long_mesh=expert * context * prefill > 1,
    )
    why = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return layout, f"{why} as asked" + (
        f"; {context} of the tensor devices hold different tokens of a sequence (decode_context)"
        if context > 1
        else ""
    )


def _default(model: _Model, slice_: Slice) -> tuple[Layout, str]:
    heads, whole = model.shape.num_attention_heads, Layout(slice_.devices)
    staged = Layout(slice_.devices_per_host, pipeline=slice_.hosts)
    if (odd := _odd(model, whole)) and not _odd(model, staged):
        why = f"pipeline={slice_.hosts}, one stage a host: {odd[0]}, but all of it by {staged.tensor}"
        return staged, why
    return whole, f"tensor={whole.tensor}: {heads} attention heads over every device of {slice_}"


def _undivided(shape: ModelShape, devices: int) -> list[int]:
    """Numbers of a layer's attention heads that do not divide by so many devices."""
    return [heads for heads in shape.head_counts if devices < 1 or heads % devices]


def _odd(model: _Model, layout: Layout) -> list[str]:
    """What the devices of a stage can't be given equal parts of."""
    heads = [
        f"{heads} attention heads do not divide by {layout.tensor} devices"
        for heads in _undivided(model.shape, layout.tensor)
    ]
    return heads or uneven(model.shape, model.sizes, layout)


def _attention_shared(model: _Model, layout: Layout, devices: int | None) -> tuple[Layout, str]:
    """The layout with attention shared by requests: over `devices`, or over those that KV heads can't fill."""
    tensor, rows = layout.tensor // layout.decode_context, model.rows
    attention_data = devices or max(int(tensor // rows), 1)
    if tensor % attention_data:
        raise PlanError(
            f"attention_data={attention_data} does not divide tensor={layout.tensor}"
            + (f" / decode_context={layout.decode_context}" if layout.decode_context > 1 else "")
        )
    left = tensor // attention_data
    if attention_data > 1 or left == rows:
        attention_expert = layout.expert
    else:
        axes = int(rows // left)
        if axes < 1:
            raise PlanError(
                f"attention_data={attention_data} leaves {left} devices for {rows:g} rows of KV heads: set it to auto, or to "
                f"{max(int(tensor // rows), 1)}"
            )
        attention_expert = max(1, layout.expert // axes)
    if layout.expert % attention_expert:
        raise PlanError(
            f"expert={layout.expert} does not divide by the {attention_expert} groups that share attention by requests; "
            f"make it a multiple"
        )
    shared = replace(layout, attention_data=attention_data, attention_expert=attention_expert, long_mesh=True)
    kind = "one latent vector" if model.shape.latent else f"{model.shape.num_key_value_heads} KV heads"
    verb = "fills" if model.shape.latent else "fill"
    how = (
        "as asked"
        if devices
        else f"a token's {kind} {verb} {min(rows, tensor):g} of the {tensor} tensor devices"
    )
    return shared, (
        f"attention_data={attention_data}: {how}, so {shared.attention_groups} groups of {shared.head_shards} run "
        f"attention for different requests (attn_dp={attention_data}, attn_dp_expert={attention_expert})"
    )


def _problems(model: _Model, slice_: Slice, layout: Layout) -> list[str]:
    shape, problems = model.shape, []
    tensor, pipeline, data = layout.tensor, layout.pipeline, layout.data
    if layout.devices != slice_.devices:
        factors = {"data": data, "expert": layout.expert, "prefill_context": layout.prefill_context}
        sizes = f"tensor={tensor} x pipeline={pipeline}" + "".join(
            f" x {name}={size}" for name, size in factors.items() if size > 1
        )
        problems.append(f"{sizes} is {layout.devices} devices, {slice_} has {slice_.devices}")
    if pipeline not in (1, slice_.hosts):
        problems.append(f"pipeline={pipeline} must be 1 or the number of hosts, {slice_.hosts}")
    if pipeline > shape.layers:
        problems.append(f"pipeline={pipeline} has more stages than the model's {shape.layers} layers")
    if data > 1 and slice_.hosts > 1:
        problems.append(f"data={data} needs a slice of one host; set replicas for more slices")
    cut = tensor * layout.expert
    name = f"tensor={tensor}" + (f" x expert={layout.expert}" if layout.expert > 1 else "")
    if odd := _undivided(shape, cut):
        problems.append(f"{odd[0]} attention heads do not divide by {name}")
    kv_heads = shape.num_key_value_heads
    if cut and kv_heads % cut and cut % kv_heads:
        problems.append(f"{kv_heads} KV heads neither divide by {name} nor it by them")
    return [*problems, *_expert_problems(model, layout), *_context_problems(model, layout)]


def _expert_problems(model: _Model, layout: Layout) -> list[str]:
    experts = model.shape.experts
    if layout.expert > 1 and experts is None:
        return [f"expert={layout.expert} needs a model with experts, {model.shape.architecture} has none"]
    cut = layout.expert
    if model.sizes.expert_parallel and experts:
        cut = layout.width
    if experts and cut > 1 and experts.count % cut:
        return [f"{experts.count} experts do not divide by the {cut} devices that they are cut over"]
    if not experts or experts_lie_whole(model.shape, model.sizes, layout):
        return []
    parts, name = experts.width, f"experts of width {experts.width}"
    quantization = model.sizes.quantization
    if quantization and quantization.format == "mxfp4":  # padded to whole blocks, which have a scale each
        parts = math.ceil(experts.width / MXFP4_BLOCK)
        name = f"{name}, {parts} blocks of {MXFP4_BLOCK} in MXFP4,"
    if parts % layout.width:
        return [f"{name} do not divide by {layout.width} devices; set engine.enable_expert_parallel: true"]
    return []


def _context_problems(model: _Model, layout: Layout) -> list[str]:
    """vLLM 0.26's own rules (ModelConfig.verify_with_parallel_config) and tpu-inference's (ShardingConfigManager)."""
    shape, decode, prefill = model.shape, layout.decode_context, layout.prefill_context
    problems = []
    if shape.latent and decode * prefill > 1:
        problems.append(
            "tpu-inference 0.26 has no context parallelism in latent attention; unset decode_context and prefill_context"
        )
    elif decode > 1:
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        if layout.tensor % decode:
            problems.append(f"decode_context={decode} does not divide tensor={layout.tensor}")
        if decode > layout.tensor * layout.expert // kv_heads:
            problems.append(
                f"decode_context={decode} is more than the {layout.tensor * layout.expert // kv_heads} devices that would "
                f"share one of {kv_heads} KV heads"
            )
        elif heads // kv_heads % decode:
            problems.append(
                f"{heads // kv_heads} query heads of a KV head do not divide by decode_context={decode}"
            )
    if decode > 1 and prefill > 1:
        problems.append("decode_context and prefill_context exclude each other; set one of them")
    if prefill > 1 and layout.data > 1:
        problems.append("prefill_context does not go with data; set one of them")
    if prefill > 1 and model.sizes.sequences > 1:
        problems.append(
            "with prefill_context the engine runs one request at a time and ends on a second one (tpu_runner.py); set "
            f"engine.max_num_seqs to 1 (it is {model.sizes.sequences})"
        )
    return problems


def _what_works(model: _Model, slice_: Slice) -> str:
    staged = [Layout(slice_.devices // stages, pipeline=stages) for stages in sorted({1, slice_.hosts})]
    works = [
        f"tensor={layout.tensor} pipeline={layout.pipeline}"
        for layout in staged
        if _works(model, slice_, layout)
    ]
    if not works and not model.sizes.lora_rank:
        copied = (Layout(slice_.devices // data, data=data) for data in COPIES if not slice_.devices % data)
        works = [
            f"tensor={layout.tensor} data={layout.data}" for layout in copied if _works(model, slice_, layout)
        ][:1]
    return f"on {slice_} {' or '.join(works)} works" if works else f"no layout of it works on {slice_}"


def _works(model: _Model, slice_: Slice, layout: Layout) -> bool:
    return not _problems(model, slice_, layout) and not uneven(model.shape, model.sizes, layout)


def _notes(model: _Model, slice_: Slice, layout: Layout) -> list[str]:
    shape, notes = model.shape, []
    if slice_.generation in _EXPERIMENTAL:
        notes.append(
            f"tpu-inference 0.26 calls {slice_.generation} experimental; it recommends v5e, v6e and v7x"
        )
    if layout.pipeline > 1 and slice_.generation in _EXPERIMENTAL:
        notes.append(
            f"untried: tpu-inference 0.26 takes a chip of {slice_.generation} for two devices when it makes stages "
            "(tpu_info.py), JAX for one"
        )
    if layout.context > 1:
        notes.append(_UNTRIED)
    if layout.long_mesh:
        notes.append("mesh " + " x ".join(f"{axis}={size}" for axis, size in layout.mesh.items()))
    heads = shape.num_key_value_heads
    if not shape.latent and layout.attention_tensor > heads:
        copies = layout.attention_tensor // heads
        notes.append(f"{heads} KV heads are copied {copies} times to fill tensor={layout.attention_tensor}")
    in_stages_by_vllm = layout.pipeline > 1 and shape.architecture in NOT_STAGED
    if (
        _experts_follow_the_mesh(model)
        and not in_stages_by_vllm
        and model.sizes.expert_parallel
        and layout.expert == 1
    ):
        notes.append(
            "engine.enable_expert_parallel has no effect: tpu-inference's own DeepSeek cuts experts over the mesh's axis for "
            "them alone; set parallel.expert and parallel.tensor: 1, or engine.model_impl: vllm"
        )
    return notes


def _experts_follow_the_mesh(model: _Model) -> bool:
    """tpu-inference's own DeepSeek reads its expert parallelism from the mesh (models/jax/deepseek_v3.py)."""
    return model.shape.architecture == "DeepseekV3ForCausalLM" and not model.sizes.by_vllm
