"""The real engine, without Ray, with a tool parser. One without would refuse all of these."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import quick_http as http
from support.one_engine import MODEL

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
COUNT = {"type": "integer", "maximum": 9}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": COUNT},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    script = Path(__file__).parents[1] / "support" / "one_engine.py"
    command = [sys.executable, str(script), json.dumps({"tool_call_parser": "llama3_json"})]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin
        assert engine.stdout
        port = next(line.split()[1] for line in engine.stdout if line.startswith("port "))
        yield f"http://127.0.0.1:{port}"
        engine.stdin.close()
        assert engine.wait(30) == 0


def ask(address: str, **fields: Any) -> Any:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Add"}],
        "tools": [ADD],
        "temperature": 0,
    }
    answer = http.post(f"{address}{CHAT}", json={**asked, "max_tokens": 200, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_a_model_may_choose_to_call_no_tool(address: str, choice: dict[str, str]) -> None:
    assert ask(address, max_tokens=5, **choice)["content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_model_that_has_to_call_a_tool_does_so_with_arguments_that_fit(address: str, choice: Any) -> None:
    (call, *_) = ask(address, tool_choice=choice)["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"])["a"] <= COUNT["maximum"]
