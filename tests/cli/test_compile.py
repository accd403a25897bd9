import io
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from serving.cli.compile import written
from serving.cli.compile_view import Watch, show
from serving.cli.main import main
from serving.compiler import libtpu
from serving.compiler.compile import Answer
from serving.compiler.records import Built, Compiled, Program, Stage
from serving.compiler.report import Asked, document, hbm
from serving.compiler.schedule import Schedule
from serving.config import load
from serving.errors import CompileError
from serving.planning import Plan
from serving.planning.fit import RESIDENT_BYTES
from serving.planning.plan import plan
from serving.tpu.generations import GIB

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "deployments" / "llama-70b-v6e-8.yaml")
ASKED = Asked("serving compile f.yaml", "2026-11-22", {"libtpu": "0"}, quick=False, full=False)
BUILT = Built(
    "flax_nnx",
    {"model": 8},
    16 * GIB,
    14 * GIB,
    2879,
    128,
    (
        Program("backbone", {"num_tokens": 16, "num_reqs": 256}),
        Program("backbone", {"num_tokens": 512, "num_reqs": 256}),
        Program("sample", {"num_reqs": 256}),
    ),
    9.0,
)
STEP = Compiled(
    1,
    "compiled",
    argument_bytes=30 * GIB,
    resident_bytes=30 * GIB,
    output_bytes=14 * GIB,
    aliased_bytes=14 * GIB,
    temporary_bytes=GIB // 8,
    code_bytes=GIB // 64,
    compile_s=45.0,
    schedule=Schedule(36_000_000, 8_000_000, 4_800_000, {"all-reduce": 65, "RPAd": 32}),
)


def planned() -> Plan:
    (service,) = load(Path(LLAMA)).services.values()
    return plan(service.models[0].per_pool()[0])


def printed(*compiled: Compiled, unbuilt: tuple[str, ...] = ()) -> str:
    console = Console(file=io.StringIO(), width=160)
    stages = () if unbuilt else (Stage(BUILT, compiled),)
    show(console, document(planned(), ASKED, stages, unbuilt))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_sets_the_compiler_beside_the_plan() -> None:
    sampled = Compiled(2, "compiled", temporary_bytes=GIB // 2, code_bytes=GIB // 1024)
    text = printed(STEP, sampled)
    assert "compiles, needs 30.6 GiB of 31.2 GiB a device" in text
    assert "backbone tokens=512 reqs=256" in text
    assert "weights" in text
    assert "16.0 GiB" in text
    assert "the engine compiles 3 programs at start" in text
    assert "tokens 16 512; reqs 256" in text
    assert "48.8M" in text


def test_a_step_s_cycles_are_told_by_what_they_are_spent_on() -> None:
    text = printed(STEP)
    assert (
        "backbone tokens=512 reqs=256: 74% matrix products, 16% copies, 10% the rest of the cycles; none are known of 65 all-reduce, 32 RPAd"
        in text
    )


def test_a_refusal_stands_in_the_compiler_s_words() -> None:
    text = printed(Compiled(1, "refused", "Ran out of memory. Used 32.40G of 31.24G hbm."))
    assert "does not compile" in text
    assert "backbone tokens=512 reqs=256: refused: Ran out of memory. Used 32.40G of 31.24G hbm." in text
    assert re.search(r"usable +31.2 GiB +31.2 GiB", text)


def test_what_can_not_be_built_is_named_with_the_reason() -> None:
    text = printed(unbuilt=("ModuleNotFoundError: No module named 'x'",))
    assert "was not built" in text
    assert "the engine can't be built here: ModuleNotFoundError: No module named 'x'" in text


def test_figures_are_left_out_where_a_program_is_missing() -> None:
    told = document(planned(), ASKED, [Stage(BUILT, (STEP, Compiled(2, "timed out", "slow")))], ())
    assert (told["compiles"], told["needs_bytes"]) == (False, None)
    assert json.loads(json.dumps(told)) == told


def test_a_line_tells_when_a_compile_ends_where_nobody_watches() -> None:
    console = Console(file=io.StringIO(), width=80)
    with Watch(console, "llama on v6e 2x4") as watch:
        watch.tell("backbone", "compiling")
        watch.tell("backbone", "compiled in 45 s")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "llama on v6e 2x4: backbone: compiled in 45 s\n"


def test_without_libtpu_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="run `make libtpu`"):
        libtpu.library(tmp_path)


def test_another_version_of_libtpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site-packages"
    (installed / "libtpu").mkdir(parents=True)
    (installed / "libtpu" / "__init__.py").touch()
    (installed / "libtpu-0.0.17.dist-info").mkdir()
    (installed / "libtpu-0.0.17.dist-info" / "METADATA").write_text("Name: libtpu\nVersion: 0.0.17\n")
    monkeypatch.syspath_prepend(installed)
    with pytest.raises(
        CompileError, match=rf"libtpu 0\.0\.17 is installed, this engine wants {libtpu.VERSION}"
    ):
        libtpu.library(tmp_path)


