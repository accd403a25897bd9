import pytest

from serving.router.forwarding.suspects import (
    HEARD_S,
    REFUSED_S,
    Flight,
    Suspects,
    fingerprint,
)
from serving.router.http.protocol import InferenceRequest

pytestmark = pytest.mark.unit

POISON, OTHER, THIRD = "poison", "other", "third"
DIED = 10.0
WORKED_SINCE = DIED - 5


def flights(*names: str, since_s: float = DIED - 0.2, answered: bool = False) -> list[Flight]:
    return [Flight(name, "llama", since_s, answered) for name in names]


def after_a_death() -> Suspects:
    made = Suspects()
    assert made.died("a", flights(POISON, OTHER, THIRD), DIED, WORKED_SINCE) == []
    return made


def found_guilty() -> Suspects:
    made = after_a_death()
    made.tried(POISON, "b", DIED + 2)
    assert made.died("b", flights(POISON, OTHER, "new", since_s=DIED + 2), DIED + 3, WORKED_SINCE) == [POISON]
    return made


def test_whoever_had_just_come_to_a_slice_that_died_is_suspected_and_refused_by_nobody() -> None:
    suspects = after_a_death()
    assert all(
        suspects.suspects(name, DIED) and not suspects.is_guilty(name) for name in (POISON, OTHER, THIRD)
    )
    assert not suspects.suspects("a stranger", DIED)


def test_who_had_got_tokens_or_had_run_for_long_is_no_suspect() -> None:
    suspects = Suspects()
    there = flights(OTHER, answered=True) + flights(THIRD, since_s=WORKED_SINCE)
    suspects.died("a", there, DIED, WORKED_SINCE)
    assert not suspects


def test_who_came_before_a_long_silence_in_which_a_slice_died_is_suspected_and_tried_for_longer() -> None:
    suspects = Suspects()
    there = flights(POISON, since_s=DIED - 40) + flights(OTHER, since_s=DIED - 46)
    suspects.died("a", there, DIED, DIED - 46)
    assert (suspects.suspects(POISON, DIED), suspects.suspects(OTHER, DIED)) == (True, False)
    suspects.tried(POISON, "b", DIED + 2)
    assert suspects.survivors(DIED + 2 + 60) == []
    assert suspects.survivors(DIED + 2 + 62) == [POISON]


def test_who_ran_on_a_second_slice_that_died_is_suspected_however_far_it_had_come() -> None:
    suspects = Suspects()
    for replica in "ab":
        suspects.died(replica, flights(POISON, answered=True), DIED, WORKED_SINCE)
    assert suspects.suspects(POISON, DIED)


def test_a_whole_answer_between_two_deaths_makes_the_second_a_first_one() -> None:
    """Clients that repeat their requests had each one tried alone, for up to 25 s, after a second slice was lost."""
    suspects = Suspects()
    suspects.died("a", flights(OTHER, answered=True), DIED, WORKED_SINCE)
    assert suspects.remembers
    suspects.answered(OTHER, whole=True)
    assert not suspects.remembers
    suspects.died("b", flights(OTHER, answered=True), DIED + 5, DIED)
    assert not suspects


def test_who_has_stayed_on_the_next_slice_for_longer_than_a_trial_is_not_suspected_of_its_death() -> None:
    for stayed_s, suspected in ((8.0, True), (9.0, False)):
        suspects = Suspects()
        suspects.died("a", flights(OTHER, answered=True), DIED, WORKED_SINCE)
        there = flights(OTHER, since_s=DIED + 1, answered=True)
        suspects.died("b", there, DIED + 1 + stayed_s, DIED + 1)
        assert bool(suspects) == suspected
    silent = Suspects()
    silent.died("a", flights(OTHER, answered=True), DIED, WORKED_SINCE)
    silent.died(
        "b", flights(OTHER, since_s=DIED + 1, answered=True), DIED + 20, DIED
    )  # it gave no tokens since
    assert silent


def test_no_suspect_is_tried_before_every_router_has_heard_of_it() -> None:
    suspects = after_a_death()
    assert suspects.heard_in_s(POISON, DIED + 1) == HEARD_S - 1
    assert suspects.heard_in_s(POISON, DIED + HEARD_S) <= 0


def test_a_router_whose_clock_is_ahead_makes_no_suspect_wait_for_it() -> None:
    second = Suspects()
    second.take([after_a_death().ours], DIED - 3600)
    assert second.heard_in_s(POISON, DIED - 3600) == HEARD_S


