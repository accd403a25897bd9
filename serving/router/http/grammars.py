"""Refuses grammars, in whichever field they stand, that take an engine long to compile. Pure.

xgrammar compiles them before the first token, in the engine's own process: a hundred patterns of 40 characters took it 7 s.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jiter

from serving.errors import BadRequestError
from serving.router.http import ebnf

_LONGEST_REGEX_CHARS = 4096
_MOST_REPEATS = 10_000
_LONGEST_GRAMMAR_CHARS = 1 << 16
_MOST_SCHEMA_VALUES = 10_000
# Each pair of bounds on a text's length is unrolled, in 50 ms and more; the same pair once.
_MOST_LENGTHS = 32
# The time for an object is as the square of the number of its properties that may be left out: 300 took 3 s, 3,000 take minutes.
_MOST_OPTIONAL_SQUARED = 200**2
_LONGEST_LITERALS_CHARS = 1 << 16
_LITERALS = frozenset(("enum", "const", "choice"))
# Each is a pattern: 2,000 integers with ranges of 16 digits took a slice's HTTP process 1.2 s and its engine 10.
_MOST_FORMATS = 512
_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Parts in a row that may be left out take as long as their number to the third: 40 of `[a-z]?` took 3 s, 200 take minutes.
_MOST_OPTIONAL_CUBED = 32**3
_FEW_OPTIONAL = 16
_MOST_DENSE_CHARS = 1 << 13  # to be read in some milliseconds
# Fields with schemas. `text` is of the Responses API, `output_config` Anthropic's.
_SCHEMAS = ("structured_outputs", "response_format", "guided_json", "guided_choice", "text", "output_config")
# All that `check` looks at.
FIELDS = (*_SCHEMAS, "tools", "guided_regex", "guided_grammar")
_REPEAT = re.compile(r"(\)?)\{(\d{0,9}),?(\d{0,9})\}")
# Digits without an end to them would be searched once for each.
# A part of a regex or a bracket of one, and what says how often it stands there.
_PART = re.compile(
    r"(?P<open>\((?:\?[:=!<]+)?)|(?P<close>\))|(?P<or>\|)|[\^$]|(?P<part>\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.)",
    re.DOTALL,
)
_TIMES = re.compile(r"(?:(?P<none>[*?]|\{0*(?:,\d*)?\})|\+|\{\d*,?\d*\})?[?+]?")
# A grammar's texts and names, each of them a part, and what stands between parts.
_TERM, _SPACE = re.compile(r'"(?:\\.|[^"\\])*"|\w+'), re.compile(r"\s+")
_LONG_REPEAT = re.compile(r"\{(?:\d{0,9},)?\d{10}")


def check(fields: Mapping[str, Any]) -> None:
    """Refuse grammars that take an engine long to compile, while all its other requests wait."""
    outputs = fields.get("structured_outputs")
    outputs = {} if outputs is None else outputs
    if not isinstance(outputs, Mapping):  # an engine's own check fails on it
        raise BadRequestError('structured_outputs is no object; send one, as {"choice": ["yes", "no"]}.')
    for name, text in (
        *outputs.items(),
        *((name, fields.get(f"guided_{name}")) for name in ("regex", "grammar")),
    ):
        if isinstance(text, str) and name == "regex":
            _check_regex(name, text)
            _check_optional(name, [text])
            continue
        if isinstance(text, str) and name == "grammar":
            _check_optional(name, _SPACE.sub("", _TERM.sub("w", text[:_LONGEST_GRAMMAR_CHARS])).split(":"))
        if isinstance(text, str) and len(text) > _LONGEST_GRAMMAR_CHARS:
            told = (
                name if name in ("grammar", "json") else "A text of structured_outputs"
            )  # a client's own name is its own
            raise BadRequestError(
                f"{told} has {len(text)} characters; send at most {_LONGEST_GRAMMAR_CHARS}."
            )
        if isinstance(text, str) and name == "grammar" and (problem := ebnf.problem(text)):
            raise BadRequestError(f"{name}: {problem}.")
    for name in _SCHEMAS:
        _check_schema(name, _unpacked(fields.get(name)))
    tools = fields.get("tools")
    if fields.get("tool_choice") not in (None, "auto", "none") or _any_is_strict(tools):
        _check_schema("tools", tools)


def _any_is_strict(tools: Any) -> bool:
    """Whether tools are a grammar though no answer has to call one. pydantic takes many values for true."""
    return isinstance(tools, list) and any(
        holder.get("strict")
        for tool in tools
        if isinstance(tool, Mapping)
        for holder in (tool, tool.get("function"))
        if isinstance(holder, Mapping)
    )


def _unpacked(outputs: Any) -> Any:
    """With the schemas in it that are texts of JSON, which vLLM takes too."""
    if not isinstance(outputs, Mapping):
        return outputs
    schemas = {}
    for name in ("json", "structural_tag"):
        if isinstance(text := outputs.get(name), str):
            try:
                schemas[name] = jiter.from_json(text.encode(), allow_inf_nan=False)
            except ValueError:  # an engine reads more than this: half of a surrogate pair, a thousand levels
                raise BadRequestError(
                    f"structured_outputs.{name} is no JSON of 200 levels at most."
                ) from None
    return {**outputs, **schemas}


def _check_schema(name: str, schema: Any) -> None:
    """Refuse JSON schemas, at any depth, that take an engine long to compile."""
    values = optional = literals = formats = 0
    lengths: set[tuple[int, int]] = set()
    patterns: dict[str, int] = {}
    for item, is_literal in _each(schema, is_literal=name == "guided_choice"):
        values += 1
        literals += _literal_chars(item) if is_literal else 0
        if not isinstance(item, dict):
            continue
        bounds = _count(item.get("minLength")), _count(item.get("maxLength"))
        if any(bounds):
            lengths.add(bounds)
        if isinstance(pattern := item.get("pattern"), str):
            _check_regex(f"a pattern of {name}", pattern)
            patterns[pattern] = _repeats(pattern)
        if "patternProperties" in item:
            # Outlines alone takes them: of lists within lists it makes a text twice as long for each level.
            raise BadRequestError(f"{name} has patternProperties; leave them out, or name the properties.")
        if isinstance(properties := item.get("properties"), dict):
            literals += _literal_chars(properties)
            optional += _optional(properties, item.get("required")) ** 2
        formats += isinstance(item.get("format"), str) or any(bound in item for bound in _RANGES)
    for what, count, most in (
        ("values", values, _MOST_SCHEMA_VALUES),
        ("different pairs of minLength and maxLength", len(lengths), _MOST_LENGTHS),
        ("repetitions in all of its patterns together", sum(patterns.values()), _MOST_REPEATS),
        ("as the sum of squares of each object's optional properties", optional, _MOST_OPTIONAL_SQUARED),
        ("characters in names of properties, enum and const", literals, _LONGEST_LITERALS_CHARS),
        ("texts with a format and numbers with a range", formats, _MOST_FORMATS),
    ):
        if count > most:
            raise BadRequestError(f"{name} has {_told(count)} {what}; send at most {most}.")
    _check_optional(name, patterns)


def _each(schema: Any, *, is_literal: bool) -> Iterator[tuple[Any, bool]]:
    """Every value at any depth, and whether an answer has to repeat it."""
    todo = [(schema, is_literal)]
    while todo:
        item, is_literal = todo.pop()
        yield item, is_literal
        if isinstance(item, list):
            todo.extend((value, is_literal) for value in item)
        elif isinstance(item, dict):
            todo.extend((value, is_literal or key in _LITERALS) for key, value in item.items())


def _literal_chars(item: Any) -> int:
    """The characters of a text, or of the names in an object."""
    if isinstance(item, str):
        return len(item)
    return sum(map(len, item)) if isinstance(item, dict) else 0


def _optional(properties: Mapping[str, Any], required: Any) -> int:
    """The properties of an object that may be left out."""
    always = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
    return len(properties.keys() - always)


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


def _check_optional(name: str, regexes: Iterable[str]) -> None:
    """Refuse long rows of parts that may be left out. Most regexes have too few such parts to be read."""
    dense = [regex for regex in regexes if sum(map(regex.count, "?*|{")) > _FEW_OPTIONAL]
    if sum(map(len, dense)) > _MOST_DENSE_CHARS or sum(map(_optional_cubed, dense)) > _MOST_OPTIONAL_CUBED:
        raise BadRequestError(
            f"{name} has too many parts that may be left out; send at most 32 before one that may not."
        )


def _optional_cubed(regex: str) -> int:
    """The sum of cubes of a regex's optional parts, for each row of them; about, where groups are within groups."""
    row = total = at = 0
    # How long the row was before a group, and behind the longest of its choices yet.
    groups: list[tuple[int, int]] = []
    filled = False  # whether the choice that is read has a part

    def longer(by: int) -> int:
        nonlocal total
        total += (row + by) ** 3 - row**3
        return row + by

    while at < len(regex) and (part := _PART.match(regex, at)):
        times = _TIMES.match(regex, part.end()) if part["close"] or part["part"] else None
        at = times.end() if times else part.end()
        may_miss = bool(times and times["none"])
        if part["open"]:
            groups.append((row, 0))
            filled = False
        elif part["or"] or part["close"]:
            before, longest = groups[-1] if groups else (0, 0)
            row = longer(not filled)
            longest, filled = max(longest, row), bool(part["close"])
            row = before
            if part["or"]:
                groups[-1:] = [(before, longest)] if groups else []
            elif groups:
                groups.pop()
                row = max(longest, longer(1)) if may_miss else longest
        elif part["part"]:
            row, filled = longer(1) if may_miss else 0, True
    return total


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
