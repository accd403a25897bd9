"""How long steps take, and that the factors are those that the published rows give."""

from dataclasses import replace

import pytest

from benchmarks import calibration as bench
from serving.simulation.engine.calibration import FACTORS, PUBLISHED, Load, factors_for, family
from serving.simulation.engine.physics import Batch, Factors, Parts, Physics
from serving.simulation.engine.replay import replay
from serving.simulation.engine.scheduler import Limits

pytestmark = pytest.mark.unit

LLAMA = bench.plan_of("llama-70b-v6e-8")


def physics(**factors: float) -> Physics:
    return Physics(LLAMA, Factors(**factors))


def test_a_step_of_decodes_takes_what_the_roofline_says() -> None:
    found = physics().seconds(Batch(64, 0, 64, 64 * 1024))
    said = LLAMA.speed(sequences=64, context=1024)
    assert found == pytest.approx(said.step_s, rel=0.01)


def test_steps_grow_with_batch_context_and_chunks() -> None:
    found = physics()
    alone, batch = Batch(1, 0, 1, 100), Batch(64, 0, 64, 6400)
    assert found.seconds(alone) < found.seconds(batch)
    assert found.seconds(batch) < found.seconds(replace(batch, context_tokens=64 * 1500))
    assert found.seconds(batch) < found.seconds(replace(batch, prefill_tokens=448, sequences=65))
    assert found.seconds(batch) < found.seconds(replace(batch, pairs=10**6))


def test_tokens_are_padded_to_the_buckets_that_are_compiled() -> None:
    found = physics(cache=0)
    assert found.seconds(Batch(33, 0, 33, 0)) == found.seconds(Batch(64, 0, 64, 0))
    assert found.seconds(Batch(65, 0, 65, 0)) > found.seconds(Batch(64, 0, 64, 0))


def test_each_factor_scales_its_part() -> None:
    batch = Batch(8, 100, 9, 9000, 5000)
    parts = physics().parts(batch)
    for name in ("decode", "prefill", "cache", "attention"):
        more = physics(**{name: 3.0}).seconds(batch) - physics().seconds(batch)
        assert more == pytest.approx(2 * getattr(parts, f"{name}_s"))


def test_a_batch_without_tokens_is_no_step() -> None:
    with pytest.raises(ValueError, match="empty batch"):
        physics().seconds(Batch(0, 0, 0, 0))


def test_limits_follow_the_plan() -> None:
    found = Limits.of(LLAMA)
    assert (found.sequences, found.batched_tokens, found.block_tokens) == (256, 512, 128)
    assert found.blocks * found.block_tokens == pytest.approx(LLAMA.fit.cache_tokens, rel=0.001)
    assert not found.prefix_caching  # as the recipe sets it
    assert Limits.of(bench.plan_of("qwen3-32b-v7x-2")).block_tokens == 256  # as the recipe sets it


def test_every_family_has_factors_and_every_published_row_a_family() -> None:
    found = {family(bench.plan_of(row.deployment)) for row in PUBLISHED}
    assert found == FACTORS.keys()
    assert factors_for(LLAMA) == FACTORS["dense on v6e"]


def test_half_of_the_rows_are_held_out_and_each_names_its_source() -> None:
    assert sum(row.fits for row in PUBLISHED) * 2 == len(PUBLISHED)
    assert all(row.source for row in PUBLISHED)


@pytest.mark.slow
def test_the_factors_are_what_a_fit_to_their_rows_gives() -> None:
    assert bench.fit_families(bench.measure([row for row in PUBLISHED if row.fits])) == FACTORS


def test_the_table_and_the_plot_show_every_row() -> None:
    loads = [Load(100, 20, 4, 10), Load(200, 20, 4, 10)]
    shown = [replace(PUBLISHED[0], load=load, fits=False) for load in loads]
    rows = bench.compare(bench.measure(shown), FACTORS)
    assert len(bench.table(rows).splitlines()) == 2 + len(rows)
    assert bench.svg(rows).count("<circle") == len(rows)
    assert "of 2 within 15%" in bench.verdict(rows)


def test_a_fit_finds_the_factors_behind_its_runs_and_stays_near_one_without() -> None:
    truth = Factors(2.0, 0.5, 1.5, 1.0)
    parts = [Parts(9, 1, 1, 0), Parts(1, 9, 1, 0), Parts(1, 1, 9, 0)]
    runs = [bench.Run(PUBLISHED[0], LLAMA, "dense", each, each.seconds(truth)) for each in parts]
    for name in ("decode", "prefill", "cache"):
        assert getattr(bench.fit(runs), name) == pytest.approx(getattr(truth, name), rel=0.05)
    assert bench.fit([]) == Factors()


def test_a_replay_answers_every_prompt_and_the_same_each_time() -> None:
    load = Load(100, 20, 4, 10, 0.5)
    once, again = (replay(LLAMA, load, Factors()) for _ in range(2))
    assert once == again
    assert once.tokens_per_s * once.seconds > 10 * 10
    assert once.ttft_s > 0
    assert replay(LLAMA, load, Factors(2, 2, 2, 2)).seconds == pytest.approx(2 * once.seconds)
