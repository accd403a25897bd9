from pathlib import Path

import pytest

from serving.config import ModelSpec, load
from serving.planning import Plan, plan
from serving.planning.speed import MEASURED, output_rate, predict
from serving.planning.summary import summary

pytestmark = pytest.mark.unit

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"


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


# How far off the prediction may be: prompts of 8192 tokens and a model of 2B run slower than their operations take.
@pytest.mark.parametrize(
    ("deployment", "bound"),
    [
        ("llama-70b-v6e-8", 0.1),
        ("qwen3-32b-v7x-2", 0.3),
        ("qwen3-coder-480b-v7x-8", 0.3),
        ("qwen3.5-397b-v7x-8", 0.3),
        ("gemma-4-e2b-v6e-1", 0.8),
    ],
)
def test_predictions_are_as_far_off_the_published_as_they_say(deployment: str, bound: float) -> None:
    (service,) = load(DEPLOYMENTS / f"{deployment}.yaml").services.values()
    rows = summary(plan(service.models[0]), {})["measured"]
    assert rows
    for row in rows:
        load_ = f"{row['sequences']} x {row['prompt_tokens']}+{row['answer_tokens']}"
        print(f"{deployment}, {load_}: off by {row['off_by']:+.0%}")
        assert abs(row["off_by"]) < (0.8 if row["prompt_tokens"] == 8192 else bound)


def test_a_larger_batch_gives_more_tokens_and_a_longer_step() -> None:
    found = llama_70b()
    steps = [
        predict(found.shape, found.sizes, found.slice, found.layout, sequences=sequences, context=1024)
        for sequences in (1, 8, 64)
    ]
    assert [step.step_s for step in steps] == sorted(step.step_s for step in steps)
    assert [step.decode_tokens_per_s for step in steps] == sorted(step.decode_tokens_per_s for step in steps)


def test_a_single_sequence_is_bound_by_reading_the_weights() -> None:
    found = llama_70b()
    alone = predict(found.shape, found.sizes, found.slice, found.layout, sequences=1, context=128)
    reading_s = 139e9 / 8 / (1638e9 * 0.72)
    assert alone.step_s == pytest.approx(reading_s + 4e-3, rel=0.1)


def test_prompts_cost_what_their_prefill_takes() -> None:
    found = llama_70b()
    step = predict(found.shape, found.sizes, found.slice, found.layout, sequences=64, context=1024)
    assert output_rate(step, prompt=1, answer=1000) > output_rate(step, prompt=8000, answer=1000)
    assert output_rate(step, prompt=1000, answer=1000) < step.decode_tokens_per_s


def test_every_published_figure_names_its_source() -> None:
    assert all(row.source and min(row.tokens_per_s.values()) > 0 for row in MEASURED)
