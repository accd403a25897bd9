"""Keeps small what vLLM's HTTP process makes of a body that it refuses.

pydantic tries every type that an item of a list may have and notes what each lacks, for every item. FastAPI makes a mapping of
each note, and vLLM a text of all, with the whole input in every one: 40 KB of `/v1/responses` took 23 s and came to a text of
2 GB. Here a list is refused with its first bad item, and the text has no input. A mapping has no such way out: it is refused by the
number of its names before any of its values is looked at. 200,000 bad ones of `vllm_xargs`, 3 MB, took 8 s and 1 GB.

vLLM looks into some fields before their types are checked, and fails on others than it expects: `chat_request: []` was a 500.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic_core import PydanticCustomError, SchemaValidator, ValidationError

_MOST_ERRORS = 16
_MOST_NAMES = 1024
_ANYTHING = {"type": "any"}
_LISTS = ("list", "tuple", "set", "frozenset")


def install(app: Any) -> None:
    """Teach this to an app of FastAPI that has all of its routes."""
    for route in app.routes:
        for field in getattr(getattr(route, "dependant", None), "body_params", ()):
            adapter = field._type_adapter  # noqa: SLF001  nothing else reaches it
            bound(adapter.core_schema)
            # Prebuilt are the validators of inner models, which know nothing of this.
            adapter.validator = _Validator(SchemaValidator(adapter.core_schema, _use_prebuilt=False))
    tell = app.exception_handlers[RequestValidationError]

    async def tell_briefly(request: Any, error: RequestValidationError) -> Any:
        return await tell(request, RequestValidationError(_brief(error.errors())))

    app.exception_handlers[RequestValidationError] = tell_briefly
    # vLLM's app has one already, with the handlers of then.
    app.middleware_stack = app.build_middleware_stack()


class _Validator:
    """pydantic's, of one route. A body on which a look at it fails is a bad one, and no failure of the engine's."""

    def __init__(self, inner: SchemaValidator) -> None:
        self._inner = inner

    def validate_python(self, body: Any, **options: Any) -> Any:
        try:
            return self._inner.validate_python(body, **options)
        except (AttributeError, LookupError, TypeError) as error:
            problem = PydanticCustomError("type", "a field is of another type than it has to be")
            raise ValidationError.from_exception_data("body", [{"type": problem, "input": None}]) from error


def bound(schema: Any) -> None:
    """Have every list in a core schema of pydantic, at any depth, refused with its first bad item, and every long mapping at once.

    A mapping to whatever there is has no bad value, and may be of any length.
    """
    todo, seen = [schema], set()
    while todo:
        part = todo.pop()
        if not isinstance(part, dict | list | tuple) or id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, dict):
            todo += part
            continue
        todo += part.values()
        if part.get("type") in _LISTS:
            part["fail_fast"] = True
        elif part.get("type") == "dict" and part.get("values_schema", _ANYTHING)["type"] != "any":
            _check_before(part)


def _check_before(mapping: dict[str, Any]) -> None:
    """Make a mapping's schema, where it stands, one that counts names first."""
    inner = {name: value for name, value in mapping.items() if name != "ref"}
    outer = {"type": "function-before", "function": {"type": "no-info", "function": _few}, "schema": inner}
    if "ref" in mapping:
        outer["ref"] = mapping["ref"]
    mapping.clear()
    mapping.update(outer)


def _few(value: Any) -> Any:
    if isinstance(value, Mapping) and len(value) > _MOST_NAMES:
        raise PydanticCustomError(
            "too_many_names",
            "it has {count} names; send at most {most}",
            {"count": len(value), "most": _MOST_NAMES},
        )
    return value


def _brief(errors: Sequence[Any]) -> list[Any]:
    return [
        {name: value for name, value in error.items() if name != "input"}
        if isinstance(error, dict)
        else error
        for error in errors[:_MOST_ERRORS]
    ]
