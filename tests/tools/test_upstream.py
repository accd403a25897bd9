import ast
import io
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from serving.planning.engine_options import DERIVED, SETTABLE
from tools import upstream, upstream_uses
from tools.python_source import Library, signature, wheel
from tools.upstream import (
    Change,
    Kind,
    UpstreamError,
    compare,
    difference,
    download,
    installed_library,
    main,
    reason,
    show,
)
from tools.upstream_names import ENGINE_ARGUMENTS, NAMES, Name
from tools.upstream_uses import Module, parse, uncovered, users

pytestmark = pytest.mark.unit

ENGINE = "demo.engine:Engine"


@pytest.fixture(scope="module")
def packages() -> Library:
    return installed_library()


@pytest.fixture(scope="module")
def modules(packages: Library) -> Mapping[str, Module]:
    return upstream_uses.read(upstream.ROOT, upstream.OURS, packages)


def library(directory: Path, version: str, files: Mapping[str, str]) -> Library:
    return Library({"demo": wheel(wheel_file(directory, "demo", version, files))})


def wheel_file(directory: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def changed(directory: Path, name: Name, before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    """What the comparison of two wheels of the package `demo` tells of one row."""
    package = {"demo/__init__.py": ""}
    older = library(directory, "1.0", package | before)
    newer = library(directory, "2.0", package | after)
    return compare([name], older, newer, {}, listed_in_full=())


@pytest.mark.slow
def test_every_name_of_the_table_is_installed_with_its_signature(packages: Library) -> None:
    assert compare(NAMES, packages, packages, {}) == []


def test_the_table_lists_every_engine_argument(packages: Library) -> None:
    assert packages.members(ENGINE_ARGUMENTS) == SETTABLE | DERIVED.keys()


def test_every_import_of_ours_has_a_row(modules: Mapping[str, Module]) -> None:
    assert uncovered(modules, NAMES) == []


def test_every_row_has_a_module_that_uses_it(modules: Mapping[str, Module]) -> None:
    assert [name.label for name in NAMES if not users(name, modules)] == []


def test_no_name_stands_in_the_table_twice() -> None:
    assert [label for label, count in Counter(name.label for name in NAMES).items() if count > 1] == []


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (
            "from vllm.v1.metrics.loggers import PrometheusStatLogger",
            {"vllm.v1.metrics.loggers:PrometheusStatLogger"},
        ),
        ("import vllm.envs as envs\nenvs.is_set('PORT')", {"vllm.envs:is_set"}),
        (
            "environment.write({'VLLM_WORKER_MULTIPROCESSING_METHOD': 'spawn'})",
            {"vllm.envs:VLLM_WORKER_MULTIPROCESSING_METHOD"},
        ),
        (
            "from tpu_inference import utils\nutils.get_padded_head_dim = len",
            {"tpu_inference.utils:get_padded_head_dim"},
        ),
        ("from ray.serve._private import api", {"ray.serve._private.api"}),
        ("import ray\nray._private.worker.global_worker.mode", {"ray._private.worker:global_worker.mode"}),
        ("import ray\nfrom ray.serve import Application\nray.get_actor('x')\nray.__version__", set()),
    ],
)
def test_an_import_or_a_patch_without_a_row_is_found(packages: Library, text: str, paths: set[str]) -> None:
    ours = {"serving.engine.new": parse(text, packages)}
    assert {path for _, path in uncovered(ours, NAMES)} == paths


def test_a_name_that_is_gone_is_told(tmp_path: Path) -> None:
    [change] = changed(tmp_path, Name("demo.engine:start", ""), {"demo/engine.py": "def start(): ..."}, {})
    assert change.kind is Kind.GONE
    assert change.now == "nothing has this name any more"
    assert change.breaks


def test_a_name_that_went_elsewhere_is_gone_and_its_new_place_told(tmp_path: Path) -> None:
    [change] = changed(
        tmp_path,
        Name("demo.engine:start", ""),
        {"demo/engine.py": "def start(): ..."},
        {"demo/engine.py": "", "demo/launch.py": "def start(): ...", "demo/text.py": "'def start():'"},
    )
    assert (change.kind, change.now) == (Kind.GONE, "see demo.launch:start")


