from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import ModelSpec, load
from serving.planning import Plan, plan
from serving.planning.published import HELD, PUBLISHED
from serving.planning.speed import (
    COSTS,
    Engine,
    per_answer_token,
    prompts_of_a_step,
    rate,
    spread,
    step,
)
from serving.planning.summary import summary

pytestmark = pytest.mark.unit

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"


def engine_of(found: Plan) -> Engine:
    return Engine(found.shape, found.sizes, found.slice, found.layout)


def planned(model: str, slice_: str, **engine: object) -> Plan:
    generation, topology = slice_.split()
    shape = {"generation": generation, "topology": topology}
    if (generation, topology) in (("v6e", "2x4"), ("v5e", "2x4")):
        shape["hosts"] = 1  # type: ignore[assignment]
    return plan(
        ModelSpec.model_validate(
            {"model": model, "slice": shape, "engine": {"max_model_len": 4096, **engine}}
        )
    )


def llama_70b(**engine: object) -> Plan:
    return planned("meta-llama/Llama-3.3-70B-Instruct", "v6e 2x4", **engine)


def test_a_range_is_wide_where_nothing_alike_was_measured() -> None:
    known = rate(engine_of(llama_70b()), prompt=1024, answer=1024, sequences=64)
    family = spread(engine_of(planned("microsoft/Phi-4-mini-instruct", "v6e 1x1")))
    nowhere = spread(engine_of(planned("meta-llama/Llama-3.1-8B-Instruct", "v5p 2x2x1")))
    assert known.low < known.tokens_per_s < known.high
    assert known.high / known.tokens_per_s < family < nowhere


@pytest.mark.parametrize(
    "deployment",
    [
        "llama-70b-v6e-8",
        "qwen3-32b-v7x-2",
        "qwen3-coder-480b-v7x-8",
        "qwen3.5-397b-v7x-8",
        "gemma-4-e2b-v6e-1",
    ],
)
def test_a_plan_shows_what_was_measured_of_its_model_and_slice(deployment: str) -> None:
    (service,) = load(DEPLOYMENTS / f"{deployment}.yaml").services.values()
    found = summary(plan(service.models[0]), {})["measured"]
    assert found
    assert all(row["source"] and row["output_tokens_per_s"] > 0 for row in found)


def test_a_larger_batch_gives_more_tokens_and_a_longer_step() -> None:
    found = llama_70b()
    steps = [found.speed(sequences=sequences, context=1024) for sequences in (1, 8, 64)]
    assert [step.step_s for step in steps] == sorted(step.step_s for step in steps)
    assert [step.decode_tokens_per_s for step in steps] == sorted(step.decode_tokens_per_s for step in steps)


def test_a_single_sequence_is_bound_by_reading_the_weights() -> None:
    parts = step(engine_of(llama_70b()), decodes=1, context=128)
    assert parts.weights_s == pytest.approx(139e9 / 8 / 1638e9, rel=0.01)
    assert parts.weights_s * COSTS.weights_s > 0.5 * parts.seconds(COSTS)


