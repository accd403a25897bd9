from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine import token_logprobs

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("asked", "sent"), [(0, 1), (None, None), (2, 2), (-1, -1)])
def test_an_engine_is_asked_for_one_logprob_where_none_beside_the_token_s_is_wanted(
    asked: int | None, sent: int | None
) -> None:
    """The server goes on reading its own parameters: it tells as many as were asked for."""

    def generate(prompt: str, params: Any, request_id: str, *, priority: int = 0) -> tuple[Any, ...]:
        return prompt, params.logprobs, request_id, priority

    engine, params = SimpleNamespace(generate=generate), SimpleNamespace(logprobs=asked)
    token_logprobs.install(engine)
    assert engine.generate("p", params, "r", priority=3) == ("p", sent, "r", 3)
    assert params.logprobs == asked
