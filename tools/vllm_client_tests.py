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
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
# Tests that a bare engine does not outlive, so that it could answer no later one (serving.engine.known_faults).
_ENDS_ENGINES = r"::test_logprob_token_ids($|_stream|_returns)"
# And where its slice has several hosts, or its HBM no room for them.
_ENDS_ENGINES_OVER_HOSTS = (
    r"::test_(more_than_one_prompt_logprobs|prompt_logprobs|chat_session_with_echo|echo_logprob|comparison_with_prompt_logprobs"
    r"|completion_return_tokens_as_token_ids)"
)
# Why a service answers otherwise than its engine would, by the tests that see it.
EXPLAINED = {
    _ENDS_ENGINES: "allowed_token_ids and logprob_token_ids end engines of tpu-inference 0.26, and are refused",
    _ENDS_ENGINES_OVER_HOSTS: "logprobs of a prompt end engines over several hosts, and those without HBM for them; they are refused there",
    r"test_batched_chat_completions_logprob_token_ids": "logprob_token_ids of several chats fail in the engine; they are refused before",
    r"::test_show_version$": "GET /version is an engine's own; a service may have engines of two versions during a roll",
    r"::test_server_load\b": "GET /load is an engine's own; /status.json has the load of all",
    r"::test_long_seed$": "a mistake is told in a sentence, without the names of pydantic's types",
    r"::test_parallel_streaming\b": "a seed is refused before the engine, which refuses it in the stream",
    r"::test_enable_response_messages\b": "enable_response_messages has an engine repeat a client's own objects behind its usage, by which keys are charged; it is refused",
}
_SERVICE_MODEL = '__import__("os").environ["SERVICE_MODEL"]'
_MODEL = re.compile(r"^(MODEL(?:_NAME)?| +model_name) *= *(.*)$", re.MULTILINE)
_LOADED = re.compile(r"snapshot_download\([^()]*\)")  # adapters, which no server here takes
_FOLDER = "tests/entrypoints"
_FILES = re.compile(
    r"(get_tokenizer\(tokenizer_name=|from_pretrained\(|get_vocab_size\()(MODEL_NAME|tokenizer_name)\b"
)
# The name under which the tests of Messages serve their model.
_MESSAGES_MODEL = '"claude-3-7-sonnet-latest"'
_STATUS = re.compile(r"[\w.]+: Error code: \d+")
_NOT_RUN = "not run"
_REQUEST_S = 60
_TEST_S = 150  # more than two requests that get no answer

# In the place of vLLM's tests/utils.py.
_UTILS = f"""
import os
import anthropic, openai, pytest

ROCM_ENV_OVERRIDES, ROCM_EXTRA_ARGS, ROCM_EXTRA_KWARGS = {{}}, [], {{}}


class RemoteOpenAIServer:
    DUMMY_API_KEY = os.environ.get("SERVICE_KEY", "token-abc123")
    uds = None

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
# What became of each phase of a test, as it comes: a run that was cut short goes on with the tests that have no outcome.
_PLUGIN = f"""
import json, os, re, signal
import pytest

# Words of a test that met no engine: it has no outcome, and is run again.
_MET_NOBODY = re.compile("ConnectError|APIConnectionError|ConnectionError|EngineCore encountered|No slice of")


def _name(nodeid):
    return nodeid.removeprefix("tests/entrypoints/")


