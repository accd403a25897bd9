"""The scheduler under arbitrary loads, stepped in simulated time."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.simulation.engine.blocks import BlockPool, chain
from serving.simulation.engine.scheduler import Limits, Request, Scheduler, Step

pytestmark = pytest.mark.unit

BLOCK = 4
LONGEST = 40
lengths = st.tuples(st.integers(1, 24), st.integers(1, 16))
limits = st.builds(
    Limits,
    sequences=st.integers(1, 6),
    batched_tokens=st.integers(1, 32),
    blocks=st.integers(LONGEST // BLOCK, 30),
    block_tokens=st.just(BLOCK),
    prefix_caching=st.booleans(),
    piece=st.sampled_from((5, math.inf)),
)


def requests(sizes: Sequence[tuple[int, int]], *, alike: bool = False) -> list[Request]:
    return [
        Request([1 if alike else number + 1] * prompt, [0] * answer, float(number))
        for number, (prompt, answer) in enumerate(sizes)
    ]


def run(scheduler: Scheduler, most_steps: int = 5000) -> list[Step]:
    steps = []
    while step := scheduler.schedule(float(len(steps))):
        steps.append(step)
        scheduler.complete(step, float(len(steps)))
        assert len(steps) < most_steps, "it does not end"
    return steps


@settings(max_examples=150, deadline=None)
@given(limits, st.lists(lengths, min_size=1, max_size=12), st.booleans())
def test_every_request_gets_its_whole_answer_and_gives_all_blocks_back(
    limit: Limits, sizes: list[tuple[int, int]], alike: bool
) -> None:
    scheduler = Scheduler(limit)
    asked = requests(sizes, alike=alike)
    for request in asked:
        scheduler.add(request)
    run(scheduler)
    assert all(request.done and request.written == len(request.answer) for request in asked)
    assert scheduler.totals.written_tokens == sum(answer for _, answer in sizes)
    assert scheduler.pool.free == scheduler.pool.count
    assert not scheduler.running
    assert not scheduler.waiting


@settings(max_examples=100, deadline=None)
@given(limits, st.lists(lengths, min_size=1, max_size=12))
def test_no_step_is_larger_than_allowed_and_none_is_empty(
    limit: Limits, sizes: list[tuple[int, int]]
) -> None:
    scheduler = Scheduler(limit)
    for request in requests(sizes):
        scheduler.add(request)
    for step in run(scheduler):
        computed = [tokens for _, tokens in step.work]
        assert all(tokens > 0 for tokens in computed)
        assert 0 < sum(computed) <= limit.batched_tokens
        assert len(computed) <= limit.sequences
        assert step.batch.decodes + step.batch.prefill_tokens == sum(computed)


@settings(max_examples=100, deadline=None)
@given(limits, st.lists(lengths, min_size=2, max_size=12))
def test_who_came_first_has_the_first_token_first(limit: Limits, sizes: list[tuple[int, int]]) -> None:
    scheduler = Scheduler(replace(limit, piece=math.inf))  # of pieces the short prompt's last comes first
    asked = requests(sizes)
    for request in asked:
        scheduler.add(request)
    run(scheduler)
    firsts = [request.first_token_s for request in asked]
    assert firsts == sorted(firsts, key=lambda at: at or 0)
    assert not asked[0].preemptions


@settings(max_examples=100, deadline=None)
@given(limits, st.lists(lengths, min_size=1, max_size=8), st.data())
def test_cancelling_at_any_moment_leaks_nothing(
    limit: Limits, sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    scheduler = Scheduler(limit)
    asked = requests(sizes)
    for request in asked:
        scheduler.add(request)
    now = 0.0
    while step := scheduler.schedule(now):
        if data.draw(st.booleans()):
            scheduler.cancel(data.draw(st.sampled_from(asked)))
        written = scheduler.complete(step, now)
        assert all(request.written <= len(request.answer) for request in written)
        now += 1
    assert all(request.done for request in asked)
    assert scheduler.pool.free == scheduler.pool.count


@given(st.lists(st.integers(1, 8), min_size=1, max_size=20))
def test_every_token_is_computed_once_where_nothing_is_preempted_or_shared(answers: list[int]) -> None:
    scheduler = Scheduler(Limits(20, 16, 1000, BLOCK, prefix_caching=False))
    asked = requests([(9, answer) for answer in answers])
    for request in asked:
        scheduler.add(request)
    computed = sum(tokens for step in run(scheduler) for _, tokens in step.work)
    assert computed == sum(9 + answer - 1 for answer in answers)


def test_a_long_prompt_is_cut_into_chunks_beside_those_that_decode() -> None:
    scheduler = Scheduler(Limits(4, 8, 100, BLOCK))
    short, long = requests([(4, 10), (20, 2)])
    scheduler.add(short)
    scheduler.complete(scheduler.schedule(0) or pytest.fail("no step"), 1)
    scheduler.add(long)
    seen = []
    while not long.written:
        step = scheduler.schedule(1)
        assert step
        seen.append((step.batch.decodes, step.batch.prefill_tokens))
        scheduler.complete(step, 2)
    assert seen == [(1, 7), (1, 7), (1, 6)]


def test_no_step_computes_more_of_a_prompt_than_its_piece() -> None:
    scheduler = Scheduler(Limits(4, 32, 60, BLOCK, piece=5))
    for request in requests([(12, 2), (3, 2)]):
        scheduler.add(request)
    assert [[tokens for _, tokens in step.work] for step in run(scheduler)] == [[5, 3], [5, 1], [2], [1]]


def test_the_last_to_come_starts_over_when_blocks_run_out() -> None:
    scheduler = Scheduler(Limits(2, 32, 10, BLOCK, prefix_caching=False))
    first, last = requests([(16, 16), (16, 16)])
    scheduler.add(first)
    scheduler.add(last)
    steps = run(scheduler)
    assert (first.preemptions, last.preemptions) == (0, 1)
    assert scheduler.totals.preemptions == 1
    again = [tokens for step in steps for request, tokens in step.work if request is last and tokens > 1]
    assert again == [16, 16 + 5]  # the prompt, then the prompt and what had been written


def test_a_prompt_that_begins_like_another_computes_only_what_differs() -> None:
    scheduler = Scheduler(Limits(2, 64, 100, BLOCK))
    first = Request([1] * 16 + [2], [3] * 8, 0.0)
    again = Request([1] * 16 + [4], [5], 0.0)
    follow_up = Request([1] * 16 + [2] + [3] * 8 + [6], [7], 0.0)
    for request in (first, again, follow_up):
        scheduler.add(request)
        run(scheduler)
    assert (first.cached, again.cached, follow_up.cached) == (0, 16, 24)
    assert scheduler.totals.queried_tokens == 17 + 17 + 26
    assert scheduler.totals.cached_tokens == 40


def test_the_last_token_of_a_cached_prompt_is_computed_again() -> None:
    scheduler = Scheduler(Limits(2, 64, 100, BLOCK))
    for request in requests([(8, 1), (8, 1)], alike=True):
        scheduler.add(request)
        steps = run(scheduler)
    assert [tokens for step in steps for _, tokens in step.work] == [4]


def test_a_request_larger_than_the_cache_or_empty_is_refused() -> None:
    scheduler = Scheduler(Limits(2, 64, 4, BLOCK))
    with pytest.raises(ValueError, match="17 tokens do not fit the cache of 16"):
        scheduler.add(Request([1] * 16, [1], 0.0))
    with pytest.raises(ValueError, match="at least one token"):
        scheduler.add(Request([], [1], 0.0))


def test_the_block_longest_untouched_is_taken_first_and_forgets_its_content() -> None:
    pool = BlockPool(2)
    old, new = (pool.take((), 1) or pytest.fail("full") for _ in range(2))
    for blocks in (old, new):
        pool.name(blocks[0], chain(0, blocks))
        pool.release(blocks)
    assert pool.take((), 1) == old
    assert pool.cached([chain(0, old)]) == []
    assert pool.cached([chain(0, new)]) == new
    assert pool.take(new, 1) is None
    assert pool.take(new, 0) == new
    assert pool.usage == 1
