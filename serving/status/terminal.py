"""Slices, models and decisions for a terminal, as rich renderables."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from serving.state.records import SliceRecord, SliceState, Wanted
from serving.status.document import (
    BatchStatus,
    DecisionStatus,
    Hbm,
    ModelStatus,
    QuarantinedStatus,
    RefusedDeployStatus,
    RolloutStatus,
    SliceStatus,
    Start,
    Status,
    UsageStatus,
)
from serving.tpu.generations import GIB

_COLOURS = {
    SliceState.STARTING: "yellow",
    SliceState.SERVING: "green",
    SliceState.DRAINING: "cyan",
    SliceState.LOST: "red",
}
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 60  # points of a line: two minutes


def slices(wanted: Sequence[Wanted], entries: Sequence[SliceRecord]) -> RenderableType:
    """Every slice replica of every model, and what is still waited for; of which application, where there are several."""
    if not wanted and not entries:
        return Text("nothing is deployed: `serve run` a YAML")
    several = len({record.application for record in wanted} | {entry.application for entry in entries}) > 1
    table = _table("model", "slice", "state", "hosts", "running", "waiting", "KV")
    for entry in sorted(entries, key=lambda entry: (entry.application, entry.model, entry.slice)):
        reasons = [entry.reason, entry.phase if entry.state is SliceState.STARTING else ""]
        state = Text.assemble(
            (entry.state, _COLOURS[entry.state]), *(f": {words}" for words in reasons if words)
        )
        table.add_row(
            Text(_named(entry.model, entry.application, several)),
            Text(f"{entry.slice} {'(simulated)' if entry.simulated else ''}\n{entry.shape}"),
            state,
            Text("\n".join(entry.hosts)),
            str(entry.running),
            str(entry.waiting),
            f"{entry.kv_usage:.0%}",
        )
    return Group(table, *(Text(_waiting(record, several)) for record in wanted if record.missing))


def _table(*columns: str, title: str | None = None) -> Table:
    """A table that folds long words where a terminal is narrow, and cuts none."""
    # An address in two pieces can't be copied.
    made = [Column(name, overflow="fold", no_wrap=name == "hosts") for name in columns]
    return Table(*made, title=title, title_justify="left")


def _named(name: str, application: str, several: bool) -> str:
    return f"{name} ({application})" if several else name


def _waiting(wanted: Wanted, several: bool) -> str:
    """One line on a model that misses slices."""
    slices = "slice" if wanted.missing == 1 else "slices"
    return (
        f"{_named(wanted.model, wanted.application, several)}: {wanted.slices - wanted.missing} of {wanted.slices} there; waiting {wanted.missing_for_s:.0f} s for "
        f"{wanted.missing} whole, free {slices} of {wanted.shape}{f': {wanted.why}' if wanted.why else ''}"
    )


def service(status: Status) -> RenderableType:
    """The status document: every model with its rates and slices, and the last scaling decisions."""
    several = len({model.application for model in status.models}) > 1
    parts: list[RenderableType] = [part for model in status.models for part in _model(model, several)]
    parts += [
        Text(
            f"refused: request {suspect.fingerprint} of {suspect.model}, under which two slices died {_time(suspect.for_s)} ago",
            "red",
        )
        for suspect in status.refused
    ]
    parts += refused_deploys(status.refused_deploys)
    parts += quarantine(status.quarantined)
    parts += [_rollout(rollout, several) for rollout in status.rollouts]
    parts += [_batch(batch, several) for batch in status.batches]
    if status.usage:
        parts += [Text(), _usage(status.usage, several)]
    if status.decisions:
        parts += [Text(), decisions(status.decisions, status.at, several=several)]
    return Group(*(parts or [Text("no model is served")]))


def refused_deploys(refused: Sequence[RefusedDeployStatus]) -> list[RenderableType]:
    """One line an application whose last deployment Serve refused."""
    return [
        Text(
            f"deployment of {entry.application} refused {_time(entry.for_s)} ago, what ran before runs on: {entry.reason}",
            "red",
        )
        for entry in refused
    ]


def quarantine(quarantined: Sequence[QuarantinedStatus]) -> list[RenderableType]:
    """One line a slice that is left out of placement."""
    return [
        Text(
            f"quarantined: slice {entry.slice}, for {_time(entry.for_s)} yet{', for one engine' if entry.engine_only else ''}; "
            f"{entry.failures} failures on {entry.host}, the last one: {entry.reason}",
            "red",
        )
        for entry in quarantined
    ]


def _rollout(rollout: RolloutStatus, several: bool) -> Text:
    failed = f", {rollout.failed} starts failed: {rollout.reason}" if rollout.failed else ""
    stopped = (
        "; stopped, old slices serve until another deploy or `serving slices retry`"
        if rollout.stopped
        else ""
    )
    return Text(
        f"rollout of {_named(rollout.model, rollout.application, several)} on {rollout.pool}: {rollout.changed} of {rollout.slices} slices{failed}{stopped}",
        "red" if rollout.stopped else "yellow",
    )


def _batch(batch: BatchStatus, several: bool) -> Text:
    failed = f", {batch.failed} refused" if batch.failed else ""
    waits = f", waits: {batch.why}" if batch.why else ""
    return Text(
        f"batch {_named(batch.name, batch.application, several)}: {batch.state.replace('_', ' ')}, {_time(batch.for_s)} old, {batch.completed} of {batch.total} lines answered{failed}{waits}"
    )


def _usage(usage: Sequence[UsageStatus], several: bool) -> Table:
    columns = ("key", "requests", "prompt", "cached", "output", "dollars")
    table = _table(*columns, title=f"used on {usage[0].day}, tokens by key")
    for used in usage:
        counts = (used.requests, used.prompt_tokens, used.cached_tokens, used.output_tokens)
        table.add_row(
            _named(used.key, used.application, several),
            *(f"{count:,}" for count in counts),
            f"{used.dollars:.4f}",
        )
    return table


def _model(model: ModelStatus, several: bool) -> list[RenderableType]:
    title = Text.assemble(
        (_named(model.name, model.application, several), "bold"),
        f"  {model.shape}",
        ("  simulated" if model.simulated else "", "yellow"),
    )
    queue = f"queue {model.held + model.waiting} ({model.held} in routers, {model.waiting} in engines)"
    times = f"TTFT p50 {_time(model.ttft_p50_s)}, p90 {_time(model.ttft_p90_s)}"
    figures = (
        f"slices {model.slices_serving} of {model.slices_wanted} · running {model.running} · {queue} · "
        f"output {model.output_tokens_per_s:.0f} tokens/s · {times}"
    )
    lines: list[RenderableType] = [title, Text(figures)]
    if model.slices_missing:
        waits = f"waiting {model.missing_for_s:.0f} s for {model.slices_missing} whole, free of {model.shape}"
        waits += f": {model.missing_why}" if model.missing_why else ""
        lines.append(Text(waits, "yellow"))
    tokens, ttft = model.history.output_tokens_per_s[-_WIDTH:], model.history.ttft_p50_s[-_WIDTH:]
    lines.append(Text(f"tokens/s {_spark(tokens)}"))
    if any(ttft):
        lines.append(Text(f"TTFT p50 {_spark(ttft)}"))
    table = _table("slice", "state", "hosts", "requests", "tokens/s", "KV", "HBM a chip, planned")
    for slice_ in model.slices:
        table.add_row(*_slice(slice_))
    return [*lines, table] if model.slices else lines


def _slice(slice_: SliceStatus) -> list[RenderableType]:
    colour = _COLOURS[slice_.state]
    hosts = Text("\n").join(
        Text.assemble(("■" * host.chips, colour), f" {worker}: {host.ip}")
        for worker, host in enumerate(slice_.hosts)
    )
    state: RenderableType = Text.assemble(
        (slice_.state, colour), f": {slice_.reason}" if slice_.reason else f" for {_time(slice_.for_s)}"
    )
    if slice_.start:
        state = _start(slice_.start, slice_.phase, slice_.reason)
    return [
        Text(f"{slice_.slice or '-'}{' (simulated)' if slice_.simulated else ''}"),
        state,
        hosts,
        Text(f"{slice_.running} running, {slice_.waiting} waiting"),
        Text(f"{slice_.output_tokens_per_s:.0f}"),
        Text(f"{slice_.kv_usage:.0%}"),
        _hbm(slice_.hbm_planned),
    ]


def _start(start: Start, phase: str, reason: str) -> RenderableType:
    expected = f" of about {_time(start.expected_s)}" if start.expected_s else ""
    bar = ProgressBar(
        total=start.expected_s or 1,
        completed=min(start.elapsed_s, 0.99 * start.expected_s) if start.expected_s else 0,
        width=20,
    )
    lines: list[RenderableType] = [
        Text(f"starting: {phase}", "yellow"),
        bar,
        Text(f"{_time(start.elapsed_s)}{expected}"),
    ]
    return Group(*lines, *([Text(reason, "red")] if reason else ()))


def _hbm(hbm: Hbm | None) -> RenderableType:
    if hbm is None:
        return Text("-")
    return Text(f"{hbm.used / GIB:.1f} of {hbm.usable / GIB:.1f} GiB")


def decisions(made: Sequence[DecisionStatus], at: float, *, several: bool) -> Table:
    """What scaling decided, how long ago, and why; of which application, where there are several."""
    table = _table("when", "model", "pool", "slices", "why", title="scaling decisions")
    for decision in made:
        ago = f"{_time(max(0.0, at - decision.at))} ago"
        table.add_row(
            Text(ago),
            Text(_named(decision.model, decision.application, several)),
            Text(decision.pool),
            Text(str(decision.wanted)),
            Text(decision.reason),
        )
    return table


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return (
        f"{seconds * 1000:.0f} ms"
        if seconds < 1
        else f"{seconds:.1f} s"
        if seconds < 10
        else f"{seconds:.0f} s"
    )


def _spark(values: Sequence[float | None]) -> str:
    """A line of blocks up to the largest value, a gap where there is none."""
    most = max((value for value in values if value), default=0.0)
    if not most:
        return "-"
    blocks = (" " if value is None else _BLOCKS[int((len(_BLOCKS) - 1) * value / most)] for value in values)
    return f"{''.join(blocks)} at most {most:.3g}"
