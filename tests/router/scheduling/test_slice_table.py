import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import Affinity
from serving.errors import NoSliceError, UnknownModelError
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.unit

LLAMA = "llama"
SHAPE = "v6e 2x4 (2 hosts x 4 chips)"


def table(*entries: SliceRecord, **wanted: int) -> SliceTable:
    wanted = wanted or {LLAMA: 1}
    made = SliceTable(wanted, dict.fromkeys(wanted, SHAPE), pools=dict.fromkeys(wanted, ("", "second")))
    made.update(entries, 0.0)
    return made


def entry(replica: str, state: SliceState = SliceState.SERVING, **more: Any) -> SliceRecord:
    fields = {"model": LLAMA, "phase": "serving", "shape": SHAPE, "beat": 1} | more
    return SliceRecord(replica, state=state, **fields)


def test_the_slice_with_the_fewest_requests_of_this_router_is_chosen() -> None:
    found = table(entry("a"), entry("b"))
    assert found.choose(LLAMA).replica == "a"
    found.begin("a")
    assert found.choose(LLAMA).replica == "b"
    found.end("a")
    assert found.choose(LLAMA).replica == "a"


def test_requests_that_a_slice_has_from_other_routers_count_like_own_ones() -> None:
    found = table(entry("a", running=3, waiting=1), entry("b"))
    for _ in range(4):
        assert found.choose(LLAMA).replica == "b"
        found.begin("b")
    assert found.choose(LLAMA).replica == "a"


def test_own_requests_that_ended_since_the_report_do_not_count_as_others() -> None:
    """A report is up to a beat old, and a beat may pass before it is read."""
    found = table(entry("a"), entry("b"))
    for _ in range(5):
        found.begin("a")
    found.begin("b")
    for _ in range(5):
        found.end("a")
    found.update([entry("a", running=5, beat=2), entry("b", running=1, beat=2)], 0.5)
    assert found.choose(LLAMA).replica == "a"
    found.update([entry("a", running=5, beat=3), entry("b", running=1, beat=3)], 1.0)
    assert found.choose(LLAMA).replica == "a"
    found.update([entry("a", running=5, beat=4), entry("b", running=1, beat=4)], 1.5)
    assert found.choose(LLAMA).replica == "b"


def test_what_slices_say_of_themselves_decides_between_equals() -> None:
    assert table(entry("a", running=1, waiting=1), entry("b", running=1)).choose(LLAMA).replica == "b"


@given(st.lists(st.sampled_from(["begin", "end"]), max_size=60))
def test_requests_spread_evenly_over_equal_slices(steps: list[str]) -> None:
    """Whatever begins and ends, a new request goes to a slice that has no more in flight than any other."""
    found = table(entry("a"), entry("b"), entry("c"))
    running: list[str] = []
    for step in steps:
        if step == "begin":
            chosen = found.choose(LLAMA).replica
            assert found.in_flight(chosen) == min(found.in_flight(replica) for replica in "abc")
            found.begin(chosen)
            running.append(chosen)
        elif running:
            found.end(running.pop(0))
        assert {replica: found.in_flight(replica) for replica in "abc"} == {
            replica: running.count(replica) for replica in "abc"
        }


@pytest.mark.parametrize("state", [SliceState.STARTING, SliceState.DRAINING, SliceState.LOST])
def test_only_a_slice_that_serves_is_chosen(state: SliceState) -> None:
    assert table(entry("a", state), entry("b")).choose(LLAMA).replica == "b"


def chat(*said: str, headers: tuple[tuple[bytes, bytes], ...] = (), **fields: Any) -> InferenceRequest:
    """A conversation of user and assistant in turn."""
    roles = itertools.cycle(["user", "assistant"])
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return InferenceRequest(
        LLAMA, "/v1/chat/completions", b"", {"messages": messages, **fields}, headers=headers
    )


def pass_beats(found: SliceTable, *replicas: str) -> None:
    """What was sent has been computed."""
    for beat in (2, 3):
        found.update([entry(replica, beat=beat) for replica in replicas], beat / 2)


