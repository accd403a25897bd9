"""What a terminal shows of slices, as rich renderables."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from serving.slices.board import Entry, State, Wanted
from serving.slices.simulation import SimulatedSlice

_COLOURS = {State.STARTING: "yellow", State.SERVING: "green", State.DRAINING: "cyan", State.LOST: "red"}


def slices(simulated: Sequence[SimulatedSlice]) -> Table:
    """Simulated slices and which of their hosts are alive."""
    table = Table("slice", "shape", "hosts", title="simulated TPU slices", title_justify="left")
    for entry in simulated:
        hosts = (
            f"{worker}: {entry.ip(worker)} {'up' if alive else '[red]down[/red]'}"
            for worker, alive in enumerate(entry.alive)
        )
        table.add_row(entry.name, str(entry.shape), "  ".join(hosts))
    return table


def board(wanted: Sequence[Wanted], entries: Sequence[Entry]) -> RenderableType:
    """Every slice replica of every model, and what is still waited for."""
    table = Table("model", "slice", "state", "hosts", "running", "waiting", "KV", title_justify="left")
    for entry in sorted(entries, key=lambda entry: (entry.model, entry.slice)):
        state = f"[{_COLOURS[entry.state]}]{entry.state}[/]" + (f": {entry.reason}" if entry.reason else "")
        if entry.state is State.STARTING:
            state += f": {entry.phase}"
        table.add_row(
            entry.model,
            f"{entry.slice} {'(simulated)' if entry.simulated else ''}\n{entry.shape}",
            state,
            "\n".join(entry.hosts),
            str(entry.running),
            str(entry.waiting),
            f"{entry.kv_usage:.0%}",
        )
    return Group(table, *(waiting(one) for one in wanted if one.missing))


def waiting(one: Wanted) -> str:
    """One line on a model that misses slices."""
    slices = "slice" if one.missing == 1 else "slices"
    return (
        f"{one.model}: {one.slices - one.missing} of {one.slices} there; waiting {one.missing_for_s:.0f} s for "
        f"{one.missing} whole, free {slices} of {one.shape}"
    )
