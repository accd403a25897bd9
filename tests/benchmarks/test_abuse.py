from collections import Counter

import pytest

from benchmarks.abuse import ATTACKS, Seen, bodies, table

pytestmark = pytest.mark.unit


def test_a_row_tells_the_well_behaved_key_s_times_against_quiet() -> None:
    quiet = Seen([0.010] * 100, 0, Counter(), 96.0, 0.1, [0.002])
    loaded = Seen([0.015] * 99 + [0.030], 1, Counter({429: 5, 0: 2}), 120.0, 0.5, [0.03, *[0.01] * 9])
    rows = table([("", quiet), ("deep", loaded)]).splitlines()
    assert rows[2].startswith("| quiet | 100 of 100 | 10.0 | 10.0 | 10.0 | 1.0 | 2.0, 0.0 | 96 |")
    assert rows[3].startswith("| deep | 100 of 101 | 15.0 |")
    assert rows[3].endswith("| 30.0, 10.0 | 120 | 0.50 | 2 x cut, 5 x 429 |")
    assert "unread streams" in ATTACKS


def test_what_one_body_costs_is_told_for_each() -> None:
    told = [line.split(" | ")[1] for line in bodies().splitlines()[2:]]
    assert told == ["400", "400", "400", "read", "read", "read", "400", "read"]
