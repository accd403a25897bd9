import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from serving.cli.interrupt import end_on_signals
from serving.cli.main import main
from serving.cli.parser import parser
from serving.cli.sim import _shape
from serving.router.http.auth import KeyFile
from serving.simulation.cluster import SimulatedCluster, default_directory
from serving.simulation.ports import free_port
from serving.tpu import GENERATIONS

pytestmark = pytest.mark.unit

LLAMA = Path(__file__).parents[2] / "deployments" / "llama.yaml"

Refusal = Callable[..., str]


@pytest.fixture(autouse=True)
def nothing_runs_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # simulations keep their state below it
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """What a command says when it refuses: one message on stderr, exit status 1, no traceback."""

    def refused(*arguments: str | Path) -> str:
        assert main([str(argument) for argument in arguments]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("serving: ")
        assert "Traceback" not in err
        assert len(err.splitlines()) == 1
        return err.removeprefix("serving: ").removesuffix("\n")

    return refused


def test_a_simulation_is_reached_with_what_env_prints_and_nobody_else_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = default_directory()
    cluster = SimulatedCluster(directory, "0" * 12, cluster_secret="a b")
    cluster._make_directory()
    cluster._save()
    assert main(["sim", "env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "export SERVING_CLUSTER_SECRET='a b'" in lines
    assert f"export RAY_TMPDIR={directory}" in lines
    token = directory / "ray-token"
    assert {"export RAY_AUTH_MODE=token", f"export RAY_AUTH_TOKEN_PATH={token}"} <= set(lines)
    assert len(token.read_text()) >= 43
    assert directory.stat().st_mode & 0o077 == 0
    assert tmp_path in directory.parents


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """deployments/llama.yaml with other keys in its model; None takes a key out."""

    def write(port: int = 8000, **changes: object) -> Path:
        raw = yaml.safe_load(LLAMA.read_text())
        raw["http_options"]["port"] = port
        model = raw["applications"][0]["args"]["models"][0]
        model.update(changes)
        raw["applications"][0]["args"]["models"][0] = {k: v for k, v in model.items() if v is not None}
        path = tmp_path / "changed.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    return write


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"replica": 2}, "models.0.replica: unknown key; did you mean 'replicas'?"),
        ({"slice": None}, "models.0.slice: missing"),
        (
            {"slice": {"generation": "v6e", "topology": "2x5"}},
            "v6e has no topology '2x5'; it has 1x1, 2x2, 2x4, 4x4",
        ),
        ({"slice": {"generation": "v6", "topology": "2x4"}}, "there is no TPU generation 'v6'"),
        (
            {"slice": {"generation": "v6e", "topology": "2x4", "hosts": 3}},
            "v6e 2x4 does not come as 3 hosts: its 8 chips are",
        ),
        ({"slice": {"generation": "v6e", "topology": "2x4"}}, "name hosts or machine_type"),
        ({"parallel": {"tensor": 4, "pipeline": 1}}, "is 4 devices, v6e 2x4 (2 hosts x 4 chips) has 8"),
        ({"engine": {"tensor_parallel_size": 8}}, "tensor_parallel_size"),
        ({"engine": {"max_model_length": 8192}}, "max_model_len"),
        ({"model": "./no/such/model"}, "model path ./no/such/model does not exist"),
        ({"model": "nobody/nothing"}, "no config.json is known for model 'nobody/nothing'"),
    ],
)
def test_a_yaml_that_asks_for_what_can_not_be_is_refused_before_anything_starts(
    refusal: Refusal, changed: Callable[..., Path], changes: dict[str, object], says: str
) -> None:
    assert says in refusal("sim", "run", changed(**changes))


def test_a_yaml_that_starts_with_no_slice(refusal: Refusal, changed: Callable[..., Path]) -> None:
    path = changed(replicas={"min": 0, "max": 2})
    assert "the YAML starts with no slice" in refusal("sim", "run", path)


