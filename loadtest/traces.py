"""Recorded traffic as JSON lines: when each request came, how long its prompt was and how long its answer.

The field names of public traces are known:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}                    Mooncake; ms
    {"TIMESTAMP": "2023-11-16 18:17:03.9799600", "ContextTokens": 4808, "GeneratedTokens": 10}  Azure's CSV, row by row
    {"timestamp_s": 1.5, "prompt_tokens": 4808, "output_tokens": 10}

Times count from the first request. Mooncake's hash_ids name the prompt's blocks of 512 tokens: requests that share the
first ones share that much of their prompts here too.
"""

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bad_input import BadInputError

BLOCK_TOKENS = 512
_MOST_S = 1e11  # the year 5138 as Unix time: what is beyond it is in another unit
_MOST_TOKENS = 10_000_000  # of a prompt or an answer: several times what any model takes
_SECONDS = {"timestamp_s": 1.0, "timestamp": 1e-3, "TIMESTAMP": 1.0}  # of a number in each field
_PROMPT = ("prompt_tokens", "input_length", "ContextTokens")
_OUTPUT = ("output_tokens", "output_length", "GeneratedTokens")


@dataclass(frozen=True)
class Record:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def load(path: Path) -> list[Record]:
    """A trace by time, from second 0; raises BadInputError naming the line at fault."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"trace {path}: {error}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(_record(json.loads(line)))
        except json.JSONDecodeError as error:
            raise BadInputError(
                f"trace {path}, line {number}: {error.msg} at column {error.colno}: {line[:120]}"
            ) from None
        except RecursionError:
            raise BadInputError(
                f"trace {path}, line {number}: nested too deeply; a request is one flat object: {line[:120]}"
            ) from None
        except ValueError as error:
            raise BadInputError(f"trace {path}, line {number}: {error}: {line[:120]}") from None
    if not records:
        raise BadInputError(f"trace {path} holds no request")
    records.sort(key=lambda record: record.at_s)
    first = records[0].at_s
    return [Record(one.at_s - first, one.prompt_tokens, one.output_tokens, one.blocks) for one in records]


def _record(fields: Any) -> Record:
    """Raises ValueError saying what is wrong with a line."""
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004  bad data, not a bug
    blocks = fields.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        raise ValueError("hash_ids is not a list of whole numbers")
    return Record(_at_s(fields), _tokens(fields, _PROMPT), _tokens(fields, _OUTPUT), tuple(blocks))


def _at_s(fields: dict[str, Any]) -> float:
    name, value = _field(fields, tuple(_SECONDS))
    if isinstance(value, str):
        # Azure writes seven digits of a second; Python reads six.
        moment = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", value))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is neither a number nor a date")  # noqa: TRY004
    most = _MOST_S / _SECONDS[name]
    if not abs(value) <= most:  # nor is NaN, and a whole number may be too large for a float
        unit = "seconds" if _SECONDS[name] == 1 else "milliseconds"
        raise ValueError(f"{name} is not between -{most:g} and {most:g}; is it in {unit}?")
    return value * _SECONDS[name]


def _tokens(fields: dict[str, Any], names: tuple[str, ...]) -> int:
    name, value = _field(fields, names)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is not a whole number above 0")
    if value > _MOST_TOKENS:
        raise ValueError(f"{name} is above {_MOST_TOKENS:,}; give the tokens of one request")
    return value


def _field(fields: dict[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    for name in names:
        if name in fields:
            return name, fields[name]
    raise ValueError(f"none of {', '.join(names)} in it")