def words(seed: str, letters: int = 4000) -> str:
    return (seed + " ") * (letters // (len(seed) + 1))


def test_a_conversation_goes_back_to_its_slice_though_another_is_less_loaded() -> None:
    found = table(entry("a"), entry("b"), entry("c"))
    first = found.choose(LLAMA, request=chat(words("one"))).replica
    for _ in range(3):
        found.begin(first)
    pass_beats(found, "a", "b", "c")
    assert found.choose(LLAMA, request=chat(words("one"), words("two"), words("three"))).replica == first
    assert found.choose(LLAMA, request=chat(words("another"))).replica != first


def test_a_hot_prefix_spreads_once_its_slice_has_more_than_the_brake_allows() -> None:
    found = table(entry("a"), entry("b"))
    taken = Counter()
    for number in range(40):
        chosen = found.choose(
            LLAMA, request=chat(words("a system prompt that all share"), str(number))
        ).replica
        found.begin(chosen)
        taken[chosen] += 1
        assert abs(taken["a"] - taken["b"]) <= 8
    assert min(taken.values()) > 10


def test_nobody_queues_behind_a_hot_prefix() -> None:
    found = table(entry("a"), entry("b"))
    hot = found.choose(LLAMA, request=chat(words("hot"))).replica
    other = "b" if hot == "a" else "a"
    found.begin(hot)
    found.begin(other)
    found.begin(hot)
    assert found.choose(LLAMA, request=chat(words("hot"))).replica == hot
    found.update([entry(hot, waiting=5, running=1, beat=2), entry(other, beat=2)], 0.5)
    assert found.choose(LLAMA, request=chat(words("hot"))).replica == other


def test_a_long_prompt_keeps_others_away_until_it_is_computed() -> None:
    found = table(entry("a"), entry("b"))
    found.begin(busy := found.choose(LLAMA, request=chat(words("long", 20_000))).replica)
    idle = "b" if busy == "a" else "a"
    for _ in range(3):
        found.begin(idle)
    assert found.choose(LLAMA, request=chat("short")).replica == idle
    pass_beats(found, "a", "b")
    assert found.choose(LLAMA, request=chat("short")).replica == busy


def test_what_a_lost_slice_had_is_forgotten_with_it() -> None:
    found = table(entry("a"), entry("b"))
    first = found.choose(LLAMA, request=chat(words("one"))).replica
    other = "b" if first == "a" else "a"
    found.update([entry(other)], 1.0)
    found.update([entry("a"), entry("b")], 2.0)
    found.begin(first)
    assert found.choose(LLAMA, request=chat(words("one"))).replica == other


@pytest.mark.parametrize(
    "tied",
    [
        {"user": "7"},
        {"prompt_cache_key": "7"},
        {"headers": ((b"x-session-id", b"7"),)},
    ],
)
def test_a_session_goes_back_to_its_slice_whatever_it_says(tied: dict[str, Any]) -> None:
    found = table(entry("a"), entry("b"), entry("c"))
    first = found.choose(LLAMA, request=chat("one", **tied)).replica
    found.begin(first)
    assert found.choose(LLAMA, request=chat("two", **tied)).replica == first
    assert found.choose(LLAMA, request=chat("two")).replica != first


def test_an_adapter_that_was_added_is_asked_of_slices_alone_that_have_been_made_anew() -> None:
    """While the change rolled, old slices answered that there is no such model."""
    found = SliceTable({LLAMA: 2}, {LLAMA: SHAPE}, adapters={"sql": LLAMA, "law": LLAMA})
    asked = InferenceRequest(LLAMA, "/v1/chat/completions", b"", {"model": "sql"})
    found.update([entry("old", adapters=("law",), slice="slice-0")], 0.0)
    with pytest.raises(NoSliceError, match="slice slice-0 does not have the adapter 'sql' yet; try again"):
        found.choose(LLAMA, request=asked)
    assert found.choose(LLAMA).replica == "old"
    found.update([entry("old", adapters=("law",)), entry("new", adapters=("law", "sql"))], 0.5)
    found.begin("new")
    assert found.choose(LLAMA, request=asked).replica == "new"
    assert found.choose(LLAMA).replica == "old"
    found.update([entry("old", adapters=("law",))], 1.0)
    found.update([entry("silent about adapters")], 1.5)
    assert found.choose(LLAMA, request=asked).replica == "silent about adapters"


def test_an_adapters_requests_go_where_it_is_on_the_chips_already() -> None:
    found = SliceTable({LLAMA: 1}, {LLAMA: SHAPE}, adapters={"sql": LLAMA})
    found.update([entry("a"), entry("b"), entry("c")], 0.0)
    assert found.resolve("sql") == LLAMA
    first = found.choose(LLAMA, request=chat("one", model="sql")).replica
    found.begin(first)
    assert found.choose(LLAMA, request=chat("two", model="sql")).replica == first
    assert found.choose(LLAMA, request=chat("two", model=LLAMA)).replica != first


def test_without_affinity_the_least_loaded_is_chosen_whatever_is_asked() -> None:
    found = SliceTable({LLAMA: 1}, {LLAMA: SHAPE}, affinity=Affinity.NONE)
    found.update([entry("a"), entry("b")], 0.0)
    found.begin(found.choose(LLAMA, request=chat(words("one"))).replica)
    assert found.choose(LLAMA, request=chat(words("one"))).replica == "b"


def test_two_routers_agree_on_a_conversations_slice_without_talking() -> None:
    tables = []
    for _ in range(2):
        each = SliceTable({LLAMA: 1}, {LLAMA: SHAPE}, routers=2)
        each.update([entry(replica) for replica in "abcdef"], 0.0)
        tables.append(each)
    for number in range(20):
        begun = tables[0].choose(LLAMA, request=chat(words(f"talk {number}"))).replica
        later = chat(words(f"talk {number}"), words("answer"), "and then?")
        assert tables[1].choose(LLAMA, request=later).replica == begun
        for each in tables:
            pass_beats(each, *"abcdef")
        tables[1].begin(begun)  # and though that one is a little busier
        assert tables[1].choose(LLAMA, request=chat(*[words(f"talk {number}")] * 3)).replica == begun
        tables[1].end(begun)
        for each in tables:
            pass_beats(each, *"abcdef")


def test_a_slice_that_gives_tokens_much_more_slowly_gets_fewer_requests() -> None:
    found = table(entry("a"), entry("b"), entry("c"))
    for beat in range(2, 12):
        reports = [
            entry(replica, running=4, beat=beat, output_tokens=beat * pace)
            for replica, pace in (("a", 20), ("b", 60), ("c", 66))
        ]
        found.update(reports, beat * 0.5)
    taken = Counter()
    for _ in range(30):
        chosen = found.choose(LLAMA).replica
        found.begin(chosen)
        taken[chosen] += 1
    assert taken["a"] < taken["b"] / 2
    assert abs(taken["b"] - taken["c"]) <= 1


def test_the_next_pool_is_asked_where_the_preferred_is_full_and_only_then() -> None:
    def preferred(**load: Any) -> str:
        found = table(entry("a", running=9, **load), entry("b", pool="second"))
        return found.choose(LLAMA).replica

    assert preferred() == "a"
    assert preferred(waiting=1) == "b"
    assert preferred(kv_usage=0.95) == "b"
    assert table(entry("a", waiting=9), entry("b", pool="second", waiting=3)).choose(LLAMA).replica == "b"
    assert table(entry("a", SliceState.LOST), entry("b", pool="second")).choose(LLAMA).replica == "b"


def test_a_slice_of_another_model_is_never_chosen() -> None:
    found = table(entry("a", model="qwen"), entry("b"), llama=1, qwen=1)
    assert found.choose("qwen").replica == "a"
    assert found.choose(LLAMA).replica == "b"


def test_a_slice_tried_already_is_not_tried_again() -> None:
    found = table(entry("a"), entry("b"))
    assert found.choose(LLAMA, ["a"]).replica == "b"
    with pytest.raises(NoSliceError):
        found.choose(LLAMA, ["a", "b"])


@pytest.mark.parametrize("name", ["gpt-4", 7, ["llama"], True])
def test_an_unknown_model_is_answered_with_those_there_are(name: object) -> None:
    with pytest.raises(UnknownModelError) as refusal:
        table(llama=1, qwen=1).resolve(name)
    assert refusal.value.message == f"The model {name!r} does not exist. Models served here: llama, qwen."


def test_a_very_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(UnknownModelError) as refusal:
        table().resolve("x" * 1_000_000)
    assert len(refusal.value.message) < 300


@pytest.mark.parametrize("name", [None, ""])
def test_a_request_without_a_model_means_the_only_one(name: str | None) -> None:
    assert table().resolve(name) == LLAMA
    with pytest.raises(UnknownModelError, match="names no model"):
        table(llama=1, qwen=1).resolve(name)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([], f"No slice of 'llama' is ready: it waits for a free {SHAPE} slice."),
        (
            [entry("a", SliceState.STARTING, phase="loading weights", slice="slice-0")],
            "No slice of 'llama' is ready: one on slice slice-0 is loading weights; try again shortly.",
        ),
        (
            [entry("a", SliceState.LOST, slice="slice-0", reason="host 1 is gone")],
            f"No slice of 'llama' is ready: one on slice slice-0 was lost (host 1 is gone); it waits for a free {SHAPE} slice.",
        ),
    ],
)
def test_where_no_slice_is_ready_the_error_says_what_is_waited_for(
    entries: list[SliceRecord], says: str
) -> None:
    with pytest.raises(NoSliceError) as refusal:
        table(*entries).choose(LLAMA)
    assert refusal.value.message == says


