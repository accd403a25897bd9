"""The Grafana dashboard, out of a list of panels: `python -m tools.dashboard > deployments/monitoring/dashboard.json`.

Queries name rows of the table and vLLM's metrics alone; a test holds them to that and asks a running Prometheus each one.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

_RATE = "$__rate_interval"
_APPLICATION = 'application=~"$application"'
_MODEL = f'{_APPLICATION},model=~"$model"'
_SLICE = f'{_MODEL},slice=~"$slice"'
_PER_SLICE = "{{model}} {{slice}}"
_WIDTH, _HEIGHT = 8, 7  # of a row's 24 columns


@dataclass(frozen=True)
class Panel:
    """A graph: `queries` with the legend of each, before which the application stands. `unit` is Grafana's name of it."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    tells: str = ""


def _rate(metric: str, by: str, where: str = _MODEL) -> str:
    return f"sum by (application, {by}) (rate({metric}{{{where}}}[{_RATE}]))"


def _quantile(share: float, metric: str, by: str = "model", where: str = _MODEL) -> str:
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', f'{by}, le', where)})"


def _quantiles(metric: str, where: str = _MODEL) -> tuple[tuple[str, str], ...]:
    return tuple(
        (_quantile(share, metric, where=where), f"p{round(share * 100)} {{{{model}}}}")
        for share in (0.5, 0.9, 0.99)
    )


def _chips(metric: str) -> str:
    return f"avg by (application, model, slice, simulated) ({metric}{{{_SLICE}}})"


_CHIP_LEGEND = f"{_PER_SLICE} simulated={{{{simulated}}}}"

SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Overview": (
        Panel(
            "Requests/s by outcome",
            ((_rate("tpu_serving_requests_total", "outcome"), "{{outcome}}"),),
            "reqps",
        ),
        Panel(
            "Share of requests answered",
            (("tpu_serving:answered:ratio_rate5m{" + _MODEL + "}", "{{model}}"),),
            "percentunit",
            "Clients' own errors and refusals by limit count as answered.",
        ),
        Panel(
            "Share of answers within the SLO's targets",
            (("1 - tpu_serving:slo_missed:ratio_rate5m{" + _MODEL + "}", "{{model}} {{target}}"),),
            "percentunit",
            "Of models with `slo:` in the YAML.",
        ),
        Panel("Time to first token", _quantiles("tpu_serving_ttft_seconds"), "s"),
        Panel("Between tokens", _quantiles("tpu_serving_inter_token_seconds"), "s", "Mean of each answer."),
        Panel(
            "Tokens/s",
            (
                (_rate("tpu_serving_slice_output_tokens_total", "model"), "out {{model}}"),
                (_rate("tpu_serving_slice_prompt_tokens_total", "model"), "in {{model}}"),
            ),
        ),
        Panel(
            "Slices by state",
            (
                (
                    f"sum by (application, model, state) (tpu_serving_slice_state{{{_MODEL}}})",
                    "{{model}} {{state}}",
                ),
            ),
        ),
    ),
    "Per model": (
        Panel(
            "Where the time to first token goes, p50",
            (
                (_quantile(0.5, "tpu_serving_queue_seconds"), "queue {{model}}"),
                (_quantile(0.5, "tpu_serving_router_seconds"), "router {{model}}"),
                (_quantile(0.5, "tpu_serving_slice_ttft_seconds"), "slice {{model}}"),
            ),
            "s",
        ),
        Panel(
            "Time to first token by pool, p90",
            ((_quantile(0.9, "tpu_serving_ttft_seconds", "model, pool"), "{{model}} pool {{pool}}"),),
            "s",
        ),
        Panel("Longest gap in an answer", _quantiles("tpu_serving_longest_gap_seconds"), "s"),
        Panel("Whole answer", _quantiles("tpu_serving_request_seconds"), "s"),
        Panel(
            "Output tokens/s by key, the ten largest",
            ((f"topk(10, {_rate('tpu_serving_output_tokens_total', 'model, key')})", "{{model}} {{key}}"),),
        ),
        Panel(
            "Prompt tokens/s by key, the ten largest",
            ((f"topk(10, {_rate('tpu_serving_prompt_tokens_total', 'model, key')})", "{{model}} {{key}}"),),
        ),
        Panel(
            "Prompt tokens found in the prefix cache",
            (
                (
                    " / ".join(
                        _rate(f"tpu_serving_slice_{tokens}_tokens_total", "model")
                        for tokens in ("cached", "prompt")
                    ),
                    "{{model}}",
                ),
            ),
            "percentunit",
        ),
    ),
    "Per slice": (
        Panel("State", ((f"tpu_serving_slice_state{{{_SLICE}}}", f"{_PER_SLICE} {{{{state}}}}"),)),
        Panel(
            "Share of time by state",
            (
                (
                    _rate("tpu_serving_slice_state_seconds_total", "model, slice, state", _SLICE),
                    f"{_PER_SLICE} {{{{state}}}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Start by phase",
            ((f"tpu_serving_slice_start_seconds{{{_SLICE}}}", f"{_PER_SLICE} {{{{phase}}}}"),),
            "s",
        ),
        Panel(
            "KV cache in use", ((f"tpu_serving_slice_kv_usage_ratio{{{_SLICE}}}", _PER_SLICE),), "percentunit"
        ),
        Panel(
            "Requests in the batch and waiting in the engine",
            (
                (f"tpu_serving_slice_requests_running{{{_SLICE}}}", f"running {_PER_SLICE}"),
                (f"tpu_serving_slice_requests_waiting{{{_SLICE}}}", f"waiting {_PER_SLICE}"),
            ),
        ),
        Panel(
            "Output tokens/s",
            ((_rate("tpu_serving_slice_output_tokens_total", "model, slice", _SLICE), _PER_SLICE),),
        ),
        Panel(
            "Engine: time to first token, p90",
            ((_quantile(0.9, "vllm:time_to_first_token_seconds", "model, slice", _SLICE), _PER_SLICE),),
            "s",
        ),
        Panel(
            "Engine: between tokens, p99",
            ((_quantile(0.99, "vllm:inter_token_latency_seconds", "model, slice", _SLICE), _PER_SLICE),),
            "s",
            "Token by token, as the engine gives them.",
        ),
        Panel(
            "Engine: preemptions/s",
            ((_rate("vllm:num_preemptions_total", "model, slice", _SLICE), _PER_SLICE),),
            tells="Requests that gave their cache back: it is too small for what is asked.",
        ),
        Panel(
            "Programs compiled while serving",
            (
                (
                    f"sum by (application, model, slice) (increase(tpu_serving_slice_late_programs_total{{{_SLICE}}}[{_RATE}]))",
                    _PER_SLICE,
                ),
            ),
            tells="All requests of the slice wait meanwhile; the replica's log names the request.",
        ),
        Panel("TensorCore utilisation", ((_chips("tpu_tensorcore_utilization"), _CHIP_LEGEND),), "percent"),
        Panel(
            "HBM bandwidth utilisation",
            ((_chips("tpu_memory_bandwidth_utilization"), _CHIP_LEGEND),),
            "percent",
        ),
        Panel("Duty cycle", ((_chips("tpu_duty_cycle"), _CHIP_LEGEND),), "percent"),
        Panel(
            "HBM in use",
            (
                (_chips("tpu_memory_used"), f"used {_CHIP_LEGEND}"),
                (_chips("tpu_memory_total"), f"of {_CHIP_LEGEND}"),
            ),
            "bytes",
        ),
    ),
    "Scaling": (
        Panel(
            "Slices wanted, serving and missing",
            (
                (f"tpu_serving_slices_wanted{{{_MODEL}}}", "wanted {{model}}"),
                (
                    f'sum by (application, model) (tpu_serving_slice_state{{{_MODEL},state="serving"}})',
                    "serving {{model}}",
                ),
                (f"tpu_serving_slices_missing{{{_MODEL}}}", "missing {{model}}"),
            ),
        ),
        Panel("Missing for", ((f"tpu_serving_slices_missing_seconds{{{_MODEL}}}", "{{model}}"),), "s"),
        Panel(
            "Decisions",
            (
                (
                    f"sum by (application, model, pool, direction) (increase(tpu_serving_scaling_decisions_total{{{_MODEL}}}[{_RATE}]))",
                    "{{model}} pool {{pool}} {{direction}}",
                ),
            ),
        ),
    ),
    "Router": (
        Panel("The router's own time", _quantiles("tpu_serving_router_seconds"), "s"),
        Panel("Time held for a slice", _quantiles("tpu_serving_queue_seconds"), "s"),
        Panel(
            "Requests held and with slices",
            (
                (f"sum by (application, model) (tpu_serving_requests_held{{{_MODEL}}})", "held {{model}}"),
                (
                    f"sum by (application, model) (tpu_serving_requests_in_flight{{{_MODEL}}})",
                    "with slices {{model}}",
                ),
            ),
        ),
        Panel(
            "CPU of all routers, cores",
            (
                (
                    f"sum by (application) (rate(tpu_serving_router_cpu_seconds_total{{{_APPLICATION}}}[{_RATE}]))",
                    "routers",
                ),
            ),
        ),
        Panel(
            "Retries and continued answers/s",
            (
                (_rate("tpu_serving_retries_total", "model"), "retries {{model}}"),
                (_rate("tpu_serving_continuations_total", "model"), "continued {{model}}"),
            ),
        ),
        Panel(
            "Streams paused for a higher priority/s",
            ((_rate("tpu_serving_preemptions_total", "model"), "{{model}}"),),
        ),
        Panel("Breakers open", ((f"tpu_serving_breaker_open{{{_SLICE}}}", _PER_SLICE),)),
        Panel(
            "Slices in quarantine",
            ((f"tpu_serving_slice_quarantined{{{_APPLICATION}}}", "{{slice}}, {{host}}"),),
        ),
        Panel(
            "Sources that gave no metrics",
            ((f"tpu_serving_scrape_sources_unreachable{{{_APPLICATION}}}", "sources"),),
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """As Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for section, listed in SECTIONS.items():
        panels.append(
            {
                "type": "row",
                "title": section,
                "collapsed": False,
                "panels": [],
                "gridPos": _grid(0, top, 24, 1),
            }
        )
        top += 1
        for at, panel in enumerate(listed):
            panels.append(_graph(panel, _grid(at % 3 * _WIDTH, top + at // 3 * _HEIGHT, _WIDTH, _HEIGHT)))
        top += (len(listed) + 2) // 3 * _HEIGHT
    return {
        "title": "TPU serving",
        "uid": "tpu-serving",
        "schemaVersion": 39,
        "tags": ["tpu-serving"],
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                _variable("application", "label_values(tpu_serving_slices_wanted, application)"),
                _variable("model", f"label_values(tpu_serving_slices_wanted{{{_APPLICATION}}}, model)"),
                _variable("slice", f"label_values(tpu_serving_slice_state{{{_MODEL}}}, slice)"),
            ]
        },
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, start=1)],
    }


def _grid(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _graph(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.tells,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query, "legendFormat": f"{{{{application}}}} {legend}"}
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }


def main() -> None:
    json.dump(dashboard(), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
