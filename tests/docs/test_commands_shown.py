"""Every command that README and docs/ show works: it is run here, or the row it stands in names the test that runs it."""

import re
import shlex
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
import yaml

from serving.cli.main import main
from serving.cli.parser import parser

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"console", "bash", "json", "promql", "text", "yaml", "python"}
WIDTH = "112"


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Shown:
    """A command on a page, and the lines that the page has below it."""

    page: str
    line: int
    command: str
    output: tuple[str, ...]


@dataclass(frozen=True)
class RunBy:
    """A test runs it, or what it calls, on whatever it needs."""

    test: str


@dataclass(frozen=True)
class Here:
    """Quick enough to be run by the test below, which compares what it prints."""


@dataclass(frozen=True)
class ByCI:
    """.ci/run calls it."""


@dataclass(frozen=True)
class InPart:
    """Nothing runs all of it. `test` runs what of it can be, and the program has the options that are shown."""

    why: str
    test: str = ""


TRIAL = "test_two_models_serve_under_load_and_ctrl_c_leaves_nothing"
CLUSTER = "test_hosts_are_killed_restarted_and_added_one_by_one"
MINUTES = "it takes minutes"
CLOUD = "it needs a project of Google's"

# As a command is typed, with `.venv/bin/` left out, to how it is kept right.
ROWS: dict[str, RunBy | Here | ByCI | InPart] = {
    r"serving plan deployments/\S+\.yaml( --json)?": Here(),
    r"serving plan \S+ --workload \S+": Here(),
    r"serving plan --what-fits \S+( --engine \S+)*": Here(),
    r"serving manifest deployments/\S+\.yaml --image REGISTRY/tpu-serving:0\.1\.0": Here(),
    r"serving compile deployments/\S+\.yaml( --\S+)*( > result\.json)?": RunBy(
        "test_a_small_model_compiles_for_a_slice"
    ),
    r"python -m tools\.compiled result\.json": RunBy("test_a_kept_answer_takes_the_place_of_an_older_one"),
    r"make libtpu": RunBy("test_a_small_model_compiles_for_a_slice"),
    r"serving keys new \S+( --\S+ \S+)* >> keys.yaml": Here(),
    r"serving keys (add|list|roll|revoke)( [a-z]+)?( --\S+ \S+)*": RunBy(
        "test_keys_are_added_rolled_and_revoked_in_the_store"
    ),
    r"serving usage --store /var/lib/tpu-serving( --\S+ \S+)*( --csv)?": RunBy(
        "test_usage_of_all_keys_is_a_table_or_csv"
    ),
    r"serving batch run in\.jsonl -o out\.jsonl --model \S+": RunBy(
        "test_an_offline_run_that_is_killed_and_interrupted_goes_on_and_has_one_result_a_line"
    ),
    r"python -m tools\.vllm_client_tests http://127\.0\.0\.1:8000 --bare \S+": RunBy(
        "test_vllm_s_tests_run_against_a_service"
    ),
    r"python -m tools\.reference": RunBy("test_a_stale_page_and_a_missing_one_are_named"),
    r"python -m tools\.dashboard > deployments/monitoring/dashboard\.json": RunBy(
        "test_the_dashboard_in_the_folder_is_what_the_panels_make"
    ),
    r"serving manifest deployments/\S+\.yaml --image \S+ \| kubectl apply -f -": InPart(
        "it needs a cluster of Kubernetes", "test_its_manifest_is_valid"
    ),
    r"serving manifest deployments/\S+\.yaml --image \S+ --kustomize base": RunBy(
        "test_a_base_for_kustomize_is_a_file_a_kind"
    ),
    r"docker build -t \S+ \.": InPart(
        "it needs Docker and gigabytes of network", "test_the_image_takes_nothing_that_is_not_locked"
    ),
    r"docker push \$IMAGE": InPart(CLOUD),
    r"export (PROJECT|PROJECT_NUMBER|IMAGE|WEBHOOK)=.*": InPart(CLOUD),
    r"export PATH=\"\$PWD/\.venv/bin:\$PATH\"": InPart("it changes the shell that it is typed in"),
    r"(gcloud|helm) .*": InPart(CLOUD),
    r"kubectl create secret generic .*": InPart(CLOUD, "test_a_pod_starts_with_its_secrets_or_not_at_all"),
    r"kubectl (get|port-forward|exec) .*": InPart(CLOUD),
    r"kubectl patch raycluster .*": InPart(CLOUD),
    r"kubectl delete (rayservice|persistentvolumeclaim) .*": InPart(CLOUD),
    r"serving manifest deployments/\S+\.yaml --image \S+ \| kubectl delete --ignore-not-found -f -": InPart(
        "it needs a cluster of Kubernetes", "test_its_manifest_is_valid"
    ),
    r"kubectl delete raycluster .*": InPart(CLOUD, "test_a_changed_image_does_not_double_the_slices"),
    r"make serve": RunBy(TRIAL),
    r"make (check|docs)": ByCI(),
    r"make test(-all)?": ByCI(),
    r"python -m pytest -n 2 -m .unit and not slow.": ByCI(),
    r"make (audit|sbom)": InPart("it asks the network", "test_every_package_of_every_lock_has_hashes"),
    r"make lock": InPart("it asks the network for every package"),
    r"make loadtest( ARGS=.*)?": RunBy("test_simulated_slices_are_loaded_and_judged_and_nothing_stays"),
    r"make bench( ARGS=.*)?": InPart(MINUTES, "test_every_report_has_its_place_on_a_page"),
    r"make bench-routing": InPart(MINUTES, "test_the_plot_and_the_table_show_every_policy_under_every_load"),
    r"make abuse": InPart(MINUTES, "test_a_row_tells_the_well_behaved_key_s_times_against_quiet"),
    r"python -m benchmarks\.abuse --bodies": RunBy("test_what_one_body_costs_is_told_for_each"),
    r"python -m benchmarks\.preemption": InPart(
        MINUTES, "test_a_row_tells_what_both_keys_saw_and_what_went_wrong"
    ),
    r"make chaos( ARGS=.*)?": InPart(
        MINUTES, "test_the_table_has_a_row_for_each_fault_and_a_column_for_each_figure"
    ),
    r"serving sim run \S+( --\S+ \S+)*": RunBy(TRIAL),
    r"serving sim up( --\S+ \S+)*": RunBy(CLUSTER),
    r"serving sim (status|down)": RunBy(CLUSTER),
    r"serving sim (kill|restart) slice-\d/\d": RunBy(CLUSTER),
    r"serving sim cut slice-\d/\d": RunBy("test_hosts_are_killed_restarted_and_added_one_by_one"),
    r'eval "\$\(serving sim env\)"': RunBy(
        "test_a_simulation_is_reached_with_what_env_prints_and_nobody_else_reads_it"
    ),
    r"ray get-auth-token --generate": InPart("it writes to the home of whoever runs it"),
    r"export SERVING_CLUSTER_SECRET=\$\(serving secret\)": RunBy("test_a_secret_is_printed_once_and_is_long"),
    r"serving sim add( --\S+ \S+)*": RunBy(CLUSTER),
    r"serving sim restart head": RunBy("test_slices_outlive_the_head_and_all_works_under_the_new_one"),
    r"serving doctor deployments/\S+\.yaml( --json)?": RunBy(
        "test_the_doctor_finds_what_is_wrong_on_simulated_hosts"
    ),
    r"serving slices release slice-\d": RunBy(
        "test_a_slice_whose_chips_are_held_is_left_out_and_let_go_by_a_command"
    ),
    r"serving status": RunBy("test_status_shows_the_slice"),
    r"serving status --watch": RunBy("test_the_terminal_shows_the_same_until_interrupted"),
    r"serve run deployments/\S+\.yaml": RunBy("test_every_slice_serves_and_says_that_it_is_simulated"),
    r"serve deploy deployments/\S+\.yaml": InPart(
        "tests deploy by `serve run --non-blocking`", "test_limits_and_scaling_change_without_a_restart"
    ),
    r"curl http://localhost:8000/v1/chat/completions .*": RunBy(TRIAL),
    r"curl -H .Authorization: Bearer sk-\.\.\.. .http://127\.0\.0\.1:8000/v1/usage\?\S+": RunBy(
        "test_days_that_are_asked_for"
    ),
    r"curl http://localhost:8000/metrics": RunBy("test_the_page_has_what_the_table_says_and_nothing_else"),
    r"curl -X POST SLICE/simulator/faults .*": RunBy("test_errors_and_refusals_on_demand"),
    r"prometheus --config\.file=deployments/monitoring/prometheus\.yml": RunBy(
        "test_prometheus_answers_every_query_and_every_rule"
    ),
    r"grep DIGITS keys\.yaml": RunBy("test_a_key_is_known_by_how_its_hash_begins_and_not_by_its_name"),
    r"locust -f loadtest/locustfile\.py --headless -u .* ShortChat": RunBy(TRIAL),
    r"locust -f loadtest/locustfile\.py --headless --arrivals .*": RunBy(
        "test_open_loop_counts_latency_from_the_intended_start"
    ),
    r"python -m pytest -m browser -s": RunBy("test_the_page_paints_and_says_when"),
    r"python -m benchmarks\.compiled": RunBy("test_the_page_of_plans_shows_what_is_kept"),
    r"python -m benchmarks\.cycles": RunBy("test_the_page_of_plans_shows_what_is_kept"),
    r"python -m benchmarks\.builds --docs": InPart(
        MINUTES, "test_planned_weights_are_within_one_percent_of_what_the_engine_lays_out"
    ),
    r"python -m benchmarks\.plans": RunBy("test_the_tables_have_every_rate_and_every_model"),
    r"python -m benchmarks\.calibration": RunBy("test_the_table_and_the_plot_show_every_row"),
    r"python -m benchmarks\.routers( --quick)?": InPart(
        MINUTES, "test_the_report_on_routers_has_every_load_and_names_who_is_missing"
    ),
    r"python -m benchmarks\.(relay|ray_llm)": InPart(
        MINUTES, "test_the_report_on_real_engines_says_who_is_missing"
    ),
    r"python -m benchmarks\.fleet( --\S+)?": InPart(MINUTES, "test_our_policy_follows_a_load_that_doubles"),
    r"python -m benchmarks\.store": InPart(
        "it starts a head of its own", "test_the_fixed_part_is_read_once_and_again_when_it_has_changed"
    ),
    r"python -m benchmarks\.choosing": InPart(
        MINUTES, "test_the_fleet_of_the_benchmark_sends_a_conversation_s_turns_to_one_slice"
    ),
    r"python -m benchmarks\.routing\.simulated": InPart(
        MINUTES, "test_in_simulated_time_routers_that_share_find_more_than_those_that_do_not"
    ),
    r"python -m benchmarks\.(simulator|footprint|metrics_cost|door_cost)( --slices-tls)?": InPart(MINUTES),
    r"python benchmarks/load_generator\.py": RunBy("test_locust_is_kept_busy_and_its_answers_are_counted"),
}


