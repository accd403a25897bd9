"""All settings of a service, and what is said of those that are wrong. Pure."""

import difflib
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from serving.config.gke import GkeSpec
from serving.config.models import ModelSpec
from serving.config.router import SENTINEL_LOGPROBS, RouterSpec
from serving.config.spec import Spec
from serving.config.store import BatchSpec, StoreSpec
from serving.errors import ConfigError


class BudgetSpec(Spec):
    """The most that all models together may hold or have on order."""

    slices: int | None = Field(default=None, ge=1, description="Slices, those on order among them.")
    dollars_per_hour: float | None = Field(
        default=None, gt=0, description="USD an hour, by `prices` or the table."
    )


class ServiceConfig(Spec):
    """`args` of the application."""

    models: tuple[ModelSpec, ...] = Field(description="At least one, each with its own name.")
    router: RouterSpec = Field(default=RouterSpec(), description="The HTTP front in front of all models.")
    budget: BudgetSpec = Field(default=BudgetSpec(), description="The limit of all models together.")
    prices: dict[str, dict[str, Annotated[float, Field(gt=0)]]] = Field(
        default_factory=dict, description="USD a chip-hour by generation and capacity."
    )
    store: StoreSpec | None = Field(
        default=None, description="Where files, batches and usage stay; without it there are none."
    )
    batch: BatchSpec = Field(default=BatchSpec(), description="Limits of files and batches.")
    gke: GkeSpec = Field(default=GkeSpec(), description="For `serving manifest` alone.")

    @field_validator("store", mode="before")
    @classmethod
    def _folder_alone(cls, raw: Any) -> Any:
        return {"folder": raw} if isinstance(raw, str) else raw

    @model_validator(mode="after")
    def _stored_keys_have_a_store(self) -> Self:
        if self.router.keys.stored and self.store is None:
            raise ValueError("router.keys.stored: there is no store; name a place for it in `store`")
        if (
            self.store is None
            and self.router.oidc
            and any(rule.has_budget for rule in self.router.oidc.rules)
        ):
            raise ValueError("router.oidc.rules: a budget wants `store`; name a place for it")
        return self

    @model_validator(mode="after")
    def _sentinel_sees_enough(self) -> Self:
        for model in self.models:
            most = model.engine.get("max_logprobs", SENTINEL_LOGPROBS)
            if self.router.sentinel.share and isinstance(most, int) and 0 <= most < SENTINEL_LOGPROBS:
                raise ValueError(
                    f"router.sentinel asks for {SENTINEL_LOGPROBS} logprobs of a token, and {model.name}'s engines give {most}; "
                    f"set engine.max_logprobs to {SENTINEL_LOGPROBS} or more, or leave the sentinel out"
                )
        return self

    @model_validator(mode="after")
    def _within_budget(self) -> Self:
        least = sum(pool.replicas.min for model in self.models for pool in model.per_pool())
        if self.budget.slices is not None and self.budget.slices < least:
            raise ValueError(
                f"budget.slices is {self.budget.slices}, and replicas.min of all pools ask for {least}; raise one or lower the other"
            )
        return self

    @field_validator("models")
    @classmethod
    def _distinct(cls, models: tuple[ModelSpec, ...]) -> tuple[ModelSpec, ...]:
        if not models:
            raise ValueError("no model is listed; give at least one")
        names = [model.name for model in models]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two models are named {duplicates[0]!r}; give each its own name")
        return models


def parse(args: dict[str, Any]) -> ServiceConfig:
    """Read the application's args; raises ConfigError with one line a problem."""
    try:
        return ServiceConfig.model_validate(args)
    except ValidationError as error:
        problems = [dict(problem) for problem in error.errors()]
        raise ConfigError("; ".join(_explain(problem) for problem in _first_causes(problems))) from None


_MOST_SHOWN = 80  # characters of a value

# What pydantic's kinds of problem mean to the writer of a YAML; `{}` are the limits that it names.
_WORDS = {
    "model_type": "a mapping is needed, one `key: value` a line",
    "dict_type": "a mapping is needed, one `key: value` a line",
    "tuple_type": "a list is needed, one `- ` an entry",
    "string_type": "text is needed, in quotes where YAML reads a number, a date or yes and no",
    "int_type": "a whole number is needed",
    "int_parsing": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "float_parsing": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool_type": "true or false is needed",
    "bool_parsing": "true or false is needed",
    "enum": "one of {expected} is needed",
    "greater_than": "a number above {gt:g} is needed",
    "greater_than_equal": "at least {ge:g} is needed",
    "less_than_equal": "at most {le:g} is needed",
    "string_too_short": "text is needed, this is empty",
    "string_too_long": "at most {max_length} characters are taken",
    "too_short": "at least {min_length} is needed",
}


def _first_causes(problems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without lists that are too short because an entry of theirs was refused."""
    return [
        problem
        for problem in problems
        if problem["type"] != "too_short"
        or not any(
            other is not problem and other["loc"][: len(problem["loc"])] == problem["loc"]
            for other in problems
        )
    ]


def _explain(problem: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "args"
    if problem["type"] == "extra_forbidden":
        known = _keys_beside(problem["loc"])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        return f"{where}: unknown key; {hint}"
    if problem["type"] == "missing":
        return f"{where}: missing"
    words = _WORDS.get(problem["type"])
    reason = (
        words.format_map(problem.get("ctx", {})) if words else problem["msg"].removeprefix("Value error, ")
    )
    return f"{where}: {reason} (got {_shown(problem['input'])})"


def _shown(value: Any) -> str:
    """A value as the writer of the YAML knows it again, not all of a long one."""
    shown = "nothing" if value is None else repr(value)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[: _MOST_SHOWN - 1]}…"


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    spec: type[BaseModel] = ServiceConfig
    for part in location[:-1]:
        if isinstance(part, str):
            spec = _spec_within(spec.model_fields[part].annotation) or spec
    return list(spec.model_fields)


def _spec_within(annotation: Any) -> type[BaseModel] | None:
    """The spec an annotation names, also inside tuple[...]."""
    spec = next((argument for argument in get_args(annotation) if argument is not ...), annotation)
    return spec if isinstance(spec, type) and issubclass(spec, BaseModel) else None
