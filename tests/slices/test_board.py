import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.servers import until

from serving.slices import board
from serving.slices.board import FORGOTTEN_S, STALE_S, Demand, Entry, Publisher, Reader, State

pytestmark = pytest.mark.unit

numbers = st.integers(min_value=0, max_value=2**31)
seconds = st.floats(min_value=0, max_value=1e6)
entries = st.builds(
    Entry,
    replica=st.text(),
    model=st.text(),
    state=st.sampled_from(State),
    phase=st.text(),
    shape=st.text(),
    slice=st.text(),
    hosts=st.lists(st.text(), max_size=4).map(tuple),
    address=st.text(),
    simulated=st.booleans(),
    max_model_len=numbers,
    phases=st.lists(st.tuples(st.text(), seconds), max_size=4).map(tuple),
    reason=st.text(),
    running=numbers,
    waiting=numbers,
    kv_usage=seconds,
    prompt_tokens=numbers,
    cached_tokens=numbers,
    output_tokens=numbers,
    pool=numbers,
    beat=numbers,
)


def entry(beat: int, state: State = State.SERVING, replica: str = "a") -> Entry:
    return Entry(replica, "llama", state, "serving", "v6e 2x4", beat=beat)


@given(entries)
def test_an_entry_comes_back_from_the_board_as_it_was(written: Entry) -> None:
    assert Entry.load(written.dump()) == written


def test_a_slice_that_beats_is_passed_on_as_it_is() -> None:
    reader = Reader()
    for beat in range(10):
        assert reader.live([entry(beat)], now_s=float(beat)) == ([entry(beat)], [])


def looked(
    reader: Reader, found: list[Entry], from_s: float, until_s: float
) -> tuple[list[Entry], list[str]]:
    """What a reader says in the end that looked every second and found the same each time."""
    now_s = from_s
    while now_s < until_s:
        reader.live(found, now_s)
        now_s += 1
    return reader.live(found, until_s)


def test_a_slice_whose_beat_stands_still_is_lost() -> None:
    reader = Reader()
    assert looked(reader, [entry(1)], 100.0, 100.0 + STALE_S)[0] == [entry(1)]
    (marked,), forgotten = looked(reader, [entry(1)], 103.0, 104.0)
    assert (marked.state, marked.reason, forgotten) == (State.LOST, "no sign of life for 4 s", [])


def test_what_a_reader_sees_first_counts_as_alive() -> None:
    """A reader that has just started can't know for how long a beat has stood still."""
    assert Reader().live([entry(1)], now_s=1e6) == ([entry(1)], [])


def test_a_time_without_a_look_is_held_against_nobody() -> None:
    """While the head restarts nobody can write either; what beat before is found as it was, and goes on."""
    reader = Reader()
    for beat in range(3):
        reader.live([entry(beat)], now_s=float(beat))
    assert reader.live([entry(2)], now_s=60.0) == ([entry(2)], [])
    assert reader.live([entry(3)], now_s=61.0) == ([entry(3)], [])
    assert looked(reader, [entry(3)], 62.0, 64.0)[0][0].state is State.LOST


def test_who_looks_seldom_still_sees_who_is_lost() -> None:
    """As scaling does with thousands of slices on the board."""
    reader = Reader()
    states = [reader.live([entry(1)], now_s)[0][0].state for now_s in (0.0, 4.0, 8.0)]
    assert states == [State.SERVING, State.SERVING, State.LOST]


def test_a_slice_that_beats_again_is_back() -> None:
    reader = Reader()
    assert looked(reader, [entry(1)], 0.0, 7.0)[0][0].state is State.LOST
    assert reader.live([entry(2)], now_s=10.0)[0] == [entry(2)]
    assert reader.live([entry(2)], now_s=10.0 + STALE_S)[0] == [entry(2)]


def test_a_slice_that_said_itself_why_it_is_lost_keeps_its_reason() -> None:
    lost = Entry("a", "llama", State.LOST, "lost", "v6e 2x4", reason="host 1 is gone")
    assert looked(Reader(), [lost], 0.0, 7.0)[0] == [lost]


@pytest.mark.parametrize("state", State)
def test_a_slice_long_silent_is_forgotten_whatever_it_last_said(state: State) -> None:
    reader = Reader()
    looked(reader, [entry(1, state), entry(1, replica="b")], 0.0, FORGOTTEN_S)
    live, forgotten = reader.live([entry(1, state), entry(2, replica="b")], now_s=FORGOTTEN_S + 1)
    assert (live, forgotten) == ([entry(2, replica="b")], ["a"])


def test_a_router_whose_beat_stands_still_is_heard_no_more_and_then_forgotten() -> None:
    reader, demand = Reader(), Demand("one", "llama", held=7, beat=1)
    said = [reader.asking([demand], float(now_s)) for now_s in range(12)]
    assert said[2] == ([demand], [])
    assert said[3] == ([], [])
    assert said[11] == ([], [demand])


def test_a_replica_that_left_the_board_leaves_nothing_behind() -> None:
    reader = Reader()
    reader.live([entry(1)], now_s=0.0)
    reader.live([], now_s=1.0)
    assert reader.live([entry(1)], now_s=100.0) == ([entry(1)], [])


def test_a_beat_that_cannot_be_written_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def write(one: Entry) -> None:
        if one.beat == 2:
            raise ConnectionError("the head restarts")
        written.append(one.beat)

    monkeypatch.setattr(board, "BEAT_S", 0.001)
    monkeypatch.setattr(board, "write", write)
    monkeypatch.setattr(board, "delete", lambda _: None)
    publisher = Publisher(entry(0))
    until(lambda: len(written) > 3, "beats")
    publisher.close()
    assert written[:3] == [1, 3, 4]
