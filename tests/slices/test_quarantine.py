from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.slices import quarantine
from serving.state.records import SliceFailures, SliceRecord, SliceState

pytestmark = pytest.mark.unit

HOSTS = ("10.0.0.1", "10.0.0.10")
POD_TYPE = "v6e-8"


def entry(
    replica: str, slice_: str = "a", state: SliceState = SliceState.STARTING, **more: Any
) -> SliceRecord:
    fields = {
        "phase": "",
        "shape": "v6e 2x4",
        "slice": slice_,
        "hosts": HOSTS,
        "version": "1",
        "pod_type": POD_TYPE,
    } | more
    return SliceRecord(replica, "llama", state, **fields)


ELSEWHERE = entry("well", "b", SliceState.SERVING)


def after(*failures: tuple[float, str], elsewhere: bool = True) -> list[SliceFailures]:
    """The records after starts that failed at these times for these reasons."""
    known: dict[str, SliceFailures] = {}
    for at, reason in failures:
        entries = [ELSEWHERE] if elsewhere else []
        record = quarantine.failed(entry(f"r{at}"), reason, at, known.values(), entries)
        known[record.host] = record
    return list(known.values())


def left_out(
    known: list[SliceFailures],
    now: float,
    version: str = "1",
    pod_type: str = POD_TYPE,
    free: tuple[str, ...] = ("a", "b"),
) -> set[str]:
    return set(quarantine.left_out(known, free, pod_type, version, now))


def test_one_failure_may_be_an_accident_and_a_second_on_the_same_host_is_not() -> None:
    assert left_out(after((100, "host 1 (10.0.0.10) is gone")), 101) == set()
    twice = after((100, "host 1 (10.0.0.10) is gone"), (200, "RayWorkerProc on 10.0.0.10 died"))
    assert left_out(twice, 201) == {"a"}
    assert [record.host for record in twice] == ["10.0.0.10"]


def test_failures_of_two_hosts_are_told_apart() -> None:
    assert (
        left_out(after((100, "host 0 (10.0.0.1) is gone"), (200, "host 1 (10.0.0.10) is gone")), 201) == set()
    )


@pytest.mark.parametrize(
    ("reason", "host"),
    [
        ("host 1 (10.0.0.10) of slice a has 2 GB free", "10.0.0.10"),
        ("RayWorkerProc on 10.0.0.10 died (x)", "10.0.0.10"),
        ("10.0.0.10: no route", "10.0.0.10"),
        ("the engine did not start: 110.0.0.10", "10.0.0.1"),
        ("", "10.0.0.1"),
    ],
)
def test_the_host_that_a_reason_names_is_blamed_else_worker_0(reason: str, host: str) -> None:
    assert quarantine.blamed(reason, HOSTS) == host


def test_each_further_failure_doubles_the_time_up_to_an_hour() -> None:
    known: list[SliceFailures] = after((0, ""))
    times = []
    for at in range(1, 12):
        known = [quarantine.failed(entry(f"r{at}"), "", at, known, [ELSEWHERE])]
        times.append(quarantine.until(known[0]) - at)
    assert times == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600, 3600, 3600]


def test_a_slice_is_tried_again_once_its_time_is_over() -> None:
    twice = after((100, ""), (200, ""))
    assert left_out(twice, 259) == {"a"}
    assert left_out(twice, 260) == set()


def test_an_engine_that_serves_nowhere_may_be_at_fault_so_a_changed_one_is_tried_everywhere() -> None:
    twice = after((100, ""), (200, ""), elsewhere=False)
    assert left_out(twice, 201, version="1") == {"a"}
    assert left_out(twice, 201, version="2") == set()
    assert left_out(after((100, ""), (200, "")), 201, version="2") == {"a"}


def test_an_engine_that_starts_nowhere_is_not_kept_from_failing_as_often_as_serve_lets_it() -> None:
    twice = after((100, ""), (200, ""), elsewhere=False)
    assert left_out(twice, 201, free=("a",)) == set()
    of_b = quarantine.failed(entry("rb", "b"), "", 200, [], [])
    of_b = quarantine.failed(entry("rb2", "b"), "", 201, [of_b], [])
    assert left_out([*twice, of_b], 202) == set()
    assert left_out([*twice, of_b], 202, free=("a", "b", "c")) == {"a", "b"}


def test_an_unfit_host_is_left_out_though_there_is_no_other() -> None:
    twice = after((100, ""), (200, ""))
    assert left_out(twice, 201, free=("a",)) == {"a"}


