import itertools
import tracemalloc
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from serving.router.http.protocol import InferenceRequest
from serving.router.http.responses import Kept, following, items
from serving.router.scheduling import prefix_index
from serving.router.scheduling.bit_columns import members
from serving.router.scheduling.prefix_index import BLOCK_BYTES, TOKEN_BYTES, PrefixIndex, Trace, tokens_of

pytestmark = pytest.mark.unit

LONG = "a word of it " * 200


def trace(adapter: str | None = None, **fields: Any) -> Trace:
    return prefix_index.trace(InferenceRequest("llama", "/v1/chat/completions", b"", fields), adapter)


def matched(index: PrefixIndex, number: int, names: Sequence[int]) -> int:
    return next((count for count, _ in index.matches(names, 1 << number)), 0)


def alike(one: str, other: str) -> int:
    """How many letters two texts begin with alike."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def shared(one: Trace, other: Trace) -> int:
    index = PrefixIndex(1000)
    number = index.join()
    index.put(number, one.names)
    return matched(index, number, other.blocks)


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=9000), st.binary(max_size=5000), st.binary(max_size=5000))
def test_texts_share_the_names_of_what_they_begin_with_alike_and_no_others(
    beginning: bytes, one: bytes, other: bytes
) -> None:
    first, second = prefix_index.blocks(beginning + one), prefix_index.blocks(beginning + other)
    for count, (left, right) in enumerate(zip(first, second, strict=False), 1):
        end = tokens_of(count) * TOKEN_BYTES
        assert (left == right) == ((beginning + one)[:end] == (beginning + other)[:end])


def test_no_match_is_understated_by_more_than_an_eighth() -> None:
    for length in range(BLOCK_BYTES, 1 << 20, 1777):
        known = tokens_of(bisect_right(prefix_index._ENDS, length)) * TOKEN_BYTES
        assert length - known < max(BLOCK_BYTES, length / 8)


def test_the_next_turn_of_a_conversation_shares_all_of_the_last() -> None:
    said = [{"role": "system", "content": LONG}, {"role": "user", "content": LONG}]
    more = [*said, {"role": "assistant", "content": LONG}, {"content": "Go on.", "role": "user"}]
    first = trace(messages=said, temperature=1)
    assert shared(first, trace(stream=True, messages=more)) == len(first.blocks) >= 10
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
        {"token_ids": list(range(2000))},
        {"input": LONG},
        {"input": [{"role": "user", "content": LONG}]},
        {"input": [{"type": "function_call", "name": "f", "arguments": LONG}]},
        {"input": [{"type": "function_call_output", "call_id": "1", "output": LONG}]},
        {"input": [{"type": "function_call_output", "output": [{"type": "input_text", "text": LONG}]}]},
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


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"image_url": {"url": "data:" + "a" * (24 << 20)}}]}]},
        {"messages": [{"role": "user", "content": "a"}] * 60_000},
        {"messages": [{"role": "user", "content": [{"text": "a"}] * 60_000}]},
        {"tools": [{"a": list(range(200_000))}, {"b": "c" * (24 << 20)}], "prompt": ["a"] * 200_000},
    ],
    ids=["picture", "messages", "parts", "tools"],
)
def test_what_is_looked_at_of_a_request_does_not_grow_with_it(fields: dict[str, Any]) -> None:
    """The router looks at it on its event loop: written out whole, 24 MB of a picture took 150 ms."""
    trace(**fields)
    tracemalloc.start()
    try:
        trace(**fields)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 5 << 20


def test_names_and_texts_in_parts_tell_prompts_apart() -> None:
    def said(name: str, text: str) -> Trace:
        return trace(messages=[{"role": "user", "content": [{"type": "text", name: text}]}])

    assert shared(said("text", LONG), said("text", LONG)) == len(said("text", LONG).blocks) > 4
    assert shared(said("text", LONG), said("document", LONG)) == 0


def test_what_engines_read_nothing_of_tells_no_prompts_apart() -> None:
    """Two turns of Claude Code: a line of its own changes, and the mark for Anthropic's cache moves on."""

    def turn(number: int, *messages: Any) -> Trace:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"}
        system = [billing, {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
        return trace(system=system, messages=list(messages), tools=[{"name": "Read"}])

    def result(**mark: Any) -> dict[str, Any]:
        return {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "7", "content": LONG, **mark}],
        }

    mark: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
    asked = {"role": "user", "content": LONG}
    marked = {"role": "user", "content": [{"type": "text", "text": LONG, **mark}]}
    first = turn(1, marked, result(**mark))
    second = turn(2, asked, result(), result(**mark))
    assert len(first.blocks) * BLOCK_BYTES > 2.5 * len(LONG)
    assert shared(first, second) == len(first.blocks)