def test_a_slice_that_was_left_out_is_not_waited_for_as_if_no_slice_were_free() -> None:
    found = table(entry("a", slice="slice-0"))
    with pytest.raises(NoSliceError) as refusal:
        found.choose(LLAMA, ["a"])
    assert refusal.value.message == (
        "No slice of 'llama' is ready: one on slice slice-0 has just failed to answer; try again shortly."
    )


def test_missing_slices_are_counted_from_when_they_went() -> None:
    """A lost slice counts as missing, one that starts or drains as there."""
    found = table(entry("a"), entry("b"), llama=2)
    assert found.wanted(5.0)[0].missing == 0
    found.update([entry("a"), entry("b", SliceState.LOST)], 10.0)
    found.update([entry("a")], 11.0)
    assert dataclasses.astuple(found.wanted(14.5)[0]) == (LLAMA, SHAPE, 2, 1, 4.5, "", "")
    found.update([entry("a"), entry("c", SliceState.STARTING)], 20.0)
    assert dataclasses.astuple(found.wanted(21.0)[0]) == (LLAMA, SHAPE, 2, 0, 0.0, "", "")
    found.update([entry("a")], 30.0)
    assert found.wanted(31.0)[0].missing_for_s == 1.0


def test_what_only_fills_a_seat_goes_to_the_cheapest_pool_that_has_one() -> None:
    pools = ("first", "cheap", "dear")
    dollars = {(LLAMA, pool): cost for pool, cost in zip(pools, (2.0, 1.0, 3.0), strict=True)}
    seats = dict.fromkeys(dollars, 1)
    found = SliceTable({LLAMA: 1}, {LLAMA: SHAPE}, pools={LLAMA: pools}, seats=seats, dollars=dollars)
    found.update([entry(pool, pool=pool) for pool in pools], 0.0)
    line = InferenceRequest(LLAMA, "/v1/completions", b"", {"prompt": "a"}, fills=True)
    assert found.choose(LLAMA, (), dataclasses.replace(line, fills=False)).replica == "first"
    for replica in ("cheap", "first", "dear"):
        assert found.choose(LLAMA, (), line).replica == replica
        found.begin(replica)


