import contextlib
import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import ParallelSpec
from serving.errors import PlanError, ServingError
from serving.planning.checkpoints import embeds
from serving.planning.engine_sizes import engine_sizes
from serving.planning.fit import measure
from serving.planning.known_models import CONFIGS
from serving.planning.parallelism import derive
from serving.planning.shapes import read_config, shape_of
from serving.tpu import resolve

pytestmark = pytest.mark.unit

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


def write_checkpoint(folder: Path, config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_local_checkpoint_is_read(tmp_path: Path) -> None:
    shape = shape_of(write_checkpoint(tmp_path / "tiny", TINY))
    assert (shape.architecture, shape.layers, shape.num_attention_heads) == ("LlamaForCausalLM", 4, 8)
    assert shape.head_dim == 64 // 8


def test_a_known_model_needs_no_network() -> None:
    shape = shape_of("meta-llama/Llama-3.1-8B-Instruct")
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (32, 8, 128)


def test_a_multimodal_wrapper_keeps_its_decoder_under_text_config() -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": TINY | {"architectures": None},
    }
    shape = read_config(config, where="wrapped")
    assert (shape.architecture, shape.hidden_size) == ("Gemma3ForConditionalGeneration", 64)


def test_what_config_json_lacks_is_given_by_hand(tmp_path: Path) -> None:
    lacking = {key: value for key, value in TINY.items() if key != "vocab_size"}
    model = write_checkpoint(tmp_path / "lacking", lacking)
    with pytest.raises(PlanError, match=r"has no vocab_size; give it as engine\.hf_overrides\.vocab_size"):
        shape_of(model)
    assert shape_of(model, {"vocab_size": 512}).vocab_size == 512


@pytest.mark.parametrize("model", ["/nowhere/llama", "./nowhere", "../nowhere", "~/nowhere-at-all"])
def test_a_path_that_does_not_exist_is_said_to_be_one(model: str) -> None:
    with pytest.raises(PlanError, match=f"^model path {model} does not exist$"):
        shape_of(model)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("m" * 300, "it is no Hugging Face id"),
        ("./" + "m" * 300, "does not exist"),
        ("~nobody-here/llama", "does not exist"),
        ("**/llama", "it is no Hugging Face id"),
        ("someone/ll\0ama", "it is no Hugging Face id"),
        ("", "it is no Hugging Face id"),
    ],
)
def test_a_name_that_no_file_and_no_repository_can_have_is_refused(model: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        shape_of(model)
    assert not embeds(model)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list, not a config"),
        ('{"a":' * 20_000 + "1" + "}" * 20_000, "is nested too deeply for a config"),
        ('{"architectures": ["LlamaForCausalLM"]}', "has no num_attention_heads"),
        (json.dumps(TINY | {"architectures": []}), "has no architectures"),
        (json.dumps(TINY | {"hidden_size": "64"}), "hidden_size is '64', not a number"),
        (json.dumps(TINY | {"num_hidden_layers": 0}), "num_hidden_layers is 0, not a number of at least 1"),
    ],
)
def test_a_broken_config_says_what_is_broken(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(PlanError) as refusal:
        shape_of(str(tmp_path))
    assert says in refusal.value.message


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no readable config\.json"):
        shape_of(str(tmp_path))


@pytest.mark.parametrize("heads", [3, 99])
def test_key_value_heads_that_attention_heads_are_no_multiple_of_are_refused(heads: int) -> None:
    with pytest.raises(PlanError, match=f"is no multiple of num_key_value_heads, {heads}"):
        read_config(TINY | {"num_key_value_heads": heads}, where="tiny")


@pytest.mark.parametrize(
    ("architecture", "near"),
    [
        ("LlamForCausalLM", "did you mean LlamaForCausalLM?"),
        ("Qwen3MoEForCausalLM", "did you mean Qwen3MoeForCausalLM?"),
        ("MyOwnForCausalLM", None),
        ("Gemma3nForCausalLM", None),
        ("Qwen4ForCausalLM", None),
    ],
)
def test_an_architecture_that_is_not_counted_is_refused_and_no_other_is_to_be_claimed(
    architecture: str, near: str | None
) -> None:
    with pytest.raises(PlanError, match=f"{architecture}, whose bytes this plan can't count") as refusal:
        read_config(TINY | {"architectures": [architecture]}, where="tiny")
    assert ("did you mean" in refusal.value.message) == (near is not None)
    assert near is None or near in refusal.value.message
    assert "hf_overrides" not in refusal.value.message


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("DeepseekV32ForCausalLM", "vLLM 0.26 runs on CUDA, ROCm and XPU only"),
        ("Gemma2ForCausalLM", "soft cap"),
        ("NemotronHForCausalLM", "state-space"),
        ("BloomForCausalLM", "ALiBi"),
        ("Olmo2ForCausalLM", "runs transformers' own"),
    ],
)
def test_what_no_tpu_serves_is_refused_with_the_reason(architecture: str, reason: str) -> None:
    with pytest.raises(PlanError, match="not served on TPUs") as refusal:
        read_config(TINY | {"architectures": [architecture]}, where="tiny")
    assert reason in refusal.value.message


