"""Every key that `args` of a YAML may have, from the pydantic models of serving/config/."""

import inspect
import types
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from serving.config import ServiceConfig

_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "anything"}
_INTRO = """# Configuration

A service is a [Ray Serve config file](https://docs.ray.io/en/releases-2.60.0/serve/production-guide/config.html).
Ours is what stands under `args` of an application whose `import_path` is `serving.app:build`.
[The YAML](../guides/yaml.md) shows a whole file.

Every key is listed once, under the mapping that it stands in. A key without a default must be given.
An unknown key is refused with the nearest known one."""


def page() -> str:
    """A table a mapping, in the order in which the mappings are met."""
    parts = [_INTRO]
    for path, spec in _mappings():
        parts.append(f"## {f'`{path}`' if path else 'The top level'}")
        if spec.__doc__:
            parts.append(_one_line(inspect.cleandoc(spec.__doc__).partition("\n\n")[0]))
        lines = ["| key | type | default | bounds | what it is |", "|---|---|---|---|---|"]
        for name, field in spec.model_fields.items():
            if not field.description:
                raise LookupError(f"{spec.__name__}.{name} in serving/config/ has no description")
            cells = [
                f"`{name}`",
                _type(field.annotation),
                _default(field),
                _bounds(field),
                field.description.replace("|", "\\|"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _mappings() -> list[tuple[str, type[BaseModel]]]:
    """Each class once, at the first path that leads to it."""
    met: dict[type[BaseModel], str] = {}

    def meet(path: str, spec: type[BaseModel]) -> None:
        if spec in met:
            return
        met[spec] = path
        for name, field in spec.model_fields.items():
            for inner, listed in specs_within(field.annotation):
                meet(f"{path}.{name}{'[]' if listed else ''}".removeprefix("."), inner)

    meet("", ServiceConfig)
    return [(path, spec) for spec, path in met.items()]


def specs_within(annotation: Any, *, listed: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """The mappings an annotation names, and whether as a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, listed
    for argument in get_args(annotation):
        yield from specs_within(argument, listed=listed or get_origin(annotation) is tuple)


def _anchor(path: str) -> str:
    """As Python-Markdown makes it of the heading."""
    return "".join(letter for letter in path.lower() if letter.isalnum() or letter in "_-")


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (types.UnionType, Union):
        return " or ".join(_type(argument) for argument in arguments if argument is not types.NoneType)
    if origin is tuple:
        return f"list: {_type(arguments[0])}"
    if origin is dict:
        of = arguments[1]
        return f"mapping of {_type(get_args(of)[0] if get_origin(of) is Annotated else of)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        path = dict((spec, path) for path, spec in _mappings())[annotation]  # noqa: C402  turned round
        return f"[mapping](#{_anchor(path)})"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return ", ".join(f"`{value}`" for value in annotation)
    return _NAMES[annotation]


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.is_required():
        text = "must be given"
    elif value is PydanticUndefined or value in ("", ()):
        text = "empty"
    elif isinstance(value, BaseModel):
        text = "its defaults"
    elif value is None:
        text = "not set"
    elif isinstance(value, bool):
        text = f"`{str(value).lower()}`"
    elif isinstance(value, tuple):
        text = ", ".join(f"`{part}`" for part in value)
    else:
        text = f"`{value}`"
    return text


def _bounds(field: FieldInfo) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "length at least"}
    found = [
        f"{text} {getattr(limit, name)}"
        for limit in field.metadata
        for name, text in words.items()
        if hasattr(limit, name)
    ]
    return ", ".join(found) or "-"


def _one_line(docstring: str) -> str:
    return " ".join(docstring.split())