def test_small_experts_pay_for_their_starts_and_large_ones_do_not() -> None:
    small = planned("Qwen/Qwen3-30B-A3B", "v6e 2x4")
    large = planned("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "v7x 2x2x1", enable_expert_parallel=True)
    assert step(engine_of(small), decodes=64, context=1024).groups_s > 0
    assert step(engine_of(large), decodes=64, context=1024).groups_s == 0


def test_prompts_cost_what_their_prefill_takes() -> None:
    engine = engine_of(llama_70b())
    loads = [(1, 1000), (1000, 1000), (3000, 1000)]
    rates = [
        rate(engine, prompt=prompt, answer=answer, sequences=64).tokens_per_s for prompt, answer in loads
    ]
    assert rates == sorted(rates, reverse=True)


def test_prompts_that_fill_every_step_make_more_steps_of_it() -> None:
    engine = engine_of(llama_70b(max_num_batched_tokens=512))
    light = per_answer_token(engine, prompt=100, answer=1000, sequences=64)
    heavy = per_answer_token(engine, prompt=4000, answer=40, sequences=64)
    assert light.steps == pytest.approx(1 / 64, rel=1e-3)
    assert heavy.steps == pytest.approx(4000 / 40 / (512 - 64), rel=1e-3)


def test_a_model_that_writes_nothing_has_no_rate_of_output() -> None:
    found = summary(planned("Qwen/Qwen3-Embedding-8B", "v6e 1x1", runner="pooling"), {})
    assert "output_tokens_per_s" not in found["speed"]
    assert found["speed"]["prefill_tokens_per_s"] > 0
    assert "million_prompt_tokens" in found["prices"]["options"]["on-demand"]


def test_every_published_figure_names_its_source() -> None:
    rows = (*PUBLISHED, *HELD)
    assert all(row.source and row.date and min(row.rates.values()) > 0 and row.family for row in rows)


def test_a_table_of_embeddings_for_each_layer_is_looked_up_and_not_read() -> None:
    """Gemma 4 E2B answers one request at 203 tokens a second on a v6e chip, whose HBM reads its 8.97 GiB 170 times."""
    alone = planned("google/gemma-4-E2B-it", "v6e 1x1")
    found = rate(engine_of(alone), prompt=128, answer=128, sequences=1)
    assert found.low < 203 < found.high
    read = step(engine_of(alone), decodes=1, context=128).weights_s
    assert read < 0.6 * alone.fit.weight_bytes / alone.slice.hardware.hbm_bytes_per_s


def test_sampling_takes_as_long_as_was_measured() -> None:
    """Gemma 4 26B on v6e-8: 6.08 ms for 32 sequences, 1.105 for two parts of 16 (tpu-inference PR 3452)."""
    engine = engine_of(planned("google/gemma-4-26B-A4B-it", "v6e 2x4"))

    def seconds(sequences: int, *, sampled: bool = True) -> float:
        return step(engine, decodes=sequences, context=1024, sampled=sampled).sampled_s * COSTS.sampled_s

    assert seconds(32) == pytest.approx(6.08e-3, rel=0.1)
    assert seconds(32) == pytest.approx(seconds(128), rel=0.5)  # lanes that are padded cost as much
    assert seconds(16) == pytest.approx(0.55e-3, rel=0.15)
    assert (
        seconds(32, sampled=False) == step(engine, prompt_tokens=512, prompt=512, sampled=True).sampled_s == 0
    )


def test_a_range_reaches_from_requests_that_sample_to_greedy_ones() -> None:
    engine = engine_of(planned("google/gemma-4-31B-it", "v6e 2x2"))
    found = rate(engine, prompt=128, answer=128, sequences=128)
    assert found.low < found.sampled_tokens_per_s < 0.95 * found.tokens_per_s < found.high


def test_layers_with_a_window_take_sequences_in_untuned_blocks() -> None:
    windows = engine_of(planned("google/gemma-3-27b-it", "v6e 2x4"))
    assert step(windows, decodes=100, context=1024).untuned == 100 * 52
    wide = engine_of(planned("google/gemma-4-31B-it", "v6e 2x2"))  # 50 windows, 10 heads of 512
    assert step(wide, decodes=100, context=1024).untuned == 100 * 60
    for tuned in (llama_70b(), planned("openai/gpt-oss-120b", "v7x 1x1x1")):
        assert step(engine_of(tuned), decodes=100, context=1024).untuned == 0


def test_prompts_that_fill_almost_every_step_are_all_read() -> None:
    """16,000 tokens for each answer of 128: as many steps go to prompts for 32 requests as for 64."""
    engine = engine_of(
        planned("google/gemma-4-E2B-it", "v6e 1x1", max_model_len=32768, max_num_batched_tokens=4096)
    )
    few, many = (
        per_answer_token(engine, prompt=16000, answer=128, sequences=sequences).products_s
        for sequences in (32, 64)
    )
    assert few == pytest.approx(many, rel=0.02)


@given(st.floats(1, 4000), st.floats(1, 4096))
def test_prompts_of_a_step_by_chance_are_as_many_as_they_are_on_average(mean: float, unit: float) -> None:
    steps = prompts_of_a_step(mean, unit, 4096)
    assert sum(share for share, _ in steps) == pytest.approx(1, abs=1e-3)
    assert sum(share * tokens for share, tokens in steps) == pytest.approx(mean, rel=0.01)
    assert all(share >= 0 and 0 <= tokens <= 4096 for share, tokens in steps)


def test_a_window_is_read_and_not_what_lies_before_it() -> None:
    engine = engine_of(planned("google/gemma-4-31B-it", "v6e 2x4", max_model_len=65536))
    near, far = (step(engine, decodes=1, context=context).cache_s for context in (8192, 16384))
    whole = engine.shape.attention
    assert far - near == pytest.approx(
        sum(
            kind.count * 2 * kind.kv_heads * kind.head_dim * 2 * 8192 * max(1, 8 / kind.kv_heads)
            for kind in whole
            if not kind.window
        )
        / (8 * engine.slice.hardware.hbm_bytes_per_s)
    )


def test_prompts_of_latent_attention_attend_to_the_compressed_vectors() -> None:
    """128 heads of DeepSeek R1 take 576 and 512 numbers of a token: 512 users of 8,192 tokens ran 2.5 times slower than planned."""
    engine = engine_of(
        planned("deepseek-ai/DeepSeek-R1", "v7x 2x2x2", enable_expert_parallel=True, kv_cache_dtype="fp8")
    )
    parts = step(engine, prompt_tokens=8192, prompt=8192)
    flops = 61 * 2 * (576 + 512) * 128 * 8192 * 4096
    assert parts.attention_s == pytest.approx(flops / 8 / 2307e12, rel=0.01)
