"""What bounds a grammar's time in EngineCore, on vLLM's own classes."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine import grammar_time
from serving.engine.grammar_time import _cutting, _timed


class Grammar:
    """Takes this much of a CPU for every mask."""

    def __init__(self, mask_s: float) -> None:
        self.mask_s = mask_s

    def fill_bitmask(self, masks: list[int], row: int) -> None:
        end_s = time.thread_time() + self.mask_s
        while time.thread_time() < end_s:
            masks[row] += 1


def request(grammar: Any, tokens: int = 1) -> Any:
    structured = SimpleNamespace(grammar=grammar) if grammar else None
    return SimpleNamespace(structured_output_request=structured, num_output_tokens=tokens, status="running")


@pytest.mark.unit
def test_the_cpu_s_time_of_a_grammar_adds_up_also_where_it_fails() -> None:
    grammar, fill = Grammar(0.002), _timed(Grammar.fill_bitmask)
    fill(grammar, [0], 0)
    first_s = grammar.serving_spent_s  # type: ignore[attr-defined]
    assert first_s >= grammar.mask_s
    with pytest.raises(IndexError):
        fill(grammar, [], 0)
    assert grammar.serving_spent_s > first_s  # type: ignore[attr-defined]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("spent_s", "tokens", "is_cut"),
    [(0.0, 1, False), (3.9, 1, False), (4.1, 1, True), (4.1, 100, False), (6, 100, True)],
)
def test_an_answer_is_cut_whose_grammar_has_taken_too_long(spent_s: float, tokens: int, is_cut: bool) -> None:
    check = _cutting(lambda _request, _length: False, "cut")
    asked = request(SimpleNamespace(serving_spent_s=spent_s), tokens)
    assert (check(asked, 100), asked.status) == (is_cut, "cut" if is_cut else "running")


@pytest.mark.unit
def test_other_answers_end_as_vllm_has_it() -> None:
    check = _cutting(lambda asked, _length: bool(asked.num_output_tokens > 1), "cut")
    for grammar in (None, SimpleNamespace(), SimpleNamespace(serving_spent_s=9.0)):
        assert check(request(grammar, 2), 100)
    assert not check(request(None), 100)
    assert not check(request(SimpleNamespace()), 100)


@pytest.mark.engine
def test_vllm_s_scheduler_cuts_an_answer_by_its_length_where_xgrammar_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import xgrammar
    from vllm import SamplingParams
    from vllm.v1.core.sched import scheduler
    from vllm.v1.engine import core  # noqa: F401  which an EngineCore has
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    for kind in (GuidanceGrammar, XgrammarGrammar):
        for name in ("fill_bitmask", "accept_tokens"):
            monkeypatch.setattr(kind, name, getattr(kind, name))
    monkeypatch.setattr(scheduler, "check_stop", scheduler.check_stop)
    grammar_time.install()
    vocabulary = ["a", "</s>"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[1]))
    compiled = compiler.compile_grammar('root ::= root root | "a"')
    grammar = XgrammarGrammar(len(vocabulary), xgrammar.GrammarMatcher(compiled), compiled)
    asked = Request("r", [0], SamplingParams(max_tokens=100), None)
    asked.structured_output_request = SimpleNamespace(grammar=grammar)  # type: ignore[assignment]
    masks = xgrammar.allocate_token_bitmask(1, len(vocabulary))
    for _ in range(3):
        grammar.fill_bitmask(masks, 0)
        assert grammar.accept_tokens("r", [0])
        asked.append_output_token_ids(0)
        assert not scheduler.check_stop(asked, 1000)
    assert grammar.serving_spent_s > 0  # type: ignore[attr-defined]
    grammar.serving_spent_s = 60.0  # type: ignore[attr-defined]
    assert scheduler.check_stop(asked, 1000)
    assert asked.status == RequestStatus.FINISHED_LENGTH_CAPPED