def test_a_yaml_that_is_not_there(refusal: Refusal, tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert refusal("sim", "run", path) == f"{path}: No such file or directory"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("plan", LLAMA, "--jsn"),
            "serving plan: error: unrecognized arguments: --jsn; did you mean --json?",
        ),
        (
            ("keys", "new", "team", "--tokens-per-dya=5"),
            "serving keys new: error: unrecognized arguments: --tokens-per-dya=5; did you mean --tokens-per-day?",
        ),
        (("sim", "kill", "slice-0/1", "now"), "serving sim kill: error: unrecognized arguments: now"),
        (
            ("keys", "new", "team", "--weight", "much"),
            "serving keys new: error: argument --weight: 'much' is no number",
        ),
    ],
)
def test_a_misspelt_option_is_refused_by_its_command(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str | Path, ...], says: str
) -> None:
    with pytest.raises(SystemExit):
        main([str(argument) for argument in arguments])
    assert capsys.readouterr().err.splitlines()[-1] == says


def test_a_busy_port_is_refused_with_the_process_that_has_it(
    refusal: Refusal, changed: Callable[..., Path]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        said = refusal("sim", "run", changed(port=port))
    assert said.startswith(f"port {port} is taken by process {os.getpid()} (")
    assert "http_options.port" in said


def test_a_service_that_runs_already_is_named_before_its_port(
    refusal: Refusal, changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, command in (("sim", "serving sim"), ("other", "serving sim --name other")):
        directory = default_directory(name)
        running = SimulatedCluster(
            directory, "1", "simulated", "", cluster_secret="s", network_kind="loopback"
        )
        running._make_directory()
        running._save()
        monkeypatch.setattr(SimulatedCluster, "_processes", lambda _: [psutil.Process()])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            said = refusal("sim", "--name", name, "run", changed(port=listener.getsockname()[1]))
        assert said == (
            f"a simulation already runs in {directory} (0 slices); `{command} down` ends it, --name starts another beside it"
        )


def test_a_home_that_can_not_be_written_is_named_with_the_way_around_it(
    capsys: pytest.CaptureFixture[str], changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert main(["sim", "run", str(changed(port=free_port()))]) == 1
    said = "can't be written to /proc/none/tpu-serving (No such file or directory); set XDG_CACHE_HOME"
    assert said in capsys.readouterr().err


def test_a_slice_without_a_shape_is_one_of_two_hosts() -> None:
    for generation in GENERATIONS:
        made = _shape(parser().parse_args(["sim", "up", "--generation", generation]))
        assert (made.generation, made.hosts) == (generation, 2)
    assert _shape(parser().parse_args(["sim", "add", "--hosts", "1"])).hosts == 1
    assert _shape(parser().parse_args(["sim", "add", "--machine-type", "ct6e-standard-8t"])).hosts == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--startup", "load=3"], "--startup is for the simulated engine; add --engine simulated"),
        (["--engine", "simulated", "--startup", "boil=3"], "there are download, load, compile, warmup"),
    ],
)
def test_a_start_that_no_engine_goes_through_is_refused(
    refusal: Refusal, changed: Callable[..., Path], options: list[str], says: str
) -> None:
    assert says in refusal("sim", "up", "--hosts", "2", *options)
    assert says in refusal("sim", "run", changed(), *options)


@pytest.mark.parametrize("action", ["up", "add"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--topology", "2x3"], "v6e has no topology '2x3'"),
        (["--generation", "v5"], "there is no TPU generation 'v5'"),
        (["--topology", "2x4", "--hosts", "4"], "v6e 2x4 does not come as 4 hosts"),
        (["--machine-type", "ct6e-standard-16t"], "no machine type 'ct6e-standard-16t'"),
    ],
)
def test_a_slice_that_does_not_exist_is_not_simulated(
    refusal: Refusal, action: str, options: list[str], says: str
) -> None:
    assert says in refusal("sim", action, *options)


@pytest.mark.parametrize(
    "command",
    [
        ["sim", "status"],
        ["sim", "down"],
        ["sim", "add", "--hosts", "2"],
        ["sim", "kill", "slice-0"],
        ["sim", "kill", "slice-0/1"],
    ],
    ids=" ".join,
)
def test_without_a_simulation_there_is_nothing_to_do(
    refusal: Refusal, tmp_path: Path, command: list[str]
) -> None:
    directory = tmp_path / f"tpu-serving-{os.getuid()}" / "sim"
    assert refusal(*command) == f"no simulation runs in {directory}; `serving sim up` starts one"


def test_status_without_a_cluster_says_how_to_name_one(refusal: Refusal) -> None:
    assert refusal("status").endswith("for another cluster set RAY_ADDRESS or give --address")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto", "127.0.0.1:", "head.invalid:6379"])
def test_status_of_a_cluster_that_is_not_there(refusal: Refusal, address: str) -> None:
    said = refusal("status", "--address", address)
    assert (
        said
        == f"no Ray cluster answers at {address!r}; RAY_ADDRESS and --address name host:port of a head that runs"
    )


def test_an_interrupted_command_ends_as_a_shell_expects(
    monkeypatch: pytest.MonkeyPatch, changed: Callable[..., Path]
) -> None:
    path = changed()

    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Path, "read_bytes", interrupted)
    assert main(["sim", "run", str(path)]) == 130


_INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from serving.cli.main import main
sys.exit(main(["plan", "no such file"]))
"""


@pytest.mark.parametrize("module", ["argparse", "rich.console", "httpx"])
def test_a_command_that_is_interrupted_while_it_is_imported_ends_in_silence(module: str) -> None:
    command = [sys.executable, "-c", _INTERRUPTED_IMPORT, module]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_what_a_command_ends_is_not_interrupted_by_signals_that_follow() -> None:
    """timeout(1) sends two: a simulation that was being ended left namespaces and its folder."""
    end_on_signals()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGHUP)


def test_output_that_can_not_be_written_ends_a_command_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["keys", "new", "a"]) == 1
    assert capsys.readouterr().err == "serving: [Errno 28] No space left on device\n"


def test_a_reader_that_has_enough_ends_a_command_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["secret"]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sim", "--name", "", "down"], "'' is no name of a simulation"),
        (["sim", "--name", "../other", "down"], "'../other' is no name of a simulation"),
        (["sim", "up", "--slices", "0"], "'0' is no whole number from 1 up"),
        (["sim", "run", "x.yaml", "--spare=-1"], "'-1' is no whole number from 0 up"),
        (["compile", "x.yaml", "--jobs", "0"], "'0' is no whole number from 1 up"),
        (["doctor", "x.yaml", "--limit", "soon"], "'soon' is no number of seconds from 0 up"),
        (["status", "--name", "a", "--address", "b"], "not allowed with argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--name", "other", "status"], ["status", "--name", "other"]], ids=" ".join
)
def test_a_simulation_s_name_stands_before_the_action_or_behind_it(
    refusal: Refusal, arguments: list[str]
) -> None:
    assert "serving sim --name other up" in refusal("sim", *arguments)


def test_a_name_that_is_given_goes_before_the_cluster_of_the_environment(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "no Ray cluster answers at '127.0.0.1:1'" in refusal("status")
    assert "`serving sim --name other up` starts one" in refusal("status", "--name", "other")


def test_a_folder_that_is_too_long_for_sockets_is_refused_before_anything_starts(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 40)))
    assert "too long for Ray's sockets below it; give a shorter --name, or set TMPDIR" in refusal("sim", "up")


def test_a_key_goes_to_stderr_and_its_hash_to_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """So that `serving keys new batch >> keys.yaml` shows the key and keeps only its hash."""
    assert main(["keys", "new", "batch", "--requests-per-minute", "60", "--weight", "0.5"]) == 0
    out, err = capsys.readouterr()
    key = err.strip().rpartition(" ")[2]
    (tmp_path / "keys.yaml").write_text(out)
    holder = KeyFile(tmp_path / "keys.yaml").ring.holder([(b"authorization", f"Bearer {key}".encode())])
    assert (holder.name, holder.requests_per_minute, holder.weight) == ("batch", 60, 0.5)
    assert key not in out


def test_a_key_with_a_limit_that_makes_no_sense(refusal: Refusal) -> None:
    said = refusal("keys", "new", "batch", "--weight", "0")
    assert said == "weight: Input should be greater than or equal to 0.001"


def test_a_terminal_without_utf_8_gets_the_plan_with_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    assert main(["plan", str(LLAMA)]) == 0
    assert b"llama-3.1-8b-instruct fits v6e 2x4" in shown.getvalue()
