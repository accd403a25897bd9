import pytest

from serving.router.forwarding.suspects import REFUSED_S, SUSPECTED_S, Suspects, fingerprint
from serving.router.http.protocol import InferenceRequest

pytestmark = pytest.mark.unit

POISON, OTHER, THIRD = "poison", "other", "third"
ALL = dict.fromkeys((POISON, OTHER, THIRD), "llama")


def after_a_death() -> Suspects:
    made = Suspects()
    assert made.died("a", ALL, 0.0) == []
    return made


def test_whoever_ran_on_a_slice_that_died_is_suspected_and_refused_by_nobody() -> None:
    suspects = after_a_death()
    assert all(suspects.suspects(name) and not suspects.is_guilty(name) for name in ALL)
    assert not suspects.suspects("a stranger")


def test_two_suspects_are_never_tried_on_one_slice() -> None:
    suspects = after_a_death()
    suspects.sent(POISON, "b")
    assert suspects.closed() == {"b"}
    suspects.sent(OTHER, "c")
    assert suspects.closed() == {"b", "c"}
    suspects.cleared(OTHER)
    assert suspects.closed() == {"b"}


def test_a_suspect_under_which_a_second_slice_dies_is_guilty_and_nobody_beside_it_is_suspected() -> None:
    suspects = after_a_death()
    suspects.sent(OTHER, "b")
    suspects.cleared(OTHER)
    suspects.sent(POISON, "b")
    assert suspects.died("b", {POISON: "llama", OTHER: "llama", "new": "llama"}, 1.0) == [POISON]
    assert suspects.is_guilty(POISON)
    assert not suspects.suspects(OTHER)
    assert not suspects.suspects("new")
    assert suspects.guilty.keys() == {POISON}


def test_a_request_that_got_something_new_is_cleared() -> None:
    suspects = after_a_death()
    for name in ALL:
        suspects.sent(name, name)
        suspects.cleared(name)
    assert not suspects


def test_a_client_that_leaves_ends_the_trial_and_not_the_suspicion() -> None:
    suspects = after_a_death()
    suspects.sent(POISON, "b")
    suspects.left(POISON)
    assert suspects.closed() == set()
    assert suspects.suspects(POISON)


def test_the_same_request_from_another_client_shares_its_suspicion() -> None:
    one = InferenceRequest("llama", "/v1/completions", b"{}", {}, headers=((b"x", b"1"),))
    same = InferenceRequest("llama", "/v1/completions", b"{}", {}, headers=((b"x", b"2"),))
    elsewhere = InferenceRequest("llama", "/v1/chat/completions", b"{}", {})
    assert fingerprint(one) == fingerprint(same) != fingerprint(elsewhere)
    suspects = after_a_death()
    suspects.sent(POISON, "b")
    assert suspects.on_trial(POISON)


def test_other_routers_learn_of_both_and_each_clears_for_itself() -> None:
    first, second = after_a_death(), Suspects()
    second.take([first.ours], 1.0)
    assert second.suspects(OTHER)
    second.sent(OTHER, "b")
    second.cleared(OTHER)
    second.take([first.ours], 2.0)
    assert not second.suspects(OTHER)
    first.sent(POISON, "c")
    first.died("c", {POISON: "llama"}, 3.0)
    second.take([first.ours], 4.0)
    assert second.is_guilty(POISON)
    second.cleared(POISON)
    assert second.is_guilty(POISON)


def test_a_cleared_request_that_is_blamed_again_elsewhere_is_suspected_again() -> None:
    first, second = after_a_death(), Suspects()
    second.take([first.ours], 1.0)
    second.cleared(OTHER)
    first.died("c", {OTHER: "llama"}, 10.0)
    second.take([first.ours], 11.0)
    assert second.suspects(OTHER)


def test_suspicion_and_guilt_end_with_time() -> None:
    suspects = after_a_death()
    suspects.sent(POISON, "b")
    suspects.died("b", ALL, 1.0)
    suspects.take([], SUSPECTED_S + 0.5)
    assert not suspects.suspects(OTHER)
    assert suspects.is_guilty(POISON)
    suspects.take([], REFUSED_S + 2)
    assert not suspects


def test_a_router_that_is_gone_is_heard_no_more() -> None:
    first, second = after_a_death(), Suspects()
    second.take([first.ours], 1.0)
    second.take([], 2.0)
    assert not second


def test_guilt_outlives_the_router_that_found_it() -> None:
    first, second, third = after_a_death(), Suspects(), Suspects()
    first.sent(POISON, "b")
    first.died("b", {POISON: "llama"}, 1.0)
    second.take([first.ours], 2.0)
    second.take([], 3.0)
    third.take([second.ours], 4.0)
    assert third.is_guilty(POISON)
