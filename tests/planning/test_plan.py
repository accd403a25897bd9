import pickle
import re
from typing import Any

import pytest

from serving.config import ModelSpec
from serving.errors import ConfigError, PlanError, TopologyError
from serving.planning import plan

pytestmark = pytest.mark.unit

LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
EAGLE = {
    "max_model_len": 4096,
    "speculative_config": {"method": "eagle3", "model": "Qwen/Qwen3-4B", "num_speculative_tokens": 4},
}
LLAMA_70B = "meta-llama/Llama-3.3-70B-Instruct"


def spec(model: str, generation: str, topology: str, **more: Any) -> ModelSpec:
    slice_ = {"generation": generation, "topology": topology, **more.pop("slice", {})}
    return ModelSpec.model_validate({"model": model, "slice": slice_, **more})


@pytest.mark.parametrize(
    ("model", "generation", "topology", "layout"),
    [
        (LLAMA_8B, "v6e", "1x1", (1, 1)),
        (LLAMA_8B, "v6e", "2x2", (4, 1)),
        (LLAMA_70B, "v6e", "4x4", (16, 1)),
        (LLAMA_70B, "v7x", "2x2x1", (8, 1)),
        (LLAMA_70B, "v5p", "2x2x2", (8, 1)),
        ("meta-llama/Llama-3.1-405B-Instruct", "v6e", "8x8", (64, 1)),
    ],
)
def test_tensor_parallelism_takes_every_device_of_the_slice(
    model: str, generation: str, topology: str, layout: tuple[int, int]
) -> None:
    found = plan(spec(model, generation, topology, engine={"max_model_len": 4096}))
    assert (found.tensor, found.pipeline) == layout


def test_a_pipeline_of_hosts_where_the_heads_do_not_divide_by_the_slice() -> None:
    found = plan(spec(LLAMA_8B, "v6e", "8x8"))
    assert (found.tensor, found.pipeline) == (4, 16)
    assert "32 attention heads do not divide by 64 devices, but all of it by 4" in found.reasons[0]


def test_the_user_may_ask_for_a_pipeline() -> None:
    found = plan(spec(LLAMA_8B, "v6e", "2x4", slice={"hosts": 2}, parallel={"pipeline": 2}))
    assert (found.tensor, found.pipeline) == (4, 2)


def test_a_pipeline_where_it_was_never_tried_is_said_to_be() -> None:
    asked = {"parallel": {"pipeline": 2}, "engine": {"max_model_len": 4096}}
    assert any("untried" in reason for reason in plan(spec(LLAMA_8B, "v5p", "2x2x2", **asked)).reasons)
    assert not any("untried" in reason for reason in plan(spec(LLAMA_8B, "v7x", "2x2x2", **asked)).reasons)


@pytest.mark.parametrize(("generation", "topology"), [("v4", "2x2x1"), ("v5p", "2x2x1"), ("v6e", "2x2")])
def test_a_generation_that_the_engine_calls_experimental_is_said_to_be(
    generation: str, topology: str
) -> None:
    asked = {"engine": {"max_model_len": 4096}}
    reasons = plan(spec(LLAMA_8B, generation, topology, **asked)).reasons
    assert any(f"calls {generation} experimental" in reason for reason in reasons) is (generation != "v6e")


def test_kv_heads_are_said_to_be_copied() -> None:
    assert plan(spec(LLAMA_8B, "v6e", "4x4")).reasons[1:] == (
        "8 KV heads are copied 2 times to fill tensor=16",
    )
    assert plan(spec(LLAMA_8B, "v6e", "2x4", slice={"hosts": 2})).reasons[1:] == ()


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, ""),
        ({"parallel": {"data": 2, "tensor": 2}}, "parallel.data"),
        ({"parallel": {"attention_data": 2}}, "parallel.attention_data"),
        ({"engine": {"additional_config": {"enable_continue_decode": True}}}, "enable_continue_decode"),
        ({"engine": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}}, ""),
        ({"engine": EAGLE}, "async_scheduling is false"),
        ({"engine": {**EAGLE, "async_scheduling": False}}, ""),
    ],
)
def test_a_plan_says_that_its_engines_take_no_grammars(asked: dict[str, Any], named: str) -> None:
    found = plan(spec(LLAMA_8B, "v6e", "2x2", **asked))
    assert bool(found.no_grammars) == bool(named)
    assert named in found.no_grammars
    assert any("grammar" in reason for reason in found.reasons) == bool(named)


def test_a_plan_keeps_what_was_asked_and_crosses_processes() -> None:
    asked = spec(LLAMA_8B, "v6e", "4x4", engine={"max_model_len": 4096})
    found = plan(asked)
    assert (found.model, found.engine) == (asked, {"max_model_len": 4096})
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301  our own bytes


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"tensor": 8}, ["pipeline=2 must be 1 or the number of hosts, 4"]),
        ({"tensor": 8, "pipeline": 1}, ["is 8 devices, v6e 4x4 (4 hosts x 4 chips) has 16"]),
        ({"pipeline": 3}, ["pipeline=3 must be 1 or the number of hosts, 4"]),
        ({"tensor": 32}, ["tensor=32 x pipeline=1 is 32 devices"]),
    ],
)
def test_parallelism_that_does_not_fill_the_slice_is_refused(
    parallel: dict[str, int], says: list[str]
) -> None:
    with pytest.raises(PlanError) as refusal:
        plan(spec(LLAMA_8B, "v6e", "4x4", parallel=parallel))
    for words in [*says, "tensor=16 pipeline=1 or tensor=4 pipeline=4 works"]:
        assert words in refusal.value.message


