import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks.compiled
import benchmarks.cycles
from serving.compiler.libtpu import VERSION
from serving.config import load
from serving.planning.compiled import ENGINE, KEPT, result_of
from serving.planning.fit import Workspace
from serving.planning.plan import plan
from tools.compiled import main

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
ESTIMATE = Workspace(
    program_bytes=8, step_bytes=9, expert_bytes=0, grammar_bytes=4, sampling_bytes=7, prompt_logprobs_bytes=6
)


def answer(version: str, **changes: Any) -> dict[str, Any]:
    program = {
        "name": "backbone",
        "bucket": {"num_tokens": 16},
        "outcome": "compiled",
        "extra_bytes": 5,
        "lower_s": 1.0,
        "compile_s": 2.0,
    }
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
        "asked": {
            "command": "serving compile f.yaml",
            "date": "2026-11-22",
            "versions": {"libtpu": "0"},
            "quick": False,
        },
        "device_hbm": [
            {"name": "a step", "plan_bytes": 9, "compiler_bytes": 5},
            {"name": "programs, at most", "plan_bytes": 9, "compiler_bytes": 3},
        ],
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
    assert (found.needs_bytes, found.step_bytes, found.weight_bytes, found.program_bytes) == (40, 5, 10, 3)
    assert found.workspace(ESTIMATE) == ESTIMATE  # another libtpu than the image's
    assert result_of("a", kept) is None


def test_answers_of_one_model_on_one_slice_in_two_files_are_kept_both(tmp_path: Path) -> None:
    kept, result = tmp_path / "kept.json", tmp_path / "result.json"
    for version in ("a", "b"):
        asked = answer(version)["asked"] | {"command": f"serving compile {version}.yaml --quick"}
        result.write_text(json.dumps([answer(version, asked=asked)]))
        assert main([str(result), "--kept", str(kept)]) == 0
    assert list(json.loads(kept.read_text())) == ["a", "b"]


def test_an_engine_that_was_not_built_is_kept_with_the_reason(tmp_path: Path) -> None:
    kept, result = tmp_path / "kept.json", tmp_path / "result.json"
    result.write_text(json.dumps([answer("a", unbuildable=["no"], compiles=False, stages=[], device_hbm=[])]))
    assert main([str(result), "--kept", str(kept)]) == 0
    found = result_of("a", kept)
    assert found is not None
    assert (found.compiles, found.unbuildable, found.weight_bytes) == (False, ["no"], None)
    assert found.workspace(ESTIMATE) == ESTIMATE


@pytest.mark.parametrize(
    ("quick", "told", "taken"),
    [(False, 5, 5), (True, 5, 9), (True, 90, 90), (False, None, 9)],
)
def test_of_a_quick_answer_a_step_is_a_lower_bound(
    tmp_path: Path, told: int | None, taken: int, *, quick: bool
) -> None:
    kept, result = tmp_path / "kept.json", tmp_path / "result.json"
    asked = answer("a")["asked"] | {"quick": quick, "versions": ENGINE}
    lines = [
        {"name": "programs, at most", "compiler_bytes": 300},
        {"name": "a step", "compiler_bytes": told},
    ]
    result.write_text(json.dumps([answer("a", asked=asked, device_hbm=lines)]))
    assert main([str(result), "--kept", str(kept)]) == 0
    found = result_of("a", kept)
    assert found is not None
    space = found.workspace(ESTIMATE)
    assert (space.program_bytes, space.step_bytes) == (ESTIMATE.program_bytes, taken)
    assert space.prompt_logprobs_bytes == ESTIMATE.prompt_logprobs_bytes


def test_a_plan_takes_the_compiler_s_figures_in_place_of_estimates() -> None:
    (service,) = load(ROOT / "deployments" / "llama-8b-v6e-1.yaml").services.values()
    pool = service.models[0].per_pool()[0]
    kept, estimate = plan(pool), plan(pool, estimated=True)
    found = result_of(kept.version)
    assert found is not None
    assert kept.version == estimate.version
    assert kept.fit.workspace == found.workspace(estimate.fit.workspace) != estimate.fit.workspace


def test_the_figures_are_those_of_the_versions_that_the_image_runs() -> None:
    assert ENGINE["libtpu"] == VERSION
    image = (ROOT / "lock" / "requirements.txt").read_text()
    assert all(f"{name}=={version}" in image for name, version in ENGINE.items() if name != "libtpu")


def test_the_page_of_plans_shows_what_is_kept() -> None:
    assert benchmarks.compiled.table() in benchmarks.compiled.PAGE.read_text()
    assert benchmarks.cycles.table() in benchmarks.cycles.PAGE.read_text()


def test_what_is_kept_names_versions_and_command() -> None:
    for version in json.loads(KEPT.read_text()):
        found = result_of(version)
        assert found is not None
        assert found.command.startswith("serving compile deployments/")
        assert set(found.versions) == {"tpu-inference", "jax", "libtpu"}
