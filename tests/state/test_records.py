import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.state.board import Board, beat, fixed_part
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.unit

numbers = st.integers(min_value=0, max_value=2**31)
seconds = st.floats(min_value=0, max_value=1e6)
entries = st.builds(
    SliceRecord,
    replica=st.text(),
    model=st.text(),
    state=st.sampled_from(SliceState),
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
    pool=st.text(),
    application=st.text(),
    beat=numbers,
)


@given(entries)
def test_a_record_comes_back_from_the_store_as_it_was(written: SliceRecord) -> None:
    board = Board()
    for _ in board.take({"a": beat(written, 7)}, {"a": fixed_part(written, 7)}):
        pass
    assert board.slices == (written,)
