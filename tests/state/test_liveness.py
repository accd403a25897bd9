import dataclasses

import pytest

from serving.state.liveness import Liveness
from serving.state.records import Demand, SliceRecord, SliceState
from serving.timings import TIMINGS

pytestmark = pytest.mark.unit


def entry(beat: int, state: SliceState = SliceState.SERVING, replica: str = "a") -> SliceRecord:
    return SliceRecord(replica, "llama", state, "serving", "v6e 2x4", beat=beat)


def test_a_slice_that_beats_is_passed_on_as_it_is() -> None:
    reader = Liveness()
    for beat in range(10):
        assert reader.slices([entry(beat)], now_s=float(beat)) == ([entry(beat)], [])


def looked(
    reader: Liveness, found: list[SliceRecord], from_s: float, until_s: float
) -> tuple[list[SliceRecord], list[SliceRecord]]:
    """What a reader says in the end that looked every second and found the same each time."""
    now_s = from_s
    while now_s < until_s:
        reader.slices(found, now_s)
        now_s += 1
    return reader.slices(found, until_s)


def test_a_slice_whose_beat_stands_still_is_lost() -> None:
    reader = Liveness()
    assert looked(reader, [entry(1)], 100.0, 100.0 + TIMINGS.stale_s)[0] == [entry(1)]
    (marked,), forgotten = looked(reader, [entry(1)], 103.0, 104.0)
    assert (marked.state, marked.reason, forgotten) == (SliceState.LOST, "no sign of life for 4 s", [])


def test_what_a_reader_sees_first_counts_as_alive() -> None:
    """A reader that has just started can't know for how long a beat has stood still."""
    assert Liveness().slices([entry(1)], now_s=1e6) == ([entry(1)], [])


def test_a_time_without_a_look_is_held_against_nobody() -> None:
    """While the head restarts nobody can write either; what beat before is found as it was, and goes on."""
    reader = Liveness()
    for beat in range(3):
        reader.slices([entry(beat)], now_s=float(beat))
    assert reader.slices([entry(2)], now_s=60.0) == ([entry(2)], [])
    assert reader.slices([entry(3)], now_s=61.0) == ([entry(3)], [])
    assert looked(reader, [entry(3)], 62.0, 64.0)[0][0].state is SliceState.LOST


def test_who_looks_seldom_still_sees_who_is_lost() -> None:
    """As scaling does with thousands of slices on the board."""
    reader = Liveness()
    states = [reader.slices([entry(1)], now_s)[0][0].state for now_s in (0.0, 4.0, 8.0)]
    assert states == [SliceState.SERVING, SliceState.SERVING, SliceState.LOST]


def test_a_slice_that_beats_again_is_back() -> None:
    reader = Liveness()
    assert looked(reader, [entry(1)], 0.0, 7.0)[0][0].state is SliceState.LOST
    assert reader.slices([entry(2)], now_s=10.0)[0] == [entry(2)]
    assert reader.slices([entry(2)], now_s=10.0 + TIMINGS.stale_s)[0] == [entry(2)]


def test_a_slice_that_said_itself_why_it_is_lost_keeps_its_reason() -> None:
    lost = SliceRecord("a", "llama", SliceState.LOST, "lost", "v6e 2x4", reason="host 1 is gone")
    assert looked(Liveness(), [lost], 0.0, 7.0)[0] == [lost]


@pytest.mark.parametrize("state", SliceState)
def test_a_slice_long_silent_is_forgotten_whatever_it_last_said(state: SliceState) -> None:
    reader = Liveness()
    looked(reader, [entry(1, state), entry(1, replica="b")], 0.0, TIMINGS.forgotten_s)
    live, forgotten = reader.slices([entry(1, state), entry(2, replica="b")], now_s=TIMINGS.forgotten_s + 1)
    assert (live, forgotten) == ([entry(2, replica="b")], [entry(1, state)])


def test_a_router_whose_beat_stands_still_is_heard_no_more_and_then_forgotten() -> None:
    reader, demand = Liveness(), Demand("one", "llama", held=7, beat=1)
    said = [reader.routers([demand], float(now_s)) for now_s in range(12)]
    assert said[2] == ([demand], [])
    assert said[4] == ([], [])
    assert said[11] == ([], [demand])


def test_routers_whose_store_takes_seconds_hear_each_other() -> None:
    """A look takes as long as a put: between two looks there may be no beat. Who is gone is gone after three."""
    reader = Liveness()
    beats = [1, 1, 2, 2, 3, 4, 4, 5, 5, 5, 5, 5, 5]
    heard = [
        bool(reader.routers([Demand("r", "m", beat=beat)], 3.5 * look)[0]) for look, beat in enumerate(beats)
    ]
    assert heard == [True] * 11 + [False] * 2