def test_a_window_without_a_pattern_is_every_layers() -> None:
    (kind,) = read_config(TINY | {"sliding_window": 4096}, where="tiny").attention
    assert (kind.count, kind.window) == (4, 4096)
    (unused,) = read_config(
        TINY | {"sliding_window": 4096, "use_sliding_window": False}, where="tiny"
    ).attention
    assert unused.window is None


def test_layer_types_must_name_every_layer() -> None:
    with pytest.raises(PlanError, match="layer_types names 3 layers, num_hidden_layers is 4"):
        read_config(TINY | {"layer_types": ["full_attention"] * 3}, where="tiny")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"text_config": 3}, "text_config is 3, not a mapping"),
        ({"layer_types": "full"}, "layer_types is 'full', not a list"),
        ({"vision_config": 3}, "config of tiny (vision_config) is 3, not a mapping"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as refusal:
        read_config(TINY | wrong, where="tiny")
    assert says in refusal.value.message


def test_overrides_reach_into_the_text_config(tmp_path: Path) -> None:
    wrapped = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": TINY}
    model = write_checkpoint(tmp_path / "wrapped", wrapped)
    shape = shape_of(model, {"text_config": {"num_hidden_layers": 2}})
    assert (shape.layers, shape.hidden_size) == (2, 64)


def paths_of(config: dict[str, Any], *parents: str) -> list[tuple[str, ...]]:
    """Where the values of a config are, those of nested mappings included."""
    found: list[tuple[str, ...]] = []
    for key, value in config.items():
        found.append((*parents, key))
        if isinstance(value, dict):
            found += paths_of(value, *parents, key)
    return found


JUNK = (
    st.none()
    | st.booleans()
    | st.integers(-2, 10**6)
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=3)
    | st.just([])
    | st.just({})
)


@given(st.sampled_from(sorted(CONFIGS)), st.data())
def test_a_config_of_any_kind_is_read_or_refused(model: str, data: st.DataObject) -> None:
    """Any value may be missing or wrong; nothing but our own errors comes out."""
    config = copy.deepcopy(CONFIGS[model])
    *parents, key = data.draw(st.sampled_from(paths_of(config)))
    holder = config
    for parent in parents:
        holder = holder[parent]
    holder[key] = data.draw(JUNK)
    with contextlib.suppress(ServingError):
        shape = read_config(config, where=model)
        sizes = engine_sizes({"max_model_len": -1}, shape)
        layout, _ = derive(shape, sizes, resolve("v7x", "2x2x1"), ParallelSpec())
        measure(shape, sizes, resolve("v7x", "2x2x1"), layout)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}, 800),
        ({"rope_type": "yarn", "factor": 4.0}, 1024),
        ({"type": "linear", "factor": 2}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, 256),
        ({"rope_type": "default"}, 256),
        ({"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {}}, 512),
    ],
)
def test_positions_are_those_that_vllm_derives(rope: dict[str, Any], positions: int) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        assert read_config(TINY | {key: rope}, "tiny").max_position_embeddings == positions


def test_a_factor_beyond_all_positions_is_refused() -> None:
    with pytest.raises(PlanError, match="not numbers above 0"):
        read_config(TINY | {"rope_parameters": {"rope_type": "linear", "factor": 1e308}}, "tiny")


def test_a_model_with_long_rope_starts_at_the_length_it_was_trained_at() -> None:
    config = TINY | {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64}
    shape = read_config(config, "tiny")
    assert (shape.max_position_embeddings, shape.default_length) == (256, 64)
    assert engine_sizes({}, shape).max_model_len == 64
    assert engine_sizes({"max_model_len": 256}, shape).max_model_len == 256


def test_a_length_beyond_the_positions_is_at_the_user_s_risk() -> None:
    shape = read_config(TINY, "tiny")
    with pytest.raises(ServingError, match="rope_parameters"):
        engine_sizes({"max_model_len": 512}, shape)
    allowed = engine_sizes({"max_model_len": 512}, shape, environment={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    assert allowed.max_model_len == 512
    assert engine_sizes({"max_model_len": 512}, read_config(TINY | {"model_max_length": 512}, "tiny"))


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than"),
        ({"vocab_size": 10**400}, "vocab_size is 10+, more than 1000000000000"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings is 10+, more than"),
        ({"rope_scaling": {"type": "linear", "factor": 10**20}}, "not numbers above 0"),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 9},
            "9 layers without experts",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:(("]}},
            "which is no pattern",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "are inf and 256, not numbers above 0"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "are -1 and 256, not numbers above 0"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5, more than 4"),
        ({"sliding_window": 8, "layer_types": ["conv", "full_attention"] * 2}, "layer_types has 'conv'"),
    ],
)
def test_odd_numbers_of_a_config_are_refused_by_name(odd: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read_config(TINY | odd, "odd")


def test_decoders_without_a_head_embed() -> None:
    shape = read_config(TINY | {"architectures": ["MistralModel"]}, "tiny")
    assert (shape.architecture, shape.scores) == ("MistralForCausalLM", True)