def test_two_suspects_are_never_tried_on_one_slice_nor_one_request_twice() -> None:
    suspects = after_a_death()
    suspects.tried(POISON, "b", DIED + 2)
    suspects.tried(OTHER, "c", DIED + 2)
    assert suspects.closed() == {"b", "c"}
    assert suspects.on_trial(POISON)
    assert suspects.cleared(OTHER) == "c"
    assert suspects.closed() == {"b"}


def test_a_suspect_under_which_a_second_slice_dies_is_guilty_and_nobody_beside_it_is_suspected() -> None:
    suspects = found_guilty()
    assert suspects.guilty.keys() == {POISON}
    assert not suspects.suspects("new", DIED)


def test_a_token_clears_nobody_under_whom_two_slices_have_died() -> None:
    """A request whose second step ends its engine has a token on every slice."""
    suspects = Suspects()
    for replica in "ab":
        suspects.died(replica, flights(POISON, answered=True), DIED, WORKED_SINCE)
    suspects.tried(POISON, "c", DIED + 1)
    assert suspects.answered(POISON, whole=False) is None
    assert suspects.died("c", flights(POISON, answered=True), DIED + 2, WORKED_SINCE) == [POISON]
    other = Suspects()
    for replica in "ab":
        other.died(replica, flights(OTHER, answered=True), DIED, WORKED_SINCE)
    other.tried(OTHER, "c", DIED + 1)
    assert other.answered(OTHER, whole=True) == "c"
    assert not other


def test_a_slice_that_dies_for_two_routers_dies_once() -> None:
    """The second one to see the death had tried the suspect there, and would find it guilty."""
    first, second = after_a_death(), Suspects()
    second.take([first.ours], DIED + 1)
    assert second.died_under(POISON) == {"a"}
    second.tried(POISON, "a", DIED + 2)
    assert second.died("a", flights(POISON), DIED + 3, WORKED_SINCE) == []
    assert not second.is_guilty(POISON)


def test_a_trial_goes_on_where_the_suspicion_is_over() -> None:
    suspects = after_a_death()
    suspects.tried(POISON, "b", DIED + REFUSED_S)
    suspects.take([], DIED + REFUSED_S + 1)
    assert suspects  # or nobody would end it
    suspects.left(POISON, "b")
    assert not suspects


def test_a_request_that_got_something_new_is_cleared() -> None:
    suspects = after_a_death()
    for name in (POISON, OTHER, THIRD):
        suspects.tried(name, name, DIED + 2)
        suspects.cleared(name)
    assert not suspects


def test_who_outlives_its_own_time_on_the_slice_that_died_is_a_survivor() -> None:
    suspects = after_a_death()
    suspects.tried(OTHER, "b", DIED + 2)
    assert suspects.survivors(DIED + 3) == []
    assert suspects.survivors(DIED + 3.3) == [OTHER]


def test_a_trial_ends_by_time_also_where_the_suspicion_was_over_before() -> None:
    """It would be found guilty of whatever ends its slice an hour later."""
    suspects = Suspects()
    suspects.died("a", flights(POISON, since_s=DIED - 50), DIED, DIED - 60)
    suspects.tried(POISON, "b", DIED + 2)
    suspects.take([], DIED + REFUSED_S + 1)
    assert suspects.survivors(DIED + 2 + 76.5) == [POISON]


def test_without_the_store_nobody_is_suspected_for_longer() -> None:
    """No trial begins then, and nothing is taken over that would forget a suspect."""
    suspects = after_a_death()
    assert suspects.suspects(OTHER, DIED + REFUSED_S)
    assert not suspects.suspects(OTHER, DIED + REFUSED_S + 0.1)


def test_a_copy_that_ends_on_another_slice_leaves_the_trial_alone() -> None:
    suspects = after_a_death()
    suspects.tried(POISON, "b", DIED + 2)
    assert suspects.left(POISON, "c") is None
    assert suspects.closed() == {"b"}


def test_who_hangs_up_on_trial_is_tried_to_the_end_and_guilty_if_the_slice_dies() -> None:
    """The next suspect would be blamed for what this one left there."""
    suspects = after_a_death()
    suspects.tried(POISON, "b", DIED + 2)
    suspects.hung_up(POISON, "b")
    assert suspects.left(POISON, "b") is None
    assert suspects.closed() == {"b"}
    assert suspects.died("b", flights(POISON, OTHER), DIED + 2.5, WORKED_SINCE) == [POISON]


