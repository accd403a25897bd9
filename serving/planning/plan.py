"""`plan`: one model of the YAML laid out on its slice, or a refusal that says what to change.

`plan` decides before hardware is allocated, from the YAML, `config.json` and the hardware table alone. `serve run` and
`serving plan` call the same function.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from serving.config import ModelSpec, ParallelSpec
from serving.errors import PlanError
from serving.planning import (
    adapters,
    alternatives,
    engine_environment,
    engine_options,
    host_memory,
    parallelism,
)
from serving.planning.architectures import JAX_MODELS, NOT_STAGED, OWN_ROUTING, TAKEN_FOR_ANOTHER
from serving.planning.cache import separate_batches
from serving.planning.checkpoints import Hub, no_hub
from serving.planning.compiled import result_of
from serving.planning.engine_sizes import EngineSizes, engine_sizes, unheeded
from serving.planning.fit import Fit, Workspace, measure
from serving.planning.layout import Layout
from serving.planning.prices import Prices
from serving.planning.shapes import ModelShape, shape_of
from serving.planning.speed import Engine, Speed, predict, spread
from serving.planning.start_refusals import check_on_hosts
from serving.planning.starts import StartTime, start_time
from serving.planning.weights import checkpoint_bytes
from serving.tpu import Slice, resolve


@dataclass(frozen=True)
class Plan:
    """A model on a slice. `engine` holds vLLM's options as the engine takes them, `reasons` explain the sizes."""

    model: ModelSpec
    slice: Slice
    shape: ModelShape
    sizes: EngineSizes
    layout: Layout
    fit: Fit
    engine: dict[str, Any]
    reasons: tuple[str, ...]

    @property
    def tensor(self) -> int:
        return self.layout.tensor

    @property
    def pipeline(self) -> int:
        return self.layout.pipeline

    @property
    def data(self) -> int:
        return self.layout.data

    @property
    def mesh(self) -> dict[str, int]:
        """The engine's mesh of one pipeline stage: devices by axis, as tpu-inference names the axes."""
        return self.layout.mesh

    @property
    def parallel_options(self) -> dict[str, int]:
        """vLLM's options that with `additional_config` make this mesh."""
        layout = self.layout
        options = {
            "tensor_parallel_size": layout.tensor * layout.expert,
            "pipeline_parallel_size": layout.pipeline,
            "data_parallel_size": layout.data,
        }
        if layout.decode_context > 1:
            options["decode_context_parallel_size"] = layout.decode_context
        if layout.prefill_context > 1:
            options["prefill_context_parallel_size"] = layout.prefill_context
        return options

    @property
    def most_sequences(self) -> int:
        """Sequences the slice runs at once: `max_num_seqs` for each group of devices that schedules apart."""
        return self.sizes.sequences * separate_batches(self.layout)

    @property
    def no_grammars(self) -> str:
        """Why engines of this plan take no requests with a grammar; empty where they do."""
        return no_grammars(self.engine, self.layout, self.sizes)

    @property
    def checkpoint_bytes(self) -> int:
        """Of all its files; each host reads them whole, as tpu-inference's loaders cut tensors after they are read."""
        return checkpoint_bytes(self.shape, self.sizes, self.layout)

    @property
    def start_time(self) -> StartTime:
        """How long a start of the engine takes, by phase, as far as starts were published."""
        machine = self.slice.hardware.machine(self.slice.machine_type)
        return start_time(self.model.model, self.checkpoint_bytes, machine.vcpus if machine else None)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of LoRA adapters, which clients request like models."""
        return tuple(adapters.adapters(self.engine))

    @property
    def options(self) -> dict[str, Any]:
        """The engine's options with those that the plan decides, in vLLM's names; where it runs adds more."""
        options = dict(self.engine) | {
            "model": self.model.model,
            "served_model_name": [self.model.name],
            # vLLM's own defaults differ without its HTTP server, and its tokens of a step may be fewer than the YAML's sequences.
            "max_num_seqs": self.sizes.sequences,
            **self.parallel_options,
        }
        if not self.sizes.towers:  # vLLM raises its default to a picture's tokens
            options["max_num_batched_tokens"] = self.sizes.batched_tokens
        if self.pipeline > 1:
            options["async_scheduling"] = False  # IndexError in tpu-inference 0.26 otherwise
        return options

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every engine process of the slice: the YAML's, and those that plan and model decide."""
        variables = dict(self.model.engine_env)
        if self.layout.long_mesh:
            variables["NEW_MODEL_DESIGN"] = "1"
        if self.data > 1:  # one process runs all copies; the launcher would start one a copy
            variables["TPU_MULTIPROCESS_DP"] = "0"
        if self.shape.architecture in (*JAX_MODELS, *TAKEN_FOR_ANOTHER) and self.sizes.by_vllm:
            variables["MODEL_IMPL_TYPE"] = "vllm"
        if self.sizes.by_vllm and (self.sizes.draft or self.sizes.draft_layers):
            # A draft that is vLLM's own beside a target that is not, by this name, ends the start (Eagle3Proposer.load_model).
            variables |= {"MODEL_IMPL_TYPE": "vllm", "DRAFT_MODEL_IMPL_TYPE": "vllm"}
        return variables

    def speed(self, *, sequences: int, context: int) -> Speed:
        """Decode of so many sequences in flight, of `context` tokens each, and prefill of full batches."""
        return predict(self.shape, self.sizes, self.slice, self.layout, sequences=sequences, context=context)

    @property
    def pool(self) -> str:
        """The key of the pool within its model: the slice's shape and the way it is bought."""
        bought = [
            *self.model.slice.capacity,
            *([self.model.slice.reservation] if self.model.slice.reservation else []),
        ]
        return "-".join([self.slice.key, *bought])

    @property
    def version(self) -> str:
        """A hash of everything the engine is started with; limits and scaling do not change it."""
        started_with = [
            self.model.name,
            self.model.model,
            self.slice.key,
            list(self.parallel_options.values()),
            self.engine,
            self.environment,
        ]
        return hashlib.sha256(json.dumps(started_with, sort_keys=True, default=str).encode()).hexdigest()[:16]