def test_a_host_that_is_found_unfit_is_left_out_for_every_engine() -> None:
    known: list[SliceFailures] = []
    for at in (100, 200):
        known = [quarantine.failed(entry(f"r{at}"), "", at, known, [], host_at_fault=True)]
    assert left_out(known, 201, version="another") == {"a"}


def test_failures_of_another_version_do_not_add_up() -> None:
    known = after((100, ""), elsewhere=False)
    changed = quarantine.failed(entry("r2", version="2"), "", 200, known, [])
    assert changed.failures == 1


def test_slices_of_another_shape_need_not_be_named() -> None:
    assert left_out(after((100, ""), (200, "")), 201, pod_type="v6e-16") == set()


def test_a_start_that_several_routers_report_counts_once() -> None:
    (known,) = after((100, ""))
    assert quarantine.failed(entry("r100"), "another", 150, [known], [ELSEWHERE]) is known


def test_records_of_slices_that_nobody_tried_for_a_day_are_forgotten() -> None:
    known = after((0, ""))
    assert quarantine.forgotten(known, 24 * 3600) == []
    assert quarantine.forgotten(known, 24 * 3600 + 1) == known


def test_of_very_many_hosts_that_failed_the_oldest_are_forgotten() -> None:
    """As of hosts that may be taken away, each of which comes back under another address."""
    (one,) = after((0, ""))
    known = [replace(one, host=f"{number}", at=float(number)) for number in range(quarantine.MOST + 3)]
    assert [record.host for record in quarantine.forgotten(known, 2000.0)] == ["2", "1", "0"]


@given(st.lists(st.floats(1, 5000), min_size=1, max_size=30))
def test_no_quarantine_is_for_ever_and_none_ends_before_a_minute(gaps: list[float]) -> None:
    known: list[SliceFailures] = []
    now = 0.0
    for number, gap in enumerate(gaps):
        now += gap
        known = [quarantine.failed(entry(str(number)), "", now, known, [ELSEWHERE])]
    for_s = quarantine.until(known[0]) - now
    assert (for_s < 0) if len(gaps) == 1 else (59.9 <= for_s <= 3600.1)


def early(replica: str, at: float, known: list[SliceFailures], *, sound_since: float = -1e6) -> SliceFailures:
    """A record after an engine died early, while another slice has served since then."""
    others = [entry("well", "b", SliceState.SERVING, since=sound_since)]
    return quarantine.failed(entry(replica), "", at, known, others, early=True)


def test_engines_that_die_early_one_after_the_other_put_the_slice_into_quarantine() -> None:
    first = early("r1", 100, [])
    assert left_out([first], 101) == set()
    second = early("r2", 300, [first])
    assert left_out([second], 301, free=("a",)) == {"a"}
    assert quarantine.until(early("r3", 700, [second])) - 700 == 120


def test_engines_that_die_early_where_all_slices_are_young_leave_the_last_free_slice_in_use() -> None:
    """Requests that nobody finds guilty may end them all."""
    first = early("r1", 100, [], sound_since=90)
    second = early("r2", 300, [first], sound_since=250)
    assert left_out([second], 301, free=("a", "b")) == {"a"}
    assert left_out([second], 301, free=("a",)) == set()


def test_deaths_while_the_others_were_young_count_once_the_others_are_sound() -> None:
    first = early("r1", 100, [], sound_since=0)
    assert early("r2", 700, [first], sound_since=0).failures == 2


def test_a_beginning_to_serve_forgets_failed_starts_and_only_lasting_service_early_deaths() -> None:
    (start,) = after((100, ""))
    death = early("r2", 200, [])
    both = early("r3", 300, [start])
    own = entry("r4", state=SliceState.SERVING)
    assert [quarantine.over(record, own, early=False) for record in (start, death, both)] == [
        True,
        False,
        False,
    ]
    assert [quarantine.over(record, own, early=True) for record in (start, death, both)] == [
        False,
        True,
        True,
    ]
    then_a_start = quarantine.failed(entry("r5"), "", 400, [death], [ELSEWHERE])
    assert not quarantine.over(then_a_start, own, early=False)


def test_a_request_that_is_guilty_of_a_death_leaves_the_slice_one_failure_fewer_once() -> None:
    first = early("r1", 100, [])
    assert [left.failures for left in quarantine.explained([first], {"r1"})] == [0]
    second = early("r2", 300, [first])
    (left,) = quarantine.explained([second], {"r1", "r2"})
    assert left.failures == 1
    assert quarantine.explained([left], {"r1", "r2"}) == []
    assert quarantine.explained(after((100, "")), {"r100"}) == []
