"""The smallest document that a JSON schema allows, always the same one: the answer to a request for JSON.

Keywords that would need a search for a solution (`pattern`, `not`, `if`, `contains`) are refused, as vLLM refuses what
its grammar compiler can't do.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_DEPTH = 32
_FILLER = "slice "
_REFUSED = (
    "pattern",
    "not",
    "if",
    "contains",
    "patternProperties",
    "propertyNames",
    "dependentRequired",
    "$dynamicRef",
)
_FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "host@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "https://example.com",
    "uri-reference": "https://example.com",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "json-pointer": "/slice",
    "regex": "slice",
}


class SchemaError(ValueError):
    """A schema that this module makes no document for."""


def instance(schema: Any) -> Any:
    """A document that the schema allows; raises SchemaError."""
    return _build(schema, schema, 0)


def _build(schema: Any, root: Any, depth: int) -> Any:
    if schema is True or schema == {}:
        return None
    if not isinstance(schema, Mapping):
        raise SchemaError(f"{schema!r} allows no document")
    if depth > _DEPTH:
        raise SchemaError("a required part of the schema contains itself")
    schema = _merged(schema, root, depth)
    if refused := [key for key in _REFUSED if key in schema]:
        raise SchemaError(f"the simulated engine makes no document for {refused[0]!r}")
    if "const" in schema:
        return schema["const"]
    if options := schema.get("enum"):
        return options[0]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            rest = {name: value for name, value in schema.items() if name != key}
            return _first_possible(schema[key], rest, root, depth)
    return _of_type(schema, root, depth)


def _merged(schema: Mapping[str, Any], root: Any, depth: int) -> dict[str, Any]:
    """A schema merged with its reference and all of its `allOf`."""
    merged = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
    parts = [_resolve(schema["$ref"], root)] if "$ref" in schema else []
    for part in [*parts, *schema.get("allOf", [])]:
        if depth > _DEPTH or not isinstance(part, Mapping):
            raise SchemaError("a required part of the schema contains itself or is no schema")
        for key, value in _merged(part, root, depth + 1).items():
            if key == "properties":
                merged[key] = {**value, **merged.get(key, {})}
            elif key == "required":
                merged[key] = [*merged.get(key, []), *value]
            else:
                merged.setdefault(key, value)
    return merged


def _resolve(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        raise SchemaError(f"{reference!r} lies outside the schema")
    target = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or name not in target:
            raise SchemaError(f"{reference!r} refers to nothing")
        target = target[name]
    return target


def _first_possible(options: Sequence[Any], rest: dict[str, Any], root: Any, depth: int) -> Any:
    problem = SchemaError("an empty list of alternatives")
    for option in options:
        try:
            return _build({**rest, "allOf": [*rest.get("allOf", []), option]}, root, depth + 1)
        except SchemaError as error:
            problem = error
    raise problem


def _of_type(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0]
    match kind or _implied(schema):
        case "object":
            return _object(schema, root, depth)
        case "array":
            return _array(schema, root, depth)
        case "string":
            return _string(schema)
        case "integer":
            return round(_number(schema, 1))
        case "number":
            return _number(schema, None)
        case "boolean" | "null" as simple:
            return True if simple == "boolean" else None
        case other:
            raise SchemaError(f"there is no type {other!r}")


def _implied(schema: Mapping[str, Any]) -> str:
    """The type of a schema that names none, by its other keywords."""
    if {"properties", "required", "additionalProperties", "minProperties"} & schema.keys():
        return "object"
    if {"items", "prefixItems", "minItems"} & schema.keys():
        return "array"
    if {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"} & schema.keys():
        return "number"
    return "string" if {"minLength", "maxLength", "format"} & schema.keys() else "null"


def _object(schema: Mapping[str, Any], root: Any, depth: int) -> dict[str, Any]:
    properties = schema.get("properties", {})
    other = schema.get("additionalProperties", True)
    required = dict.fromkeys(schema.get("required", []))
    names = [name for name in properties if name in required]
    names += [name for name in required if name not in properties]
    names += [name for name in properties if name not in required][
        : max(0, schema.get("minProperties", 0) - len(names))
    ]
    names += [f"slice_{index}" for index in range(schema.get("minProperties", 0) - len(names))]
    return {name: _build(properties.get(name, other), root, depth + 1) for name in names}


def _array(schema: Mapping[str, Any], root: Any, depth: int) -> list[Any]:
    first = schema.get("prefixItems", [])
    wanted = schema.get("minItems", 0)
    items = [_build(item, root, depth + 1) for item in first[:wanted]]
    items += [_build(schema.get("items", True), root, depth + 1) for _ in range(wanted - len(items))]
    if schema.get("uniqueItems") and len(items) > 1:
        return _distinct(schema, items)
    return items


def _distinct(schema: Mapping[str, Any], items: list[Any]) -> list[Any]:
    """The items made distinct where that is simple: numbers count up, strings grow, enumerations go on."""
    item_schema = schema.get("items", {})
    if isinstance(item_schema, Mapping) and len(options := item_schema.get("enum", [])) >= len(items):
        return list(options[: len(items)])
    if all(type(item) is int for item in items):
        step = item_schema.get("multipleOf", 1)
        return [item + index * step for index, item in enumerate(items)]
    if all(isinstance(item, str) for item in items) and "format" not in item_schema:
        return [item + "s" * index for index, item in enumerate(items)]
    raise SchemaError("the simulated engine makes no distinct items of this kind")


def _string(schema: Mapping[str, Any]) -> str:
    if (known := _FORMATS.get(schema.get("format", ""))) is not None:
        return known
    least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    text = _FILLER.strip()
    if least > len(text):
        text = (_FILLER * (least // len(_FILLER) + 1))[: least - 1] + "s"
    return text if len(text) <= most else text[: int(most)]


def _number(schema: Mapping[str, Any], whole: int | None) -> float:
    """The number within the bounds that is nearest to zero, on the grid of `multipleOf` or of whole numbers."""
    grid = schema.get("multipleOf", whole)
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    step = grid or _inside(max(low, above), min(high, below))
    number: float = min(max(0, low), high)
    number = math.ceil(number / step) * step if grid else number
    if number <= above:
        number = (math.floor(above / step) + 1) * step if grid else above + step
    if number > high or number >= below:
        number = (math.ceil(min(high, below) / step) - 1) * step if grid else min(high, below) - step
        number = high if grid is None and high < below else number
    if not (low <= number <= high and above < number < below):
        raise SchemaError("no number is within these bounds")
    return number


def _inside(low: float, high: float) -> float:
    """A step that stays between two bounds."""
    return (high - low) / 2 if math.isfinite(high - low) else 1.0
