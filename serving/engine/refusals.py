"""Keeps small what vLLM's HTTP process makes of a body that it refuses.

pydantic tries every type that an item of a list may have and notes what each lacks, for every item. FastAPI makes a mapping of
each note, and vLLM a text of all, with the whole input in every one: 40 KB of `/v1/responses` took 23 s and came to a text of
2 GB. Here a list is refused with its first bad item, and the text has no input.
"""

from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic_core import SchemaValidator

_MOST_ERRORS = 16
_LISTS = ("list", "tuple", "set", "frozenset")


def install(app: Any) -> None:
    """Teach this to an app of FastAPI that has all of its routes."""
    for route in app.routes:
        for field in getattr(getattr(route, "dependant", None), "body_params", ()):
            adapter = field._type_adapter  # noqa: SLF001  nothing else reaches it
            fail_fast(adapter.core_schema)
            # Prebuilt are the validators of inner models, which know nothing of this.
            adapter.validator = SchemaValidator(adapter.core_schema, _use_prebuilt=False)
    tell = app.exception_handlers[RequestValidationError]

    async def tell_briefly(request: Any, error: RequestValidationError) -> Any:
        return await tell(request, RequestValidationError(_brief(error.errors())))

    app.exception_handlers[RequestValidationError] = tell_briefly
    # vLLM's app has one already, with the handlers of then.
    app.middleware_stack = app.build_middleware_stack()


def fail_fast(schema: Any) -> None:
    """Have every list in a core schema of pydantic, at any depth, refused with its first bad item."""
    todo, seen = [schema], set()
    while todo:
        part = todo.pop()
        if not isinstance(part, dict | list | tuple) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            if part.get("type") in _LISTS:
                part["fail_fast"] = True
            todo += part.values()
        else:
            todo += part


def _brief(errors: Sequence[Any]) -> list[Any]:
    return [
        {name: value for name, value in error.items() if name != "input"}
        if isinstance(error, dict)
        else error
        for error in errors[:_MOST_ERRORS]
    ]
