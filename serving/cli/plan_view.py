"""Plans for a terminal: the figures of `summary`, as tables."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from serving.planning.fit import gib
from serving.scaling.sizing import Offer, Workload

_BAR = 48  # cells of an HBM bar
_OFFERS = 8  # other shapes that are shown
_WIDEST = 1000  # columns that no table needs


def show_plans(console: Console, plans: Sequence[dict[str, Any]]) -> None:
    for plan in plans:
        console.print(_plan(plan))


def show_candidates(console: Console, model: str, rows: Sequence[dict[str, Any]]) -> None:
    """One row a slice. What is no terminal gets every column; a narrow terminal loses machines and mesh."""
    _print_whole(console, _candidates(model, rows), _candidates(model, rows, narrow=True))


def _print_whole(console: Console, table: Table, narrow: Table) -> None:
    needed = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    if needed > console.width and not console.is_terminal:
        console.width = needed
    console.print(table if needed <= console.width else narrow)


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


def offer_summary(offer: Offer) -> dict[str, Any]:
    """An offer as plain data; prices are of an hour, on demand or as the YAML buys it."""
    slice_ = offer.plan.slice
    return {
        "own": offer.own,
        "slice": f"{slice_.generation} {slice_.topology}",
        "hosts": slice_.hosts,
        "slices": offer.slices,
        "slices_range": [offer.least, offer.most],
        "slice_requests_per_s": round(offer.slice_requests_per_s, 3),
        "sequences": round(offer.sequences, 1),
        "itl_s": round(offer.itl_s, 4),
        "ttft_s": round(offer.ttft_s, 3),
        "slice_hour": round(offer.dollars_per_hour, 2),
        "per_hour": None if offer.slices is None else round(offer.slices * offer.dollars_per_hour, 2),
        "missed": offer.missed,
    }


def show_offers(console: Console, model: str, workload: Workload, rows: Sequence[Offer]) -> None:
    """The model's own pools, marked, and the cheapest other shapes. A narrow terminal loses requests/s and ttft."""
    own = [offer for offer in rows if offer.own]
    shown = [*own, *[offer for offer in rows if not offer.own and offer.slices][:_OFFERS]]
    answer = "" if rows[0].plan.sizes.pools else f"+{workload.answer}"
    title = f"{model}: {workload.requests_per_s:g} requests/s of {workload.prompt}{answer} tokens"
    _print_whole(console, _offers(title, shown), _offers(title, shown, narrow=True))
    for offer in own:
        if offer.missed:
            console.print(Text(f"  {offer.plan.slice}: {offer.missed}"), soft_wrap=True)
        elif offer.slices and offer.slices > offer.plan.model.replicas.max:
            console.print(
                f"  {offer.plan.slice}: replicas.max is {offer.plan.model.replicas.max}; set it to {offer.slices}",
                highlight=False,
                soft_wrap=True,
            )


