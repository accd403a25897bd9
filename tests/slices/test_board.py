import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.slices.board import FORGOTTEN_S, STALE_S, Entry, Reader, State

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


def test_a_slice_whose_beat_stands_still_is_lost() -> None:
    reader = Reader()
    reader.live([entry(1)], now_s=100.0)
    assert reader.live([entry(1)], now_s=100.0 + STALE_S)[0] == [entry(1)]
    (marked,), forgotten = reader.live([entry(1)], now_s=104.0)
    assert (marked.state, marked.reason, forgotten) == (State.LOST, "no sign of life for 4 s", [])


def test_what_a_reader_sees_first_counts_as_alive() -> None:
    """A reader that has just started can't know for how long a beat has stood still."""
    assert Reader().live([entry(1)], now_s=1e6) == ([entry(1)], [])


def test_a_slice_that_beats_again_is_back() -> None:
    reader = Reader()
    reader.live([entry(1)], now_s=0.0)
    assert reader.live([entry(1)], now_s=10.0)[0][0].state is State.LOST
    assert reader.live([entry(2)], now_s=11.0)[0] == [entry(2)]
    assert reader.live([entry(2)], now_s=11.0 + STALE_S)[0] == [entry(2)]


def test_a_slice_that_said_itself_why_it_is_lost_keeps_its_reason() -> None:
    reader = Reader()
    lost = Entry("a", "llama", State.LOST, "lost", "v6e 2x4", reason="host 1 is gone")
    reader.live([lost], now_s=0.0)
    assert reader.live([lost], now_s=10.0)[0] == [lost]


@pytest.mark.parametrize("state", State)
def test_a_slice_long_silent_is_forgotten_whatever_it_last_said(state: State) -> None:
    reader = Reader()
    reader.live([entry(1, state), entry(1, replica="b")], now_s=0.0)
    live, forgotten = reader.live([entry(1, state), entry(2, replica="b")], now_s=FORGOTTEN_S + 1)
    assert (live, forgotten) == ([entry(2, replica="b")], ["a"])


def test_a_replica_that_left_the_board_leaves_nothing_behind() -> None:
    reader = Reader()
    reader.live([entry(1)], now_s=0.0)
    reader.live([], now_s=1.0)
    assert reader.live([entry(1)], now_s=100.0) == ([entry(1)], [])
