"""Answers whose grammar allows no further token, on vLLM's own classes."""

from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine import dead_grammars
from serving.engine.dead_grammars import DEAD_END, _ending, _noticing


class Row(tuple[int, ...]):
    __slots__ = ()

    def any(self) -> bool:
        return any(self)


def request(grammar: Any) -> Any:
    structured = SimpleNamespace(grammar=grammar) if grammar else None
    return SimpleNamespace(structured_output_request=structured, status="running", stop_reason=None)


@pytest.mark.unit
def test_an_answer_ends_where_its_grammar_allowed_no_token() -> None:
    fill = _noticing(lambda _grammar, _masks, _row: None)
    check = _ending(lambda _request, _length: False, "error")
    grammar = SimpleNamespace()
    asked = request(grammar)
    fill(grammar, [Row((0, 0)), Row((0, 8))], 1)
    assert not check(asked, 100)
    fill(grammar, [Row((0, 0)), Row((0, 8))], 0)
    assert check(asked, 100)
    assert (asked.status, asked.stop_reason) == ("error", DEAD_END)


@pytest.mark.unit
def test_other_answers_end_as_vllm_has_it() -> None:
    for grammar in (None, SimpleNamespace()):
        for ends in (True, False):
            asked = request(grammar)
            assert _ending(lambda _request, _length, ends=ends: ends, "error")(asked, 100) is ends  # type: ignore[misc]
            assert (asked.status, asked.stop_reason) == ("running", None)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("regex", "tokens"),
    [(r"[^\s\S]", 0), (r"a[^\s\S]", 1), (r"aab", 2)],
)
def test_vllm_s_scheduler_ends_an_answer_at_a_dead_end_of_xgrammar_s(
    regex: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import xgrammar
    from vllm import SamplingParams
    from vllm.v1.core.sched import scheduler
    from vllm.v1.engine import core  # noqa: F401  which an EngineCore has
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    monkeypatch.setattr(XgrammarGrammar, "fill_bitmask", XgrammarGrammar.fill_bitmask)
    monkeypatch.setattr(scheduler, "check_stop", scheduler.check_stop)
    dead_grammars.install()
    vocabulary = ["a", "</s>"]  # of which nobody writes a "b"
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[1]))
    compiled = compiler.compile_regex(regex)
    grammar = XgrammarGrammar(len(vocabulary), xgrammar.GrammarMatcher(compiled), compiled)
    asked = Request("r", [0], SamplingParams(max_tokens=100), None)
    asked.structured_output_request = SimpleNamespace(grammar=grammar)  # type: ignore[assignment]
    masks = xgrammar.allocate_token_bitmask(1, len(vocabulary))
    for written in range(tokens + 1):
        grammar.fill_bitmask(masks, 0)
        assert grammar.accept_tokens("r", [0]) is (written < tokens)
        asked.append_output_token_ids(0)
        assert scheduler.check_stop(asked, 1000) is (written == tokens)
    assert (asked.status, asked.stop_reason) == (RequestStatus.FINISHED_ERROR, DEAD_END)