# Each ended as its engine was built by `serving compile`, before plans refused it: JAX's IndivisibleError, or a reshape of vLLM's.
QWEN25_VL_3B = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_hidden_layers": 36,
}


@pytest.mark.parametrize(
    ("model", "engine", "says"),
    [
        ("google/gemma-4-E4B-it", {}, "vision_config.num_attention_heads, 12, does not divide by 8 devices"),
        (
            "Qwen/Qwen2.5-VL-7B-Instruct",
            {"hf_overrides": QWEN25_VL_3B},
            "vision_config.intermediate_size, 3420, does not divide by 8 devices",
        ),
        (
            "Qwen/Qwen2.5-VL-7B-Instruct",
            {"hf_overrides": QWEN25_VL_3B, "model_impl": "vllm"},
            "vision_config.intermediate_size, 3420, does not divide by 8 devices",
        ),
        (LLAMA_8B, {"hf_overrides": {"vocab_size": 128258}}, "vocab_size, 128258, does not divide by 8"),
        (LLAMA_8B, {"hf_overrides": {"intermediate_size": 14340}}, "intermediate_size, 14340, does not"),
    ],
)
def test_sizes_that_devices_can_not_share_evenly_are_refused(
    model: str, engine: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError, match=says) as refusal:
        plan(spec(model, "v6e", "2x4", slice={"hosts": 1}, engine={"max_model_len": 4096, **engine}))
    assert re.search(r"tensor=[24] data=[24] works", refusal.value.message)


@pytest.mark.parametrize(
    ("model", "engine"),
    [
        # An encoder that every device has whole, or that is not loaded; a vocabulary that is padded.
        ("google/gemma-4-E4B-it", {"additional_config": {"mm-encoder-tp-mode": "data"}}),
        ("google/gemma-4-E4B-it", {"model_impl": "vllm"}),
        ("google/gemma-4-E4B-it", {"language_model_only": True}),
        ("google/gemma-4-31B-it", {}),
        (LLAMA_8B, {"hf_overrides": {"vocab_size": 128258}, "model_impl": "vllm"}),
        ("Qwen/Qwen3-8B", {"hf_overrides": {"vocab_size": 151938}}),
    ],
)
def test_sizes_that_the_engine_does_not_cut_may_be_odd(model: str, engine: dict[str, Any]) -> None:
    found = plan(spec(model, "v6e", "2x4", slice={"hosts": 1}, engine={"max_model_len": 4096, **engine}))
    assert found.tensor == 8


def test_an_encoder_that_the_slice_can_not_share_is_cut_over_the_devices_of_a_host() -> None:
    found = plan(spec("Qwen/Qwen3-VL-8B-Instruct", "v6e", "4x8"))
    assert (found.tensor, found.pipeline) == (4, 8)
    assert "vision_config.intermediate_size, 4304, does not divide by 32 devices" in found.reasons[0]


def test_heads_that_can_not_be_cut_are_refused() -> None:
    overrides = {"num_attention_heads": 40, "head_dim": 128}
    with pytest.raises(PlanError, match="40 attention heads do not divide by tensor=16"):
        plan(spec(LLAMA_8B, "v6e", "4x4", engine={"hf_overrides": overrides}, parallel={"tensor": 16}))
    with pytest.raises(PlanError, match=r"on v6e 2x4 .1 host x 8 chips. tensor=2 data=4 works"):
        plan(
            spec(
                LLAMA_8B,
                "v6e",
                "2x4",
                slice={"hosts": 1},
                engine={"hf_overrides": {"num_attention_heads": 30, "num_key_value_heads": 10}},
            )
        )


def test_kv_heads_that_neither_divide_nor_are_divided_are_refused() -> None:
    overrides = {"num_attention_heads": 36, "head_dim": 128, "num_key_value_heads": 6}
    with pytest.raises(PlanError, match="6 KV heads neither divide by tensor=4 nor it by them"):
        plan(spec(LLAMA_8B, "v6e", "2x2", engine={"hf_overrides": overrides}))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="pipeline=4 has more stages than the model's 3 layers"):
        plan(
            spec(
                LLAMA_8B,
                "v6e",
                "4x4",
                engine={"hf_overrides": {"num_hidden_layers": 3}},
                parallel={"pipeline": 4},
            )
        )


def test_the_slice_and_the_options_are_checked_too() -> None:
    with pytest.raises(TopologyError, match="name hosts or machine_type"):
        plan(spec(LLAMA_8B, "v6e", "2x4"))
    with pytest.raises(ConfigError, match=r"set parallel\.tensor"):
        plan(spec(LLAMA_8B, "v6e", "4x4", engine={"tensor_parallel_size": 4}))
    with pytest.raises(ConfigError, match="hf_overrides: a mapping"):
        plan(spec(LLAMA_8B, "v6e", "4x4", engine={"hf_overrides": "x"}))


@pytest.mark.parametrize(
    ("slo", "says"),
    [
        (
            {"itl_s": 0.001},
            "slo.itl_s is 0.001 s, and one step of v6e 2x4 (2 hosts x 4 chips) takes at least 0.00",
        ),
        ({"ttft_s": 0.001}, "slo.ttft_s is 0.001 s, and the first step"),
    ],
)
def test_targets_that_no_slice_can_meet_are_refused(slo: dict[str, float], says: str) -> None:
    spec = {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "slice": {"generation": "v6e", "topology": "2x4", "hosts": 2},
        "slo": slo,
    }
    with pytest.raises(PlanError) as refused:
        plan(ModelSpec.model_validate(spec))
    assert says in refused.value.message
    assert "no number of slices keeps it" in refused.value.message
