"""What a run comes to, wherever locust shows it: the terminal, the web UI's own tab, the HTML report with plots."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import gevent
from flask import Response, request
from locust.env import Environment
from locust.runners import STATE_RUNNING, STATE_SPAWNING, WORKER_REPORT_INTERVAL

from figures import Counts, Figures, Slo, figures
from plots import plot
from rows import count, names
from thresholds import Judgement

_TAB = "inference"
# Column, its heading, and the factor that brings a figure to the heading's unit.
_COLUMNS = (
    ("requests_per_s", "answered/s", 1),
    ("goodput_per_s", "goodput/s", 1),
    ("goodput", "goodput %", 100),
    ("tokens_per_s", "tokens/s", 1),
    ("ttft_p50_ms", "TTFT p50 ms", 1),
    ("ttft_p99_ms", "TTFT p99 ms", 1),
    ("itl_p50_ms", "ITL p50 ms", 1),
    ("itl_p99_ms", "ITL p99 ms", 1),
    ("latency_p99_ms", "answer p99 ms", 1),
    ("failures", "failed %", 100),
    ("refusals", "refused %", 100),
    ("late_starts", "late starts %", 100),
    ("dropped", "dropped %", 100),
)
_PLOTS = (
    (
        "Requests a second",
        {"arrived": "arrived", "answered": "requests_per_s", "within the SLO": "goodput_per_s"},
    ),
    ("Time to first token, ms", {"p50": "ttft_p50_ms", "p90": "ttft_p90_ms", "p99": "ttft_p99_ms"}),
    ("Inter-token latency, ms", {"p50": "itl_p50_ms", "p90": "itl_p90_ms", "p99": "itl_p99_ms"}),
    ("Output tokens a second", {"tokens": "tokens_per_s"}),
    ("Share of requests", {"failed": "failures", "refused": "refusals", "late start": "late_starts"}),
    ("In flight", {"requests": "in flight"}),
)


@dataclass
class Course:
    """A run's figures over time, each point those of the seconds since the point before."""

    points: list[tuple[float, Figures]] = field(default_factory=list)
    _second: float = 0.0
    _counts: Counts = field(default_factory=Counts)

    def add(self, second: float, counts: Counts) -> None:
        during = counts.since(self._counts)
        seconds = second - self._second
        point = figures(during, seconds)
        # Closed loop has no arrivals: what comes and is in flight is up to its users.
        point["arrived"] = (during.start.total() + during.dropped) / seconds if counts.start else None
        point["in flight"] = counts.in_flight if counts.start else None
        self.points.append((second, point))
        self._second, self._counts = second, counts

    def plots(self) -> list[str]:
        return [
            plot(
                title,
                {
                    name: [(second, point[key]) for second, point in self.points]
                    for name, key in lines.items()
                },
            )
            for title, lines in _PLOTS
        ]


