import re

import pytest

from serving.metrics import table
from serving.metrics.table import TABLE, Kind, Row

pytestmark = pytest.mark.unit

ROWS = pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
# A client writes none of these; every one is a name of the YAML, of the hardware, or of a short list in the code.
BOUNDED = {
    "model", "key", "outcome", "pool", "slice", "state", "phase", "direction", "host", "chip", "simulated",
    "target", "met", "node", "application",
}  # fmt: skip


def test_every_row_is_in_the_table() -> None:
    assert [row for row in vars(table).values() if isinstance(row, Row)] == list(TABLE.values())


@ROWS
def test_a_name_says_type_and_unit_as_prometheus_wants_it(row: Row) -> None:
    assert re.fullmatch(r"tpu_[a-z_]+", row.name)
    assert row.name.endswith("_total") == (row.kind is Kind.COUNTER) or row.name == "tpu_memory_total"
    assert (row.kind is Kind.HISTOGRAM) == bool(row.buckets)
    if row.kind is Kind.HISTOGRAM:
        assert row.name.endswith("_seconds")


@ROWS
def test_no_label_is_unbounded(row: Row) -> None:
    assert set(row.page_labels) <= BOUNDED


@ROWS
def test_buckets_rise(row: Row) -> None:
    assert list(row.buckets) == sorted(set(row.buckets))
    assert all(bucket > 0 for bucket in row.buckets)


@ROWS
def test_a_row_says_what_it_tells_in_one_sentence(row: Row) -> None:
    assert row.tells.endswith(".")
    assert "\n" not in row.tells
