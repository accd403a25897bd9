"""Refuses grammars, in whichever field they stand, that take an engine long to compile. Pure.

xgrammar compiles them before the first token, in the engine's own process: a hundred patterns of 40 characters took it 7 s.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jiter

from serving.errors import BadRequestError

_LONGEST_REGEX_CHARS = 4096
_MOST_REPEATS = 10_000
_LONGEST_GRAMMAR_CHARS = 1 << 16
_MOST_SCHEMA_VALUES = 10_000
# Each pair of bounds on a text's length is unrolled, in 50 ms and more; the same pair once.
_MOST_LENGTHS = 32
# Fields with schemas. `text` is of the Responses API, `output_config` Anthropic's.
_SCHEMAS = ("structured_outputs", "response_format", "guided_json", "guided_choice", "text", "output_config")
# All that `check` looks at.
FIELDS = (*_SCHEMAS, "tools", "guided_regex", "guided_grammar")
_REPEAT = re.compile(r"(\)?)\{(\d{0,9}),?(\d{0,9})\}")
# Digits without an end to them would be searched once for each.
_LONG_REPEAT = re.compile(r"\{(?:\d{0,9},)?\d{10}")


def check(fields: Mapping[str, Any]) -> None:
    """Refuse grammars that take an engine long to compile, while all its other requests wait."""
    outputs = fields.get("structured_outputs")
    named = outputs if isinstance(outputs, Mapping) else {}
    for name, text in (
        *named.items(),
        *((name, fields.get(f"guided_{name}")) for name in ("regex", "grammar")),
    ):
        if isinstance(text, str) and name == "regex":
            _check_regex(name, text)
        elif isinstance(text, str) and len(text) > _LONGEST_GRAMMAR_CHARS:
            raise BadRequestError(
                f"{name[:40]} has {len(text)} characters; send at most {_LONGEST_GRAMMAR_CHARS}."
            )
    for name in _SCHEMAS:
        _check_schema(name, _unpacked(fields.get(name)))
    if fields.get("tool_choice") not in (None, "auto", "none"):  # only then they are a grammar
        _check_schema("tools", fields.get("tools"))


def _unpacked(outputs: Any) -> Any:
    """With the schemas in it that are texts of JSON, which vLLM takes too; the engine refuses those that are none."""
    if not isinstance(outputs, Mapping):
        return outputs
    schemas = {}
    for name in ("json", "structural_tag"):
        if isinstance(text := outputs.get(name), str):
            with suppress(ValueError):
                schemas[name] = jiter.from_json(text.encode("utf-8", "surrogatepass"))
    return {**outputs, **schemas}


def _check_schema(name: str, schema: Any) -> None:
    """Refuse JSON schemas, at any depth, that take an engine long to compile."""
    values, todo = 0, [schema]
    lengths: set[tuple[int, int]] = set()
    patterns: dict[str, int] = {}
    while todo:
        item = todo.pop()
        values += 1
        if isinstance(item, list):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
            bounds = _count(item.get("minLength")), _count(item.get("maxLength"))
            if any(bounds):
                lengths.add(bounds)
            if isinstance(pattern := item.get("pattern"), str):
                _check_regex(f"a pattern of {name}", pattern)
                patterns[pattern] = _repeats(pattern)
    for what, count, most in (
        ("values", values, _MOST_SCHEMA_VALUES),
        ("different pairs of minLength and maxLength", len(lengths), _MOST_LENGTHS),
        ("repetitions in all of its patterns together", sum(patterns.values()), _MOST_REPEATS),
    ):
        if count > most:
            raise BadRequestError(f"{name} has {_told(count)} {what}; send at most {most}.")


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _check_regex(name: str, regex: str) -> None:
    if len(regex) > _LONGEST_REGEX_CHARS:
        raise BadRequestError(f"{name} has {len(regex)} characters; send at most {_LONGEST_REGEX_CHARS}.")
    if _LONG_REPEAT.search(regex):
        raise BadRequestError(
            f"{name} repeats a part a number of times that has ten digits; send at most {_MOST_REPEATS}."
        )
    if (repeats := _repeats(regex)) > _MOST_REPEATS:
        raise BadRequestError(
            f"{name} repeats a part {_told(repeats)} times, one count inside another; send at most {_MOST_REPEATS}."
        )


def _repeats(regex: str) -> int:
    """The most that a regex's counts can come to: those of groups may stand one inside another."""
    groups, single = 1, 0
    for group, least, most in _REPEAT.findall(regex):
        count = max(1, int(most or least or "1"))
        if group:
            groups = min(groups * count, 1 << 60)
        else:
            single += count
    return groups * max(1, single)


def _told(count: int) -> str:
    return str(count) if count < 1 << 64 else f"a number of {count.bit_length()} bits"
