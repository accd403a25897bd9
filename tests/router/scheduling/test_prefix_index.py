from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling import prefix_index
from serving.router.scheduling.prefix_index import BLOCK_BYTES, PrefixIndex, Trace

pytestmark = pytest.mark.unit

LONG = "a word of it " * 200


def trace(adapter: str | None = None, **fields: Any) -> Trace:
    return prefix_index.trace(InferenceRequest("llama", "/v1/chat/completions", b"", fields), adapter)


def shared(one: Trace, other: Trace) -> int:
    index = PrefixIndex(1000)
    index.keep("a")
    index.add("a", one)
    return index.matched("a", other.blocks)


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=5000), st.binary(max_size=5000), st.binary(max_size=5000))
def test_texts_share_the_names_of_what_they_begin_with_alike_and_no_others(
    beginning: bytes, one: bytes, other: bytes
) -> None:
    first, second = prefix_index.blocks(beginning + one), prefix_index.blocks(beginning + other)
    alike = len(beginning) // BLOCK_BYTES
    assert first[:alike] == second[:alike]
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        end = (index + 1) * BLOCK_BYTES
        assert (left == right) == ((beginning + one)[:end] == (beginning + other)[:end])


def test_the_next_turn_of_a_conversation_shares_all_of_the_last() -> None:
    said = [{"role": "system", "content": LONG}, {"role": "user", "content": LONG}]
    more = [*said, {"role": "assistant", "content": LONG}, {"content": "Go on.", "role": "user"}]
    first = trace(messages=said, temperature=1)
    assert shared(first, trace(stream=True, messages=more)) == len(first.blocks) > 10
    assert first.home == trace(messages=more).home != 0


@pytest.mark.parametrize("field", ["tools", "system", "instructions", "cache_salt"])
def test_what_the_engine_caches_apart_shares_nothing(field: str) -> None:
    said = [{"role": "user", "content": LONG}]
    assert shared(trace(messages=said), trace(messages=said, **{field: "other"})) == 0


def test_an_adapter_shares_nothing_with_its_model() -> None:
    assert shared(trace(prompt=LONG), trace("sql", prompt=LONG)) == 0
    assert shared(trace("sql", prompt=LONG), trace("sql", prompt=LONG)) > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": LONG},
        {"prompt": [LONG, LONG]},
        {"prompt": list(range(2000))},
        {"prompt": [list(range(2000))]},
        {"input": LONG},
        {"input": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"messages": [{"role": "user", "content": LONG, "tool_calls": [{"id": "7"}]}]},
    ],
)
def test_prompts_of_every_kind_are_known_again(fields: dict[str, Any]) -> None:
    found = trace(**fields)
    assert found.blocks
    assert shared(found, trace(**fields)) == len(found.blocks)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=5,
)
asked = ["messages", "prompt", "input", "tools", "system", "user", "cache_salt", "prompt_cache_key"]


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from(asked), json_values))
def test_no_body_is_too_odd_to_be_sent_on(fields: dict[str, Any]) -> None:
    assert trace(**fields) == trace(**fields)


def test_half_a_character_is_hashed_like_any_other() -> None:
    assert trace(prompt="\ud800" * 2000).blocks


def test_of_a_huge_prompt_only_the_beginning_is_looked_at() -> None:
    most = 1 << 20
    assert len(trace(prompt="x" * 3 * most).blocks) == most // BLOCK_BYTES
    assert len(trace(messages=[{"role": "user", "content": "x" * most}] * 5).blocks) <= most // BLOCK_BYTES


names = st.lists(st.integers(0, 30), unique=True, max_size=40).map(tuple)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 50), st.lists(st.tuples(st.sampled_from("abc"), st.binary(max_size=20)), max_size=60))
def test_the_index_never_holds_more_than_it_may_nor_a_block_without_those_before_it(
    most: int, sent: list[tuple[str, bytes]]
) -> None:
    index = PrefixIndex(most)
    index.keep("abc")
    for replica, text in sent:
        # Prompts as chains: a block's name stands for all of the text up to it.
        chain = tuple(hash(text[: end + 1]) for end in range(len(text)))
        index.add(replica, Trace(blocks=chain))
        assert index.size <= most
        known = index.matched(replica, chain)
        assert known == min(len(chain), most // 3)
        held = index._held[replica]
        assert all((name in held) == (position < known) for position, name in enumerate(chain))


def test_more_slices_share_the_same_memory() -> None:
    index = PrefixIndex(90)
    index.keep("a")
    index.add("a", Trace(blocks=tuple(range(200))))
    assert index.matched("a", range(200)) == 90
    index.keep("abc")
    assert index.matched("a", range(200)) == 30


def test_what_was_asked_for_least_lately_is_forgotten_first() -> None:
    index = PrefixIndex(10)
    index.keep("a")
    hot, once, newcomer = (tuple(range(start, start + 4)) for start in (0, 100, 200))
    for chain in (hot, once, hot, newcomer):
        index.add("a", Trace(blocks=chain))
    assert [index.matched("a", chain) for chain in (hot, once, newcomer)] == [4, 2, 4]


def test_nothing_is_remembered_of_a_slice_that_is_gone() -> None:
    index = PrefixIndex(10)
    index.keep("ab")
    index.add("a", Trace(blocks=(1, 2), session=3))
    index.keep("b")
    index.add("a", Trace(blocks=(1, 2), session=3))
    assert index.matched("a", (1, 2)) == index.size == 0
    assert not index.has("a", 3)
