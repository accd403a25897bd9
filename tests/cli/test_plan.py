import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from serving.cli.main import main
from serving.cli.plan import OK, REFUSED, UNREADABLE, manifest_file, plan_file, what_fits, workload_file
from serving.config import IMPORT_PATH, load
from serving.errors import ServingError
from serving.planning.service import plan_service

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
LLAMA = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "slice": {"generation": "v6e", "topology": "2x2"},
    "engine": {"max_model_len": 8192},
}
TOO_LARGE = {
    "name": "large",
    "model": "meta-llama/Llama-3.1-405B-Instruct",
    "slice": {"generation": "v6e", "topology": "2x2"},
}


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=160)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def deployment(folder: Path, *models: dict[str, Any], **args: Any) -> str:
    path = folder / "service.yaml"
    application = {"name": "a", "import_path": IMPORT_PATH, "args": {"models": list(models), **args}}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return str(path)


def test_the_table_says_where_the_hbm_goes_and_what_it_costs(tmp_path: Path, console: Console) -> None:
    assert plan_file(deployment(tmp_path, LLAMA), console) == OK
    text = printed(console)
    for words in (
        "8.0B parameters",
        "1 host of ct6e-standard-4t",
        "tensor 4",
        "of 31.2 GiB usable (32.0 GiB nameplate)",
    ):
        assert words in text
    for words in (
        "sequences of 8,192",
        "those that sample: ",
        "a million output tokens",
        "on-demand",
    ):
        assert words in text


def test_the_table_of_an_encoder_has_no_cache_and_prices_of_less_than_a_cent(
    tmp_path: Path, console: Console
) -> None:
    encoder = {"model": "BAAI/bge-m3", "slice": {"generation": "v6e", "topology": "1x1"}}
    assert plan_file(deployment(tmp_path, encoder), console) == OK
    text = printed(console)
    assert "none; 256 texts of 8,192 tokens at once" in text
    assert re.search(r"on-demand +2\.70 +0\.00\d+ ", text)


def test_a_published_figure_stands_beside_the_prediction(console: Console) -> None:
    assert plan_file(str(ROOT / "deployments" / "llama-70b-v6e-8.yaml"), console) == OK
    assert "2,495 tokens/s at 64 x 1000+1000, where this plan says" in printed(console)


def test_a_refusal_ends_with_a_status_and_shows_the_rest(tmp_path: Path, console: Console) -> None:
    assert plan_file(deployment(tmp_path, LLAMA, TOO_LARGE), console) == REFUSED
    text = printed(console)
    assert "Llama-3.1-8B-Instruct fits v6e 2x2" in text
    assert "refused large does not fit v6e 2x2 (1 host x 4 chips): weights of 189.0 GiB" in text
    assert "  - as it is it fits v5p" in text


def test_json_says_the_same_of_both(tmp_path: Path, console: Console) -> None:
    assert plan_file(deployment(tmp_path, LLAMA, TOO_LARGE), console, as_json=True) == REFUSED
    fits, refused = json.loads(printed(console))
    assert fits["slice"]["pod_type"] == "v6e-4"
    assert (refused["fits"], refused["code"]) == (False, "impossible_plan")


def test_prices_of_the_yaml_replace_the_table(tmp_path: Path, console: Console) -> None:
    path = deployment(tmp_path, LLAMA, prices={"v6e": {"on-demand": 1.0, "reserved-3y": 0.5}})
    assert plan_file(path, console, as_json=True) == OK
    options = json.loads(printed(console))[0]["prices"]["options"]
    assert options["on-demand"]["slice_hour"] == 4.0
    assert options["reserved-3y"]["slice_hour"] == 2.0
    assert options["spot"]["slice_hour"] == 5.6


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "service.yaml: No such file"),
        ("a: [", "is not YAML"),
        ("[]", "no applications"),
        (
            "applications: [{name: a, import_path: other:app}]",
            f"no application has import_path: {IMPORT_PATH}",
        ),
        (f"applications: [{{import_path: '{IMPORT_PATH}', args: {{modles: []}}}}]", "did you mean 'models'?"),
    ],
)
def test_a_file_that_can_not_be_read_says_why(
    tmp_path: Path, console: Console, content: str | None, says: str
) -> None:
    path = tmp_path / "service.yaml"
    if content is not None:
        path.write_text(content)
    assert plan_file(str(path), console) == UNREADABLE
    assert manifest_file(str(path), sys.stdout, console) == UNREADABLE
    assert says in printed(console)
    assert plan_file(str(path), Console(file=io.StringIO()), as_json=True) == UNREADABLE


