"""Answers compared, with slices that round differently, and one that is wrong."""

import math
import random
from collections.abc import Mapping

import pytest

from serving.engine.answer_check import Answer, Ask, Case, Found, Wrong, again, compare, is_greedy, read

pytestmark = pytest.mark.unit

SURE, TIE = {1: -0.1, 2: -3.0}, {1: -0.7, 2: -0.8}


def answer(*tokens: int, tops: Mapping[int, float] | None = None) -> Answer:
    return Answer(tokens, () if tops is None else tuple(tops for _ in tokens))


def test_answers_are_the_same_up_to_the_shorter_one() -> None:
    assert compare(answer(1, 2, 3), answer(1, 2)) is Found.SAME


def test_a_difference_between_tokens_almost_as_likely_is_a_near_tie() -> None:
    assert compare(answer(7, 2), answer(7, 1, tops=TIE)) is Found.NEAR_TIE
    assert compare(answer(7, 1, tops=TIE), answer(7, 2)) is Found.NEAR_TIE


def test_a_difference_where_one_was_sure_is_none() -> None:
    assert compare(answer(7, 2), answer(7, 1, tops=SURE)) is Found.DIFFERENT


def test_a_token_that_is_not_among_the_likeliest_is_behind_the_last_of_them() -> None:
    assert compare(answer(7, 99), answer(7, 1, tops=SURE)) is Found.DIFFERENT
    assert compare(answer(7, 99), answer(7, 1, tops={1: -1.0, 2: -1.5})) is Found.NEAR_TIE


def test_a_tie_is_one_for_both_of_two() -> None:
    other = {2: -0.7, 1: -0.8}
    assert compare(answer(2, tops=other), answer(1, tops=TIE)) is Found.NEAR_TIE
    assert compare(answer(2, tops=other), answer(1, tops=SURE)) is Found.DIFFERENT


def test_without_logprobs_nothing_is_called_different() -> None:
    assert compare(answer(1), answer(2)) is Found.NEAR_TIE


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({"temperature": 0, "prompt": "x"}, True),
        ({"temperature": 0, "prompt": [1, 2]}, True),
        ({"temperature": 0, "messages": [], "n": 1}, True),
        ({"prompt": "x"}, False),
        ({"temperature": 0.7}, False),
        ({"temperature": 0, "n": 2}, False),
        ({"temperature": 0, "prompt": ["x", "y"]}, False),
        ({"temperature": 0, "echo": True}, False),
    ],
)
def test_an_answer_follows_from_a_request_that_asks_for_one_greedy_one(
    fields: dict[str, object], greedy: bool
) -> None:
    assert is_greedy(fields) is greedy


