"""What the TPU's compiler said of plans, as `serving compile` found it: kept as data, looked up by the plan's version.

`python -m tools.compiled FILE...` adds results of `serving compile --json`. A YAML that changes what the engine is started with has
another version, and no result until it is compiled again.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_name("compiled.json")


@dataclass(frozen=True)
class CompileResult:
    """Bytes are of one device. `needs_bytes` has weights, cache, programs and the largest step; None where it was refused."""

    compiles: bool
    needs_bytes: int | None
    weight_bytes: int
    extra_bytes: int | None
    date: str
    command: str
    versions: dict[str, str]


def result_of(version: str, kept: Path = KEPT) -> CompileResult | None:
    """The result that is kept for a plan's version."""
    entry = _entries(kept).get(version)
    return entry and CompileResult(**{name: entry[name] for name in CompileResult.__dataclass_fields__})


@cache
def _entries(kept: Path) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads(kept.read_text())
    return entries
