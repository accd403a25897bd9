import pytest

from serving.config import ModelSpec
from serving.planning import Plan, plan
from serving.planning.speed import MEASURED, output_rate, predict
from serving.planning.summary import summary

pytestmark = pytest.mark.unit


def llama_70b(**engine: object) -> Plan:
    return plan(
        ModelSpec.model_validate(
            {
                "model": "meta-llama/Llama-3.3-70B-Instruct",
                "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
                "engine": {"max_model_len": 4096, **engine},
            }
        )
    )


def test_predictions_on_v6e_are_within_a_quarter_of_the_published() -> None:
    found = llama_70b(max_model_len=2048, gpu_memory_utilization=0.98, max_num_batched_tokens=512)
    rows = summary(found, {})["measured"]
    assert [row["sequences"] for row in rows] == [64, 128]
    for row in rows:
        print(f"{row['sequences']} sequences: off by {row['off_by']:+.0%}")
        assert abs(row["off_by"]) < 0.25


def test_a_larger_batch_gives_more_tokens_and_a_longer_step() -> None:
    found = llama_70b()
    steps = [
        predict(found.shape, found.demand, found.slice, found.layout, sequences=sequences, context=1024)
        for sequences in (1, 8, 64)
    ]
    assert [step.step_s for step in steps] == sorted(step.step_s for step in steps)
    assert [step.decode_tokens_per_s for step in steps] == sorted(step.decode_tokens_per_s for step in steps)


def test_a_single_sequence_is_bound_by_reading_the_weights() -> None:
    found = llama_70b()
    alone = predict(found.shape, found.demand, found.slice, found.layout, sequences=1, context=128)
    reading_s = 139e9 / 8 / (1638e9 * 0.72)
    assert alone.step_s == pytest.approx(reading_s, rel=0.1)


def test_prompts_cost_what_their_prefill_takes() -> None:
    found = llama_70b()
    step = predict(found.shape, found.demand, found.slice, found.layout, sequences=64, context=1024)
    assert output_rate(step, prompt=1, answer=1000) > output_rate(step, prompt=8000, answer=1000)
    assert output_rate(step, prompt=1000, answer=1000) < step.decode_tokens_per_s


def test_every_published_figure_names_its_page() -> None:
    assert all(row.source.startswith("https://") and row.tokens_per_s > 0 for row in MEASURED)
