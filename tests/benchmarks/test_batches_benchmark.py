import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.batches import batch_service
from support.simulated_engine import MODEL

from benchmarks.batches import Load, Turn, likely, percentile, play, ratio, report

P99 = partial(percentile, percent=99)


def turns(with_batch_s: float, noise_s: float = 0.0) -> list[Turn]:
    draw = random.Random(1)
    return [
        Turn(kind, [0.1 + kind * with_batch_s + draw.random() * noise_s for _ in range(20)], [0.1])
        for _ in range(5)
        for kind in (False, True)
    ]


@pytest.mark.unit
def test_what_a_batch_costs_is_told_with_how_sure_that_is() -> None:
    same = [*turns(0.0, 0.001)]
    assert ratio(same, P99) == pytest.approx(1.0, abs=0.01)
    least, most = likely(same, P99)
    assert 0.98 < least <= most < 1.02
    assert likely(turns(0.02, 0.001), P99)[0] > 1.15


@pytest.mark.unit
def test_one_slow_turn_shows_in_the_range() -> None:
    some = turns(0.0)
    some[1].first_s = [1.0] * 20
    least, most = likely(some, P99)
    assert (least, most) == (pytest.approx(1.0), pytest.approx(10.0))


@pytest.mark.unit
def test_the_table_has_both_kinds_of_turns() -> None:
    some = turns(0.02)
    some[1].lines, some[3].failed = 100, 2
    rows = report(some, 10.0).splitlines()
    assert rows[2] == "| without a batch | 100 | 0 | 100.0 | 100.0 | 100.0 | 0.0 |"
    assert rows[3] == "| with one | 100 | 2 | 120.0 | 120.0 | 100.0 | 2.0 |"
    assert rows[-1] == "p99 of TTFT with a batch over without: 1.200 (1.200 to 1.200)"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with batch_service(tmp_path) as router:
        yield router


@pytest.mark.http
async def test_turns_with_a_batch_have_its_lines_beside_the_same_requests(address: str) -> None:
    load = Load(MODEL, per_s=20, words=5, tokens=4, lines=5000, line_words=5, line_tokens=16)
    # A line counts once the store has it, which is told every second.
    without, with_one = await play(load, address, turns=2, seconds=3.0, settled_s=0.1)
    assert (without.with_batch, without.lines, without.failed) == (False, 0, 0)
    assert with_one.lines > 0
    assert with_one.failed == 0
    assert with_one.first_s
