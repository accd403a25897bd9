"""Plans for a terminal: the figures of `summary`, as tables."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from serving.planning.fit import gib

_BAR = 48  # cells of an HBM bar
_WIDEST = 1000  # columns that no table needs


def show_plans(console: Console, plans: Sequence[dict[str, Any]]) -> None:
    for plan in plans:
        console.print(_plan(plan))


def show_candidates(console: Console, model: str, rows: Sequence[dict[str, Any]]) -> None:
    """One row a slice. What is no terminal gets every column; a narrow terminal loses machines and mesh."""
    table = _candidates(model, rows)
    needed = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    if needed > console.width:
        if console.is_terminal:
            table = _candidates(model, rows, narrow=True)
        else:
            console.width = needed
    console.print(table)


def _candidates(model: str, rows: Sequence[dict[str, Any]], *, narrow: bool = False) -> Table:
    table = Table(title=f"Slices that {model} fits; USD an hour", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("slice", *(("hosts",) if narrow else ("machines", "mesh"))):
        table.add_column(column, no_wrap=True)
    for column in ("cache tokens", *(() if narrow else ("sequences",)), "on demand"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("cheapest", no_wrap=True)
    for row in rows:
        option, price = min(row["per_hour"].items(), key=lambda pair: pair[1])
        mesh = f"{row['tensor']} x {row['pipeline']}"
        table.add_row(
            row["slice"],
            *((str(row["hosts"]),) if narrow else (f"{row['hosts']} x {row['machine_type']}", mesh)),
            f"{row['cache_tokens']:,}",
            *(() if narrow else (f"{row['sequences_at_max_model_len']:,}",)),
            f"{row['per_hour']['on-demand']:,.2f}",
            f"{price:,.2f} {option}",
        )
    return table


def _plan(plan: dict[str, Any]) -> RenderableType:
    table = Table(
        title=f"{plan['model']} fits {plan['slice']['generation']} {plan['slice']['topology']}",
        title_justify="left",
        show_header=False,
        title_style="bold green",
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in _rows(plan):
        table.add_row(name, value)
    return table


def _rows(plan: dict[str, Any]) -> list[tuple[str, RenderableType]]:
    slice_, mesh, counts = plan["slice"], plan["mesh"], plan["slices"]
    hosts = f"{slice_['hosts']} host{'s' if slice_['hosts'] > 1 else ''} of {slice_['machine_type']}"
    total, active = plan["parameters"]["total"], plan["parameters"]["active"]
    cache = f"{plan['cache_tokens']:,} tokens: {plan['sequences_at_max_model_len']:,} sequences of "
    cache += f"{plan['max_model_len']:,} (at most {plan['most_sequences']:,} at once)"
    return [
        ("checkpoint", f"{plan['checkpoint']}, {total / 1e9:.1f}B parameters, {active / 1e9:.1f}B a token"),
        (
            "slice",
            f"{slice_['generation']} {slice_['topology']}: {hosts}, {slice_['chips']} chips, {slice_['devices']} devices",
        ),
        ("slices", f"{counts['min']} to {counts['max']}"),
        ("mesh", f"tensor {mesh['tensor']}, pipeline {mesh['pipeline']}, data {mesh['data']}"),
        ("because", "\n".join(plan["reasons"])),
        ("all weights", _weights(plan["parameters"]["groups"])),
        ("HBM a device", _hbm(plan["device_hbm"])),
        ("cache", cache),
        ("speed", _speed(plan["speed"])),
        *([("measured", _measured(plan["measured"]))] if plan["measured"] else []),
        (f"{plan['prices']['currency']}, {plan['prices']['as_of']}", _prices(plan["prices"]["options"])),
    ]


def _weights(groups: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{group['name']} {gib(group['bytes'])} {group['format']}" for group in groups)


def _hbm(hbm: dict[str, int]) -> RenderableType:
    """One bar of the usable HBM, in the order it is taken."""
    taken = hbm["weight_bytes"] + hbm["state_bytes"] + hbm["resident_bytes"]
    parts = [
        ("weights", taken, "blue", "█"),
        ("cache", hbm["cache_bytes"], "green", "▓"),
        ("programs and activations", hbm["withheld_bytes"], "yellow", "░"),
    ]
    bar = Text()
    legend = Text()
    for name, size, style, cell in parts:
        bar.append(cell * round(_BAR * size / hbm["usable_bytes"]), style=style)
        legend.append(f"{cell} {name} {gib(size)}  ", style=style)
    expected = Text(
        f"of {gib(hbm['usable_bytes'])} usable ({gib(hbm['nameplate_bytes'])} nameplate); programs and activations "
        f"should take {gib(hbm['workspace_bytes'])}",
        style="dim",
    )
    return Group(bar, legend, expected)


def _speed(speed: dict[str, Any]) -> str:
    return (
        f"{speed['output_tokens_per_s']:,} output tokens/s by roofline: {speed['sequences']} sequences of "
        f"{speed['prompt_tokens']}+{speed['answer_tokens']} tokens, a step of {speed['step_s'] * 1e3:.1f} ms, "
        f"prefill {speed['prefill_tokens_per_s']:,} tokens/s"
    )


def _measured(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join(
        f"{row['output_tokens_per_s']:,.0f} tokens/s at {row['sequences']} x {row['prompt_tokens']}+{row['answer_tokens']}, "
        f"where the roofline says {row['predicted_tokens_per_s']:,} ({row['off_by']:+.0%}): {row['source']}"
        for row in rows
    )


def _prices(options: dict[str, dict[str, float]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_row("", "a slice-hour", "a million output tokens", style="dim")
    for option, cost in options.items():
        table.add_row(option, f"{cost['slice_hour']:,.2f}", f"{cost['million_output_tokens']:,.2f}")
    return table
