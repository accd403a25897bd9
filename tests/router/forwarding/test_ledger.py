import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.answer_check import Answer, Case
from serving.router.forwarding.ledger import TIME_SHARE, Ledger

pytestmark = pytest.mark.unit


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5)), max_size=50), st.integers(1, 4))
def test_a_slice_spends_no_more_than_its_share_beyond_one_answer(
    asked: list[tuple[float, float]], routers: int
) -> None:
    """Of all routers together; each knows its own part alone."""
    ledgers, now_s, spent_s, longest_s = [Ledger(routers) for _ in range(routers)], 0.0, 0.0, 0.0
    for ledger in ledgers:
        ledger.keep(["a"], now_s)
    for number, (pause_s, takes_s) in enumerate(asked):
        now_s += pause_s
        ledger = ledgers[number % routers]
        if ledger.may_ask("a", now_s):
            ledger.spent("a", takes_s)
            spent_s += takes_s
            longest_s = max(longest_s, takes_s)
    assert spent_s <= TIME_SHARE * now_s + routers * longest_s + 1e-9


def test_who_differed_from_whom_is_counted_while_both_are_there() -> None:
    ledger = Ledger()
    ledger.keep(["a", "b", "c"], 0.0)
    sure = {1: -0.1, 2: -9.0}
    for _ in range(2):
        ledger.note(Case({"a": Answer((2,)), "b": Answer((1,), (sure,)), "c": Answer((1,), (sure,))}))
    assert ledger.differed == {frozenset("ab"): 2, frozenset("ac"): 2}
    ledger.keep(["a", "b"], 1.0)
    assert ledger.differed == {frozenset("ab"): 2}


def test_a_slice_that_comes_back_begins_anew() -> None:
    ledger = Ledger()
    ledger.spent("a", 100.0)
    ledger.keep(["a"], 0.0)
    assert not ledger.may_ask("a", 1.0)
    ledger.keep([], 2.0)
    ledger.keep(["a"], 3.0)
    assert ledger.may_ask("a", 3.0)
