"""Keeps what `serving compile FILE --json` printed in serving/planning/compiled.json, where plans look it up.

python -m tools.compiled RESULT.json...
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.planning.compiled import KEPT


def entry(document: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of one pool's answer: its sums, each program's bytes and seconds, and why an engine was not built."""
    stages = document["stages"]
    programs = [program for stage in stages for program in stage["programs"]]
    lines = {line["name"]: line for line in document["device_hbm"]}

    def told(line: str) -> Any:
        return lines.get(line, {}).get("compiler_bytes")

    asked = document["asked"]
    return {
        "model": document["model"],
        "slice": document["slice"],
        "compiles": document["compiles"],
        "unbuildable": document["unbuildable"],
        "needs_bytes": document["needs_bytes"],
        "weight_bytes": max((stage["weight_bytes"] for stage in stages), default=None),
        "cache_bytes": max((stage["cache_bytes"] for stage in stages), default=None),
        "program_bytes": told("programs, at most"),
        "step_bytes": told("a step"),
        "grammar_bytes": told("grammars, at start"),
        "sampling_bytes": told("sampling and the like"),
        "prompt_logprobs_bytes": told("prompt logprobs, if asked for"),
        "seconds": round(sum(program["lower_s"] + program["compile_s"] for program in programs), 1),
        "quick": asked["quick"],
        "date": asked["date"],
        "command": asked["command"],
        "versions": asked["versions"],
        "programs_at_start": sum(
            of_name["programs"] for stage in stages for of_name in stage["ledger"].values()
        ),
        "programs": programs,
    }


def keep(documents: Sequence[Mapping[str, Any]], kept: Path) -> None:
    """Add answers to those that are kept, in the place of older ones of the same plans; an engine that was not built, with its reason."""
    entries = json.loads(kept.read_text()) if kept.exists() else {}
    new = {document["version"]: entry(document) for document in documents}
    anew = [_plan_of(one) for one in new.values()]
    left = {version: old for version, old in entries.items() if _plan_of(old) not in anew}
    kept.write_text(json.dumps(left | new, indent=1, sort_keys=True) + "\n")


def _plan_of(kept: Mapping[str, Any]) -> tuple[str, str, Any]:
    """The YAML, the model in it and the slice, whatever the engine was started with."""
    _, _, file, *_ = kept["command"].split()
    return file, kept["model"], kept["slice"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.compiled", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="what `serving compile FILE --json` printed")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where results are kept")
    options = parser.parse_args(arguments)
    documents = [document for path in options.results for document in json.loads(path.read_text())]
    keep(documents, options.kept)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
