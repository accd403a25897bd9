"""An engine's words on a request that it refuses, for a reader who knows this service's YAML and its HTTP API alone. Pure.

vLLM names flags of its own command line. It passes pydantic's errors on as Python prints them, with all of the input. Clients log
errors, so none of the request's text stays.
"""

import ast
import re
from collections.abc import Iterator
from typing import Any

from serving.planning.engine_options import OF_SERVER, SETTABLE

_LONGEST = 4000
_MOST_PROBLEMS = 5
_MOST_READ = 64  # problems of a request; each is parsed, and a request may have one for each of its values
# vLLM's `exc.errors()`, a dictionary a line; everything from the input on goes, or from a context that holds Python's own error.
_VALIDATION = re.compile(r"\d+ validation errors?:\n")
_INPUT = re.compile(r", '(?:input|ctx)': .*", re.MULTILINE)
# pydantic's own text of the same.
_PYDANTIC = re.compile(r"\d+ validation errors? for .*\n")
_DETAIL = re.compile(r" \[type=\w+, input_value=.*")
# What pydantic puts between a field's names for the types that it tries: classes, functions, lists of something.
_TYPE = re.compile(r"[A-Z]\w*|.*\[.*|str|int|float|bool")
# What Python itself says of a value of another type, and of a text that is no JSON.
_OF_TYPES = re.compile(r"'\w+' object (?:is|has|does)\b")
_OF_JSON = re.compile(r"[A-Z][\w ',:-]{0,80}: line \d+ column \d+ \(char \d+\)")
_NO_TOOL_PARSER = re.compile(
    r'("auto"|"required"|)(?: tool choice|) requires (?:--enable-auto-tool-choice and )?--tool-call-parser'
)
_FLAG = re.compile(r"--([a-z][a-z0-9-]*[a-z0-9])")


def in_our_words(message: str) -> str:
    """An error's message, as a client reads it."""
    message = _INPUT.sub("}", message)  # first: it may have megabytes, and say anything
    if without_tools := _NO_TOOL_PARSER.search(message):
        asked = without_tools[1] or "a function's name"
        return (
            f"tool_choice is {asked}, and this model has no tool parser: set engine.tool_call_parser in its YAML, "
            'or send tool_choice "none".'
        )
    if _VALIDATION.match(message):
        message = _sentence([*_listed(message)])
    elif _PYDANTIC.match(message):
        message = _sentence([*_printed(message)])
    elif _OF_TYPES.match(message):
        message = _sentence(["a field is of a type that it can't have, or is null"])
    elif _OF_JSON.fullmatch(message):
        message = _sentence(["a text that has to be JSON, as a tool call's arguments, is none"])
    return _FLAG.sub(_key, message)[:_LONGEST]


def field(place: Any) -> str | None:
    """An engine's name of a wrong field, as OpenAI writes it: `body.messages.2.SomeParam.content` is `messages[2].content`."""
    if not isinstance(place, str):
        return None
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", _where(place.split("."))) or None


def _listed(message: str) -> Iterator[str]:
    for line in message.splitlines()[1 : 1 + _MOST_READ]:
        text = line.strip()
        try:
            problem = ast.literal_eval(text)
            yield _problem([str(part) for part in problem["loc"]], str(problem["msg"]))
        except (ValueError, SyntaxError, KeyError, TypeError):
            if not text.startswith("{"):
                yield _DETAIL.sub("", text)


def _printed(message: str) -> Iterator[str]:
    place = ""
    for line in message.splitlines()[1:]:
        if not line.startswith(" "):
            place = line
        elif not line.startswith("    "):  # with no place before it, of the fields together
            yield _problem(place.split(".") if place else [], _DETAIL.sub("", line.strip()))


def _problem(place: list[str], words: str) -> str:
    where = _where(place)
    words = words.removeprefix("Value error, ")
    return f"{where}: {words}" if where else words


def _where(place: list[str]) -> str:
    return ".".join(part for part in place[place[:1] == ["body"] :] if not _TYPE.fullmatch(part))


def _sentence(problems: list[str]) -> str:
    """A request may be wrong for every kind of message that there is; the first few tell what to mend."""
    distinct = list(dict.fromkeys(problem.rstrip(".") for problem in problems)) or [
        "the engine does not take these fields"
    ]
    left_out = len(distinct) - _MOST_PROBLEMS
    more = f"; and {left_out} more" if left_out > 0 else ""
    return f"The request is not valid: {'; '.join(distinct[:_MOST_PROBLEMS])}{more}."


def _key(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    return f"engine.{name}" if name in SETTABLE | OF_SERVER else flag[0]
