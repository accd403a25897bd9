import pytest

from serving.engine.grammar_rows import rows_of

pytestmark = pytest.mark.unit


def test_masks_come_in_the_order_of_the_scheduler_not_of_ids() -> None:
    assert list(rows_of(["c", "a"], ["a", "b", "c"], {})) == [2, 0]


def test_a_request_has_a_mask_for_each_drafted_token_and_one_more() -> None:
    assert list(rows_of(["b", "a"], ["a", "b", "c"], {"a": [5, 6], "c": [7]})) == [3, 0, 1, 2]


def test_masks_of_a_request_that_has_left_the_batch_are_passed_over() -> None:
    assert list(rows_of(["x", "b"], ["a", "b"], {"x": [5]})) == [None, None, 1]