def blocks() -> list[Block]:
    """Every fenced block of every page."""
    return [
        Block(
            str(page.relative_to(ROOT)),
            text[: fence.start()].count("\n") + 1,
            fence["language"],
            fence["text"],
        )
        for page in PAGES
        for text in [page.read_text()]
        for fence in re.finditer(r"^```(?P<language>.*)\n(?P<text>(?s:.*?))^```$", text, re.MULTILINE)
    ]


def shown() -> list[Shown]:
    return [entry for block in blocks() for entry in _commands(block)]


def _commands(block: Block) -> Iterator[Shown]:
    """Of `console` what stands behind `$ `, of `bash` every line; a backslash goes on in the next line."""
    text = block.text.replace("\\\n", " ")
    if block.language == "bash":
        text = "".join(f"$ {line}\n" for line in text.splitlines() if line and line[0] != "#")
    if block.language not in ("bash", "console"):
        return
    assert text.startswith("$ "), f"{block.page}:{block.line}: a block of commands begins with `$ `"
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *output = part.rstrip("\n").split("\n")
        yield Shown(block.page, block.line, " ".join(command.split()), tuple(output))


def row_of(command: str) -> RunBy | Here | ByCI | InPart | None:
    typed = command.replace(".venv/bin/", "")
    return next((row for pattern, row in ROWS.items() if re.fullmatch(pattern, typed)), None)


