"""What the choice of slices is worth, on simulated engines in simulated time; benchmarks/routing measures it over HTTP."""

from functools import lru_cache

import pytest
from support.simulated_engine import small_plan
from support.simulated_fleet import MODEL, Outcome, Talk, play, talks

from serving.config import Affinity
from serving.planning import Plan
from serving.router.scheduling.slice_table import SliceTable

pytestmark = pytest.mark.unit

SECONDS = 12


def routers(affinity: Affinity, count: int = 1) -> list[SliceTable]:
    shapes = {MODEL: "v6e 2x4"}
    return [SliceTable({MODEL: 1}, shapes, affinity=affinity, routers=count) for _ in range(count)]


@lru_cache
def chat(affinity: Affinity, count: int = 1) -> Outcome:
    traffic = talks(SECONDS, 4, turns=(3, 6), asked=(200, 800), answered=(10, 40), think_s=0.5)
    return play(traffic, routers(affinity, count), plan=plan())


@lru_cache
def unlike(affinity: Affinity) -> Outcome:
    traffic = talks(SECONDS, 30, turns=(1, 1), asked=(500, 4000), answered=(10, 40))
    return play(traffic, routers(affinity), plan=plan())


@lru_cache
def plan() -> Plan:
    return small_plan(max_model_len=8192)


def hot() -> list[Talk]:
    return talks(SECONDS, 100, turns=(1, 1), asked=(50, 200), answered=(10, 40), shared=(2000,))


def test_conversations_find_their_cache_again() -> None:
    assert chat(Affinity.PREFIX).hit_rate > 1.5 * chat(Affinity.NONE).hit_rate
    assert chat(Affinity.PREFIX).ttft_at(0.5) < chat(Affinity.NONE).ttft_at(0.5)


def test_three_routers_that_do_not_talk_find_it_more_often_than_not() -> None:
    assert chat(Affinity.PREFIX, 3).hit_rate > 1.3 * chat(Affinity.NONE).hit_rate


def test_where_prompts_share_nothing_nothing_is_lost() -> None:
    by_prefix, by_load = unlike(Affinity.PREFIX), unlike(Affinity.NONE)
    assert by_prefix.hit_rate == 0
    assert by_prefix.ttft_at(0.5) < 1.05 * by_load.ttft_at(0.5)
    assert by_prefix.ttft_at(0.95) < 1.1 * by_load.ttft_at(0.95)


def test_a_system_prompt_that_all_share_is_served_by_all_slices_alike() -> None:
    found = play(hot(), routers(Affinity.PREFIX), plan=plan())
    assert found.hit_rate > 0.8
    assert max(found.per_slice.values()) < 1.3 * min(found.per_slice.values())


def test_a_slow_slice_is_spared() -> None:
    found = play(hot(), routers(Affinity.PREFIX), plan=plan(), slowness=(4.0, 1.0, 1.0, 1.0))
    assert found.per_slice["s0"] < min(found.per_slice[name] for name in ("s1", "s2", "s3")) / 2