def plan(
    spec: ModelSpec, hub: Hub = no_hub, *, estimated: bool = False, prices: Prices | None = None
) -> Plan:
    """Lay a model out on its slice; `hub` gives the config.json of a checkpoint that is not known here.

    What the TPU's compiler said of this very engine takes the place of estimates, unless `estimated`. Raises TopologyError,
    ConfigError or PlanError where the YAML can't be served; `prices` are the service's, for the slices that a refusal names.
    """
    drawn = _drawn(spec, hub)
    decided = _fitted(spec, drawn, None, prices)
    kept = None if estimated else result_of(decided.version)
    return _fitted(spec, drawn, kept.workspace(decided.fit.workspace), prices) if kept else decided


@dataclass(frozen=True)
class _Drawn:
    """A model laid out on its slice, before its bytes are counted."""

    slice: Slice
    shape: ModelShape
    sizes: EngineSizes
    layout: Layout
    reasons: tuple[str, ...]


def _drawn(spec: ModelSpec, hub: Hub) -> _Drawn:
    engine_options.check(spec.engine)
    engine_environment.check(spec.engine_env)
    slice_ = resolve(spec.slice.generation, spec.slice.topology, spec.slice.hosts, spec.slice.machine_type)
    shape = shape_of(
        str(spec.engine.get("hf_config_path") or spec.model), spec.engine.get("hf_overrides"), hub
    )
    sizes = engine_sizes(spec.engine, shape, hub, spec.engine_env, spec.model)
    if slice_.hosts > 1:
        check_on_hosts(spec.engine, shape)
    layout, reasons = parallelism.derive(shape, sizes, slice_, spec.parallel, spec.engine_env)
    if layout.pipeline > 1 and shape.architecture in NOT_STAGED:
        sizes = replace(sizes, by_vllm=True)
    if sizes.lora_rank and layout.data * layout.attention_groups > 1:
        raise PlanError(
            f"{spec.name}: tpu-inference has no LoRA with data parallelism; unset engine.enable_lora, or parallel.data and "
            "parallel.attention_data"
        )
    adapters.adapters(spec.engine)
    notes = (
        *unheeded(spec.engine, shape, sizes),
        *_routing_notes(shape, sizes),
        *_encoder_notes(shape),
        *_grammar_notes(spec.engine, layout, sizes),
    )
    return _Drawn(slice_, shape, sizes, layout, (*reasons, *notes))


def _routing_notes(shape: ModelShape, sizes: EngineSizes) -> list[str]:
    """What a reader has to know of experts that tpu-inference 0.26 does not choose as the model would."""
    if shape.experts is None or not sizes.by_vllm:
        return []
    if shape.architecture in OWN_ROUTING:
        return [
            f"untried: tpu-inference 0.26 drops the function by which vLLM's {shape.architecture} chooses and weighs experts "
            "(layers/vllm/interface/moe.py): answers may be wrong; compare them with another engine's"
            + ("; tpu-inference's own model has it" if shape.architecture in JAX_MODELS else "")
        ]
    if shape.experts.groups > 1:
        return [
            f"experts are chosen from all {shape.experts.groups} groups, not from the best, as tpu-inference 0.26 runs vLLM's models"
        ]
    return []


def _encoder_notes(shape: ModelShape) -> list[str]:
    if not shape.encodes:
        return []
    return [
        f"untried: tpu-inference has attention for encoders as {shape.architecture} since 0.25 (PR 2753); this service has not run one"
    ]


def _grammar_notes(engine: Mapping[str, Any], layout: Layout, sizes: EngineSizes) -> list[str]:
    why = no_grammars(engine, layout, sizes)
    return (
        [f"requests with a grammar (response_format, required and strict tools) are refused: {why}"]
        if why
        else []
    )


