"""From a process of the service to Prometheus: through Ray's metrics agent of its node, by the rows of the table.

A record through Ray costs 2 to 3 us. Counters and gauges are therefore kept in plain Python and handed over once a beat;
a histogram takes single values only, so they are handed over as they come.
"""

import copy
import threading
from collections import defaultdict
from typing import Any

from ray.util import metrics

from serving.metrics.table import Kind, Row

Labels = tuple[str, ...]


class Recorder:
    """The counts of one process for one application. Values of labels come in the row's order; safe to use from several threads."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._lock = threading.Lock()
        self._counted: defaultdict[tuple[Row, Labels], float] = defaultdict(float)
        self._read: dict[tuple[Row, Labels], float] = {}
        self._gauges: dict[tuple[Row, Labels], float] = {}
        self._metrics: dict[str, Any] = {}
        self._series: dict[tuple[Row, Labels], Any] = {}

    def add(self, row: Row, value: float, *labels: str) -> None:
        """Add to a counter."""
        with self._lock:
            self._counted[row, labels] += value

    def total(self, row: Row, value: float, *labels: str) -> None:
        """Bring a counter to the value of one kept elsewhere."""
        with self._lock:
            grown = value - self._read.get((row, labels), 0.0)
            self._read[row, labels] = value
            self._counted[row, labels] += grown if grown >= 0 else value  # the other counter began anew

    def set(self, row: Row, value: float, *labels: str) -> None:
        with self._lock:
            self._gauges[row, labels] = value

    def only(self, row: Row, values: dict[Labels, float]) -> None:
        """Set all series of a gauge; series that `values` lacks end."""
        with self._lock:
            self._gauges = {key: value for key, value in self._gauges.items() if key[0] is not row}
            self._gauges |= {(row, labels): value for labels, value in values.items()}

    def observe(self, row: Row, value: float, *labels: str) -> None:
        series = self._series.get((row, labels)) or self._series_of(row, labels)
        series.observe(value)

    def flush(self) -> None:
        """Hand over what was counted, and every gauge again: Ray drops a gauge that is not repeated."""
        with self._lock:
            counted, self._counted = self._counted, defaultdict(float)
            gauges = list(self._gauges.items())
        for (row, labels), value in counted.items():
            if value > 0:
                self._series_of(row, labels).inc(value)
        for (row, labels), value in gauges:
            self._series_of(row, labels).set(value)

    def _series_of(self, row: Row, labels: Labels) -> Any:
        """One series of a metric, kept with default tags: Ray checks them less than the tags of a record."""
        series = self._series.get((row, labels))
        if series is None:
            metric = self._metrics.get(row.name)
            if metric is None:
                metric = self._metrics[row.name] = _make(row)
            values = map(ascii_label, (self._application, *labels))
            tags = dict(zip(row.all_labels, values, strict=True))
            series = self._series[row, labels] = copy.copy(metric).set_default_tags(tags)
        return series


def ascii_label(label: str) -> str:
    """Ray's metrics take ASCII alone, and a model may be named in any letters."""
    return label.encode("ascii", "backslashreplace").decode()


def _make(row: Row) -> Any:
    """Ray puts ray_ before a name and _total behind a counter's."""
    match row.kind:
        case Kind.COUNTER:
            return metrics.Counter(row.name.removesuffix("_total"), row.tells, row.all_labels)
        case Kind.GAUGE:
            return metrics.Gauge(row.name, row.tells, row.all_labels)
        case Kind.HISTOGRAM:
            return metrics.Histogram(row.name, row.tells, list(row.buckets), row.all_labels)
