"""What an operator looks up, as README has it: `python -m serving.metrics.guide README.md` writes the tables anew.

Metrics come from the table, alerts and what to do on them from deployments/monitoring/alerts.yml.
"""

import sys
from pathlib import Path

import yaml

from serving.metrics.table import TABLE, VLLM

ALERTS = Path(__file__).parents[2] / "deployments" / "monitoring" / "alerts.yml"


def metrics() -> str:
    """A line a row."""
    lines = ["| metric | labels | what it tells |", "|---|---|---|"]
    lines += [f"| `{row.name}` | {', '.join(row.page_labels)} | {row.tells} |" for row in TABLE.values()]
    known = ", ".join(f"`{name.removeprefix('vllm:')}`" for name in VLLM)
    return "\n".join(
        [
            *lines,
            f"| `vllm:*` | model, slice, pool, vLLM's own | Every metric of each engine: {known} and more. |",
        ]
    )


def alerts() -> str:
    """A line an alert."""
    rules = [
        rule
        for group in yaml.safe_load(ALERTS.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    lines = ["| alert | severity | what to do |", "|---|---|---|"]
    lines += [
        f"| {rule['alert']} | {rule['labels']['severity']} | {rule['annotations']['action']} |"
        for rule in rules
    ]
    return "\n".join(lines)


def written(text: str) -> str:
    """The text with its tables as they should be, between their marks."""
    for name, made in (("metrics", metrics()), ("alerts", alerts())):
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + made + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(written(readme.read_text()))
