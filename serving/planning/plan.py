"""`plan`: one model of the YAML laid out on its slice, or a refusal that says what to change.

`plan` decides before hardware is allocated, from the YAML, `config.json` and the hardware table alone. `serve run` and
`serving plan` call the same function.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.config import ModelSpec
from serving.errors import PlanError
from serving.planning import adapters, alternatives, engine_options, parallelism
from serving.planning.architectures import JAX_MODELS
from serving.planning.checkpoints import Hub, no_hub
from serving.planning.engine_sizes import EngineSizes, engine_sizes
from serving.planning.fit import Fit, measure
from serving.planning.layout import Layout
from serving.planning.shapes import ModelShape, shape_of
from serving.planning.speed import Engine, predict, spread
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
    def most_sequences(self) -> int:
        """Sequences the slice runs at once: `max_num_seqs` for each group of devices that schedules apart."""
        return self.sizes.sequences * self.layout.data * self.layout.attention_data

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of LoRA adapters, which clients request like models."""
        return tuple(adapters.adapters(self.engine))

    @property
    def environment(self) -> dict[str, str]:
        """Variables that tpu-inference needs in every process of the slice, beyond the engine options."""
        variables = {}
        if self.sizes.attention_data_parallel:
            variables["NEW_MODEL_DESIGN"] = "1"
        if self.data > 1:  # one process runs all copies; the launcher would start one a copy
            variables["TPU_MULTIPROCESS_DP"] = "0"
        if self.shape.architecture in JAX_MODELS and self.sizes.by_vllm:
            variables["MODEL_IMPL_TYPE"] = "vllm"
        return variables

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
            [self.tensor, self.pipeline, self.data],
            self.engine,
            self.environment,
        ]
        return hashlib.sha256(json.dumps(started_with, sort_keys=True, default=str).encode()).hexdigest()[:16]


def plan(spec: ModelSpec, hub: Hub = no_hub) -> Plan:
    """Lay a model out on its slice; `hub` gives the config.json of a checkpoint that is not known here.

    Raises TopologyError, ConfigError or PlanError where the YAML can't be served.
    """
    engine_options.check(spec.engine)
    slice_ = resolve(spec.slice.generation, spec.slice.topology, spec.slice.hosts, spec.slice.machine_type)
    shape = shape_of(
        str(spec.engine.get("hf_config_path") or spec.model), spec.engine.get("hf_overrides"), hub
    )
    sizes = engine_sizes(spec.engine, shape, hub)
    layout, reasons = parallelism.derive(shape, sizes, slice_, spec.parallel)
    if sizes.lora_rank and layout.data * layout.attention_data > 1:
        raise PlanError(
            f"{spec.name}: tpu-inference has no LoRA with data parallelism; unset engine.enable_lora or parallel.data"
        )
    adapters.adapters(spec.engine)
    fit = measure(shape, sizes, slice_, layout)
    if fit.problems:
        ways = alternatives.advice(shape, sizes, slice_, layout, fit)
        raise PlanError(f"{spec.name} does not fit {slice_}: {'; '.join(fit.problems)}; {ways}")
    _refuse_missed_targets(spec, shape, sizes, slice_, layout)
    return Plan(
        model=spec,
        slice=slice_,
        shape=shape,
        sizes=sizes,
        layout=layout,
        fit=fit,
        engine=_engine(spec.engine, sizes, fit),
        reasons=(*reasons, *fit.notes),
    )


def plan_pools(spec: ModelSpec, hub: Hub = no_hub) -> list[Plan]:
    """A model on each of its pools, the preferred first; raises as `plan` does, and where two pools can't be told apart."""
    plans = [plan(pool, hub) for pool in spec.per_pool()]
    keys = [one.pool for one in plans]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise PlanError(
            f"{spec.name}: two pools are {twice}: the same slice bought in the same way; make them one with the sum of their "
            "replicas, or give them other `capacity`"
        )
    return plans


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


def _engine(options: Mapping[str, Any], sizes: EngineSizes, fit: Fit) -> dict[str, Any]:
    """The YAML's options, with those the model decides: the length that fits, attention data parallelism."""
    engine = dict(options)
    if sizes.max_model_len is None:
        engine["max_model_len"] = fit.longest
    if sizes.attention_data_parallel:
        additional = dict(engine.get("additional_config") or {})
        sharding = dict(additional.get("sharding") or {})
        strategy = {**(sharding.get("sharding_strategy") or {}), "enable_dp_attention": True}
        engine["additional_config"] = {**additional, "sharding": {**sharding, "sharding_strategy": strategy}}
    return engine
