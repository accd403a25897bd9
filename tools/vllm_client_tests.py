"""vLLM's own tests of its HTTP API, run against a service and against a bare engine; lists what comes out differently.

The tests are those of vLLM's source distribution that need a server's URL alone. Their server fixture is replaced by the URL,
their model's name by the service's. A test that fails at both is the model's or the engine's business.

    python -m tools.vllm_client_tests http://127.0.0.1:8000 --bare http://127.0.0.1:34567
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

VERSION = "0.26.0"
SOURCE = (
    "https://files.pythonhosted.org/packages/cd/72/fa30f8459d11ae206f1a20bd0ac7ed1b9e390b695fa3dfc9ef6056de0cfe/"
    f"vllm-{VERSION}.tar.gz"
)
SHA256 = "23e9fa19d7e20ce7dcc1c074d41503e2116d23f19e688f5d5ea91b741f958502"
CACHE = Path("~/.cache/tpu-serving/vllm-tests").expanduser()
# Below tests/entrypoints. Others start servers of their own, load models themselves, or need pictures, sound or GPUs.
SUITES = (
    "anthropic/test_messages.py",
    "generate/generative_scoring/test_generative_scoring_e2e.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/models/test_models.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_simple.py",
    "openai/test_async_tokenization.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "scale_out/token_in_token_out/test_serving_tokens.py",
    "serve/instrumentator/test_basic.py",
    "serve/tokenize/test_tokenization.py",
)
_MODEL = re.compile(r"^(MODEL(?:_NAME)?) *= *.*$", re.MULTILINE)
_FOLDER = "tests/entrypoints"
_REQUEST_S = 60

# In the place of vLLM's tests/utils.py.
_UTILS = f"""
import os
import anthropic, openai, pytest

ROCM_ENV_OVERRIDES, ROCM_EXTRA_ARGS, ROCM_EXTRA_KWARGS = {{}}, [], {{}}


class RemoteOpenAIServer:
    DUMMY_API_KEY = os.environ.get("SERVICE_KEY", "token-abc123")

    def __init__(self, model, args=(), **kwargs):
        self.url_root = os.environ["SERVICE_URL"]
        self.host, self.port = self.url_root.split("://")[1].rsplit(":", 1)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def url_for(self, *parts):
        return self.url_root + "/" + "/".join(part.strip("/") for part in parts if part)

    def _client(self, kind, url, **options):
        return kind(**{{"base_url": url, "api_key": self.DUMMY_API_KEY, "max_retries": 0, **options, "timeout": {_REQUEST_S}}})

    def get_client(self, **options):
        return self._client(openai.OpenAI, self.url_for("v1"), **options)

    def get_async_client(self, **options):
        return self._client(openai.AsyncOpenAI, self.url_for("v1"), **options)

    def get_client_anthropic(self, **options):
        return self._client(anthropic.Anthropic, self.url_root, **options)

    def get_async_client_anthropic(self, **options):
        return self._client(anthropic.AsyncAnthropic, self.url_root, **options)
"""
# What became of each phase of a test, as it comes: a run may be cut short.
_PLUGIN = r"""
import json, os


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message if crash else str(report.longrepr or "")
        name = report.nodeid.removeprefix("tests/entrypoints/")
        with open(os.environ["OUTCOMES"], "a") as lines:
            lines.write(json.dumps([name, report.outcome, (why.splitlines() or [""])[0]]) + "\n")
"""
# Behind vLLM's own fixtures, which load adapters from Hugging Face's site.
_CONFTEST = """

@pytest.fixture(scope="session")
def zephyr_lora_files():
    return "unused"


@pytest.fixture(scope="session")
def qwen3_lora_files():
    return "unused"
"""


def fetched(cache: Path) -> Path:
    """vLLM's source distribution, loaded once; raises SystemExit where it is not what it is to be."""
    archive = cache / f"vllm-{VERSION}.tar.gz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as part:
            with httpx.stream("GET", SOURCE, follow_redirects=True, timeout=60) as answer:
                answer.raise_for_status()
                for piece in answer.iter_bytes():
                    part.write(piece)
            part.flush()
            Path(part.name).rename(archive)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{archive} is not vLLM {VERSION}'s source distribution; delete it and try again")
    return archive


