"""`plan`: one model of the YAML laid out on its slice, or a refusal that says what to change."""

from dataclasses import dataclass
from typing import Any

from serving.config import ModelSpec
from serving.errors import ConfigError
from serving.planning import engine_options, parallelism
from serving.planning.shapes import ModelShape, shape_of
from serving.tpu import Slice, resolve


@dataclass(frozen=True)
class Plan:
    """A model on a slice. `engine` holds vLLM's options as the user gave them, `reasons` why the sizes are these."""

    model: ModelSpec
    slice: Slice
    shape: ModelShape
    tensor: int
    pipeline: int
    engine: dict[str, Any]
    reasons: tuple[str, ...]


def plan(spec: ModelSpec) -> Plan:
    """Raises TopologyError, ConfigError or PlanError where the YAML asks for what can't be."""
    engine_options.check(spec.engine)
    slice_ = resolve(spec.slice.generation, spec.slice.topology, spec.slice.hosts, spec.slice.machine_type)
    shape = shape_of(spec.model, _hf_overrides(spec))
    tensor, pipeline, reasons = parallelism.derive(shape, slice_, spec.parallel)
    return Plan(
        model=spec,
        slice=slice_,
        shape=shape,
        tensor=tensor,
        pipeline=pipeline,
        engine=dict(spec.engine),
        reasons=reasons,
    )


def _hf_overrides(spec: ModelSpec) -> dict[str, Any]:
    overrides = spec.engine.get("hf_overrides") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"engine.hf_overrides: a mapping of config.json keys (got {overrides!r})")
    return overrides
