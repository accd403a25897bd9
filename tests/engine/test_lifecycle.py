"""The table of a replica's life, every pair of it."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.lifecycle import TABLE, Action, Event, Life

pytestmark = pytest.mark.unit

ENDS = {Action.LAST_WORDS, Action.EXIT}
_ENDS_A_START = (Event.STARTED, Event.FAILED, Event.LOST, Event.NOTICE, Event.STOP)


def lived(events: list[Event]) -> tuple[Life, list[Action]]:
    life, done = Life.STARTING, []
    for event in events:
        step = TABLE[life, event]
        life = step.life
        done += step.actions
    return life, done


def test_the_table_knows_every_event_in_every_life() -> None:
    assert TABLE.keys() == set(product(Life, Event))


def test_nothing_happens_once_a_life_is_over() -> None:
    assert all(TABLE[Life.OVER, event].actions == () for event in Event)
    assert all(TABLE[Life.OVER, event].life is Life.OVER for event in Event)


@given(st.lists(st.sampled_from(Event)))
def test_whatever_happens_a_replica_ends_once_and_says_one_thing_of_it(events: list[Event]) -> None:
    life, done = lived(events)
    left_its_start = done[-2:] == [Action.SAY_LEAVING, Action.EXIT]
    assert done.count(Action.SAY_LOST) + done.count(Action.FORGET) + left_its_start == (life is Life.OVER)
    assert done.count(Action.KILL) == (life is Life.OVER)
    assert sum(done.count(action) for action in ENDS) <= 1
    assert done.count(Action.FINISH) <= 1


@given(st.lists(st.sampled_from(Event)), st.sampled_from([Event.NOTICE, Event.STOP]))
def test_a_slice_that_leaves_by_plan_is_never_told_of_as_lost(events: list[Event], plan: Event) -> None:
    _, done = lived([Event.STARTED, plan, *events])
    assert Action.SAY_LOST not in done


@given(st.lists(st.sampled_from(Event)))
def test_no_order_of_events_leaves_a_leaving_slice_without_an_end(events: list[Event]) -> None:
    """DONE comes of FINISH by itself, whatever else happens."""
    life, _ = lived([Event.STARTED, Event.NOTICE, *events, Event.DONE])
    assert life is Life.OVER


@given(st.lists(st.sampled_from(Event)))
def test_once_serve_stops_a_serving_replica_serve_alone_ends_its_process(events: list[Event]) -> None:
    without_loss = [event for event in events if event is not Event.LOST]
    _, done = lived([Event.STARTED, Event.STOP, *without_loss])
    assert not ENDS & set(done)


def test_an_engine_is_killed_before_the_store_hears_of_it() -> None:
    for step in TABLE.values():
        for said in (Action.SAY_LOST, Action.FORGET):
            if said in step.actions:
                assert step.actions.index(Action.KILL) < step.actions.index(said)


@given(st.lists(st.sampled_from(Event)))
def test_a_failure_is_noted_at_most_once_and_never_of_a_start_that_was_ended_by_plan(
    events: list[Event],
) -> None:
    _, done = lived(events)
    assert done.count(Action.NOTE_FAILURE) <= 1
    ending = next((event for event in events if event in _ENDS_A_START), None)
    if ending is not Event.STARTED:
        assert done.count(Action.NOTE_FAILURE) == (ending in (Event.FAILED, Event.LOST))


@given(st.lists(st.sampled_from(Event)))
def test_a_slice_that_gives_wrong_tokens_is_killed_whatever_it_is_about(events: list[Event]) -> None:
    life, done = lived([Event.STARTED, *events, Event.WRONG])
    assert life is Life.OVER
    assert done.count(Action.KILL) == 1


def test_nothing_comes_after_the_process_has_ended() -> None:
    for step in TABLE.values():
        assert Action.EXIT not in step.actions[:-1]