def pytest_collection_modifyitems(items):
    with open(os.environ["OUTCOMES"]) as lines:
        done = {{json.loads(line)[0] for line in lines}}
    left_out = os.environ["LEFT_OUT"]
    items[:] = [
        item
        for item in items
        if _name(item.nodeid) not in done and not (left_out and re.search(left_out, item.nodeid))
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    def too_long(*_):
        raise TimeoutError("not done after {_TEST_S} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm({_TEST_S})
    try:
        return (yield)
    finally:
        signal.alarm(0)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message if crash else str(report.longrepr or "")
        first = (why.splitlines() or [""])[0]
        if _MET_NOBODY.search(first):
            return
        with open(os.environ["OUTCOMES"], "a") as lines:
            lines.write(json.dumps([_name(report.nodeid), report.outcome, first, round(report.duration, 1)]) + "\\n")
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
    with (folder / _FOLDER / "conftest.py").open("a") as fixtures:
        fixtures.write(_CONFTEST)
    equip(folder)


def equip(folder: Path) -> None:
    """Give the tests in `folder`/tests what is not vLLM's: a server that is there already, and a record of outcomes."""
    (folder / "tests" / "__init__.py").touch()
    (folder / "tests" / "utils.py").write_text(_UTILS)
    (folder / "conftest.py").write_text(_PLUGIN)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    skip_global_cleanup\n    slow_test\n")


def with_model(source: str) -> str:
    """A test's source, with the names of the model and its tokenizer from the environment."""
    source = _FILES.sub(r'\1__import__("os").environ["SERVICE_TOKENIZER"]', source)
    source = _LOADED.sub('"unused"', source)
    name = _MODEL.search(source)
    names = {_MESSAGES_MODEL, name[2]} if name else {_MESSAGES_MODEL}
    for literal in names:
        if literal.startswith('"'):
            source = source.replace(literal, _SERVICE_MODEL)
    return _MODEL.sub(rf"\1 = {_SERVICE_MODEL}", source)


def outcomes(lines: str) -> dict[str, tuple[str, str]]:
    """By test: passed, failed or skipped, and the first line of why. A test's worst phase counts."""
    found: dict[str, tuple[str, str]] = {}
    for line in lines.splitlines():
        name, kind, why, _ = json.loads(line)
        if found.get(name, ("passed", ""))[0] == "passed":
            found[name] = kind, why[:300]
    return found


def differences(
    service: Mapping[str, tuple[str, str]], bare: Mapping[str, tuple[str, str]]
) -> list[tuple[str, str, str]]:
    """(test, at the service, at the bare engine) of those that came out differently, or failed of different causes."""
    nothing = (_NOT_RUN, "")
    names = sorted(service.keys() | bare.keys())
    pairs = [(name, service.get(name, nothing), bare.get(name, nothing)) for name in names]
    return [
        (name, ": ".join(filter(None, ours)), ": ".join(filter(None, theirs)))
        for name, ours, theirs in pairs
        if (ours[0], cause(ours[1])) != (theirs[0], cause(theirs[1]))
    ]


def cause(why: str) -> str:
    """The kind of a failure: an exception, and the status of an answer where it names one. Words may differ."""
    if found := _STATUS.match(why):
        return found[0]
    return why.partition(":")[0].partition(" ")[0]


@dataclass(frozen=True)
class Asked:
    """Whom the tests ask: its URL, the model's name, the folder or name of its tokenizer, an API key.

    `left_out` is a pattern of tests that are not run.
    """

    url: str
    model: str
    tokenizer: str
    key: str
    left_out: str = ""


def left_out(hosts: int) -> str:
    """A pattern of the tests that a bare engine on so many hosts does not outlive."""
    return f"{_ENDS_ENGINES}|{_ENDS_ENGINES_OVER_HOSTS}" if hosts > 1 else _ENDS_ENGINES


def run(
    folder: Path, asked: Asked, suites: Sequence[str], report: Path, limit_s: float
) -> dict[str, tuple[str, str]]:
    """Run what has no outcome in `report` yet, and add it there."""
    report.touch()
    own = {
        "SERVICE_URL": asked.url,
        "SERVICE_MODEL": asked.model,
        "SERVICE_TOKENIZER": asked.tokenizer,
        "SERVICE_KEY": asked.key,
        "LEFT_OUT": asked.left_out,
        "OUTCOMES": str(report.absolute()),
        "PYTHONPATH": str(folder),
    }
    paths = [str(folder / _FOLDER / suite) for suite in suites]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    try:
        subprocess.run(
            [*command, *paths], cwd=folder, env={**os.environ, **own}, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{asked.url}: not done after {limit_s:g} s; the rest was not run")
    return outcomes(report.read_text())


def report(found: Mapping[str, Mapping[str, tuple[str, str]]]) -> tuple[str, int]:
    """What an operator reads of the outcomes by side, and how many tests differ without an explanation or were not compared."""
    lines = [f"{side}: {_counts(results)}" for side, results in found.items()]
    if "bare" not in found:
        return "\n".join(lines), 0
    differing = differences(found["service"], found["bare"])
    explained: dict[str, list[str]] = {}
    unexplained: list[tuple[str, str, str]] = []
    missing: list[tuple[str, str, str]] = []
    for row in differing:
        if reason := next((why for pattern, why in EXPLAINED.items() if re.search(pattern, row[0])), ""):
            explained.setdefault(reason, []).append(row[0])
        else:
            (missing if _NOT_RUN in row[1:] else unexplained).append(row)
    count = sum(map(len, explained.values()))
    lines.append(f"{len(unexplained)} differ without an explanation, {count} with one")
    for name, ours, theirs in unexplained:
        lines += [f"- {name}", f"    service: {ours}", f"    bare: {theirs}"]
    for reason, names in explained.items():
        lines += [f"{reason}:", *(f"- {name}" for name in names)]
    if missing:
        lines.append(f"{len(missing)} were run at one side alone; run again with the same --results")
    named = {name for name, _, _ in differing}
    both = Counter(
        cause(why) for name, (kind, why) in found["bare"].items() if kind == "failed" and name not in named
    )
    lines += ["fail at both, by cause at the bare engine:"] if both else []
    lines += [f"{number:5d}  {what}" for what, number in both.most_common()]
    return "\n".join(lines), len(unexplained) + len(missing)


def _counts(found: Mapping[str, tuple[str, str]]) -> str:
    kinds = [kind for kind, _ in found.values()]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))


def models(url: str, key: str) -> list[str]:
    """The names that a server serves; raises SystemExit where it does not say."""
    try:
        answer = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SystemExit(f"{url}/v1/models: {error}") from None
    return [str(model["id"]) for model in answer.json()["data"]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="the service, as http://HOST:PORT")
    parser.add_argument(
        "--bare", help="an engine of the same model without a service; then differences are listed"
    )
    parser.add_argument("--model", help="name to ask for; by default the first of /v1/models")
    parser.add_argument(
        "--tokenizer", help="folder or name of the model's tokenizer; by default the model's name"
    )
    parser.add_argument("--key", default="none", help="API key of the service, and of the bare engine")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where vLLM's source distribution is kept")
    parser.add_argument(
        "--results", type=Path, help="folder of outcomes; a test that has one there is not run again"
    )
    parser.add_argument(
        "--hosts",
        type=int,
        default=1,
        help="hosts of the bare engine's slice; over several, more ends an engine",
    )
    parser.add_argument("--limit", type=float, default=3600, help="seconds that one side may take")
    parser.add_argument("--suites", nargs="+", default=SUITES, help="files below tests/entrypoints")
    options = parser.parse_args()
    sides = {"service": options.url, "bare": options.bare}
    served = {side: models(url, options.key) for side, url in sides.items() if url}
    model = options.model or served["service"][0]
    with tempfile.TemporaryDirectory(prefix="vllm-client-tests-") as made:
        folder = Path(made)
        unpack(fetched(options.cache), folder)
        results = options.results or folder
        results.mkdir(parents=True, exist_ok=True)
        found = {
            side: run(
                folder,
                Asked(
                    sides[side],
                    model,
                    options.tokenizer or model,
                    options.key,
                    left_out(options.hosts) if side == "bare" else "",
                ),
                options.suites,
                results / f"{side}.jsonl",
                options.limit,
            )
            for side in served
        }
    text, open_ = report(found)
    print(text)
    return 1 if open_ else 0


if __name__ == "__main__":
    sys.exit(main())
