import json
from pathlib import Path
from typing import Any

import pytest

from serving.planning.compiled import KEPT, result_of
from tools.compiled import main

pytestmark = pytest.mark.unit


def answer(version: str, **changes: Any) -> dict[str, Any]:
    program = {"name": "backbone", "bucket": {"num_tokens": 16}, "outcome": "compiled", "extra_bytes": 5}
    stage = {
        "weight_bytes": 10,
        "cache_bytes": 20,
        "programs": [program],
        "ledger": {"backbone": {"programs": 2, "buckets": {}}},
    }
    return {
        "model": "m",
        "version": version,
        "slice": {"generation": "v6e", "topology": "1x1", "hosts": 1},
        "asked": {"command": "serving compile f.yaml", "date": "2026-11-22", "versions": {"libtpu": "0"}},
        "unbuildable": [],
        "compiles": True,
        "needs_bytes": 40,
        "stages": [stage],
    } | changes


def test_a_kept_answer_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    kept, result = tmp_path / "kept.json", tmp_path / "result.json"
    for version in ("a", "b"):
        result.write_text(json.dumps([answer(version)]))
        assert main([str(result), "--kept", str(kept)]) == 0
    assert list(json.loads(kept.read_text())) == ["b"]
    found = result_of("b", kept)
    assert found is not None
    assert (found.needs_bytes, found.extra_bytes, found.weight_bytes) == (40, 5, 10)
    assert result_of("a", kept) is None


def test_an_engine_that_was_not_built_is_not_kept(tmp_path: Path) -> None:
    kept, result = tmp_path / "kept.json", tmp_path / "result.json"
    result.write_text(json.dumps([answer("a", unbuildable=["no"], stages=[])]))
    assert main([str(result), "--kept", str(kept)]) == 0
    assert json.loads(kept.read_text()) == {}


def test_what_is_kept_names_versions_and_command() -> None:
    for version in json.loads(KEPT.read_text()):
        found = result_of(version)
        assert found is not None
        assert found.command.startswith("serving compile deployments/")
        assert set(found.versions) == {"tpu-inference", "jax", "libtpu"}