def unpack(archive: Path, folder: Path) -> None:
    """The tests as `folder`/tests, with the model's name and the server taken from the environment."""
    prefix = f"vllm-{VERSION}/"
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            name = member.name.removeprefix(prefix)
            if name.startswith(f"{_FOLDER}/") and name.endswith(".py") and member.isfile():
                source = tar.extractfile(member)
                assert source is not None  # noqa: S101  it is a file
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(with_model(source.read().decode()))
    (folder / "tests" / "__init__.py").touch()
    (folder / "tests" / "utils.py").write_text(_UTILS)
    (folder / "conftest.py").write_text(_PLUGIN)
    with (folder / _FOLDER / "conftest.py").open("a") as fixtures:
        fixtures.write(_CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    skip_global_cleanup\n    slow_test\n")


def with_model(source: str) -> str:
    """A test's source, with the model's name from the environment."""
    return _MODEL.sub(r'\1 = __import__("os").environ["SERVICE_MODEL"]', source)


def outcomes(lines: str) -> dict[str, tuple[str, str]]:
    """By test: passed, failed or skipped, and the first line of why. A test's worst phase counts."""
    found: dict[str, tuple[str, str]] = {}
    for line in lines.splitlines():
        name, kind, why = json.loads(line)
        if found.get(name, ("passed", ""))[0] == "passed":
            found[name] = kind, why[:300]
    return found


def differences(
    service: Mapping[str, tuple[str, str]], bare: Mapping[str, tuple[str, str]]
) -> list[tuple[str, str, str]]:
    """(test, at the service, at the bare engine) of those that came out differently."""
    nothing = ("not run", "")
    names = sorted(service.keys() | bare.keys())
    pairs = [(name, service.get(name, nothing), bare.get(name, nothing)) for name in names]
    return [
        (name, ": ".join(filter(None, ours)), ": ".join(filter(None, theirs)))
        for name, ours, theirs in pairs
        if ours[0] != theirs[0]
    ]


def run(
    folder: Path, url: str, model: str, key: str, suites: Sequence[str], limit_s: float
) -> dict[str, tuple[str, str]]:
    """Run the suites against one URL."""
    report = folder / "outcomes"
    report.write_text("")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "--tb=line",
        "-p",
        "no:cacheprovider",
    ]
    own = {
        "SERVICE_URL": url,
        "SERVICE_MODEL": model,
        "SERVICE_KEY": key,
        "OUTCOMES": str(report),
        "PYTHONPATH": str(folder),
    }
    paths = [str(folder / _FOLDER / suite) for suite in suites]
    try:
        subprocess.run(
            [*command, *paths], cwd=folder, env={**os.environ, **own}, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{url}: not done after {limit_s:g} s; the rest was not run")
    return outcomes(report.read_text())


def _counts(found: Mapping[str, tuple[str, str]]) -> str:
    kinds = [kind for kind, _ in found.values()]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="the service, as http://HOST:PORT")
    parser.add_argument(
        "--bare", help="an engine of the same model without a service; then differences are listed"
    )
    parser.add_argument(
        "--model", help="name to ask for, and tokenizer to load; by default the first of /v1/models"
    )
    parser.add_argument("--key", default="none", help="API key of the service")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where vLLM's source distribution is kept")
    parser.add_argument("--limit", type=float, default=3600, help="seconds that one side may take")
    parser.add_argument("--suites", nargs="+", default=SUITES, help="files below tests/entrypoints")
    options = parser.parse_args()
    model = options.model or str(
        httpx.get(f"{options.url}/v1/models", headers={"authorization": f"Bearer {options.key}"}).json()[
            "data"
        ][0]["id"]
    )
    folder = Path(tempfile.mkdtemp(prefix="vllm-client-tests-"))
    try:
        unpack(fetched(options.cache), folder)
        sides = {"service": options.url, "bare": options.bare}
        found = {
            side: run(folder, url, model, options.key, options.suites, options.limit)
            for side, url in sides.items()
            if url
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for side, results in found.items():
        print(f"{side}: {_counts(results)}")
    if not options.bare:
        return 0
    differing = differences(found["service"], found["bare"])
    print(f"{len(differing)} differ")
    for name, ours, theirs in differing:
        print(f"- {name}\n    service: {ours}\n    bare: {theirs}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
