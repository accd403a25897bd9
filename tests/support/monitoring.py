"""The queries of the dashboard and the rules of deployments/monitoring, and the metrics that they ask for."""

import re
import shutil
from pathlib import Path

import yaml

from serving.metrics.table import TABLE, VLLM, Kind
from tools import dashboard

MONITORING = Path(__file__).parents[2] / "deployments" / "monitoring"
RULES = yaml.safe_load((MONITORING / "alerts.yml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
RECORDED = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
QUERIES = [query for panels in dashboard.SECTIONS.values() for panel in panels for query, _ in panel.queries]
EXPRESSIONS = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]


def program(name: str) -> str:
    found = shutil.which(name)
    assert found, (
        f"queries and rules are tested by Prometheus itself: install {name} (Debian: apt-get install prometheus)"
    )
    return found


def names(expression: str) -> set[str]:
    """The metrics that an expression asks for."""
    return set(re.findall(r"\b(?:tpu_|vllm:)[a-z_:0-9]+", re.sub(r'"[^"]*"', "", expression)))


def exported(name: str) -> bool:
    kinds = {row.name: row.kind for row in TABLE.values()} | VLLM
    if name in RECORDED or kinds.get(name) in (Kind.COUNTER, Kind.GAUGE):
        return True
    stem, _, part = name.rpartition("_")
    return part in ("bucket", "count", "sum") and kinds.get(stem) is Kind.HISTOGRAM