class Report:
    """A run as this process of locust sees all of it: its only one, or the master."""

    def __init__(
        self,
        environment: Environment,
        slo: Slo,
        judge: Callable[[Figures], Sequence[Judgement]],
        remark: Callable[[], str],
    ) -> None:
        self._environment = environment
        self._slo, self._judge, self._remark = slo, judge, remark
        self.course = Course()

    def follow(self) -> None:
        """Take a point every few seconds, for as long as locust lives."""
        while True:
            gevent.sleep(WORKER_REPORT_INTERVAL)  # more often, a master would see nothing new
            runner = self._environment.runner
            if runner is not None and runner.state in (STATE_RUNNING, STATE_SPAWNING):
                self.course.add(time.time() - runner.stats.start_time, count(runner.stats))

    def figures(self, only: list[str] | None = None) -> Figures:
        stats = self._environment.stats
        ended = max((entry.last_request_timestamp or 0 for entry in stats.entries.values()), default=0)
        return figures(count(stats, only), max(ended - stats.start_time, 0))

    def judgements(self) -> Sequence[Judgement]:
        return self._judge(self.figures())

    def rows(self) -> list[dict[str, str]]:
        """A row for each kind of request, and one for all."""
        rows: list[tuple[str, list[str] | None]] = [(name, [name]) for name in names(self._environment.stats)]
        return [{"name": name, **_cells(self.figures(only))} for name, only in [*rows, ("all", None)]]

    def say(self) -> str:
        """For the terminal."""
        rows = self.rows()
        heads = {"name": "", **{key: heading for key, heading, _ in _COLUMNS}}
        widths = {key: max(len(heading), *(len(row[key]) for row in rows)) for key, heading in heads.items()}
        table = [
            "  ".join(
                row[key].rjust(width) if key != "name" else row[key].ljust(width)
                for key, width in widths.items()
            )
            for row in (heads, *rows)
        ]
        verdict = [f"{'broken' if one.broken else 'held  '} {one}" for one in self.judgements()]
        return "\n".join(filter(None, [*table, self._slo_text(), *verdict, self._remark()]))

    def html(self) -> str:
        heads = "".join(f"<th>{escape(heading)}</th>" for heading in ("", *(head for _, head, _ in _COLUMNS)))
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row.values()) + "</tr>"
            for row in self.rows()
        )
        verdict = "".join(
            f'<li style="color: {"#dc2626" if one.broken else "#16a34a"}">'
            f"{'broken' if one.broken else 'held'}: {escape(str(one))}</li>"
            for one in self.judgements()
        )
        return (
            '<section id="inference" style="max-width: 1200px; margin: 32px auto; font-family: sans-serif">'
            "<style>#inference td, #inference th { padding: 4px 8px; text-align: right; font-size: 13px }</style>"
            f"<h2>Inference</h2><table><tr>{heads}</tr>{body}</table>"
            f"<p>{escape(self._slo_text())}</p><p>{escape(self._remark())}</p><ul>{verdict}</ul>"
            f"{''.join(self.course.plots())}</section>"
        )

    def add_to_file(self, path: Path) -> None:
        """Put our part into the report that locust has written."""
        path.write_text(self._into(path.read_text(encoding="utf-8")), encoding="utf-8")

    def add_to_web_ui(self) -> None:
        """A tab, fed by the figures locust's page asks for every two seconds, and the downloadable report."""
        web_ui = self._environment.web_ui
        if web_ui is None:
            return
        columns = [("name", "Name"), *((key, heading) for key, heading, _ in _COLUMNS)]
        web_ui.template_args |= {
            "extended_tabs": [{"title": "Inference", "key": _TAB}],
            "extended_tables": [
                {"key": _TAB, "structure": [{"key": key, "title": title} for key, title in columns]}
            ],
        }

        @web_ui.app.after_request
        def extend(response: Response) -> Response:
            if request.path.endswith("/stats/requests") and response.status_code == 200:
                shown: dict[str, Any] = {
                    **(response.json or {}),
                    "extended_stats": [{"key": _TAB, "data": self.rows()}],
                }
                response.set_data(json.dumps(shown))
            elif request.path.endswith("/stats/report") and response.status_code == 200:
                response.set_data(self._into(response.get_data(as_text=True)))
            return response

    def _into(self, page: str) -> str:
        """Above locust's own part, which its script draws into this element."""
        before, root, after = page.rpartition('<div id="root"></div>')
        return before + self.html() + root + after

    def _slo_text(self) -> str:
        return (
            f"SLO: TTFT {self._slo.ttft_ms:g} ms, mean ITL {self._slo.itl_ms:g} ms, from the intended start"
        )


def _cells(found: Figures) -> dict[str, str]:
    cells = {}
    for key, _, factor in _COLUMNS:
        value = found[key]
        cells[key] = "-" if value is None else re.sub(r"\.0$", "", f"{value * factor:.1f}")
    return cells