def test_a_slice_whose_seats_are_taken_gets_no_request_that_another_has_a_seat_for() -> None:
    """A cache, or less to read, is not worth the engine's queue."""
    wanted = {LLAMA: 1}
    found = SliceTable(wanted, {LLAMA: SHAPE}, pools={LLAMA: ("", "second")}, seats={(LLAMA, ""): 2})
    found.update([entry("a"), entry("b"), entry("c", pool="second")], 0.0)
    talk = InferenceRequest(LLAMA, "/v1/completions", b"", {"prompt": "long " * 4000, "user": "same"})
    first = found.choose(LLAMA, (), talk).replica
    other = {"a": "b", "b": "a"}[first]
    for _ in range(2):
        assert found.choose(LLAMA, (), talk).replica == first
        found.begin(first)
    assert found.choose(LLAMA, (), talk).replica == other
    found.begin(other)
    found.begin(other)
    assert found.choose(LLAMA, (), talk).replica == "c"
    found.end(first)
    assert found.choose(LLAMA, (), talk).replica == first
    found.update([entry("a", beat=2), entry("b", beat=2, running=2)], 0.5)
    assert found.choose(LLAMA, ("c",), talk).replica == first


class Filled:
    """Slices that read 1,000 tokens a second; lines and requests of other texts each, at a time of the test's."""

    def __init__(self, slices: int, reads: float = 1000.0) -> None:
        self.now_s = 100.0
        self.table = SliceTable(
            {LLAMA: slices}, {LLAMA: SHAPE}, reads={(LLAMA, ""): reads}, clock=lambda: self.now_s
        )
        self.table.update([entry(f"s{at}") for at in range(slices)], 0.0)
        self._texts = itertools.count()

    def sent(self, *, fills: bool, words: int = 800) -> str:
        text = f"{next(self._texts)} " + "word " * words
        request = InferenceRequest(LLAMA, "/v1/completions", b"", {"prompt": text}, fills=fills)
        chosen = self.table.choose(LLAMA, (), request).replica
        self.table.begin(chosen)
        return chosen


