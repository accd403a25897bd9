import dataclasses

import pytest

from serving.state.board import Board, beat, fixed_part
from serving.state.records import BEATING, SliceRecord, SliceState

pytestmark = pytest.mark.unit

RECORD = SliceRecord(
    "a", "llama", SliceState.SERVING, "serving", "v6e 2x4", address="http://10.0.0.1", beat=1
)


def looked(board: Board, beats: dict[str, bytes], fixed: dict[str, bytes]) -> list[SliceRecord]:
    """A look at a store that has these, as a reader takes it."""
    wanted = board.changed(beats)
    for _ in board.take(beats, {name: fixed[name] for name in wanted if name in fixed}):
        pass
    return list(board.slices)


def test_the_fixed_part_is_read_once_and_again_when_it_has_changed() -> None:
    board = Board()
    fixed = {"a": fixed_part(RECORD, 1)}
    assert looked(board, {"a": beat(RECORD, 1)}, fixed) == [RECORD]
    busy = dataclasses.replace(RECORD, beat=2, running=7, kv_usage=0.5)
    assert board.changed({"a": beat(busy, 1)}) == []
    assert looked(board, {"a": beat(busy, 1)}, {}) == [busy]
    lost = dataclasses.replace(busy, beat=3, state=SliceState.LOST, reason="host 1 is gone")
    assert board.changed({"a": beat(lost, 2)}) == ["a"]
    assert looked(board, {"a": beat(lost, 2)}, {"a": fixed_part(lost, 2)}) == [lost]


def test_a_record_whose_beat_stands_still_is_the_very_same_object() -> None:
    board = Board()
    (first,) = looked(board, {"a": beat(RECORD, 1)}, {"a": fixed_part(RECORD, 1)})
    assert looked(board, {"a": beat(RECORD, 1)}, {})[0] is first


def test_a_slice_without_its_fixed_part_comes_with_the_next_look_and_one_without_a_beat_has_gone() -> None:
    board = Board()
    beats, fixed = {"a": beat(RECORD, 1)}, {"a": fixed_part(RECORD, 1)}
    assert looked(board, beats, {}) == []
    assert looked(board, beats, fixed) == [RECORD]
    assert looked(board, {}, fixed) == []
    assert board.changed(beats) == ["a"]


def test_a_thousand_slices_are_taken_over_in_steps() -> None:
    board = Board()
    records = {str(number): dataclasses.replace(RECORD, replica=str(number)) for number in range(1000)}
    steps = board.take(
        {name: beat(record, 1) for name, record in records.items()},
        {name: fixed_part(record, 1) for name, record in records.items()},
    )
    assert sum(1 for _ in steps) >= 20
    assert board.slices == tuple(records.values())


def test_what_changes_from_beat_to_beat_is_no_more_than_numbers() -> None:
    assert set(BEATING) <= {field.name for field in dataclasses.fields(SliceRecord)}
    assert RECORD.fixed == dataclasses.replace(RECORD, beat=0)