def _offers(title: str, offers: Sequence[Offer], *, narrow: bool = False) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("slice", "slices (range)"):
        table.add_column(column, no_wrap=True)
    for column in ("requests/s each", "itl ms", "ttft ms", "USD/h"):
        if not (narrow and column in ("requests/s each", "ttft ms")):
            table.add_column(column, justify="right", no_wrap=True)
    for offer in offers:
        slice_ = offer.plan.slice
        cells = {"requests/s each": "-", "itl ms": "-", "ttft ms": "-", "USD/h": "-"}
        slices = "none"
        if offer.slices is not None:
            slices = f"{offer.slices} ({offer.least or '-'} to {offer.most or 'none'})"
            cells = {
                "requests/s each": f"{offer.slice_requests_per_s:.2f}",
                "itl ms": f"{offer.itl_s * 1e3:.1f}",
                "ttft ms": f"{offer.ttft_s * 1e3:.0f}",
                "USD/h": f"{offer.slices * offer.dollars_per_hour:,.2f}",
            }
        columns = {str(column.header) for column in table.columns}
        table.add_row(
            f"{'*' if offer.own else ' '} {slice_.generation} {slice_.topology} ({slice_.hosts}h)",
            slices,
            *(cell for column, cell in cells.items() if column in columns),
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
    parameters = plan["parameters"]
    total, active = parameters["checkpoint"], parameters["active"]
    loaded = f" ({parameters['total'] / 1e9:.1f}B loaded)" if parameters["total"] < 0.99 * total else ""
    cache = f"{plan['cache_tokens']:,} tokens: {plan['sequences_at_max_model_len']:,} sequences of "
    cache += f"{plan['max_model_len']:,} (at most {plan['most_sequences']:,} at once)"
    if not plan["device_hbm"]["cache_bytes"]:
        cache = f"none; {plan['most_sequences']:,} texts of {plan['max_model_len']:,} tokens at once"
    return [
        (
            "checkpoint",
            f"{plan['checkpoint']}, {total / 1e9:.1f}B parameters{loaded}, {active / 1e9:.1f}B a token",
        ),
        (
            "slice",
            f"{slice_['generation']} {slice_['topology']}: {hosts}, {slice_['chips']} chips, {slice_['devices']} devices",
        ),
        ("slices", f"{counts['min']} to {counts['max']}"),
        ("mesh", _mesh(mesh)),
        ("because", "\n".join(plan["reasons"])),
        ("all weights", _weights(parameters["groups"])),
        ("HBM a device", _hbm(plan["device_hbm"])),
        ("cache", cache),
        ("speed", _speed(plan["speed"])),
        ("start", _start(plan["start"])),
        *([("measured", _measured(plan["measured"]))] if plan["measured"] else []),
        *([("compiled", _compiled(plan["compiled"]))] if plan["compiled"] else []),
        (f"{plan['prices']['currency']}, {plan['prices']['as_of']}", _prices(plan["prices"]["options"])),
    ]


def _mesh(mesh: dict[str, Any]) -> str:
    """Tensor, pipeline and data always, the others where they cut anything."""
    always = ("tensor", "pipeline", "data")
    sizes = {name: size for name, size in mesh.items() if name in always or (name != "engine" and size > 1)}
    return ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())


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
    least, most = speed["prefill_tokens_per_s_range"]
    if "output_tokens_per_s" not in speed:
        return f"{least:,} to {most:,} prompt tokens/s; it writes no tokens"
    low, high = speed["output_tokens_per_s_range"]
    return (
        f"{low:,} to {high:,} output tokens/s; {speed['output_tokens_per_s']:,} by greedy requests, "
        f"{speed['sampled_tokens_per_s']:,} by those that sample: {speed['sequences']} sequences of "
        f"{speed['prompt_tokens']}+{speed['answer_tokens']} tokens, a step of {speed['step_s'] * 1e3:.1f} ms, "
        f"prefill {speed['prefill_tokens_per_s']:,} tokens/s"
    )


def _start(start: dict[str, Any]) -> str:
    """Ranges of few published starts, and from how many each comes."""
    phases = start["phases"]
    cold, warm = (f"{low} to {high} s" for low, high in (start["cold_s_range"], start["warm_s_range"]))
    phrases = [
        f"{name} {_seconds(phase['s_range'])} ({phase['starts']} published start{'s' if phase['starts'] > 1 else ''})"
        for name, key in (
            ("weights", "weights"),
            ("compiling", "compile"),
            ("from the cache", "compile_warm"),
        )
        if (phase := phases[key])
    ]
    downloads = "" if phases["weights"] else ", and the download"
    return f"{cold}{downloads}; {warm} with XLA's cache: {', '.join(phrases)}"


def _seconds(ends: Sequence[int]) -> str:
    low, high = ends
    return f"{low} s" if low == high else f"{low} to {high} s"


def _measured(rows: Sequence[dict[str, Any]]) -> str:
    """The rates and what was planned; each source once, behind its rates."""
    lines: list[str] = []
    for source, group in groupby(rows, lambda row: row["source"]):
        lines += [
            f"{row['output_tokens_per_s']:,.0f} tokens/s at {row['sequences']} x {row['prompt_tokens']}+{row['answer_tokens']}, "
            f"where this plan says {row['predicted_tokens_per_s']:,} ({row['off_by']:+.0%})"
            for row in group
        ]
        lines.append(f"  {source}")
    return "\n".join(lines)


def _compiled(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    answer = "no"
    if result["compiles"]:
        least = "at least " if result["quick"] else ""
        answer = f"yes, needs {least}{gib(result['needs_bytes'])} a device"
    elif result["unbuildable"]:
        answer = f"not built without a TPU: {result['unbuildable'][0]}"
    return f"{answer} ({result['date']}, {versions}): {result['command']}"


def _prices(options: dict[str, dict[str, float]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    kind = next(iter(options.values())).keys() - {"slice_hour"}
    million = next(iter(kind))
    table.add_row("", "a slice-hour", f"a {million.replace('_', ' ')}", style="dim")
    for option, cost in options.items():
        table.add_row(option, f"{cost['slice_hour']:,.2f}", _dollars(cost[million]))
    return table


def _dollars(price: float) -> str:
    """With cents, and with the two digits that matter of what is less."""
    return f"{price:,.2f}" if price >= 0.1 else f"{price:.2g}"