def test_prices_of_an_unknown_generation_are_refused(tmp_path: Path, console: Console) -> None:
    assert plan_file(deployment(tmp_path, LLAMA, prices={"v6": {"spot": 1.0}}), console) == UNREADABLE
    assert "prices.v6: no such TPU generation" in printed(console)


@pytest.mark.parametrize(
    ("prices", "says"),
    [
        ({"on-demnd": 1.0}, "did you mean 'on-demand'?"),
        ({"friends": 1.0}, "there are on-demand, flex-start, spot, reserved, reserved-1y, reserved-3y"),
        ({"spot": -1.0}, "prices.v6e.spot: a number above 0 is needed"),
        ({"spot": float("nan")}, "prices.v6e.spot: a finite number is needed"),
    ],
)
def test_a_price_that_is_none_is_refused(
    prices: dict[str, float], says: str, tmp_path: Path, console: Console
) -> None:
    console.width = 400
    assert plan_file(deployment(tmp_path, LLAMA, prices={"v6e": prices}), console) == UNREADABLE
    assert says in printed(console)


def test_the_command_line_has_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = deployment(tmp_path, LLAMA)
    assert main(["plan", path, "--json"]) == OK
    assert json.loads(capsys.readouterr().out)[0]["fits"]
    assert main(["plan", "--what-fits", "Qwen/Qwen3-4B", "--engine", "max_model_len=4096"]) == OK
    assert main(["manifest", path]) == UNREADABLE
    assert "gke.image names no image" in capsys.readouterr().err
    assert main(["manifest", path, "--image", "registry/image:1"]) == OK
    assert "image: registry/image:1" in capsys.readouterr().out
    assert main(["manifest", deployment(tmp_path, TOO_LARGE)]) == REFUSED
    ended = capsys.readouterr()
    assert (ended.out, "refused large" in ended.err) == ("", True)


def test_a_manifest_is_of_one_application(tmp_path: Path, console: Console) -> None:
    path = Path(deployment(tmp_path, LLAMA))
    document = yaml.safe_load(path.read_text())
    document["applications"].append({**document["applications"][0], "name": "b", "route_prefix": "/b"})
    path.write_text(yaml.safe_dump(document))
    assert plan_file(str(path), console) == OK
    assert manifest_file(str(path), sys.stdout, console) == UNREADABLE
    assert "a manifest is of one application, " in printed(console)


def test_a_base_for_kustomize_is_a_file_a_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = deployment(tmp_path, LLAMA), tmp_path / "made" / "base"
    assert main(["manifest", path, "--image", "image", "--kustomize", str(folder)]) == OK
    assert capsys.readouterr().out == ""
    base = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert {"rayservice.yaml", "service.yaml", "networkpolicy.yaml"} < set(base["resources"])
    assert {entry.name for entry in folder.iterdir()} == {"kustomization.yaml", *base["resources"]}
    (tmp_path / "file").write_text("")
    assert main(["manifest", path, "--image", "image", "--kustomize", str(tmp_path / "file")]) == UNREADABLE
    assert "name a folder that can be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("kustomization.yaml", "resources: [../base]\n"),
        (
            "kustomization.yaml",
            "# another: written by `serving manifest FILE --kustomize DIR`; change it in an overlay.\n",
        ),
        ("kustomization.yml", "resources: []\n"),
        ("service.yaml", "kind: Service\n"),
    ],
)
def test_a_base_is_written_over_its_own_earlier_one_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str
) -> None:
    path, folder = deployment(tmp_path, LLAMA), tmp_path / "overlay"
    folder.mkdir()
    (folder / file).write_text(text)
    command = ["manifest", path, "--image", "image", "--kustomize", str(folder)]
    assert main(command) == UNREADABLE
    assert f"overlay has a {file} that is not of this application's base" in capsys.readouterr().err.replace(
        "\n", ""
    )
    assert [entry.name for entry in folder.iterdir()] == [file]
    assert (folder / file).read_text() == text
    (folder / file).unlink()
    assert main(command) == OK
    (folder / "service.yaml").write_text("")
    assert main(command) == OK
    assert (folder / "service.yaml").read_text()


