"""One page of metrics for the whole service from those of Ray's agents and of the engines. Text in, text out.

Of the agents' pages it takes the rows of the table, without Ray's prefix and without the labels that grow with every
process (WorkerId); of the engines' pages all of vLLM's, with the names of model, slice and pool. What processes add to is
added up within a node alone: a sum over nodes would fall whenever an agent is late or its host goes, and Prometheus would
take that for a counter that began anew.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from serving.metrics.table import NODE, TABLE, Across, Kind, Row

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
    agents: Iterable[tuple[str, str]], engines: Sequence[tuple[Engine, str]], more: Mapping[str, float]
) -> str:
    """The service's page. `agents` are nodes' addresses and what their agents say, `more` rows without labels that only the
    page's maker knows.
    """
    where = {host: engine for engine, _ in engines for host in engine.hosts}
    series: dict[str, dict[Labels, float]] = {}
    for node, text in agents:
        _collect(node, text, where, series)
    for name, value in more.items():
        series[name] = {(): value}
    out = [_own(row, series) for row in TABLE.values()]
    families: dict[str, _Family] = {}
    for engine, text in engines:
        if text:
            _pass_on(text, engine, families)
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
    said = ",".join(f'{key}="{text}"' for key, text in labels)
    return f"{name}{{{said}}} {value!r}\n" if said else f"{name} {value!r}\n"


def _collect(
    node: str, text: str, where: Mapping[str, Engine], series: dict[str, dict[Labels, float]]
) -> None:
    """Add an agent's series of the table; label values stay escaped as they are."""
    for line in text.splitlines():
        if not line.startswith(_OURS):
            continue
        name, _, rest = line.partition("{")
        said, _, value = rest.rpartition("} ")
        name = name.removeprefix(_RAY)
        row = TABLE.get(name) or TABLE.get(_stem(name))
        if row is None:
            continue
        found = dict(_LABEL.findall(said)) | {NODE: node}
        if "TpuIndex" in found:
            found |= _chip(found, where)
        labels = tuple((key, found.get(key, "")) for key in row.page_labels)
        if "le" in found:
            labels += (("le", found["le"]),)
        values = series.setdefault(name, {})
        number = float(value)
        if row.across is Across.SUM:
            values[labels] = values.get(labels, 0.0) + number
        else:
            values[labels] = max(values.get(labels, number), number)


def _stem(name: str) -> str:
    """The histogram that a series belongs to."""
    return next((name.removesuffix(part) for part in _PARTS if name.endswith(part)), name)


def _chip(found: Mapping[str, str], where: Mapping[str, Engine]) -> dict[str, str]:
    """Ray's agent on a TPU host knows host and chip; the board knows whose they are."""
    engine = where.get(found.get("ip", ""))
    return {
        "model": engine.model if engine else "",
        "slice": engine.slice if engine else "",
        "host": found.get("ip", ""),
        "chip": found["TpuIndex"],
        "simulated": "false",
    }


def _pass_on(text: str, engine: Engine, families: dict[str, _Family]) -> None:
    added = f'model="{escape(engine.model)}",slice="{escape(engine.slice)}",pool="{engine.pool}"'
    tells, family = "", None
    for line in text.splitlines():
        if line.startswith("# HELP "):
            tells = line.split(" ", 3)[3] if line.count(" ") > 2 else ""
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            keep = name.startswith("vllm:") and not name.endswith("_created")
            family = families.setdefault(name, _Family(kind, tells)) if keep else None
        elif family is not None and line and line[0] != "#":
            name, brace, rest = line.partition("{")
            if brace:
                said = _MODEL_NAME.sub("", brace + rest, count=1)[1:]
                family.lines.append(f"{name}{{{added}{'' if said[0] == '}' else ','}{said}")
            else:
                name, _, value = line.partition(" ")
                family.lines.append(f"{name}{{{added}}} {value}")


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
