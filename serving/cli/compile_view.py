"""Compiles for a terminal: what runs now, then the tables."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from serving.compiler.records import BACKBONE
from serving.planning.fit import gib

_MOST_SIZES = 12  # of a bucket that are shown one by one


class Watch:
    """The compiles of one plan while they run; on what is no terminal, a line when one ends."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._rows: dict[str, tuple[str, float]] = {}
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._table, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def tell(self, what: str, state: str) -> None:
        """`what` is compiled, and is now in this state."""
        if not self._console.is_terminal and state not in ("building", "lowering", "compiling"):
            self._console.print(
                f"{self._title}: {what}: {state}", markup=False, highlight=False, soft_wrap=True
            )
        self._rows = {**self._rows, what: (state, time.monotonic())}

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row(Text(self._title, style="bold"))
        for what, (state, since) in self._rows.items():
            runs = state in ("building", "lowering", "compiling")
            words = f"{state} {time.monotonic() - since:.0f} s" if runs else state
            table.add_row(Text(f"  {what}"), Spinner("dots", text=words) if runs else Text(words))
        return table


def show(console: Console, document: Mapping[str, Any]) -> None:
    """One pool's answer: its programs, its HBM beside the plan's, its ledger, and what failed in the compiler's words."""
    slice_ = document["slice"]
    console.print(
        Text(
            f"{document['model']} on {slice_['generation']} {slice_['topology']}: {_verdict(document)}",
            style="bold green" if document["compiles"] else "bold red",
        )
    )
    for reason in document["unbuildable"]:
        console.print(
            f"  the engine can't be built here: {reason}", markup=False, highlight=False, soft_wrap=True
        )
    for stage in document["stages"]:
        of = f"stage {stage['stage']} of {document['pipeline']}: " if document["pipeline"] > 1 else ""
        console.print(_programs(of, stage["programs"], quick=document["asked"]["quick"]))
        for program in stage["programs"]:
            if program["outcome"] != "compiled":
                console.print(
                    f"  {_name(program)}: {program['outcome']}: {program['reason']}",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
            elif program["name"].startswith(BACKBONE):
                console.print(f"  {_name(program)}: {_schedule(program['schedule'])}", highlight=False)
        console.print(_ledger(of, stage["ledger"]))
    if document["device_hbm"]:
        console.print(_hbm(document["device_hbm"]))


def _verdict(document: Mapping[str, Any]) -> str:
    if document["compiles"]:
        needs = document["needs_bytes"]
        usable = next(line["plan_bytes"] for line in document["device_hbm"] if line["name"] == "usable")
        least = "at least " if document["asked"]["quick"] else ""
        return f"compiles, needs {least}{gib(needs)} of {gib(usable)} a device"
    return "was not built" if document["unbuildable"] else "does not compile"


def _programs(of: str, programs: Sequence[Mapping[str, Any]], *, quick: bool) -> Table:
    how = "steps of a few layers: temporaries are at least these" if quick else "all layers"
    table = Table(title=f"{of}programs, bytes a device ({how})", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("program")  # folded where a terminal is narrow, and no figure is
    for column in ("arguments", "outputs", "temporaries", "code", "cycles", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    for program in programs:
        if program["outcome"] != "compiled":
            table.add_row(_name(program), Text(program["outcome"], style="red"))
            continue
        table.add_row(
            _name(program),
            _size(program["argument_bytes"]),
            _size(program["output_bytes"] - program["aliased_bytes"]),
            _size(program["temporary_bytes"]),
            _size(program["code_bytes"]),
            f"{_cycles(program['schedule']) / 1e6:.1f}M",
            f"{program['lower_s'] + program['compile_s']:.0f}",
        )
    return table


def _cycles(schedule: Mapping[str, Any]) -> int:
    return sum(schedule[f"{kind}_cycles"] for kind in ("product", "move", "other"))


def _schedule(schedule: Mapping[str, Any]) -> str:
    """Where the cycles go that the compiler estimates, and what it estimates none for."""
    total = max(1, _cycles(schedule))
    shares = ", ".join(
        f"{schedule[f'{kind}_cycles'] / total:.0%} {words}"
        for kind, words in (("product", "matrix products"), ("move", "copies"), ("other", "the rest"))
    )
    without = ", ".join(f"{count} {name}" for name, count in schedule["unestimated"].items())
    return f"{shares} of the cycles" + (f"; none are known of {without}" if without else "")


def _hbm(lines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="HBM a device", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for column in ("plan", "compiler", "off by"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        planned, compiled = line["plan_bytes"], line["compiler_bytes"]
        table.add_row(
            line["name"],
            "-" if planned is None else _size(planned),
            "-" if compiled is None else _size(compiled),
            "-" if planned is None or compiled is None else _difference(planned - compiled),
        )
    return table


def _ledger(of: str, ledger: Mapping[str, Any]) -> Table:
    total = sum(entry["programs"] for entry in ledger.values())
    table = Table(
        title=f"{of}the engine compiles {total} programs at start", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("program", no_wrap=True)
    table.add_column("how many", justify="right", no_wrap=True)
    table.add_column("buckets")
    for name, entry in ledger.items():
        buckets = "; ".join(
            f"{key.removeprefix('num_')} {_sizes(sizes)}" for key, sizes in entry["buckets"].items()
        )
        table.add_row(name, str(entry["programs"]), buckets)
    return table


def _sizes(sizes: Sequence[int]) -> str:
    if len(sizes) > _MOST_SIZES:
        return f"{sizes[0]} to {sizes[-1]} in {len(sizes)} sizes"
    return " ".join(map(str, sizes))


def _name(program: Mapping[str, Any]) -> str:
    sizes = " ".join(f"{key.removeprefix('num_')}={value}" for key, value in program["bucket"].items())
    return f"{program['name']} {sizes}"


def _size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size < 2**27 else gib(size)


def _difference(size: int) -> str:
    return ("+" if size >= 0 else "-") + _size(abs(size))
