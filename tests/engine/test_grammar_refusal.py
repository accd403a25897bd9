from types import SimpleNamespace
from typing import Any

import pytest

from serving.config import ModelSpec
from serving.engine import grammar_refusal
from serving.planning import Plan, plan

pytestmark = pytest.mark.unit


def planned(**changed: Any) -> Plan:
    spec = {
        "name": "llama",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "slice": {"generation": "v6e", "topology": "2x2"},
        **changed,
    }
    return plan(ModelSpec.model_validate(spec))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, ""),
        ({"parallel": {"data": 2, "tensor": 2}}, "parallel.data"),
        ({"parallel": {"attention_data": 2}}, "parallel.attention_data"),
        ({"engine": {"additional_config": {"enable_continue_decode": True}}}, "enable_continue_decode"),
    ],
)
def test_engines_that_would_end_on_a_grammar_say_why(changed: dict[str, Any], named: str) -> None:
    why = grammar_refusal.reason(planned(**changed))
    assert bool(why) == bool(named)
    assert named in why


@pytest.mark.parametrize(
    "grammar", [None, SimpleNamespace(all_constraints_none=lambda: True)], ids=["none", "empty"]
)
def test_a_request_without_a_grammar_goes_on(grammar: Any) -> None:
    grammar_refusal.check(SimpleNamespace(structured_outputs=grammar), "they can't")


def test_a_grammar_is_refused_only_where_the_engine_takes_none() -> None:
    params = SimpleNamespace(structured_outputs=SimpleNamespace(all_constraints_none=lambda: False))
    grammar_refusal.check(params, "")
    with pytest.raises(ValueError, match="they can't"):
        grammar_refusal.check(params, "they can't")