def test_a_replica_that_left_the_board_leaves_nothing_behind() -> None:
    reader = Liveness()
    leaving = entry(1, SliceState.DRAINING)
    reader.slices([leaving], now_s=0.0)
    assert reader.slices([], now_s=1.0) == ([], [])
    assert reader.slices([leaving], now_s=100.0) == ([leaving], [])


def test_a_start_that_left_the_board_is_neither_lost_nor_forgotten() -> None:
    """Serve stopped it."""
    reader, starts = Liveness(), entry(1, SliceState.STARTING)
    reader.slices([starts], now_s=0.0)
    assert reader.slices([], now_s=1.0) == ([starts], [])
    assert looked(reader, [], 2.0, 4.0) == ([], [])


SILENT = SliceRecord(
    "a", "llama", SliceState.SERVING, "serving", "v6e 2x4", beat=1, address="http://10.0.0.1"
)


def asked(
    reader: Liveness, record: SliceRecord, until_s: float, *, answers: bool, from_s: float = 0.0
) -> SliceState | None:
    """What a router makes of a record that stands still, looking every half second; None: forgotten."""
    now_s = from_s
    while True:
        marked, _ = reader.slices([record], now_s)
        for slice_ in reader.silent:
            if answers:
                reader.answered(slice_.replica, now_s + 0.1)
            else:
                reader.unanswered(slice_.replica)
        if now_s >= until_s:
            return marked[0].state if marked else None
        now_s += 0.5


def test_a_slice_that_is_silent_in_the_store_but_answers_serves_on() -> None:
    """As when its put takes seconds, or the head comes back slowly."""
    assert asked(Liveness(asks=True), SILENT, 120.0, answers=True) is SliceState.SERVING


def test_a_slice_that_does_not_answer_either_is_lost_as_soon_as_by_its_silence_and_then_forgotten() -> None:
    assert asked(Liveness(asks=True), SILENT, TIMINGS.stale_s, answers=False) is SliceState.SERVING
    assert asked(Liveness(asks=True), SILENT, TIMINGS.stale_s + 0.5, answers=False) is SliceState.LOST
    assert asked(Liveness(asks=True), SILENT, TIMINGS.forgotten_s + 0.5, answers=False) is None


def test_without_an_answer_yet_a_slice_is_not_lost_and_is_asked_once() -> None:
    reader, silent = Liveness(asks=True), []
    for step in range(20):
        marked, _ = reader.slices([SILENT], step / 2)
        silent += reader.silent
        assert marked == [SILENT]
    assert silent == [SILENT]


def test_a_slice_that_answers_again_is_back() -> None:
    reader = Liveness(asks=True)
    assert asked(reader, SILENT, 5.0, answers=False) is SliceState.LOST
    assert asked(reader, SILENT, 6.0, answers=True, from_s=5.5) is SliceState.SERVING


def test_a_loss_that_a_slice_wrote_itself_is_not_asked_about() -> None:
    reader = Liveness(asks=True)
    lost = dataclasses.replace(SILENT, state=SliceState.LOST)
    assert asked(reader, lost, 5.0, answers=True) is SliceState.LOST
    assert reader.silent == []


def test_a_slice_without_an_address_can_t_be_asked() -> None:
    assert asked(Liveness(asks=True), entry(1), 3.0, answers=True) is SliceState.LOST


def test_a_slice_at_whose_address_nobody_listens_is_lost_at_the_next_look() -> None:
    reader = Liveness(asks=True)
    reader.slices([entry(1)], now_s=0.0)
    reader.ended(["a"])
    (marked,), _ = reader.slices([entry(2)], now_s=0.5)  # its last beat
    assert (marked.state, marked.reason) == (SliceState.LOST, "nobody listens at its address")
    assert reader.slices([entry(2)], now_s=1.0)[0] == [marked]
    assert not reader.silent
    assert looked(reader, [entry(2)], 2.0, 0.5 + TIMINGS.forgotten_s + 1) == ([], [entry(2)])


def test_a_slice_that_beats_on_has_only_closed_its_door() -> None:
    reader = Liveness(asks=True)
    reader.ended(["a"])
    assert reader.slices([entry(1)], now_s=0.0)[0][0].state is SliceState.LOST
    assert reader.slices([entry(2)], now_s=0.5)[0] == [entry(2)]
    assert reader.slices([entry(2)], now_s=1.0)[0] == [entry(2)]


def test_a_slice_that_leaves_as_planned_is_not_lost_when_its_door_closes() -> None:
    reader, leaving = Liveness(asks=True), entry(1, SliceState.DRAINING)
    reader.ended(["a"])
    assert reader.slices([leaving], now_s=0.0)[0] == [leaving]
