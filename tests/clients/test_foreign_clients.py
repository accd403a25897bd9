"""Clients and load generators of others on the router, before a simulated engine: what most of their users ask of them.

Anthropic's client is tested in tests/router/http/test_anthropic_models.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import tokenizer_folder
from support.foreign_clients import node_modules, python_of
from support.fronts import front
from support.simulated_engine import MODEL

pytestmark = [pytest.mark.http, pytest.mark.slow]

SCRIPTS = Path(__file__).parents[1] / "support" / "clients"
# langchain's tests of what a model understands; the simulated engine calls a tool with any arguments that fit.
OF_THE_MODEL = (
    "test_tool_calling[model0]",
    "test_tool_calling[model1]",
    "test_tool_calling_async",
    "test_agent_loop[model0]",
    "test_agent_loop[model1]",
    "test_unicode_tool_call_integration",
)
ONE_LOOP = [
    option
    for name in ("asyncio_default_test_loop_scope", "asyncio_default_fixture_loop_scope")
    for option in ("-o", f"{name}=session")  # langchain keeps one asynchronous client for all tests
]


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with front() as running:
        yield running.address


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_folder.write(folder)
    return folder


def run(service: str, *command: str | Path, folder: Path | None = None, **more: str) -> str:
    """What a client prints, which has to end well."""
    own = {
        "SERVICE_URL": service,
        "SERVICE_MODEL": MODEL,
        "OPENAI_API_KEY": "none",
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "JAX_PLATFORMS": "cpu",
    }
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        env={**inherited, **own, **more},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_openai_python(service: str) -> None:
    run(service, sys.executable, SCRIPTS / "openai_python.py")


def test_litellm(service: str) -> None:
    run(service, python_of("litellm"), SCRIPTS / "litellm_client.py")


def test_llama_index(service: str) -> None:
    run(service, python_of("llama-index"), SCRIPTS / "llama_index_client.py")


def test_langchain_s_standard_tests(service: str, tmp_path: Path) -> None:
    (tmp_path / "test_standard.py").write_text((SCRIPTS / "langchain_standard.py").read_text())
    left_out = [f"--deselect=test_standard.py::TestService::{name}" for name in OF_THE_MODEL]
    options = ["-q", "-o", "asyncio_mode=auto", *ONE_LOOP, "--rootdir", tmp_path, *left_out]
    said = run(service, python_of("langchain"), "-m", "pytest", *options, "test_standard.py", folder=tmp_path)
    assert f"{len(OF_THE_MODEL)} deselected" in said
    assert int(said.rpartition(" passed")[0].split()[-1]) >= 30


@pytest.mark.parametrize("script", ["openai_node.mjs", "ai_sdk.mjs"])
def test_clients_for_node(service: str, script: str) -> None:
    modules = node_modules()
    (modules / script).write_text((SCRIPTS / script).read_text())  # Node looks for packages beside a script
    run(service, "node", modules / script)


def test_vllm_bench_serve(service: str, tokenizer: Path, tmp_path: Path) -> None:
    run(service, sys.executable, SCRIPTS / "vllm_bench.py", tmp_path, TOKENIZER=str(tokenizer))


def test_guidellm(service: str, tokenizer: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={service},model={MODEL}",
        "profile": "kind=synchronous",
        "constraint": "kind=max_requests,count=4",
        "tokenizer": f"kind=hf_auto,model={tokenizer}",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "output": f"kind=json,path={report}",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = python_of("guidellm").with_name("guidellm")
    run(service, command, "run", "--disable-console", *arguments, folder=tmp_path)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert (len(benchmark["requests"]["successful"]), benchmark["requests"]["errored"]) == (4, [])


def test_inference_perf(service: str, tokenizer: Path, tmp_path: Path) -> None:
    config = {
        "server": {"type": "vllm", "model_name": MODEL, "base_url": service},
        "api": {"type": "chat", "streaming": True},
        "tokenizer": {"pretrained_model_name_or_path": str(tokenizer)},
        "data": {"type": "mock"},  # others draw prompts that are not always of the length they should have
        "load": {"stages": [{"rate": 4, "duration": 1}], "num_workers": 1},
        "storage": {"local_storage": {"path": str(tmp_path)}},
    }
    (tmp_path / "config.yml").write_text(json.dumps(config))  # which is YAML too
    command = python_of("inference-perf").with_name("inference-perf")
    run(service, command, "--config_file", tmp_path / "config.yml", folder=tmp_path)
    summary = json.loads((tmp_path / "summary_lifecycle_metrics.json").read_text())
    answered, failed = summary["successes"], summary["failures"]
    assert (answered["count"], failed["count"]) == (4, 0)
    assert answered["output_tokens"]["total"] == 4 * 30  # what it asks for
