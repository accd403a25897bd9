"""Bodies of messages and responses whose fields are of other types than they are to be."""

import itertools
from typing import Any

import pytest

from serving.simulation.engine import messages, responses
from serving.simulation.engine.orders import RequestError

pytestmark = pytest.mark.unit

MESSAGE = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
RESPONSE = {"input": "a", "max_output_tokens": 3}
ODD: list[Any] = [3, "x", ["x"], [None], {"format": "x"}, True]


@pytest.mark.parametrize(
    ("read", "body", "field"),
    [
        *(
            (messages.order_of, MESSAGE, field)
            for field in ("messages", "output_config", "tools", "vllm_xargs")
        ),
        *((responses.order_of, RESPONSE, field) for field in ("input", "text", "tools", "vllm_xargs")),
    ],
)
def test_a_field_of_another_type_is_refused_in_words_or_means_nothing(
    read: Any, body: dict[str, Any], field: str
) -> None:
    refused = []
    for odd, others in itertools.product(ODD, ({}, {"tools": [{"name": "f"}]})):
        try:
            read({**body, **others, field: odd}, 1000, 0)
        except RequestError as error:
            refused.append(error.body["error"]["message"])
    assert len(refused) >= len(ODD)
    assert all(refused)


def test_an_input_item_that_is_refused_is_not_repeated() -> None:
    with pytest.raises(RequestError, match="alone") as refused:
        responses.order_of({"input": [{"type": "secret words"}]}, 1000, 0)
    assert "secret" not in str(refused.value.body)
