"""Reports in pages of docs/benchmarks, each between marks with its name."""

import argparse
from pathlib import Path


def show(about: str, report: str, page: Path, name: str) -> None:
    """The command of a benchmark that takes no option of its own: prints the report, and with --docs puts it into its page."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument(
        "--docs", action="store_true", help=f"write the table into docs/benchmarks/{page.name}"
    )
    options = parser.parse_args()
    print(report)
    if options.docs:
        page.write_text(put(page.read_text(), name, report))


def put(text: str, name: str, report: str) -> str:
    """A text with what is between the marks of this name replaced; raises ValueError where there are no such marks."""
    before, _, after = _parted(text, name)
    return f"{before}\n{report.strip()}\n\n{after}"


def between(text: str, name: str) -> str:
    """What is between the marks of this name; raises ValueError where there are no such marks."""
    return _parted(text, name)[1]


def _parted(text: str, name: str) -> tuple[str, str, str]:
    """The text as far as the first mark, what is between the two, and the text from the second on."""
    begin, end = f"<!-- bench: {name} -->\n", f"<!-- /bench: {name} -->"
    before, found, rest = text.partition(begin)
    middle, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"there is no {begin.strip()} ... {end} to put the report between")
    return before + begin, middle, end + after