def test_a_method_of_a_class_that_went_elsewhere_tells_where_the_class_is(tmp_path: Path) -> None:
    text = "class Engine:\n    def start(self): ..."
    [change] = changed(
        tmp_path,
        Name(f"{ENGINE}.start", ""),
        {"demo/engine.py": text},
        {"demo/core.py": text, "demo/a.py": "def start(): ..."},
    )
    assert (change.kind, change.now) == (Kind.GONE, "see demo.core:Engine")


def test_a_name_that_can_still_be_imported_from_its_old_place_has_moved_and_breaks_nothing(
    tmp_path: Path,
) -> None:
    [change] = changed(
        tmp_path,
        Name("demo.engine:start", "", "port"),
        {"demo/engine.py": "def start(port): ..."},
        {"demo/engine.py": "from .launch import start", "demo/launch.py": "def start(port): ..."},
    )
    assert (change.kind, change.now) == (Kind.MOVED, "defined in demo.launch:start")
    assert not change.breaks


def test_a_signature_that_changed_tells_what_it_loses_and_gains(tmp_path: Path) -> None:
    [change] = changed(
        tmp_path,
        Name(f"{ENGINE}.start", "", "port, host="),
        {"demo/engine.py": "class Engine:\n    def start(self, port, host=''): ..."},
        {"demo/engine.py": "class Engine:\n    async def start(self, port, *, address): ..."},
    )
    assert (change.kind, change.now) == (Kind.CHANGED, "loses host=; gains *, address")


def test_a_function_whose_callers_are_gone_is_no_longer_worth_replacing(tmp_path: Path) -> None:
    row = Name("demo.engine:memory", "is replaced: it asks a TPU", "")
    text = "def memory(): ..."
    [change] = changed(
        tmp_path,
        row,
        {"demo/engine.py": text, "demo/run.py": "from demo.engine import memory\nmemory()"},
        {"demo/engine.py": text},
    )
    assert change.kind is Kind.UNREAD


def test_a_log_line_is_known_by_how_it_begins(tmp_path: Path) -> None:
    row = Name("demo.engine", "begins a phase", line="Init worker")
    text = "log(f'Init worker | {rank}')"
    assert changed(tmp_path, row, {"demo/engine.py": text}, {"demo/engine.py": f"x = 1\n{text}"}) == []
    [change] = changed(tmp_path, row, {"demo/engine.py": text}, {"demo/engine.py": "log('Started worker')"})
    assert (change.kind, change.label) == (Kind.GONE, 'demo.engine "Init worker"')


def test_a_new_field_of_a_class_and_a_new_function_of_a_module_listed_in_full_are_told(
    tmp_path: Path,
) -> None:
    base = "class Base:\n    model: str\n"
    options = "def options(): ...\ndef _own(): ...\n"
    older = library(
        tmp_path, "1.0", {"demo/a.py": f"{base}class Arguments(Base):\n    seed: int", "demo/b.py": options}
    )
    newer = library(
        tmp_path,
        "2.0",
        {
            "demo/a.py": f"{base}    port: int\nclass Arguments(Base):\n    seed: int",
            "demo/b.py": f"{options}def more(): ...\ndef _other(): ...",
        },
    )
    changes = compare([], older, newer, {}, listed_in_full=("demo.a:Arguments", "demo.b"))
    assert [(change.kind, change.label, change.now) for change in changes] == [
        (Kind.NEW, "demo.a:Arguments", "gains port"),
        (Kind.NEW, "demo.b", "gains more"),
    ]


