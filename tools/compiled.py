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
    """What is kept of one pool's answer: its sums, and each program's bytes and seconds."""
    programs = [program for stage in document["stages"] for program in stage["programs"]]
    extras = [program["extra_bytes"] for program in programs if program["outcome"] == "compiled"]
    asked = document["asked"]
    return {
        "model": document["model"],
        "slice": document["slice"],
        "compiles": document["compiles"],
        "needs_bytes": document["needs_bytes"],
        "weight_bytes": max(stage["weight_bytes"] for stage in document["stages"]),
        "cache_bytes": max(stage["cache_bytes"] for stage in document["stages"]),
        "extra_bytes": max(extras, default=None),
        "date": asked["date"],
        "command": asked["command"],
        "versions": asked["versions"],
        "programs_at_start": sum(
            of_name["programs"] for stage in document["stages"] for of_name in stage["ledger"].values()
        ),
        "programs": programs,
    }


def keep(documents: Sequence[Mapping[str, Any]], kept: Path) -> None:
    """Add answers to those that are kept, in the place of older ones of the same plans. An engine that was not built is left out."""
    entries = json.loads(kept.read_text()) if kept.exists() else {}
    new = {document["version"]: entry(document) for document in documents if not document["unbuildable"]}
    anew = [(one["model"], one["slice"]) for one in new.values()]
    left = {version: old for version, old in entries.items() if (old["model"], old["slice"]) not in anew}
    kept.write_text(json.dumps(left | new, indent=1, sort_keys=True) + "\n")


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
