"""Anthropic's own client on the router: models, ids of requests, errors."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.fronts import front
from support.simulated_engine import MODEL

from serving.errors import BadRequestError
from serving.router.http.anthropic_models import card, page

if TYPE_CHECKING:
    import anthropic

CARDS = [card(name, 0.0, 512) for name in "abcde"]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("query", "shown", "has_more"),
    [
        ({}, "abcde", False),
        ({"limit": "2"}, "ab", True),
        ({"limit": "2", "after_id": "b"}, "cd", True),
        ({"limit": "2", "after_id": "d"}, "e", False),
        ({"limit": "3", "after_id": "b"}, "cde", False),
        ({"after_id": "e"}, "", False),
        ({"limit": "2", "before_id": "d"}, "bc", True),
        ({"limit": "3", "before_id": "d"}, "abc", False),
        ({"before_id": "a"}, "", False),
        ({"after_id": "a", "before_id": "e", "limit": "2"}, "bc", True),
        ({"after_id": "a", "before_id": "d"}, "bc", False),
    ],
)
def test_a_page_of_the_list_is_what_was_asked_for(query: dict[str, str], shown: str, has_more: bool) -> None:
    found = page(CARDS, query)
    assert "".join(each["id"] for each in found["data"]) == shown
    assert found["has_more"] is has_more
    assert (found["first_id"], found["last_id"]) == ((shown[0], shown[-1]) if shown else (None, None))


@pytest.mark.unit
@pytest.mark.parametrize(
    "query",
    [{"limit": limit} for limit in ("0", "1001", "x", "1".zfill(5000), "²")] + [{"after_id": "secret"}],
)
def test_a_page_that_does_not_exist_is_refused_without_the_client_s_words(query: dict[str, str]) -> None:
    with pytest.raises(BadRequestError, match=r"limit is not|names no model") as refused:
        page(CARDS, query)
    assert "secret" not in refused.value.message


@pytest.fixture(scope="module", params=[True, False], ids=["door", "asgi"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with front(door=request.param) as running:
        yield running.address


def client(address: str, **options: Any) -> "anthropic.Anthropic":
    import anthropic

    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, **options)


@pytest.mark.http
def test_anthropic_s_client_lists_models_and_openai_s_still_does(address: str) -> None:
    import openai

    models = client(address).models.list()
    assert [(model.id, model.type, model.lifecycle) for model in models] == [(MODEL, "model", "active")]
    assert models._request_id
    assert client(address).models.retrieve(MODEL).created_at.tzinfo is not None
    plain = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    assert [model.object for model in plain.models.list()] == ["model"]
    assert "request-id" not in httpx.get(f"{address}/v1/models").headers


@pytest.mark.http
def test_anthropic_s_client_reads_the_id_and_kind_of_every_error(address: str) -> None:
    import anthropic

    named = client(address, default_headers={"x-request-id": "job-7"})
    message: Any = {"role": "user", "content": "Hello"}
    with pytest.raises(anthropic.NotFoundError) as unknown:
        named.models.retrieve("other")
    with pytest.raises(anthropic.NotFoundError) as no_path:
        named.messages.batches.list()
    with pytest.raises(anthropic.NotFoundError) as no_model:
        named.messages.create(model="other", messages=[message], max_tokens=4)
    with pytest.raises(anthropic.BadRequestError) as wrong:
        named.messages.create(
            model=MODEL, messages=[message], max_tokens=4, extra_body={"max_tokens": "four"}
        )
    for refused in (unknown, no_path, no_model, wrong):
        assert refused.value.request_id == "job-7"
        error = refused.value.body
        assert isinstance(error, dict)
        assert (error["type"], error["request_id"]) == ("error", "job-7")
    assert "max_tokens is a text of 4 characters" in str(wrong.value)
