"""The dashboard and the rules of deployments/monitoring, by name, by promtool's own tests, and over a running service."""

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from support.monitoring import (
    ALERTS,
    EXPRESSIONS,
    MONITORING,
    QUERIES,
    exported,
    names,
    program,
)

from serving.metrics.table import TABLE, Across
from tools import dashboard


@pytest.mark.unit
@pytest.mark.parametrize("expression", QUERIES + EXPRESSIONS)
def test_a_query_asks_only_for_what_the_table_has(expression: str) -> None:
    assert names(expression)
    assert {name for name in names(expression) if not exported(name)} == set()


@pytest.mark.unit
@pytest.mark.parametrize("expression", QUERIES + EXPRESSIONS)
def test_a_query_adds_up_what_the_page_has_by_node(expression: str) -> None:
    added_up = {name for name, row in TABLE.items() if row.across is Across.SUM}
    in_a_sum: list[bool] = []
    for sums, mark, name in re.findall(
        r"(\bsum(?: by \([^)]*\))? )?([()])|\b(tpu_serving_[a-z_]+)", expression
    ):
        if mark == "(":
            in_a_sum.append(bool(sums))
        elif mark:
            in_a_sum.pop()
        elif {name, name.rpartition("_")[0]} & added_up:
            assert any(in_a_sum), name


@pytest.mark.unit
@pytest.mark.parametrize("expression", QUERIES + EXPRESSIONS)
def test_a_query_keeps_applications_apart(expression: str) -> None:
    grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    assert [labels for labels in grouped if "application" not in labels.split(", ")] == []
    if expression in QUERIES:
        series = re.findall(r"\b(?:tpu_|vllm:)[a-z_:0-9]+({[^}]*})?", expression)
        assert all('application=~"$application"' in labels for labels in series)


@pytest.mark.unit
def test_the_dashboard_in_the_folder_is_what_the_panels_make() -> None:
    written = json.loads((MONITORING / "dashboard.json").read_text())
    assert written == dashboard.dashboard(), (
        "python -m tools.dashboard > deployments/monitoring/dashboard.json"
    )


@pytest.mark.unit
def test_every_field_of_the_dashboard_is_one_of_grafanas() -> None:
    """What Grafana's own types do not have is lost on the way through them."""
    plugins.register_default_plugins()
    written = dashboard.dashboard()
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(written))))
    assert list(lost(written, kept)) == []
    written["panels"][1]["targets"][0]["exprr"] = "up"
    assert list(lost(written, kept)) == ["/panels/1/targets/0/exprr"]


def lost(written: Any, kept: Any, at: str = "") -> Iterator[str]:
    """Where a document has what another has not, or something else."""
    if isinstance(written, dict) and isinstance(kept, dict):
        pairs = [(key, value, kept.get(key)) for key, value in written.items()]
    elif isinstance(written, list) and isinstance(kept, list) and len(written) == len(kept):
        pairs = [(number, *both) for number, both in enumerate(zip(written, kept, strict=True))]
    else:
        if written != kept:
            yield at
        return
    for key, one, other in pairs:
        yield from lost(one, other, f"{at}/{key}")


@pytest.mark.unit
def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.unit
@pytest.mark.parametrize("rule", ALERTS.values(), ids=ALERTS)
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["action"].endswith(".")


