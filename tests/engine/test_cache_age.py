"""What a slice says of its prefix cache, from the events that vLLM tells of it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.cache_age import CacheAge
from serving.engine.kv_events import KvEvents
from serving.simulation.engine.blocks import BlockPool, chain

pytestmark = pytest.mark.unit


def test_a_cache_that_has_dropped_nothing_has_no_age() -> None:
    cache = CacheAge()
    cache.stored([1, 2], 10.0)
    assert cache.age_s(50.0) == 0.0


def test_the_age_is_that_of_the_newest_block_that_was_dropped() -> None:
    cache = CacheAge()
    cache.stored([1], 10.0)
    cache.stored([2], 20.0)
    cache.stored([3], 30.0)
    cache.removed([2, 1])
    assert cache.age_s(50.0) == 30.0
    assert cache.age_s(60.0) == 40.0


def test_a_block_that_was_never_told_of_changes_nothing() -> None:
    cache = CacheAge()
    cache.removed([7])
    assert cache.age_s(50.0) == 0.0


def test_a_block_stored_twice_and_dropped_twice_counts_from_the_first_time() -> None:
    cache = CacheAge()
    cache.stored([1], 10.0)
    cache.stored([1], 40.0)
    cache.removed([1])
    cache.removed([1])
    assert cache.age_s(50.0) == 40.0


def test_nothing_is_left_of_a_cleared_cache() -> None:
    cache = CacheAge()
    cache.stored([1], 10.0)
    cache.cleared(20.0)
    assert cache.age_s(50.0) == 30.0


def test_what_is_kept_stays_bounded_where_news_of_dropped_blocks_are_lost() -> None:
    cache = CacheAge(most_blocks=10)
    cache.stored(range(100), 10.0)
    cache.removed(range(90))
    assert cache.age_s(50.0) == 0.0
    cache.removed([95])
    assert cache.age_s(50.0) == 40.0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_nothing_that_is_said_to_be_gone_is_still_there(prompts: list[int]) -> None:
    """Prompts of two blocks, one after another, in a cache of eight that drops what was used longest ago."""
    pool, cache, asked_s = BlockPool(8), CacheAge(), dict[int, int]()
    had: set[int] = set()
    for now_s, prompt in enumerate(prompts, 1):
        names = blocks_of(prompt)
        shared = pool.cached(names)
        blocks = pool.take(shared, 2 - len(shared), now_s)
        assert blocks
        for block, name in zip(blocks, names, strict=True):
            pool.name(block, name)
        pool.release(blocks)
        asked_s[prompt] = now_s
        have = {name for known in asked_s for name in blocks_of(known) if pool.cached([name])}
        cache.stored(have - had, now_s)
        cache.removed(had - have)
        had, age_s = have, cache.age_s(now_s)
        gone = [known for known, at_s in asked_s.items() if age_s and now_s - at_s > age_s]
        assert not {name for known in gone for name in blocks_of(known)} & have
    if len(asked_s) > 8 // 2:
        assert cache.age_s(len(prompts))


def blocks_of(prompt: int) -> list[int]:
    first = chain(0, (prompt, 0))
    return [first, chain(first, (prompt, 1))]


def batch(*events: dict[str, object]) -> bytes:
    """As vLLM writes a step's events."""
    return msgspec.msgpack.encode([1.5, events, 0])


STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "group_idx": 0,
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 0}


def test_vllm_s_events_are_read() -> None:
    events = KvEvents()
    events.take(batch(STORED), 10.0)
    events.take(batch(STORED | {"block_hashes": [b"3" * 32], "group_idx": 1}), 20.0)
    events.take(batch(REMOVED | {"group_idx": 1}), 30.0)  # of another group of layers
    assert events.age_s(50.0) == 0.0
    events.take(batch(REMOVED), 30.0)
    assert events.age_s(50.0) == 40.0
    events.take(batch({"type": "AllBlocksCleared"}), 45.0)
    assert events.age_s(50.0) == 5.0
    events.close()


def test_an_event_of_another_vllm_is_an_error_that_the_reader_can_catch() -> None:
    events = KvEvents()
    with pytest.raises(msgspec.DecodeError):
        events.take(batch({"type": "BlockMoved", "block_hashes": [1]}), 10.0)
    events.close()