def test_the_version_is_the_lock_s_and_the_extra_s() -> None:
    assert f"libtpu=={libtpu.VERSION} " in (ROOT / "lock" / "libtpu.txt").read_text()
    assert f'compile = ["libtpu=={libtpu.VERSION}"]' in (ROOT / "pyproject.toml").read_text()


def test_a_model_that_the_file_has_not_is_refused_with_those_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    library = libtpu.FOLDER.expanduser() / "libtpu" / "libtpu.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert main(["compile", LLAMA, "--model", "other"]) == 2
    assert "has llama-3.3-70b-instruct" in capsys.readouterr().out


def test_a_cache_that_can_t_be_written_is_refused_before_anything_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["compile", LLAMA, "--cache", str(tmp_path / "file")]) == 2
    assert "file: File exists; name a folder that can be written" in capsys.readouterr().out
    assert main(["compile", LLAMA, "--cache", str(tmp_path / "file" / "below")]) == 2
    assert "Not a directory; name a folder that can be written" in capsys.readouterr().out


def test_programs_that_a_full_disk_did_not_take_are_told(tmp_path: Path) -> None:
    whole = zlib.compress(bytes(100_000))
    (tmp_path / "jit_run_model-1-cache").write_bytes(whole)
    assert "cache: 1 programs, 0.0 MiB" in written(tmp_path)
    (tmp_path / "jit_logits-1-cache").write_bytes(b"\x28\xb5\x2f\xfdby zstandard")
    assert "cache: 2 programs, 0.0 MiB" in written(tmp_path)
    (tmp_path / "jit_sample-2-cache").touch()
    (tmp_path / "jit_sample-3-cache").write_bytes(whole[:-1])
    assert "2 of 4 programs are empty or cut files" in written(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no program", zlib.compress(b"a program")[:-1]])
def test_a_cache_with_a_damaged_program_is_refused_for_jax_would_keep_it(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jit_run_model-1-cache").write_bytes(zlib.compress(b"a program"))
    (tmp_path / "jit_sample-2-cache").write_bytes(content)
    assert main(["compile", LLAMA, "--cache", str(tmp_path)]) == 2
    assert "1 of its programs are empty, cut or damaged" in (says := capsys.readouterr().out)
    assert "jit_sample-2-cache first; delete them" in says
    assert (tmp_path / "jit_sample-2-cache").read_bytes() == content


def test_a_cache_of_a_few_layers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", LLAMA, "--quick", "--cache", str(tmp_path / "cache")]) == 2
    assert "--cache keeps whole steps" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


def test_stages_have_their_own_numbers() -> None:
    console = Console(file=io.StringIO(), width=160)
    stages = [Stage(BUILT, (STEP,), number) for number in (0, 1, 3)]
    show(
        console, document(replace(planned(), layout=replace(planned().layout, pipeline=4)), ASKED, stages, ())
    )
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert re.findall(r"stage (\d) of 4: programs", text) == ["1", "2", "4"]


def test_figures_are_whole_on_a_narrow_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    long = replace(
        BUILT,
        programs=(*BUILT.programs, Program("substitute_placeholder_token_fn", {"next_tokens_size": 2048})),
    )
    show(console, document(planned(), ASKED, [Stage(long, (STEP, replace(STEP, index=3)))], ()))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("30.0 GiB") == 2


def test_prompt_logprobs_stand_apart_for_they_run_where_they_are_asked_for() -> None:
    asked_for = Program("compute_and_gather_prompt_logprobs", {"num_tokens": 512})
    built = replace(BUILT, programs=(*BUILT.programs, asked_for))
    large = Compiled(3, "compiled", temporary_bytes=2 * GIB)
    lines = {line.name: line.compiler_bytes for line in hbm(planned(), [Stage(built, (STEP, large))])}
    assert lines["prompt logprobs, if asked for"] == 2 * GIB
    assert lines["all of it"] == 30 * GIB + RESIDENT_BYTES + GIB // 8 + GIB // 64


def test_what_was_answered_before_an_interrupt_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([Answer((Stage(BUILT, (STEP,)),), (), None)])

    def ask(*_: object) -> Answer:
        answer = next(answers, None)
        if answer is None:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr("serving.cli.compile._ask", ask)
    monkeypatch.setattr(libtpu, "library", lambda: Path("/nowhere"))
    monkeypatch.setattr("serving.compiler.processes.check_installed", lambda: None)
    assert main(["compile", str(ROOT / "deployments" / "two-models.yaml"), "--json"]) == 130
    (told,) = json.loads(capsys.readouterr().out)
    assert told["model"] == "llama-3.1-8b-instruct"
