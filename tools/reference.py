"""The reference pages of docs/, each written from the code that it tells of.

python -m tools.reference            # writes docs/reference/*.md
python -m tools.reference --check    # writes nothing; status 1 and the names of pages that are not as the code is now
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools import cli_page, config_page, errors_page, http_api_page, operator_pages, redeploy_page

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
# Page: what it is made of, and what makes it.
PAGES: dict[str, tuple[str, Callable[[], str]]] = {
    "config.md": ("serving/config/", config_page.page),
    "redeploy.md": ("what serving/app.py builds", redeploy_page.page),
    "cli.md": ("the parser of the `serving` command", cli_page.page),
    "metrics.md": ("serving/metrics/table.py", operator_pages.metrics),
    "alerts.md": ("deployments/monitoring/alerts.yml", operator_pages.alerts),
    "errors.md": ("serving/errors.py", errors_page.page),
    "http-api.md": ("the router's OpenAPI document", http_api_page.page),
}


def written(name: str) -> str:
    """A page as it should be."""
    source, page = PAGES[name]
    return f"<!-- Written by python -m tools.reference from {source}: change that. -->\n\n{page()}\n"


def stale(folder: Path) -> list[str]:
    """Pages of a folder that are not as the code is now."""
    return [
        name
        for name in PAGES
        if not (folder / name).is_file() or (folder / name).read_text() != written(name)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.reference",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing, name the pages that are stale")
    parser.add_argument("--folder", type=Path, default=REFERENCE, help="where the pages are")
    options = parser.parse_args(arguments)
    if options.check:
        for name in (found := stale(options.folder)):
            print(f"{options.folder / name} is stale: python -m tools.reference", file=sys.stderr)
        return 1 if found else 0
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        (options.folder / name).write_text(written(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
