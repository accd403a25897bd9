"""README and docs/ beyond what MkDocs itself checks: YAML that the service takes, links of README, its length."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving import config
from serving.config import ModelSpec, ServiceConfig

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
YAML = {
    f"{page.relative_to(ROOT)}:{number}": text
    for page in PAGES
    for number, text in enumerate(re.findall(r"^```yaml\n((?s:.*?))^```$", page.read_text(), re.MULTILINE))
}
MODEL = {"model": "meta-llama/Llama-3.1-8B-Instruct", "slice": {"generation": "v6e", "topology": "2x2"}}


@pytest.mark.parametrize("text", YAML.values(), ids=YAML)
def test_a_yaml_that_is_shown_is_one_that_the_service_takes(text: str, tmp_path: Path) -> None:
    document = yaml.safe_load(text)
    if not isinstance(document, dict):
        return  # a line for the file of keys
    if "applications" in document:
        path = tmp_path / "shown.yaml"
        path.write_text(text)
        assert config.load(path).services
    elif document.keys() <= ServiceConfig.model_fields.keys():
        config.parse({"models": [MODEL]} | document)
    elif document.keys() <= ModelSpec.model_fields.keys():
        config.parse({"models": [MODEL | document]})
    elif "patches" in document:
        for patch in document["patches"]:
            for operation in yaml.safe_load(patch["patch"]):
                assert isinstance(_of_a_manifest(operation["path"].removesuffix("/-")), list)
    else:
        assert document.keys() <= {"controller_options", "runtime_env", "slo", "thresholds"}


def _of_a_manifest(path: str) -> Any:
    """What a JSON pointer leads to in the RayService of a manifest."""
    text = (ROOT / "tests" / "gke" / "goldens" / "llama.yaml").read_text()
    found: Any = next(
        entry for entry in yaml.load_all(text, yaml.CSafeLoader) if entry["kind"] == "RayService"
    )
    for key in path.split("/")[1:]:
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_links_of_readme_lead_somewhere() -> None:
    """Those of docs/ are checked by `make docs`."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)(#[^)]+)?\)", README)
    assert links
    assert {path for path, _ in links if not (ROOT / path).exists()} == set()
    for path, anchor in links:
        if anchor:
            titles = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}
            assert anchor[1:] in slugs, f"{path} has no {anchor}"


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    entries = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert entries == {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}


@pytest.mark.parametrize("folder", ["serving", "serving/router"])
def test_the_layout_names_every_folder_and_module(folder: str) -> None:
    page = (ROOT / "docs" / "contributing" / "layout.md").read_text()
    entries = [entry for entry in (ROOT / folder).iterdir() if not entry.name.startswith("_")]
    names = {entry.name if entry.suffix else f"{entry.name}/" for entry in entries}
    shown = folder.removeprefix("serving/")
    assert {name for name in names if f"| `{shown}/{name}` |" not in page} == set()