# For each alert: series that bring it, the minute at which it has to fire, and one at which it may not yet.
BAD, GOOD = (
    'tpu_serving_requests_total{model="m",outcome="slice_lost"}',
    'tpu_serving_requests_total{model="m",outcome="ok"}',
)
MET, MISSED = (
    f'tpu_serving_slo_requests_total{{model="m",target="ttft",met="{met}"}}' for met in ("yes", "no")
)
LATE = 'tpu_serving_slice_late_compile_seconds_total{model="m",slice="s",pool="0",node="n"}'
KV = 'tpu_serving_slice_kv_usage_ratio{model="m",slice="s"}'
FIRES: dict[str, tuple[dict[str, str], int, int]] = {
    "RequestsFail": ({GOOD: "0+80x60", BAD: "0+0x9 0+20x50"}, 20, 9),
    "RequestsFailSlowly": ({GOOD: "0+95x400", BAD: "0+0x9 0+5x400"}, 370, 5),
    "RequestEndsEngines": ({'tpu_serving_poisonous_requests_total{model="m"}': "0x9 0+1x10"}, 12, 8),
    "WrongTokens": ({'tpu_serving_wrong_slices_total{model="m"}': "0x9 1x10"}, 12, 8),
    "SloMissed": ({MET: "0+100x9 900+10x70", MISSED: "0+0x9 0+90x70"}, 60, 9),
    "SloMissedSlowly": ({MET: "0+100x9 900+80x400", MISSED: "0+0x9 0+20x400"}, 370, 9),
    "SliceQuarantined": ({'tpu_serving_slice_quarantined{slice="s",host="h"}': "_x4 1x10"}, 7, 4),
    "SliceMissing": ({'tpu_serving_slices_missing_seconds{model="m"}': "0+60x30"}, 16, 14),
    "SlicesComeAndGo": ({'tpu_serving_slice_starts_total{model="m",pool="0"}': "1x5 1+1x10"}, 12, 5),
    "KvSaturated": ({KV: "0.5x4 0.97x20"}, 12, 8),
    "CompilesWhileServing": ({LATE: "_x8 40x20"}, 12, 7),
    "ChipsIdleUnderLoad": (
        {
            'tpu_duty_cycle{model="m",slice="s",chip="0"}': "80x4 1x20",
            'tpu_serving_slice_requests_running{model="m",slice="s",pool="0"}': "20x30",
        },
        12,
        8,
    ),
    "BreakerOpen": ({'tpu_serving_breaker_open{model="m",slice="s"}': "0x4 1x20"}, 8, 4),
    "QueueGrows": ({'tpu_serving_requests_held{model="m"}': "0x4 0+10x20"}, 18, 5),
    "MetricsIncomplete": ({"tpu_serving_scrape_sources_unreachable": "0x4 1x20"}, 12, 8),
    "MetricsGone": ({'tpu_serving_slices_wanted{model="m"}': "1x4 stale"}, 15, 4),
}


def of(application: str, series: str) -> str:
    return series.replace("{", f'{{application="{application}",', 1)


# Two applications of one model: what of each has to fire alone, and nothing of the other's.
BLUE_AND_GREEN: dict[str, tuple[dict[str, str], dict[int, set[str]]]] = {
    "RequestsFail": (
        {
            of("blue", GOOD): "0+800x60",
            of("green", GOOD): "0+8x60",
            of("green", BAD): "0+0x9 0+2x50",
        },
        {9: set(), 20: {"green"}},
    ),
    "KvSaturated": ({of("blue", KV): "0.1x30", of("green", KV): "0.99x30"}, {12: {"green"}}),
    "SlicesComeAndGo": (
        {
            of(application, 'tpu_serving_slice_starts_total{model="m",pool="0"}'): "1x5 2x4 3x30"
            for application in ("blue", "green")
        },
        {20: set()},
    ),
    "ChipsIdleUnderLoad": (
        {
            of("blue", 'tpu_duty_cycle{model="m",slice="s",chip="0"}'): "1x30",
            of("green", 'tpu_serving_slice_requests_running{model="m",slice="s",pool="0"}'): "20x30",
        },
        {20: set()},
    ),
    "MetricsGone": (
        {
            of("blue", 'tpu_serving_slices_wanted{model="m"}'): "1x150",
            of("green", 'tpu_serving_slices_wanted{model="m"}'): "1x4 stale",
        },
        {4: set(), 9: {"green"}, 60: {"green"}, 90: set()},
    ),
}