def test_who_hangs_up_on_trial_is_not_cleared_by_the_time() -> None:
    suspects = after_a_death()
    suspects.tried(POISON, "b", DIED + 2)
    suspects.hung_up(POISON, "b")
    assert suspects.survivors(DIED + 4) == [POISON]
    assert suspects.outlived(POISON) == "b"
    assert suspects.suspects(POISON, DIED + 4)


def test_who_leaves_its_slice_by_nobody_s_fault_ends_the_trial_and_not_the_suspicion() -> None:
    suspects = after_a_death()
    suspects.tried(POISON, "b", DIED + 2)
    assert suspects.left(POISON, "b") == "b"
    assert suspects.closed() == set()
    assert suspects.suspects(POISON, DIED)


def test_the_same_request_from_another_client_shares_its_suspicion() -> None:
    one = InferenceRequest("llama", "/v1/completions", b"{}", {}, headers=((b"x", b"1"),))
    same = InferenceRequest("llama", "/v1/completions", b"{}", {}, headers=((b"x", b"2"),))
    elsewhere = InferenceRequest("llama", "/v1/chat/completions", b"{}", {})
    assert fingerprint(one) == fingerprint(same) != fingerprint(elsewhere)


def test_other_routers_learn_of_both_and_each_clears_for_itself() -> None:
    first, second = found_guilty(), Suspects()
    second.take([first.ours], DIED + 3)
    assert second.suspects(OTHER, DIED)
    second.tried(OTHER, "b", DIED + 4)
    second.cleared(OTHER)
    second.take([first.ours], DIED + 5)
    assert not second.suspects(OTHER, DIED)
    assert second.is_guilty(POISON)
    second.cleared(POISON)
    assert second.is_guilty(POISON)


def test_a_cleared_request_that_is_blamed_again_elsewhere_is_suspected_again() -> None:
    first, second = after_a_death(), Suspects()
    second.take([first.ours], DIED)
    second.cleared(OTHER)
    first.died("c", flights(OTHER, since_s=DIED + 9), DIED + 10, WORKED_SINCE)
    second.take([first.ours], DIED + 11)
    assert second.suspects(OTHER, DIED + 11)


def test_who_comes_again_once_the_only_slice_is_back_minutes_later_is_tried_and_found_guilty() -> None:
    """It ended each next engine as the first: nobody remembered it for as long as a start takes."""
    suspects = after_a_death()
    for beat in range(1, 300):
        suspects.take([], DIED + beat)
    assert suspects.suspects(POISON, DIED + 300)
    suspects.tried(POISON, "b", DIED + 300)
    assert suspects.died("b", flights(POISON, since_s=DIED + 300), DIED + 301, WORKED_SINCE) == [POISON]
    assert suspects.ended == {"a", "b"}


def test_nobody_is_suspected_of_the_death_of_a_slice_that_lives() -> None:
    first, second = Suspects(), Suspects()
    there = flights(POISON) + flights(OTHER, answered=True)
    first.died("a", there, DIED, WORKED_SINCE)
    second.take([first.ours], DIED + 1)
    for suspects in (first, second):
        suspects.lives("a")
        assert not suspects.remembers
    second.take([Suspects().ours], DIED + 1)
    first.died("b", there, DIED + 2, WORKED_SINCE)
    assert first.deaths(OTHER) == 1
    assert first.suspects(POISON, DIED + 2)
    assert not first.suspects(OTHER, DIED + 2)
    guilty = found_guilty()
    guilty.lives("b")
    assert guilty.is_guilty(POISON)


def test_suspicion_and_guilt_end_with_time() -> None:
    suspects = found_guilty()
    assert suspects.suspects(OTHER, DIED + REFUSED_S)
    suspects.take([], DIED + REFUSED_S + 1)
    assert not suspects.suspects(OTHER, DIED)
    assert suspects.is_guilty(POISON)
    suspects.take([], DIED + 3 + REFUSED_S + 1)
    assert not suspects


def test_suspicion_ends_with_the_router_that_had_it_and_guilt_does_not() -> None:
    first, second, third = found_guilty(), Suspects(), Suspects()
    second.take([first.ours], DIED + 4)
    second.take([], DIED + 5)
    assert not second.suspects(OTHER, DIED)
    third.take([second.ours], DIED + 6)
    assert third.is_guilty(POISON)
