"""What an operator looks up: every metric, from the table, and every alert with what to do, from alerts.yml."""

from pathlib import Path
from typing import Any

import yaml

from serving.metrics.table import TABLE, VLLM, Row

ALERTS = Path(__file__).parents[1] / "deployments" / "monitoring" / "alerts.yml"
_SECTIONS = {
    "requests": "Requests",
    "router": "Routers",
    "failover": "Failover",
    "slices": "Slices",
    "scaling": "Scaling",
    "scrape": "The scrape itself",
    "TPU": "Chips",
}


def metrics() -> str:
    """A table a part of the service, a line a metric."""
    parts = [
        "# Metrics",
        "`GET /metrics` of the front door has all of these. [Observe](../guides/observe.md) says how to scrape it.",
        """Sums over processes carry `node`: add them up with `sum by (...) (rate(...))`, so that a host that goes takes
only its own series along. Read quantiles of a histogram, not its mean: Ray makes `_sum` of bucket midpoints.""",
    ]
    for section in dict.fromkeys(row.section for row in TABLE.values()):
        rows = [row for row in TABLE.values() if row.section == section]
        parts += [f"## {_SECTIONS[section]}", _table(rows)]
    known = "\n".join(f"- `{name}`, {kind}" for name, kind in VLLM.items())
    parts += [
        "## Engines",
        """Every metric of each engine under vLLM's own name, with `model`, `slice` and `pool` in the place of
`model_name`. Dashboard and alerts may count on these, and the simulated engine has them too:""",
        known,
    ]
    return "\n\n".join(parts)


def _table(rows: list[Row]) -> str:
    lines = ["| metric | type | labels | what it tells |", "|---|---|---|---|"]
    lines += [
        f"| `{row.name}` | {row.kind} | {', '.join(row.page_labels) or '-'} | {row.tells} |" for row in rows
    ]
    return "\n".join(lines)


def alerts() -> str:
    """A section an alert, so that a pager can link to it."""
    parts = [
        "# Alerts",
        """Prometheus reads these rules from `deployments/monitoring/alerts.yml`. [Observe](../guides/observe.md)
says how to load them. Severity `page` wakes somebody, `ticket` can wait for the day.""",
        "\n".join(
            [
                "| alert | severity |",
                "|---|---|",
                *(
                    f"| [{rule['alert']}](#{rule['alert'].lower()}) | {rule['labels']['severity']} |"
                    for rule in _rules()
                ),
            ]
        ),
    ]
    for rule in _rules():
        waits = f", for {rule['for']}" if "for" in rule else ""
        parts += [
            f"## {rule['alert']}",
            f"**Severity**: {rule['labels']['severity']}. **It says**: `{rule['annotations']['summary']}`",
            f"**What to do**: {rule['annotations']['action']}",
            f"It fires when this holds{waits}:",
            f"```promql\n{rule['expr'].strip()}\n```",
        ]
    return "\n\n".join(parts)


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]