@pytest.mark.http
def test_an_alert_tells_of_the_application_that_it_is_about(tmp_path: Path) -> None:
    promtool(
        tmp_path,
        [
            {
                "interval": "1m",
                "name": alert,
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count by (application) (ALERTS{{alertname="{alert}",alertstate="firing"}})',
                        "eval_time": f"{minute}m",
                        "exp_samples": [
                            {"labels": f'{{application="{application}"}}', "value": 1}
                            for application in sorted(fires)
                        ],
                    }
                    for minute, fires in minutes.items()
                ],
            }
            for alert, (series, minutes) in BLUE_AND_GREEN.items()
        ],
    )


# Starts of slices as the page has them, by node; the service has been known for longer.
WANTED = {'tpu_serving_slices_wanted{model="m"}': "2x150"}
STARTS = 'tpu_serving_slice_starts_total{{model="m",pool="0",node="{}"}}'.format
COME_AND_GO: dict[str, tuple[dict[str, str], dict[int, bool]]] = {
    "every slice on a host of its own, the last ones gone again": (
        WANTED | {STARTS(at): f"_x{80 + 5 * at} 1x10 stale" for at in range(4)},
        {90: False, 97: True},
    ),
    "a scale-down takes a node with its four starts along, another is late": (
        WANTED | {STARTS(1): "4x80 stale", STARTS(2): "4x80 _x5 4x60"},
        dict.fromkeys(range(75, 150), False),
    ),
    "a Prometheus that is new to eight slices": (
        {'tpu_serving_slices_wanted{model="m"}': "8x150"} | {STARTS(at): "1x150" for at in range(8)},
        dict.fromkeys((5, 30, 59, 61, 90, 149), False),
    ),
}


@pytest.mark.http
def test_every_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    assert set(FIRES) == set(ALERTS)
    promtool(
        tmp_path,
        [rule_test(name, series, {at: True, before: False}) for name, (series, at, before) in FIRES.items()],
    )


@pytest.mark.http
@pytest.mark.parametrize("case", COME_AND_GO.values(), ids=COME_AND_GO)
def test_slices_come_and_go_by_their_starts_and_not_by_nodes_that_are_gone(
    tmp_path: Path, case: tuple[dict[str, str], dict[int, bool]]
) -> None:
    promtool(tmp_path, [rule_test("SlicesComeAndGo", *case)])


# Seconds of programs compiled while a slice serves, as the page has them.
COMPILES: dict[str, tuple[dict[str, str], dict[int, bool]]] = {
    "one more, an hour after the first": ({LATE: "9x60 40x60"}, {10: True, 50: False, 65: True, 90: False}),
    "a replica that begins anew on the same host": ({LATE: "60x30 20x30"}, {29: False, 33: True, 50: False}),
    "its series goes with its host": ({LATE: "9x20 stale"}, {14: True, 17: False, 30: False}),
    "small programs of first requests": ({LATE: "_x5 0.4x10 1.1x20"}, dict.fromkeys((6, 16, 30), False)),
}


@pytest.mark.http
@pytest.mark.parametrize("case", COMPILES.values(), ids=COMPILES)
def test_compiles_while_serving_are_told_for_a_quarter_of_an_hour(
    tmp_path: Path, case: tuple[dict[str, str], dict[int, bool]]
) -> None:
    promtool(tmp_path, [rule_test("CompilesWhileServing", *case)])


def rule_test(alert: str, series: dict[str, str], fires: dict[int, bool]) -> dict[str, Any]:
    """As promtool reads it; `fires` by minute."""
    return {
        "interval": "1m",
        "name": alert,
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                "eval_time": f"{minute}m",
            }
            | ({"exp_samples": [{"value": 1}]} if firing else {})
            for minute, firing in fires.items()
        ],
    }


def promtool(tmp_path: Path, tests: list[dict[str, Any]]) -> None:
    file = tmp_path / "tests.yaml"
    file.write_text(
        json.dumps(
            {"rule_files": [str(MONITORING / "alerts.yml")], "evaluation_interval": "1m", "tests": tests}
        )
    )
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