@pytest.mark.parametrize(
    ("path", "definition"),
    [
        ("demo.engine:Engine.start", "demo.core:Base.start"),
        ("demo.engine:Engine.model", "demo.core:Base.model"),
        ("demo.engine:Engine.seed", "demo.core:Base.seed"),
        ("demo.engine:engine.start", "demo.core:Base.start"),
        ("demo.engine:PORT", "demo.engine:PORT"),
        ("demo.engine:fast", "demo.engine:fast"),
        ("demo:core.Base", "demo.core:Base"),
        ("demo.engine:handle.request.app", "demo.engine:handle.request.app"),
        ("demo._native:Client", "demo._native:Client"),
        ("demo.engine:Engine.stop", None),
        ("demo.engine:handle.request.route", None),
        ("demo.engine:loop", None),
        ("demo._native:Server", None),
        ("demo.nowhere", None),
    ],
)
def test_a_path_is_followed_as_python_would(tmp_path: Path, path: str, definition: str | None) -> None:
    packages = library(
        tmp_path,
        "1.0",
        {
            "demo/__init__.py": "from . import core",
            "demo/core.py": "class Base:\n    seed: int\n    def start(self): self.model = ''",
            "demo/engine.py": "from typing import TYPE_CHECKING\n"
            "from demo._native import Client\n"
            "from demo.core import Base as Parent\n"
            "from demo.engine import loop\n"
            "class Engine(Parent[int]): ...\n"
            "engine = Engine()\n"
            "if TYPE_CHECKING:\n    PORT: int\n"
            "try:\n    from fast import fast\nexcept ImportError:\n    def fast(): ...\n"
            "def handle(request): return request.app",
            "demo/_native.abi3.so": "",
        },
    )
    followed = packages.find(path)
    assert (followed and followed.path) == definition


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ("", ""),
        ("a, /, b, c=1, *rest, d, e=2, **more", "a, /, b, c=, *rest, d, e=, **more"),
        ("a, *, b", "a, *, b"),
    ],
)
def test_a_signature_names_parameters_and_marks_defaults(parameters: str, text: str) -> None:
    [function] = ast.parse(f"def function({parameters}): ...").body
    assert isinstance(function, ast.FunctionDef)
    assert signature(function) == text


def test_a_difference_of_order_and_the_end_of_a_function_are_told() -> None:
    assert difference("a, b", "b, a") == "new order: b, a"
    assert difference("a", None) == "no function any more"


def test_pips_words_become_what_to_do() -> None:
    missing = "ERROR: Could not find a version that satisfies the requirement x==9 (from versions: {})\n"
    assert (
        reason("x", "9", missing.format("1.0rc1, 1.0, 1.1.dev3, 1.1, 1.2"))
        == "x has no wheel of 9; the newest are 1.0, 1.1, 1.2"
    )
    assert reason("x", "9", missing.format("none")) == "x: the package index has no wheel of it"
    assert (
        reason("x", "9", "python: No module named pip\n")
        == "x: this Python has no pip to download with; run `python -m ensurepip`"
    )


def test_a_version_that_does_not_exist_is_refused_with_the_newest_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("0.1.0", "0.2.0"):
        metadata = f"Metadata-Version: 2.1\nName: tpu-inference\nVersion: {version}\n"
        wheel_file(
            tmp_path / "index",
            "tpu_inference",
            version,
            {f"tpu_inference-{version}.dist-info/METADATA": metadata},
        )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(
        UpstreamError, match=r"tpu-inference has no wheel of 9\.9; the newest are 0\.1\.0, 0\.2\.0"
    ):
        download("tpu_inference", "9.9", tmp_path)


def test_an_index_that_is_not_reached_is_told_from_a_version_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(UpstreamError, match="reaches no package index"):
        download("tpu_inference", "9.9", tmp_path)


@pytest.mark.slow
def test_the_command_prints_what_is_gone_and_ends_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel_file(tmp_path / "tpu-inference", "tpu_inference", "9.9", {"tpu_inference/__init__.py": ""})
    wheel_file(tmp_path / "vllm-tpu", "vllm_tpu", "9.9", {"vllm/__init__.py": ""})

    assert main(["9.9", "--wheels", str(tmp_path), "--markdown"]) == 1

    page = capsys.readouterr().out
    assert "tpu-inference 9.9" in page
    assert "| `vllm.sampling_params:SamplingParams.stop` | nothing has this name any more |" in page


def test_the_terminal_shows_a_row_for_each_change() -> None:
    change = Change(Kind.GONE, "demo[fast]:start", "see demo.core:start", "", ("serving.engine.vllm",))
    console = Console(width=100, record=True, file=io.StringIO())
    show([change], "demo 1 to demo 2", console)
    shown = console.export_text()
    assert all(
        text in shown for text in ("gone", "demo[fast]:start", "see demo.core:start", "serving.engine.vllm")
    )


def test_a_version_without_wheels_ends_with_status_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert main(["9.9"]) == 2
    assert capsys.readouterr().err == "error: tpu-inference: the package index has no wheel of it\n"