ALL = shown()


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", WIDTH)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # simulations would keep their state below it
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@cache
def names_of_tests() -> frozenset[str]:
    """The name of every test there is."""
    sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return frozenset(
        name for text in sources for name in re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE)
    )


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: f"{entry.page}:{entry.line}")
def test_a_command_stands_in_a_row(entry: Shown) -> None:
    assert row_of(entry.command), f"no row of ROWS says what runs `{entry.command}`"


def test_a_row_is_of_a_command_that_is_shown() -> None:
    typed = {entry.command.replace(".venv/bin/", "") for entry in ALL}
    assert [pattern for pattern in ROWS if not any(re.fullmatch(pattern, one) for one in typed)] == []


def test_the_test_that_a_row_names_is_there() -> None:
    named = {row.test for row in ROWS.values() if isinstance(row, RunBy | InPart) and row.test}
    assert named - names_of_tests() == set()


@pytest.mark.parametrize("command", sorted({entry.command for entry in ALL if "make " in entry.command}))
def test_make_has_the_target_and_ci_calls_what_it_is_said_to(command: str) -> None:
    assert re.search(rf"^{shlex.split(command)[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if isinstance(row_of(command), ByCI):
        assert f"make {shlex.split(command)[1]}" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    "command", sorted({entry.command for entry in ALL if re.match(r"(\.venv/bin/)?serving ", entry.command)})
)
def test_the_command_line_takes_the_arguments(command: str) -> None:
    words = shlex.split(re.split(r" (?:\||>>?) ", command)[0])
    parser().parse_args(words[1:])


