"""The reference pages are as the code is; whoever changes the code learns here which page to write anew."""

from pathlib import Path

import pytest
import yaml

from serving.metrics.table import TABLE, VLLM
from tools import reference

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_reference_page_is_as_the_code_is(name: str) -> None:
    assert (reference.REFERENCE / name).read_text() == reference.written(name), "python -m tools.reference"


def test_a_stale_page_and_a_missing_one_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ["--folder", str(tmp_path)]
    assert reference.main(folder) == 0
    assert reference.main(["--check", *folder]) == 0
    (tmp_path / "cli.md").write_text("# Command line\n")
    (tmp_path / "errors.md").unlink()
    assert reference.main(["--check", *folder]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"{tmp_path / name} is stale: python -m tools.reference" for name in ("cli.md", "errors.md")
    ]


def test_every_metric_and_every_alert_is_explained() -> None:
    metrics, alerts = ((reference.REFERENCE / name).read_text() for name in ("metrics.md", "alerts.md"))
    assert {name for name in [*TABLE, *VLLM] if f"`{name}`" not in metrics} == set()
    rules = yaml.safe_load((ROOT / "deployments" / "monitoring" / "alerts.yml").read_text())
    names = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    assert {name for name in names if f"## {name}\n" not in alerts} == set()
