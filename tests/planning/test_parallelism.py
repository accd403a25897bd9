from typing import Any

import pytest

from serving.config import ModelSpec
from serving.errors import ConfigError, PlanError
from serving.planning import Plan, plan

pytestmark = pytest.mark.unit

DENSE, EXPERTS, LATENT = "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-R1"


def planned(model: str, parallel: dict[str, Any], topology: str = "2x2x1", **engine: Any) -> Plan:
    options = {"max_model_len": 4096, "kv_cache_dtype": "fp8", **engine}
    slice_ = {"generation": "v7x", "topology": topology}
    return plan(
        ModelSpec.model_validate({"model": model, "slice": slice_, "engine": options, "parallel": parallel})
    )


@pytest.mark.parametrize(
    ("model", "parallel", "says"),
    [
        (DENSE, {"expert": 2}, "expert=2 needs a model with experts, Qwen3ForCausalLM has none"),
        (EXPERTS, {"tensor": 4, "expert": 4}, "tensor=4 x pipeline=1 x expert=4 is 16 devices, v7x 2x2x1"),
        (EXPERTS, {"expert": 3}, "128 experts do not divide by the 3 devices that they are cut over"),
        (EXPERTS, {"attention_data": 3}, "attention_data=3 does not divide tensor=8"),
        (EXPERTS, {"decode_context": 4}, "decode_context=4 is more than the 2 devices that would share one"),
        (DENSE, {"decode_context": 2}, "decode_context=2 is more than the 1 devices that would share one"),
        (
            EXPERTS,
            {"prefill_context": 2},
            "ends on a second one (tpu_runner.py); set engine.max_num_seqs to 1",
        ),
        (EXPERTS, {"prefill_context": 2, "data": 2}, "prefill_context does not go with data"),
        (EXPERTS, {"prefill_context": 2, "decode_context": 2}, "exclude each other"),
        (LATENT, {"decode_context": 2}, "no context parallelism in latent attention"),
    ],
)
def test_a_strategy_that_the_engine_can_t_run_is_refused_with_the_reason(
    model: str, parallel: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError) as refusal:
        planned(model, parallel)
    assert says in refusal.value.message


@pytest.mark.parametrize("size", [0, "many", -1, 1.5])
def test_a_size_is_a_whole_number_or_auto(size: Any) -> None:
    with pytest.raises(ValueError, match="attention_data"):
        planned(EXPERTS, {"attention_data": size})


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("enable_dp_attention", "set parallel.attention_data: auto"),
        ("expert_parallelism", "set parallel.expert"),
        ("sequence_parallelism", "no axis for it in its meshes"),
        ("expert_paralelism", "does not know it"),
    ],
)
def test_tpu_inference_s_own_keys_of_a_strategy_are_refused_with_ours(key: str, says: str) -> None:
    strategy = {"sharding": {"sharding_strategy": {key: 2}}}
    with pytest.raises(ConfigError) as refusal:
        planned(EXPERTS, {}, additional_config=strategy)
    assert f"sharding_strategy.{key}: not settable" in refusal.value.message
    assert says in refusal.value.message


def test_a_mesh_for_experts_is_asked_of_the_engine_as_its_recipe_does() -> None:
    found = planned(LATENT, {"tensor": 1, "expert": 16}, "2x2x2", enable_expert_parallel=True)
    assert found.parallel_options["tensor_parallel_size"] == 16
    assert found.engine["additional_config"]["sharding"]["sharding_strategy"] == {
        "tensor_parallelism": 1,
        "expert_parallelism": 16,
        "enable_dp_attention": True,
    }
    assert found.environment == {"NEW_MODEL_DESIGN": "1"}
    assert found.most_sequences == 16 * found.sizes.sequences


def test_deepseek_by_tpu_inference_s_own_model_says_that_its_experts_need_an_axis() -> None:
    without = planned(LATENT, {}, "2x2x2", enable_expert_parallel=True)
    assert any("engine.enable_expert_parallel has no effect" in reason for reason in without.reasons)
    by_vllm = planned(LATENT, {}, "2x2x2", enable_expert_parallel=True, model_impl="vllm")
    assert not any("no effect" in reason for reason in by_vllm.reasons)


def test_devices_that_hold_different_tokens_of_a_sequence_hold_more_of_them() -> None:
    one, two = (planned(EXPERTS, {"decode_context": size}) for size in (1, 2))
    assert two.mesh["dcp"] == 2
    assert two.fit.cache_tokens == pytest.approx(2 * one.fit.cache_tokens, rel=0.01)
    assert any("untested" in reason for reason in two.reasons)


def test_a_slice_keeps_the_strategy_s_other_options() -> None:
    rules = {"all": {"vocab_vd": ["model", None]}}
    found = planned(EXPERTS, {"expert": 4}, additional_config={"sharding": {"logical_rules": rules}, "x": 1})
    assert found.engine["additional_config"] == {
        "sharding": {
            "logical_rules": rules,
            "sharding_strategy": {"tensor_parallelism": 2, "expert_parallelism": 4},
        },
        "x": 1,
    }
