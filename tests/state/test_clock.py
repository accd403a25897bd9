import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory_store import MemoryStore, MemoryTable

from serving.state.clock import SharedClock

pytestmark = pytest.mark.unit


def test_before_anybody_has_told_the_time_a_process_goes_by_its_own_clock() -> None:
    assert SharedClock().now(5.0, 1000.0) == 1000.0


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 5)), min_size=1), st.floats(-1e5, 1e5))
def test_the_time_is_at_most_as_late_as_the_freshest_that_was_read_and_never_goes_back(
    reads: list[tuple[float, float]], own: float
) -> None:
    """`own`: what the reader's clock shows at 1,000,000."""
    clock, now, shown = SharedClock(), 1e6, 0.0
    freshest_s = min(age_s for _, age_s in reads)
    for later_s, age_s in reads:
        now += later_s
        clock.heard(now - age_s, own + now - 1e6)
        assert clock.now(own + now - 1e6, 0.0) >= shown - 1e-6
        shown = clock.now(own + now - 1e6, 0.0)
    assert now - freshest_s - 1e-3 <= shown <= now + 1e-3


def test_a_time_that_stands_still_holds_no_reader_up_and_another_teller_s_is_taken_over() -> None:
    clock = SharedClock()
    for now_s in range(300):
        clock.heard(1000.0, float(now_s))  # nobody tells any more
    assert clock.now(300.0, 0.0) == 1300.0
    clock.heard(500.0, 300.0)
    assert clock.now(301.0, 0.0) == 501.0


def test_all_stores_of_a_cluster_have_one_time_whatever_their_hosts_clocks_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = MemoryTable()
    teller, reader = MemoryStore(table), MemoryStore(table)
    teller.tell_time()
    told = teller.now()
    monkeypatch.setattr(time, "time", lambda: told - 3600.0)
    reader.read()
    assert reader.now() == pytest.approx(told, abs=5.0)
    after = MemoryStore(table)  # the controller came back, and its clock was put back meanwhile
    after.tell_time()
    assert after.now() == pytest.approx(told, abs=5.0)