def no_grammars(engine: Mapping[str, Any], layout: Layout, sizes: EngineSizes) -> str:
    """Why an engine takes no requests with a grammar; empty where it does. Read in tpu-inference 0.26.0 and tried.

    With several schedulers (core/sched/dp_scheduler.py) requests go to processes, and a grammar that is being compiled goes to none:
    EngineCore ends. `enable_continue_decode` draws tokens ahead of the grammar, which then rejects them (upstream: tpu-inference#3463).
    Tokens that a model drafts stay on the devices where steps are scheduled ahead (runner/speculative_decoding_manager.py), and vLLM cuts
    them as lists; this was read, and not tried.
    """
    if separate_batches(layout) > 1:
        return (
            "tpu-inference 0.26 ends on them with data parallelism (parallel.data, parallel.attention_data)"
        )
    if (engine.get("additional_config") or {}).get("enable_continue_decode"):
        return "tpu-inference 0.26 fails on them with additional_config.enable_continue_decode"
    drafts = sizes.draft or sizes.draft_layers
    if drafts and layout.pipeline == 1 and engine.get("async_scheduling") is not False:
        return "tpu-inference 0.26 ends on them where a model drafts, unless engine.async_scheduling is false"
    return ""


def _fitted(spec: ModelSpec, drawn: _Drawn, compiled: Workspace | None, prices: Prices | None) -> Plan:
    shape, sizes, slice_, layout = drawn.shape, drawn.sizes, drawn.slice, drawn.layout
    fit = measure(shape, sizes, slice_, layout, compiled)
    if fit.problems:
        ways = alternatives.advice(shape, sizes, slice_, layout, fit, prices)
        raise PlanError(f"{spec.name} does not fit {slice_}: {'; '.join(fit.problems)}; {ways}")
    _refuse_missed_targets(spec, shape, sizes, slice_, layout)
    return Plan(
        model=spec,
        slice=slice_,
        shape=shape,
        sizes=sizes,
        layout=layout,
        fit=fit,
        engine=_engine(spec, shape, sizes, layout, fit),
        reasons=(
            *drawn.reasons,
            *fit.notes,
            *host_memory.notes(sizes, slice_, checkpoint_bytes(shape, sizes, layout)),
        ),
    )


def _refuse_missed_targets(
    spec: ModelSpec, shape: ModelShape, sizes: EngineSizes, slice_: Slice, layout: Layout
) -> None:
    """Refuse targets that even an idle slice misses at the fast end of its range: more slices would not help."""
    alone = predict(shape, sizes, slice_, layout, sequences=1, context=1)
    least_s = alone.step_s / spread(Engine(shape, sizes, slice_, layout))
    if spec.slo.itl_s is not None and least_s > spec.slo.itl_s:
        raise PlanError(
            f"{spec.name}: slo.itl_s is {spec.slo.itl_s:g} s, and one step of {slice_} takes at least {least_s:.2g} s with a single "
            "request; no number of slices keeps it: raise it, or take a slice of more chips"
        )
    if spec.slo.ttft_s is not None and least_s > spec.slo.ttft_s:
        raise PlanError(
            f"{spec.name}: slo.ttft_s is {spec.slo.ttft_s:g} s, and the first step of {slice_} takes at least {least_s:.2g} s; no "
            "number of slices keeps it: raise it, or take a slice of more chips"
        )


def _engine(
    spec: ModelSpec, shape: ModelShape, sizes: EngineSizes, layout: Layout, fit: Fit
) -> dict[str, Any]:
    """The YAML's options, with those that plan and model decide: the length that fits, the strategy of the mesh."""
    engine = dict(spec.engine)
    if sizes.max_model_len is None:
        engine["max_model_len"] = fit.longest
    if (
        sizes.pools
        and not shape.scores
        and engine.get("runner") in (None, "auto")
        and not engine.get("convert")
    ):
        engine["runner"] = "pooling"  # as vLLM finds out by itself from the checkpoint's other files
    if strategy := _strategy(spec.parallel, shape, layout):
        additional = dict(engine.get("additional_config") or {})
        sharding = {**(additional.get("sharding") or {}), "sharding_strategy": strategy}
        engine["additional_config"] = {**additional, "sharding": sharding}
    return engine


def _strategy(parallel: ParallelSpec, shape: ModelShape, layout: Layout) -> dict[str, Any]:
    """tpu-inference's `sharding_strategy`, empty where vLLM's own options say all."""
    strategy: dict[str, Any] = {}
    if layout.expert > 1:
        strategy |= {"tensor_parallelism": layout.tensor, "expert_parallelism": layout.expert}
    if (
        parallel.attention_data or shape.latent
    ):  # tpu-inference refuses latent attention without it (tpu_platform.py)
        strategy["enable_dp_attention"] = True
    if isinstance(parallel.attention_data, int):
        strategy["attn_dp_size"] = parallel.attention_data
    return strategy
