"""What `args` of a deployments/*.yaml may say, and nothing else.

Names only: whether a topology exists or a model fits is the plan's question. Every model is frozen and refuses
unknown keys, naming the nearest known one.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from serving.errors import ConfigError


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SliceSpec(_Spec):
    """A slice shape as the user names it."""

    generation: str = Field(description="TPU generation: v4, v5e, v5p, v6e or v7x.")
    topology: str = Field(description="Chips along each axis of the slice, as in 2x4 or 2x2x2.")
    hosts: int | None = Field(
        default=None, ge=1, description="VMs of the slice, where the topology leaves a choice."
    )
    machine_type: str | None = Field(default=None, description="GKE machine type instead of hosts.")


class ParallelSpec(_Spec):
    """Parallelism that overrides the derived one; both must fill the slice."""

    tensor: int | None = Field(default=None, ge=1, description="Tensor parallel size in JAX devices.")
    pipeline: int | None = Field(default=None, ge=1, description="Pipeline stages: 1 or the number of hosts.")


class ReplicaSpec(_Spec):
    """How many slices serve the model."""

    min: int = Field(default=1, ge=0)
    max: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class ModelSpec(_Spec):
    """One model on slices of one shape."""

    name: str = Field(default="", description="Name clients use; the model id where left out.")
    model: str = Field(min_length=1, description="Hugging Face id or a local path of a checkpoint.")
    slice: SliceSpec
    replicas: ReplicaSpec = ReplicaSpec()
    parallel: ParallelSpec = ParallelSpec()
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine options by vLLM's names.")
    drain_s: float = Field(
        default=60, ge=0, description="Seconds a slice may take to finish its requests when it stops."
    )
    stall_s: float = Field(
        default=30, gt=0, description="Seconds without an answer after which an engine counts as hung."
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and not raw.get("name") and isinstance(raw.get("model"), str):
            return {**raw, "name": raw["model"]}
        return raw

    @field_validator("replicas", mode="before")
    @classmethod
    def _fixed_count(cls, raw: Any) -> Any:
        return {"min": raw, "max": raw} if isinstance(raw, int) and not isinstance(raw, bool) else raw


class RouterSpec(_Spec):
    """The HTTP front."""

    replicas: int = Field(default=1, ge=1)


class ServiceConfig(_Spec):
    """`args` of the application."""

    models: tuple[ModelSpec, ...]
    router: RouterSpec = RouterSpec()

    @field_validator("models")
    @classmethod
    def _distinct(cls, models: tuple[ModelSpec, ...]) -> tuple[ModelSpec, ...]:
        if not models:
            raise ValueError("no model is listed; give at least one")
        names = [model.name for model in models]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two models are named {twice[0]!r}; give each its own name")
        return models


def parse(args: dict[str, Any]) -> ServiceConfig:
    """Read the application's args; raises ConfigError with one line a problem."""
    try:
        return ServiceConfig.model_validate(args)
    except ValidationError as error:
        problems = "; ".join(_explain(dict(problem)) for problem in error.errors())
        raise ConfigError(problems) from None


def _explain(problem: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "args"
    if problem["type"] == "extra_forbidden":
        known = _keys_beside(problem["loc"])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        return f"{where}: unknown key; {hint}"
    if problem["type"] == "missing":
        return f"{where}: missing"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')} (got {problem['input']!r})"


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    spec: Any = ServiceConfig
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        annotation = spec.model_fields[part].annotation
        spec = ModelSpec if part == "models" else annotation
    return list(spec.model_fields)


@dataclass(frozen=True)
class DeploymentFile:
    """A deployments/*.yaml: the services of its applications, and the port Serve opens."""

    path: Path
    port: int
    services: dict[str, ServiceConfig]


def load(path: Path) -> DeploymentFile:
    """Read a Serve config file as far as it is ours; raises ConfigError."""
    raw = _read(path)
    services = {}
    for application in raw["applications"]:
        name = application.get("name", "default")
        try:
            services[name] = parse(application.get("args") or {})
        except ConfigError as error:
            raise ConfigError(f"{path}, application {name}: {error.message}") from None
    return DeploymentFile(path, _port(path, raw.get("http_options") or {}), services)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    applications = raw.get("applications") if isinstance(raw, dict) else None
    if not isinstance(applications, list) or not applications:
        raise ConfigError(f"{path}: no applications; see deployments/llama.yaml")
    if not all(isinstance(application, dict) for application in applications):
        raise ConfigError(f"{path}: applications: each is a mapping with import_path and args")
    return dict(raw)


def _port(path: Path, http_options: Any) -> int:
    port = http_options.get("port", 8000) if isinstance(http_options, dict) else http_options
    if not isinstance(port, int) or not isinstance(http_options, dict):
        raise ConfigError(f"{path}: http_options.port: a number is needed (got {port!r})")
    return port
