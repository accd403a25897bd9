import json
import math
from pathlib import Path
from typing import Any

import pytest

import traces
from bad_input import BadInputError
from traces import Record

pytestmark = pytest.mark.unit


def trace(directory: Path, *lines: dict[str, Any] | str) -> Path:
    path = directory / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_mooncake_trace_counts_in_ms_and_names_blocks(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        {"timestamp": 27000, "input_length": 700, "output_length": 52, "hash_ids": [46, 47]},
        {"timestamp": 28500, "input_length": 600, "output_length": 26, "hash_ids": [46]},
    )
    assert traces.load(path) == [Record(0, 700, 52, (46, 47)), Record(1.5, 600, 26, (46,))]


def test_azure_rows_count_by_date(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        {"TIMESTAMP": "2023-11-16 18:17:03.9799600", "ContextTokens": 4808, "GeneratedTokens": 10},
        {"TIMESTAMP": "2023-11-16 18:17:04.0319600", "ContextTokens": 3180, "GeneratedTokens": 8},
    )
    assert [record.at_s for record in traces.load(path)] == pytest.approx([0, 0.052])


def test_records_are_by_time_and_blank_lines_are_none(tmp_path: Path) -> None:
    fields = {"prompt_tokens": 1, "output_tokens": 2}
    path = trace(tmp_path, {"timestamp_s": 3, **fields}, "", {"timestamp_s": 1.5, **fields}, "")
    assert traces.load(path) == [Record(0, 1, 2), Record(1.5, 1, 2)]


GOOD = {"timestamp": 0, "input_length": 1, "output_length": 1}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"timestamp": 1500', "line 2: Expecting"),
        ("[1, 2]", "line 2: not a JSON object"),
        (
            {"timestamp": 1, "input_length": 5},
            "line 2: none of output_tokens, output_length, GeneratedTokens",
        ),
        ({**GOOD, "input_length": 0}, "line 2: input_length is not a whole number above 0"),
        ({**GOOD, "output_length": True}, "line 2: output_length"),
        ({**GOOD, "timestamp": None}, "line 2: timestamp is neither"),
        ({**GOOD, "timestamp": "noon"}, "line 2: Invalid isoformat"),
        ({**GOOD, "hash_ids": "46"}, "line 2: hash_ids"),
        ({**GOOD, "timestamp": math.nan}, "line 2: timestamp is not between .* is it in milliseconds"),
        ({**GOOD, "timestamp": math.inf}, "line 2: timestamp is not between"),
        ('{"timestamp_s": -1e999, "input_length": 1, "output_length": 1}', "line 2: .* is it in seconds"),
        ({**GOOD, "timestamp": 10**400}, "line 2: timestamp is not between"),
        ({**GOOD, "timestamp": 1700000000 * 10**9}, "line 2: timestamp is not between"),
        ({**GOOD, "input_length": 999999999999}, "line 2: input_length is above 10,000,000"),
        ({**GOOD, "output_length": 10**400}, "line 2: output_length is above 10,000,000"),
        ("[" * 100_000, "line 2: nested too deeply"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        traces.load(trace(tmp_path, GOOD, line))


@pytest.mark.parametrize("lines", [[], ["", " "]])
def test_a_trace_without_a_request_is_refused(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(BadInputError, match="holds no request"):
        traces.load(trace(tmp_path, *lines))


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"none\.jsonl"):
        traces.load(tmp_path / "none.jsonl")
