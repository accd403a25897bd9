import dataclasses

import pytest
from support.simulated_engine import small_plan

from serving.simulation.chip_use import chip_use
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.unit

PLAN = small_plan()
IDLE = SliceRecord("a", "llama", SliceState.SERVING, "serving", "v6e 2x4", slice="slice-0")


def test_an_idle_slice_holds_its_weights_and_does_nothing() -> None:
    use = chip_use(PLAN, IDLE, IDLE, 2.0)
    assert (use.tensorcore, use.bandwidth, use.duty_cycle) == (0, 0, 0)
    assert use.hbm_used == PLAN.fit.weight_bytes
    assert use.hbm_total == PLAN.slice.hardware.hbm_bytes


def test_writing_reads_memory_more_than_it_multiplies_and_prefill_the_other_way_round() -> None:
    writing = chip_use(
        PLAN, IDLE, dataclasses.replace(IDLE, running=8, output_tokens=1600, kv_usage=0.1), 2.0
    )
    filling = chip_use(
        PLAN, IDLE, dataclasses.replace(IDLE, running=8, prompt_tokens=80_000, kv_usage=0.1), 2.0
    )
    assert writing.bandwidth > writing.tensorcore > 0
    assert filling.tensorcore > filling.bandwidth > 0
    assert 0 < writing.duty_cycle <= 100


def test_no_share_passes_100_percent_and_a_new_engines_counters_count_as_nothing() -> None:
    flooded = dataclasses.replace(IDLE, running=8, output_tokens=10**9, prompt_tokens=10**9, kv_usage=1.0)
    use = chip_use(PLAN, IDLE, flooded, 1.0)
    assert max(use.tensorcore, use.bandwidth, use.duty_cycle) <= 100
    assert use.hbm_used <= use.hbm_total
    assert chip_use(PLAN, flooded, IDLE, 1.0).duty_cycle == 0
