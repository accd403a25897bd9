"""One page of metrics for the whole service, from the pages of Ray's agents and of the engines. Text in, text out.

The page takes the table's rows of its own application from agents, without Ray's prefix and without labels that grow with
every process (WorkerId). From engines it takes all of vLLM's series, with the names of application, model, slice and pool.
Counters are added up within a node alone: a sum over nodes would fall whenever an agent is late or its host goes. Prometheus
would take the fall for a counter that began anew.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from serving.metrics.recorder import ascii_label
from serving.metrics.table import APPLICATION, NODE, TABLE, Across, Kind, Row

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_RAY = "ray_"
_OURS = "ray_tpu_"
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_MODEL_NAME = re.compile(r'(?<=[{,])model_name="(?:[^"\\]|\\.)*",|,?model_name="(?:[^"\\]|\\.)*"(?=})')
_PARTS = ("_bucket", "_sum", "_count")

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Engine:
    """Where an engine's page comes from."""

    model: str
    slice: str
    pool: str
    hosts: tuple[str, ...] = ()


@dataclass
class _Family:
    kind: str
    tells: str
    lines: list[str] = field(default_factory=list)


def page(
    application: str,
    agents: Iterable[tuple[str, str]],
    engines: Sequence[tuple[Engine, str]],
    more: Mapping[str, float],
) -> str:
    """The page of one application. `agents` are (node address, agent's page), `more` values of rows without labels."""
    own = _label(application)
    engine_on = {host: engine for engine, _ in engines for host in engine.hosts}
    series: dict[str, dict[Labels, float]] = {}
    for node, text in agents:
        _collect(own, node, text, engine_on, series)
    for name, value in more.items():
        series[name] = {((APPLICATION, own),): value}
    out = [_own(row, series) for row in TABLE.values()]
    families: dict[str, _Family] = {}
    for engine, text in engines:
        if text:
            _pass_on(own, text, engine, families)
    for name, family in families.items():
        out.append(
            f"# HELP {name} {family.tells}\n# TYPE {name} {family.kind}\n" + "\n".join(family.lines) + "\n"
        )
    return "".join(out)


def _own(row: Row, series: Mapping[str, Mapping[Labels, float]]) -> str:
    names = [row.name + part for part in _PARTS] if row.kind is Kind.HISTOGRAM else [row.name]
    lines = [_line(name, labels, value) for name in names for labels, value in series.get(name, {}).items()]
    return f"# HELP {row.name} {row.tells}\n# TYPE {row.name} {row.kind}\n" + "".join(lines)


def _line(name: str, labels: Labels, value: float) -> str:
    pairs = ",".join(f'{key}="{text}"' for key, text in labels)
    return f"{name}{{{pairs}}} {value!r}\n" if pairs else f"{name} {value!r}\n"


def _collect(
    own: str, node: str, text: str, engine_on: Mapping[str, Engine], series: dict[str, dict[Labels, float]]
) -> None:
    """Add an agent's series of the table that are the application's own; label values stay escaped."""
    for line in text.splitlines():
        if not line.startswith(_OURS):
            continue
        name, _, rest = line.partition("{")
        pairs, _, value = rest.rpartition("} ")
        name = name.removeprefix(_RAY)
        row = TABLE.get(name) or TABLE.get(_stem(name))
        if row is None:
            continue
        tags = dict(_LABEL.findall(pairs)) | {NODE: node}
        if "TpuIndex" in tags:
            tags |= _chip(own, tags, engine_on)
        elif tags.get(APPLICATION) != own:
            continue
        labels = tuple((key, tags.get(key, "")) for key in row.page_labels)
        if "le" in tags:
            labels += (("le", tags["le"]),)
        if (number := _number(value)) is None:
            continue
        values = series.setdefault(name, {})
        if row.across is Across.SUM:
            values[labels] = values.get(labels, 0.0) + number
        else:
            values[labels] = max(values.get(labels, number), number)


def _number(value: str) -> float | None:
    """A series' value; None for what is no number."""
    try:
        return float(value)
    except ValueError:
        return None


def _stem(name: str) -> str:
    """The histogram that a series belongs to."""
    return next((name.removesuffix(part) for part in _PARTS if name.endswith(part)), name)


def _chip(own: str, tags: Mapping[str, str], engine_on: Mapping[str, Engine]) -> dict[str, str]:
    """The labels of a chip's series: Ray's agent knows host and chip, the store the engine on that host."""
    engine = engine_on.get(tags.get("ip", ""))
    return {
        APPLICATION: own if engine else "",
        "model": _label(engine.model) if engine else "",
        "slice": _label(engine.slice) if engine else "",
        "host": tags.get("ip", ""),
        "chip": tags["TpuIndex"],
        "simulated": "false",
    }


def _pass_on(own: str, text: str, engine: Engine, families: dict[str, _Family]) -> None:
    added = f'{APPLICATION}="{own}",model="{_label(engine.model)}",slice="{_label(engine.slice)}",pool="{engine.pool}"'
    tells, family = "", None
    for line in text.splitlines():
        if line.startswith("# HELP "):
            tells = line.split(" ", 3)[3] if line.count(" ") > 2 else ""
        elif line.startswith("# TYPE "):
            name, _, kind = line.removeprefix("# TYPE ").partition(" ")
            keep = name.startswith("vllm:") and not name.endswith("_created")
            family = families.setdefault(name, _Family(kind, tells)) if keep else None
        elif family is not None and line and line[0] != "#":
            name, brace, rest = line.partition("{")
            if brace:
                others = _MODEL_NAME.sub("", brace + rest, count=1)[1:]
                family.lines.append(f"{name}{{{added}{'' if others[0] == '}' else ','}{others}")
            else:
                name, _, value = line.partition(" ")
                family.lines.append(f"{name}{{{added}}} {value}")


def _label(text: str) -> str:
    """A label's value as Ray's agents write those of our own rows."""
    text = ascii_label(text)
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
