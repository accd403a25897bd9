"""What a request makes an engine do, route by route, as vLLM 0.26 reads the same fields."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.router.http.routes import ROUTES
from serving.router.http.work import texts

pytestmark = pytest.mark.unit

TALK = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "fields", "sequences", "output_tokens"),
    [
        ("/v1/chat/completions", {"messages": TALK, "n": 3, "max_tokens": 7}, 3, 7),
        ("/v1/chat/completions", {"messages": TALK, "max_tokens": 7, "max_completion_tokens": 9}, 1, 9),
        ("/v1/chat/completions", {"messages": TALK}, 1, None),
        ("/v1/chat/completions", {"messages": TALK, "use_beam_search": True, "n": 8}, 8, None),
        ("/v1/chat/completions/batch", {"messages": [TALK] * 100_000}, 100_000, None),
        ("/v1/chat/completions/batch", {"messages": [TALK] * 10, "n": 2, "max_tokens": 5}, 20, 5),
        ("/v1/chat/completions/render", {"messages": TALK * 9}, 1, 0),
        ("/v1/completions", {"prompt": "a"}, 1, 16),
        ("/v1/completions", {"prompt": ["a"] * 4096, "max_tokens": 1}, 4096, 1),
        ("/v1/completions", {"prompt": [1, 2, 3], "n": 2}, 2, 16),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "best_of": 5}, 10, 16),
        ("/v1/completions", {"prompt_embeds": ["AAAA"] * 6, "prompt": "a"}, 7, 16),
        ("/v1/completions/render", {"prompt": ["a"] * 50}, 50, 0),
        ("/v1/completions/derender", {"generate_responses": [{}] * 50}, 50, 0),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"n": 256, "max_tokens": 9}},
            256,
            9,
        ),
        ("/inference/v1/generate", {"token_ids": [1], "n": 256, "sampling_params": {}}, 1, None),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": None}}, 1, None),
        ("/v1/responses", {"input": "a", "max_output_tokens": 5}, 1, 5),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 9}, 1, None),
        # What bounds an answer on another route bounds none here.
        ("/v1/chat/completions", {"messages": TALK, "max_output_tokens": 1}, 1, None),
        ("/v1/chat/completions/batch", {"messages": [TALK], "max_output_tokens": 1}, 1, None),
        ("/v1/completions", {"prompt": "a", "max_completion_tokens": 1}, 1, 16),
        ("/v1/responses", {"input": "a", "max_tokens": 1}, 1, None),
        ("/v1/messages", {"messages": TALK, "max_tokens": 4}, 1, 4),
        ("/v1/messages/count_tokens", {"messages": TALK * 7}, 1, 0),
        ("/v1/embeddings", {"input": ["a"] * 300}, 300, 0),
        ("/v1/embeddings", {"input": [1, 2]}, 1, 0),
        ("/v1/embeddings", {"messages": [TALK] * 12}, 12, 0),
        ("/v2/embed", {"texts": ["a"] * 100_000}, 100_000, 0),
        ("/v2/embed", {"inputs": [{"content": []}] * 9}, 9, 0),
        ("/v2/embed", {"images": ["data:,"] * 9}, 9, 0),
        ("/pooling", {"input": [[1], [2]]}, 2, 0),
        ("/classify", {"input": "a"}, 1, 0),
        ("/score", {"text_1": "a", "text_2": ["b"] * 8}, 9, 0),
        ("/score", {"queries": ["a"] * 3, "documents": {"content": [{}] * 8}}, 11, 0),
        ("/v1/score", {"data_1": "a", "data_2": ["b"] * 8}, 9, 0),
        ("/generative_scoring", {"query": "a", "items": ["b"] * 8}, 8, 1),
        ("/rerank", {"query": "a", "documents": ["b"] * 100_000}, 100_001, 0),
        ("/v2/rerank", {"query": "a", "documents": {"content": [{}] * 5}}, 6, 0),
        ("/tokenize", {"prompt": "a"}, 1, 0),
        ("/detokenize", {"tokens": [1, 2]}, 1, 0),
        ("/invocations", {"prompt": ["a"] * 7, "n": 2}, 14, 16),
        ("/invocations", {"prompt": ["a"] * 7, "max_tokens": 3, "sampling_params": {}}, 7, 3),
        ("/invocations", {"query": "a", "documents": ["b"] * 70}, 71, 0),
        ("/invocations", {"messages": TALK}, 1, None),
        ("/invocations", {"messages": TALK, "documents": ["a"] * 9}, 9, None),
        ("/invocations", {"prompt": "a", "documents": ["a"] * 9, "max_tokens": 5}, 9, 5),
    ],
)
def test_a_route_s_work_is_what_vllm_makes_of_its_fields(
    path: str, fields: dict[str, Any], sequences: int, output_tokens: int | None
) -> None:
    work = ROUTES[path].work(fields, 100)
    assert (work.sequences, work.output_tokens) == (sequences, output_tokens)


def test_a_long_recording_is_as_many_sequences_as_vllm_cuts_it_into() -> None:
    """It takes ten minutes of one: 25 MB of WAV counted as more than a slice runs at once, and were refused."""
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        assert ROUTES[path].work({"n": 2}, 25 << 20).sequences == 2 * 20
        assert ROUTES[path].work({}, 1 << 20).sequences == 9
        assert ROUTES[path].work({}, 1000).sequences == 1


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "messages",
        "prompt",
        "input",
        "n",
        "best_of",
        "max_tokens",
        "max_completion_tokens",
        "sampling_params",
        "texts",
        "images",
        "inputs",
        "documents",
        "query",
        "queries",
        "items",
        "text_1",
        "text_2",
        "data_1",
        "data_2",
        "data",
        "prompt_embeds",
        "generate_responses",
    ]
)


@given(path=st.sampled_from(sorted(ROUTES)), fields=st.dictionaries(NAMES, ANYTHING, max_size=5))
def test_whatever_the_fields_are_work_is_a_number_of_sequences(path: str, fields: dict[str, Any]) -> None:
    work = ROUTES[path].work(fields, 100)
    assert work.sequences >= 1
    assert work.output_tokens is None or 0 <= work.output_tokens <= 1 << 30
    list(texts(fields))


def test_every_text_is_found_with_the_object_it_stands_in() -> None:
    fields = {"a": "1", "b": [{"c": "2"}, ["3"]], "d": [1, 2]}
    assert sorted((name, text) for _, name, text in texts(fields)) == [("a", "1"), ("b", "3"), ("c", "2")]