def test_nothing_is_rendered_of_what_does_not_fit(tmp_path: Path, console: Console) -> None:
    output = io.StringIO()
    assert manifest_file(deployment(tmp_path, TOO_LARGE), output, console) == REFUSED
    assert output.getvalue() == ""
    assert "refused large does not fit" in printed(console)


NAMED = LLAMA | {"name": "llama"}
TWICE = {"pools": [{"slice": LLAMA["slice"]}, {"slice": LLAMA["slice"]}]}


@pytest.mark.parametrize(
    ("models", "args", "says"),
    [
        ([NAMED], {"budget": {"dollars_per_hour": 10}}, "replicas.min of all pools cost 10.80 USD an hour"),
        ([{key: NAMED[key] for key in ("name", "model", "engine")} | TWICE], {}, "two pools are v6e-2x2"),
        ([LLAMA | {"name": "org/a"}, LLAMA | {"name": "org-a"}], {}, "would share the Serve deployment"),
        (
            [NAMED, NAMED | {"name": "b", "engine": {"enable_lora": True, "lora_modules": ["llama=/a"]}}],
            {},
            "adapter 'llama' has the name of another",
        ),
    ],
)
def test_what_serve_run_refuses_of_a_whole_service_is_neither_planned_nor_rendered(
    models: list[dict[str, Any]], args: dict[str, Any], says: str, tmp_path: Path, console: Console
) -> None:
    path, output = deployment(tmp_path, *models, **args), io.StringIO()
    with pytest.raises(ServingError, match=re.escape(says)):
        plan_service(next(iter(load(Path(path)).services.values())))
    assert plan_file(path, console) == REFUSED
    assert says in printed(console)
    told = Console(file=io.StringIO(), width=160)
    assert plan_file(path, told, as_json=True) == REFUSED
    *plans, refusal = json.loads(printed(told))
    assert all(entry["fits"] for entry in plans)
    assert says in refusal["error"]
    assert manifest_file(path, output, told, image="image") != OK
    assert output.getvalue() == ""


def test_slices_are_listed_by_price(console: Console) -> None:
    model = "meta-llama/Llama-3.3-70B-Instruct"
    assert what_fits(model, console, engine=["max_model_len=8192"], as_json=True) == OK
    rows = json.loads(printed(console))
    prices = [row["per_hour"]["on-demand"] for row in rows]
    assert prices == sorted(prices)
    assert (rows[0]["slice"], rows[0]["hosts"]) == ("v7x 1x1x1", 1)
    table = Console(file=io.StringIO(), width=160)
    assert what_fits(model, table, engine=["max_model_len=8192"]) == OK
    assert "tpu7x-standard-1t" in printed(table)


def test_a_workload_is_answered_in_slices_and_prices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = deployment(tmp_path, LLAMA)
    assert main(["plan", path, "--workload", "in=1024,out=256,rate=400", "--json"]) == OK
    (found,) = json.loads(capsys.readouterr().out)
    first = found["offers"][0]
    assert (first["slice"], first["own"]) == ("v6e 2x2", True)
    assert first["per_hour"] == pytest.approx(first["slices"] * first["slice_hour"])
    assert main(["plan", path, "--workload", "in=1024,out=256,rate=400"]) == OK
    table = capsys.readouterr().out
    assert "* v6e 2x2 (1h)" in table
    assert f"replicas.max is 1; set it to {first['slices']}" in table
    assert main(["plan", path, "--workload", "in=1024"]) == UNREADABLE
    assert main(["plan", deployment(tmp_path, TOO_LARGE), "--workload", "in=8,out=8,rate=1"]) == REFUSED