@pytest.mark.parametrize("command", sorted({entry.command for entry in ALL if "benchmarks" in entry.command}))
def test_a_benchmark_has_the_options_that_are_shown(command: str) -> None:
    words = shlex.split(command)
    name = next(word for word in words if word.startswith("benchmarks"))
    path = ROOT / (name if name.endswith(".py") else f"{name.replace('.', '/')}.py")
    if not path.is_file():
        path = path.with_suffix("") / "__main__.py"
    source = path.read_text()
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == []


def test_files_that_are_named_are_there() -> None:
    words = {word for entry in ALL for word in shlex.split(entry.command)}
    files = {word.rpartition("=")[2] for word in words if re.search(r"(deployments|loadtest)/", word)}
    assert {name for name in files if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize(
    "entry",
    [entry for entry in ALL if isinstance(row_of(entry.command), Here)],
    ids=lambda entry: f"{entry.page}:{entry.line}",
)
def test_what_a_page_shows_is_what_the_command_prints(
    entry: Shown, capsys: pytest.CaptureFixture[str]
) -> None:
    command, redirect, _ = entry.command.partition(" >> ")
    assert main(shlex.split(command)[1:]) == 0
    out, err = capsys.readouterr()
    if entry.output:
        assert_shown(entry.output, err if redirect else out)


def assert_shown(page: tuple[str, ...], printed: str) -> None:
    """The page's lines in the order of what was printed; `...` alone stands for lines, at a line's end for its rest."""
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    at, elided = 0, False
    wanted = [line.rstrip() for line in page if line.strip()]
    for is_gap, group in groupby(wanted, lambda line: line == "..."):
        if is_gap:
            elided = True
            continue
        part = list(group)
        places = range(at, len(lines) - len(part) + 1) if elided else [at]
        place = next((place for place in places if _same(part, lines[place : place + len(part)])), None)
        assert place is not None, "not printed so:\n" + "\n".join(part) + "\nbut\n" + "\n".join(lines[at:])
        at, elided = place + len(part), False
    assert elided or at == len(lines), "printed too:\n" + "\n".join(lines[at:])


def _same(part: list[str], lines: list[str]) -> bool:
    return len(part) == len(lines) and all(
        line.startswith(wanted.removesuffix("...")) if wanted.endswith("...") else line == wanted
        for wanted, line in zip(part, lines, strict=True)
    )


def test_the_refusal_that_is_shown_is_the_one_that_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The same model on half the slice."""
    document = yaml.safe_load((ROOT / "deployments" / "llama-70b-v6e-8.yaml").read_text())
    slice_ = document["applications"][0]["args"]["models"][0]["slice"]
    slice_["topology"] = "2x2"
    slice_.pop("hosts", None)
    slice_.pop("machine_type", None)
    path = tmp_path / "half.yaml"
    path.write_text(yaml.safe_dump(document))
    assert main(["plan", str(path)]) == 1
    text = next(block.text for block in blocks() if block.text.startswith("refused "))
    assert_shown(tuple(text.splitlines()), capsys.readouterr().out)


def test_the_line_of_a_key_that_is_shown_is_the_one_that_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = next(entry.command for entry in ALL if entry.command.startswith("serving keys new"))
    assert main(shlex.split(command.partition(" >> ")[0])[1:]) == 0
    (written,) = yaml.safe_load(capsys.readouterr().out)
    text = next(block.text for block in blocks() if block.text.startswith("- {name: batch"))
    (told,) = yaml.safe_load(text)
    assert told == written | {"sha256": "..."}


def test_a_block_says_what_it_holds() -> None:
    assert {f"{block.page}:{block.line}" for block in blocks() if block.language not in LANGUAGES} == set()
