"""An embedding model: the stand-in's last hidden state, through the front door."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.leases import Leases
from support.reference import embeddings
from support.service import Service, service

from serving.simulation import stand_in
from serving.simulation.cluster import cache_directory

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BORROWS = "one host, 1"
ONE_HOST = {"generation": "v6e", "topology": "2x4", "hosts": 1}
TEXTS = ["a river", "a clock in a lighthouse"]


@pytest.fixture(scope="module")
def running(leases: Leases) -> Iterator[Service]:
    options = {"max_model_len": 512, "runner": "pooling", "convert": "embed"}
    with service(leases, slices=1, slice=ONE_HOST, options=options) as started:
        yield started


def test_embeddings_equal_hugging_face_s(running: Service) -> None:
    expected = embeddings(stand_in.ensure(running.plan().shape, cache_directory()), TEXTS)

    answer = running.post("/v1/embeddings", input=TEXTS).json()

    for one, right in zip(answer["data"], expected, strict=True):
        assert one["embedding"] == pytest.approx(right, abs=1e-4)
    assert answer["usage"]["prompt_tokens"] > 0


def test_openai_s_client_which_asks_for_base64_reads_the_same_numbers(running: Service) -> None:
    api = openai.OpenAI(base_url=f"{running.address}/v1", api_key="none", max_retries=0)
    model = running.plan().model.name
    packed = api.embeddings.create(model=model, input=TEXTS)
    plain = api.embeddings.create(model=model, input=TEXTS, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    assert packed.usage == plain.usage
    mistakes: tuple[dict[str, Any], ...] = (
        {"dimensions": 8},
        {"encoding_format": "zip"},
        {"input": []},
        {"input": [[]]},
        {"input": ["a", 1]},
        {"input": [[10**9]]},
        {"input": "a " * 5000},
        {"input": None},
    )
    for mistake in mistakes:
        with pytest.raises(openai.BadRequestError):
            api.embeddings.create(**{"model": model, "input": "a", **mistake})


def test_the_other_pooling_endpoints_answer(running: Service) -> None:
    """Texts are nearest to themselves."""
    assert running.post("/pooling", input="a river").json()["data"][0]["data"]
    scores = running.post("/score", text_1="a river", text_2=["a river", "a clock"]).json()["data"]
    assert scores[0]["score"] == pytest.approx(1, abs=1e-3)
    assert scores[1]["score"] < 0.9
    ranked = running.post("/v1/rerank", query="a river", documents=["a clock", "a river"]).json()["results"]
    assert [one["index"] for one in ranked] == [1, 0]


def test_a_chat_with_it_says_that_it_takes_none(running: Service) -> None:
    answer = running.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")