def test_an_answer_is_asked_again_as_far_as_it_went_whole_and_with_logprobs() -> None:
    fields = {"model": "m", "prompt": "x", "temperature": 0, "stream": True, "max_tokens": 9, "stop": "y"}
    assert again(fields, 4, chat=False) == {
        "model": "m",
        "prompt": "x",
        "temperature": 0,
        "max_tokens": 4,
        "logprobs": 20,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    chat = again({"messages": [], "max_completion_tokens": 9000}, 9000, chat=True)
    assert (chat["max_tokens"], chat["logprobs"], chat["top_logprobs"]) == (64, True, 20)
    assert "max_completion_tokens" not in chat


def test_tokens_and_logprobs_are_read_from_completions_and_from_chat() -> None:
    tops = [{"token_id:7": -0.1, "token_id:8": -2.0}, None]
    completion = {"choices": [{"token_ids": [7, 9], "logprobs": {"top_logprobs": tops}}]}
    assert read(completion) == Answer((7, 9), ({7: -0.1, 8: -2.0}, {}))
    content = [{"token": "token_id:7", "top_logprobs": [{"token": "token_id:7", "logprob": -0.1}]}]
    chat = {"choices": [{"token_ids": [7], "logprobs": {"content": content}}]}
    assert read(chat) == Answer((7,), ({7: -0.1},))
    assert read({"choices": [{"text": "x"}]}) is None


def test_a_case_of_two_that_agree_is_over_after_one_question() -> None:
    case = Case({"a": answer(1, 1)})
    assert case.next(["b", "c"]) == Ask("b")
    case.answers["b"] = answer(1, 1, tops=SURE)
    assert case.next(["c"]) is None


@pytest.mark.parametrize("odd", ["a", "b"])
def test_the_odd_one_of_three_is_asked_again_before_it_is_called_wrong(odd: str) -> None:
    case = Case({"a": answer(1, 2 if odd == "a" else 1)})
    case.answers["b"] = answer(1, 2 if odd == "b" else 1, tops={2: -0.1, 1: -9.0} if odd == "b" else SURE)
    assert case.next(["c"]) == Ask("c")
    case.answers["c"] = answer(1, 1, tops=SURE)
    assert case.next([]) == Ask(odd)
    case.confirms = answer(1, 2, tops={2: -0.1, 1: -9.0})
    verdict = case.next([])
    assert isinstance(verdict, Wrong)
    assert verdict.replica == odd
    assert set(verdict.others) == {"a", "b", "c"} - {odd}


def test_a_slice_that_was_wrong_once_is_not_called_wrong() -> None:
    case = Case({"a": answer(2), "b": answer(1, tops=SURE), "c": answer(1, tops=SURE)})
    assert case.next([]) == Ask("a")
    case.confirms = answer(1, tops=SURE)
    assert case.next([]) is None


def test_with_two_slices_nobody_is_called_wrong() -> None:
    case = Case({"a": answer(2), "b": answer(1, tops=SURE)})
    assert case.next([]) is None
    assert case.differing == [("a", "b")]


def test_where_all_three_differ_nobody_is_called_wrong() -> None:
    case = Case({"a": answer(2), "b": answer(1, tops=SURE), "c": answer(3, tops={3: -0.1, 1: -9, 2: -9})})
    assert case.next([]) is None


class Slice:
    """A model of a slice: logits follow from the tokens so far, each slice's rounding is its own, and ties are frequent."""

    def __init__(self, seed: int, *, wrong: bool = False) -> None:
        self._rounding = random.Random(seed)
        self._wrong = wrong

    def gives(self, prompt: int, tokens: int = 6) -> Answer:
        history, tops = [prompt], []
        for _ in range(tokens):
            source = random.Random(hash(tuple(history)))
            logits = {token: source.gauss(0, 2) for token in range(6)}
            if source.random() < 0.3:  # a near-tie
                first, second = sorted(logits, key=lambda token: -logits[token])[:2]
                logits[second] = logits[first] - source.uniform(0, 0.05)
            rounded = {token: logit + self._rounding.uniform(-0.06, 0.06) for token, logit in logits.items()}
            if self._wrong:
                rounded[prompt % 6] += 4
            total = math.log(sum(map(math.exp, rounded.values())))
            top = sorted(rounded, key=lambda token: -rounded[token])[:5]
            tops.append({token: rounded[token] - total for token in top})
            history.append(top[0])
        return Answer(tuple(history[1:]), tuple(tops))


def looked_into(slices: dict[str, Slice], first: str, prompt: int) -> tuple[Wrong | None, Case]:
    case = Case({first: Answer(slices[first].gives(prompt).tokens)})
    while isinstance(step := case.next([name for name in slices if name not in case.answers]), Ask):
        if step.replica in case.answers:
            case.confirms = slices[step.replica].gives(prompt)
        else:
            case.answers[step.replica] = slices[step.replica].gives(prompt)
    return step, case


@pytest.mark.slow
def test_ten_thousand_answers_with_near_ties_accuse_nobody() -> None:
    slices = {name: Slice(seed) for seed, name in enumerate("abcd")}
    names, ties = list(slices), 0
    for prompt in range(10_000):
        found, case = looked_into(slices, names[prompt % 4], prompt)
        assert found is None
        assert case.differing == []
        one, other = case.answers.values()
        ties += compare(one, other) is Found.NEAR_TIE
    assert ties > 1000


def test_a_slice_with_a_wrong_weight_is_found_and_no_other() -> None:
    slices = {name: Slice(seed, wrong=name == "c") for seed, name in enumerate("abcd")}
    names = list(slices)
    found = [looked_into(slices, names[prompt % 4], prompt)[0] for prompt in range(200)]
    accused = {wrong.replica for wrong in found if wrong}
    assert accused == {"c"}