def test_a_response_that_follows_on_a_text_is_its_conversation_s() -> None:
    fields = {"input": LONG, "instructions": "Be brief", "previous_response_id": "resp_1"}
    first = trace(**fields)
    output = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]}
    body, _ = following({**fields, "input": "Why?"}, Kept(to_json({"output": [output]}), items(fields)))
    second = trace(**from_json(body))
    assert shared(first, second) == len(first.blocks) > 4
    assert second.home == first.home


def test_of_a_huge_prompt_only_the_beginning_is_looked_at() -> None:
    most = 1 << 20
    assert len(trace(prompt="x" * 3 * most).blocks) == len(prefix_index._ENDS) == 72
    assert len(trace(messages=[{"role": "user", "content": "x" * most}] * 5).blocks) <= 72


@settings(max_examples=50, deadline=None)
@given(st.integers(4, 60), st.lists(st.tuples(st.integers(0, 2), st.text("ab", max_size=12)), max_size=60))
def test_the_index_holds_no_more_than_it_may_and_no_block_without_those_before_it(
    most: int, sent: list[tuple[int, str]]
) -> None:
    index = PrefixIndex(most)
    numbers = [index.join() for _ in range(3)]
    for which, text in sent:
        # Prompts as chains: a block's name stands for all of the text up to it.
        chain = tuple(hash(text[: end + 1]) for end in range(len(text)))
        index.put(numbers[which], chain[: most // 2])
        assert index.size <= most
        known = matched(index, numbers[which], chain)
        assert known == min(len(chain), most // 2)
        having = [bool(index.holders(name) >> numbers[which] & 1) for name in chain]
        assert having == [position < known for position in range(len(chain))]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.text("ab", max_size=6)), max_size=40), st.text("ab", max_size=8)
)
def test_every_slice_comes_with_the_longest_beginning_it_was_sent_the_longest_first(
    sent: list[tuple[int, str]], asked: str
) -> None:
    index = PrefixIndex(1000)
    numbers = [index.join() for _ in range(6)]

    def chain(text: str) -> tuple[int, ...]:
        return tuple(hash(text[: end + 1]) for end in range(len(text)))

    for which, text in sent:
        index.put(numbers[which], chain(text))
    found = [
        (count, number)
        for count, holders in index.matches(chain(asked), 0b011111)
        for number in members(holders)
    ]
    assert [count for count, _ in found] == sorted((count for count, _ in found), reverse=True)
    longest = {
        numbers[which]: max(alike(asked, text) for other, text in sent if other == which)
        for which in {which for which, _ in sent} - {5}
    }
    assert {number: count for count, number in found} == {
        number: count for number, count in longest.items() if count
    }


def test_the_same_memory_holds_the_same_prompts_whatever_the_number_of_slices() -> None:
    index = PrefixIndex(4000)
    numbers = [index.join() for _ in range(1000)]
    for number in numbers:
        index.put(number, (number, -number - 1))
    assert all(matched(index, number, (number, -number - 1)) == 2 for number in numbers)


def test_a_beginning_that_all_slices_were_sent_is_kept_once() -> None:
    index = PrefixIndex(1000)
    numbers = [index.join() for _ in range(100)]
    for number in numbers:
        index.put(number, tuple(range(50)))
    assert index.size == 50
    assert list(index.matches(range(50), (1 << 100) - 1)) == [(50, (1 << 100) - 1)]


def test_what_was_asked_for_least_lately_is_forgotten_first() -> None:
    index = PrefixIndex(10)
    number = index.join()
    hot, once, newcomer = (tuple(range(start, start + 4)) for start in (0, 100, 200))
    for chain in (hot, once, hot, newcomer):
        index.put(number, chain)
    assert [matched(index, number, chain) for chain in (hot, once, newcomer)] == [4, 0, 4]


def test_nothing_is_remembered_of_a_slice_that_is_gone() -> None:
    index = PrefixIndex(100)
    gone, stays = index.join(), index.join()
    for number in (gone, stays):
        index.put(number, (1, 2, 3))
    index.leave(gone)
    assert list(index.matches((1, 2), 0b11)) == [(2, 1 << stays)]
    assert index.holders(3) == 1 << stays


def test_a_new_slice_gets_no_number_whose_blocks_are_still_remembered() -> None:
    index = PrefixIndex(1000)
    for _ in range(2000):
        number = index.join()
        assert not index.holders(1) >> number & 1
        index.put(number, (1,))
        index.leave(number)
    assert number < 1000  # and numbers do not grow with all slices that ever were
