import pytest

from serving.metrics import table
from serving.metrics.recorder import Recorder

pytestmark = pytest.mark.unit

LABELS = ("llama", "slice-0", "0")


def test_a_counter_kept_elsewhere_adds_what_it_has_grown_by() -> None:
    recorder = Recorder("blue")
    for stands_at in (10, 10, 25):
        recorder.total(table.SLICE_OUTPUT, stands_at, *LABELS)
    assert recorder._counted[table.SLICE_OUTPUT, LABELS] == 25


def test_a_counter_kept_elsewhere_may_begin_anew() -> None:
    recorder = Recorder("blue")
    for stands_at in (10, 3):
        recorder.total(table.SLICE_OUTPUT, stands_at, *LABELS)
    assert recorder._counted[table.SLICE_OUTPUT, LABELS] == 13


def test_series_that_are_not_named_any_more_end() -> None:
    recorder = Recorder("blue")
    serving, lost = (*LABELS, "serving"), (*LABELS, "lost")
    recorder.set(table.WANTED, 2, "llama")
    recorder.only(table.SLICE_STATE, {serving: 1.0})
    recorder.only(table.SLICE_STATE, {lost: 1.0})
    assert set(recorder._gauges) == {(table.WANTED, ("llama",)), (table.SLICE_STATE, lost)}


def test_what_was_handed_over_is_not_counted_again_and_gauges_are_repeated() -> None:
    recorder = Recorder("blue")
    recorder.add(table.RETRIES, 1, "llama")
    recorder.set(table.WANTED, 2, "llama")
    recorder.flush()
    assert not recorder._counted
    assert recorder._gauges == {(table.WANTED, ("llama",)): 2}


def test_a_value_for_every_label_is_needed() -> None:
    with pytest.raises(ValueError, match="zip"):
        Recorder("blue").observe(table.TTFT, 1.0, "llama")


def test_a_model_may_be_named_in_any_letters() -> None:
    recorder = Recorder("blue")
    recorder.set(table.WANTED, 2, "modèle\u2028")
    recorder.flush()
    series = recorder._series[table.WANTED, ("modèle\u2028",)]
    assert series.info["default_tags"] == {"application": "blue", "model": r"mod\xe8le\u2028"}