def test_requests_avoid_a_slice_for_as_long_as_it_reads_a_line() -> None:
    found = Filled(2)
    line = found.sent(fills=True)
    (other,) = {"s0", "s1"} - {line}
    assert [found.sent(fills=False, words=0) for _ in range(3)] == [other] * 3
    found.now_s += 5
    assert [found.sent(fills=False, words=0) for _ in range(2)] == [line] * 2


def test_lines_that_a_slice_reads_one_after_the_other_are_avoided_until_the_last_is_read() -> None:
    found = Filled(1)
    for _ in range(2):
        found.sent(fills=True)
    found.table.update([entry("s0"), entry("s1", running=4)], 0.0)
    found.now_s += 1.5
    assert found.sent(fills=False, words=0) == "s1"
    found.now_s += 1.5
    assert found.sent(fills=False, words=0) == "s0"


def test_a_slice_that_reads_a_line_is_chosen_for_a_longer_prompt_that_it_has() -> None:
    found = Filled(2)
    talk = InferenceRequest(LLAMA, "/v1/completions", b"", {"prompt": "long " * 4000})
    home = found.table.choose(LLAMA, (), talk).replica
    (other,) = {"s0", "s1"} - {home}
    found.now_s += 20  # it has read that
    for beat in (2, 3):
        found.table.update([entry("s0", beat=beat), entry("s1", beat=beat)], beat / 2)
    line = InferenceRequest(LLAMA, "/v1/completions", b"", {"prompt": "word " * 800}, fills=True)
    assert found.table.choose(LLAMA, (other,), line).replica == home
    found.table.begin(home)
    assert found.sent(fills=False, words=0) == other
    assert found.table.choose(LLAMA, (), talk).replica == home


def test_requests_avoid_a_slice_while_it_reads_a_request_and_no_longer() -> None:
    found = Filled(2)
    found.table.update([entry("s0"), entry("s1", running=2)], 0.0)
    assert found.sent(fills=False) == "s0"
    found.now_s += 0.5
    assert found.sent(fills=False, words=0) == "s1"
    found.now_s += 1.0
    assert found.sent(fills=False, words=0) == "s0"


def test_a_slice_whose_requests_are_over_reads_nothing() -> None:
    found = Filled(2)
    first = found.sent(fills=False)
    (other,) = {"s0", "s1"} - {first}
    found.table.begin(other)
    assert found.sent(fills=False, words=0) == other
    found.table.end(first)
    assert found.sent(fills=False, words=0) == first


def test_a_slice_in_the_place_of_one_that_left_has_read_everything() -> None:
    found = Filled(1)
    found.sent(fills=False)
    found.table.update([entry("new")], 1.0)
    found.table.update([entry("new"), entry("loaded", running=2)], 1.0)
    assert found.sent(fills=False, words=0) == "new"


def test_a_slice_that_is_faster_than_its_plan_is_taken_to_read_for_ten_seconds_at_most() -> None:
    found = Filled(2, reads=1.0)
    first = found.sent(fills=False)
    found.now_s += 10.5
    found.table.begin("s1" if first == "s0" else "s0")
    found.table.begin("s1" if first == "s0" else "s0")
    assert found.sent(fills=False, words=0) == first


def test_a_model_is_asked_where_requests_come_that_are_no_lines() -> None:
    found = Filled(1)
    assert not found.table.is_asked(LLAMA)
    found.sent(fills=True)
    found.table.choose(LLAMA)  # a probe
    assert not found.table.is_asked(LLAMA)
    found.sent(fills=False)
    found.now_s += 9
    assert found.table.is_asked(LLAMA)
    found.now_s += 2
    assert not found.table.is_asked(LLAMA)