def test_answers_of_a_model_that_writes_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = deployment(tmp_path, LLAMA | {"model": "Qwen/Qwen3-Embedding-8B"})
    assert main(["plan", path, "--workload", "in=512,rate=40", "--json"]) == OK
    assert json.loads(capsys.readouterr().out)[0]["offers"][0]["own"]
    assert main(["plan", path, "--workload", "in=512,out=8,rate=40"]) == UNREADABLE
    said = capsys.readouterr().out
    assert "out is 8" in said
    assert "leave out= away" in said


def test_options_of_one_question_are_refused_with_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "any.yaml", "--engine", "max_model_len=1"]) == UNREADABLE
    assert "--engine goes with --what-fits" in capsys.readouterr().out
    assert main(["plan", "--what-fits", ""]) == UNREADABLE
    assert "no config.json is known for model ''" in capsys.readouterr().out
    assert main(["plan", "--what-fits", "any", "--workload", "in=1,out=1,rate=1"]) == UNREADABLE
    assert "--workload goes with a file" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [False, True])
def test_a_workload_keeps_slices_and_prices_in_eighty_columns(tmp_path: Path, terminal: bool) -> None:
    table = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)
    assert workload_file(deployment(tmp_path, LLAMA), "in=1024,out=256,rate=90000", table) == OK
    assert "…" not in printed(table)
    assert "* v6e 2x2 (1h)" in printed(table)
    assert ("requests/s each" in printed(table)) != terminal


def test_a_refusal_is_printed_as_it_is(console: Console) -> None:
    assert (
        what_fits("Qwen/Qwen3-4B", console, engine=["speculative_config={':x:': 1, '[b]': 2}"]) == UNREADABLE
    )
    assert "speculative_config.:x:: " in printed(console)
    assert "speculative_config.[b]: " in printed(console)


@pytest.mark.parametrize(("terminal", "machines"), [(False, True), (True, False)])
def test_slices_keep_their_topology_in_eighty_columns(terminal: bool, machines: bool) -> None:
    table = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)
    assert what_fits("Qwen/Qwen3-Coder-480B-A35B-Instruct", table, engine=["max_model_len=8192"]) == OK
    for line in ("v7x 2x2x2", "v6e 8x16"):
        assert line in printed(table)
    assert ("ct6e-standard-4t" in printed(table)) == machines
    assert "on-demand" in printed(table)


@pytest.mark.parametrize(
    ("model", "engine", "status", "says"),
    [
        ("/nowhere", [], UNREADABLE, "model path /nowhere does not exist"),
        ("Qwen/Qwen3-4B", ["max_model_len"], UNREADABLE, "--engine max_model_len: write KEY=VALUE"),
        ("Qwen/Qwen3-4B", ["model=x"], UNREADABLE, "set model beside engine"),
        ("Qwen/Qwen3-4B", ["revision=2026-02-30"], UNREADABLE, "--engine revision is not YAML"),
        ("Qwen/Qwen3-4B", ["hf_overrides=&a [*a]"], UNREADABLE, "*a stands inside of &a"),
        ("Qwen/Qwen3-4B", ["seed=" + "[\n" * 3000], UNREADABLE, "in each other too deeply"),
        (
            "deepseek-ai/DeepSeek-V3",
            ["dtype=float32", "gpu_memory_utilization=0.01"],
            REFUSED,
            "fits no slice",
        ),
    ],
)
def test_what_fits_refuses_in_one_line(
    console: Console, model: str, engine: list[str], status: int, says: str
) -> None:
    assert what_fits(model, console, engine=engine) == status
    assert says in printed(console)


def test_a_plan_needs_neither_ray_nor_vllm() -> None:
    script = (
        "import sys\n"
        "from rich.console import Console\n"
        "from serving.cli.plan import plan_file\n"
        "status = plan_file('deployments/llama-70b-v6e-8.yaml', Console())\n"
        "heavy = {'ray', 'vllm', 'tpu_inference', 'jax', 'torch', 'transformers'} & sys.modules.keys()\n"
        "sys.exit(status or (f'imported {heavy}' if heavy else 0))\n"
    )
    before, started = os.times(), time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    after, waited_s = os.times(), time.monotonic() - started
    assert ended.returncode == 0, ended.stderr
    busy_s = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"planned in {waited_s:.2f} s, {busy_s:.2f} s of the processor, the interpreter's start included")
