from typing import Any

import pytest

from serving.errors import ConfigError, PlanError
from serving.planning.engine_sizes import engine_sizes
from serving.planning.layout import Layout
from serving.planning.quantization import bytes_per_weight, read_quantization
from serving.planning.shapes import shape_of
from serving.planning.weights import tensor_groups

pytestmark = pytest.mark.unit


def int_weights(bits: int, group: int | None = None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": bits, "group_size": group}}},
    }


@pytest.mark.parametrize(
    ("config", "weight_format", "size"),
    [
        ({"quant_method": "fp8"}, "fp8", 1.0),
        ({"quant_method": "mxfp4"}, "mxfp4", 0.53),
        ({"quant_method": "awq", "group_size": 128}, "int4-g128", 0.516),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "int4-g64", 0.53125),
        (int_weights(8), "int8", 1.0),
        (int_weights(4, 32), "int4-g32", 0.5625),
        (int_weights(4), "int4", 0.516),
        ({**int_weights(8), "quant_method": "Compressed_Tensors"}, "int8", 1.0),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, "nvfp4", 0.5625),
    ],
)
def test_a_format_is_read_with_its_scales(config: dict[str, Any], weight_format: str, size: float) -> None:
    found = read_quantization(config, "model")
    assert found is not None
    assert found.format == weight_format
    assert bytes_per_weight(found.format) == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"quant_method": "gptq"},
            "quantised with gptq, which tpu-inference does not load; it loads fp8, mxfp4",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "gives weights as nothing"),
        (int_weights(3), "gives weights as"),
        (
            {"quant_method": "awq", "bits": 8, "group_size": 128},
            "by AWQ to 8 bits; tpu-inference loads AWQ with 4",
        ),
        (
            {"quant_method": "awq", "bits": 4},
            "in groups of None; tpu-inference loads AWQ in groups of a size",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": True}, "in groups of True"),
        ({"quant_method": "awq", "bits": 4, "q_group_size": -1}, "in groups of -1"),
        (
            {"quant_method": "fp8", "activation_scheme": "none"},
            "activation_scheme 'none'; vLLM takes dynamic",
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]},
            "static for weights without blocks",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size [128]; vLLM takes two numbers",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"type": "int", "num_bits": 8},
                        "input_activations": {"num_bits": 8, "dynamic": False},
                    }
                },
            },
            "scales of activations fixed beforehand",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mxfp4-pack-quantized",
                "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 4, "group_size": 32}}},
            },
            "4-bit floats in groups of 32; of such formats of compressed-tensors tpu-inference loads NVFP4, with groups of 16",
        ),
    ],
)
def test_a_format_the_engine_has_not_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as refusal:
        read_quantization(config, "model")
    assert says in refusal.value.message


@pytest.mark.parametrize(
    ("skipped", "formats"),
    [
        ([], {"attention": "fp8", "MLP": "fp8"}),
        (["lm_head", "re:.*self_attn.*"], {"attention": "bf16", "MLP": "fp8"}),
        (["model.layers.*.mlp"], {"attention": "fp8", "MLP": "bf16"}),
        (["q_proj"], {"attention": "bf16", "key/value projections": "fp8"}),
    ],
)
def test_modules_that_are_skipped_keep_full_size(skipped: list[str], formats: dict[str, str]) -> None:
    overrides = {"quantization_config": {"quant_method": "fp8", "ignored_layers": skipped}}
    shape = shape_of("meta-llama/Llama-3.1-8B-Instruct", overrides)
    groups = {group.name: group.format for group in tensor_groups(shape, engine_sizes({}, shape), Layout(1))}
    assert {name: groups[name] for name in formats} == formats
    assert groups["embedding"] == groups["output head"] == "bf16"


def test_a_rule_for_every_module_quantises_while_loading() -> None:
    shape = shape_of("Qwen/Qwen3-32B")
    rules = [
        {"module_path": ".*attn.*", "weight_qtype": "int4"},
        {"module_path": ".*", "weight_qtype": "int8"},
    ]
    sizes = engine_sizes({"additional_config": {"quantization": {"qwix": {"rules": rules}}}}, shape)
    assert sizes.quantization is not None
    assert sizes.quantization.format == "int8"


def test_rules_that_are_no_list_are_named() -> None:
    with pytest.raises(ConfigError, match=r"qwix\.rules: a list"):
        engine_sizes(
            {"additional_config": {"quantization": {"qwix": {"rules": 3}}}}, shape_of("Qwen/Qwen3-32B")
        )


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
        {"quant_method": "modelopt_fp4"},
    ],
)
def test_nvfp4_of_modelopt_is_read(config: dict[str, Any]) -> None:
    found = read_quantization(config, "somewhere")
    assert found is not None
    assert found.format == "nvfp4"
    assert found.skipped == (() if len(config) == 1 else ("lm_head",))


CACHE_SCHEME = {"type": "float", "num_bits": 8, "dynamic": False}


@pytest.mark.parametrize(
    ("more", "itemsize"),
    [
        ({}, 2),
        ({"kv_cache_scheme": CACHE_SCHEME}, 1),
        ({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, 1),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": True}}, 2),
    ],
)
def test_a_cache_has_the_format_that_a_checkpoint_of_modelopt_asks_for(
    more: dict[str, Any], itemsize: int
) -> None:
    overrides = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", **more}}
    shape = shape_of("Qwen/Qwen3-32B", overrides)
    assert engine_sizes({}, shape).cache_itemsize == itemsize
    assert engine_sizes({"kv_cache_dtype": "bfloat16"}, shape).cache_itemsize == 2
    assert engine_sizes({"kv_cache_dtype": "fp8"}, shape).cache_itemsize == 1


def test_a_cache_in_nvfp4_is_refused_unless_the_yaml_has_another() -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}
    shape = shape_of("Qwen/Qwen3-32B", {"quantization_config": config})
    with pytest.raises(ConfigError, match="cache in NVFP4, which is not for TPUs"):
        engine_sizes({}, shape)
    assert engine_sizes({"kv_cache_dtype": "fp8"}, shape).cache_itemsize == 1


@pytest.mark.parametrize("algorithm", ["FP8", "MXFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8", "MIXED_PRECISION"])
def test_other_formats_of_modelopt_are_refused(algorithm: str) -> None:
    with pytest.raises(PlanError, match=f"by modelopt to {algorithm}, which tpu-inference does not load"):
        read_quantization({"quant_method": "modelopt", "quant_algo": algorithm}, "somewhere")


def compressed(kind: str, bits: int, activations: dict[str, Any] | None, ignore: list[str]) -> dict[str, Any]:
    group = {"weights": {"type": kind, "num_bits": bits}, "input_activations": activations}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": group},
            "ignore": ignore,
        }
    }


@pytest.mark.parametrize(
    ("kind", "bits", "activations", "by_vllm"),
    [
        ("float", 8, {"type": "float", "num_bits": 8}, False),
        ("int", 8, {"type": "int", "num_bits": 8}, True),
        ("int", 4, {"type": "float", "num_bits": 8}, True),
        ("float", 4, None, True),
    ],
)
def test_only_fp8_of_compressed_tensors_runs_in_jax(
    kind: str, bits: int, activations: dict[str, Any] | None, by_vllm: bool
) -> None:
    overrides = compressed(kind, bits, activations, ["lm_head"])
    assert engine_sizes({}, shape_of("Qwen/Qwen3-8B", overrides)).by_vllm is by_vllm


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"])
def test_models_whose_layers_in_jax_have_no_format_but_their_own_run_as_vllm_s(model: str) -> None:
    fp8 = compressed("float", 8, {"type": "float", "num_bits": 8}, ["lm_head"])
    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for overrides in (fp8, blocks):
        assert engine_sizes({}, shape_of(model, overrides)).by_vllm
    assert not engine_sizes({}, shape_of(model)).by_vllm


def with_scales_for_the_cache() -> dict[str, Any]:
    overrides = compressed("float", 8, {"type": "float", "num_bits": 8}, ["lm_head"])
    overrides["quantization_config"]["kv_cache_scheme"] = {"type": "float", "num_bits": 8, "dynamic": False}
    return overrides


def test_scales_for_an_fp8_cache_want_its_format_named_where_the_model_is_vllm_s() -> None:
    shape = shape_of("meta-llama/Llama-3.1-8B-Instruct", with_scales_for_the_cache())
    for engine in ({}, {"kv_cache_dtype": "auto"}):
        with pytest.raises(ConfigError, match=r"kv_cache_scheme.*set it to fp8"):
            engine_sizes(engine, shape)
    with pytest.raises(ConfigError, match="vLLM refuses fp8_e5m2"):
        engine_sizes({"kv_cache_dtype": "fp8_e5m2"}, shape)
    assert engine_sizes({"kv_cache_dtype": "fp8"}, shape).cache_itemsize == 1
    in_jax = shape_of("Qwen/Qwen3-8B", with_scales_for_the_cache())
    assert engine_sizes({}, in_jax).cache_itemsize == 2


@pytest.mark.parametrize(("kind", "bits"), [("int", 8), ("int", 4), ("float", 8)])
def test_weights_of_compressed_tensors_with_zero_points_are_refused(kind: str, bits: int) -> None:
    config = compressed(kind, bits, {"type": "int", "num_bits": 8, "dynamic": True}, ["lm_head"])
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    with pytest.raises(PlanError, match=r"with zero points \(symmetric: false\)"):
        shape_of("meta-llama/Llama-3.1-8B-Instruct", config)


@pytest.mark.parametrize(("kind", "bits"), [("int", 4), ("int", 8), ("float", 8)])
def test_linear_layers_with_full_activations_are_refused_and_experts_in_int4_are_not(
    kind: str, bits: int
) -> None:
    linear = shape_of("meta-llama/Llama-3.1-8B-Instruct", compressed(kind, bits, None, ["lm_head"]))
    with pytest.raises(ConfigError, match="activations at full size"):
        engine_sizes({}, linear)
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate.*"]
    experts = shape_of("Qwen/Qwen3-30B-A3B", compressed(kind, bits, None, ignored))
    if kind == "int" and bits == 4:
        engine_sizes({}, experts)
        return
    with pytest.raises(ConfigError, match="experts are"):
        engine_sizes({}, experts)


TOKENS = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("weights", "activations", "says"),
    [
        ({"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}, TOKENS, None),
        ({"type": "int", "num_bits": 4, "group_size": 128}, TOKENS | {"type": "float"}, None),
        ({"type": "int", "num_bits": 8, "strategy": "channel"}, TOKENS, None),
        ({"type": "int", "num_bits": 4, "strategy": "channel"}, TOKENS, "int4 with scales by channel"),
        ({"type": "int", "num_bits": 4, "group_size": -1}, TOKENS, "int4 with scales by channel"),
        ({"type": "int", "num_bits": 8, "group_size": 128}, TOKENS, "int8 with scales by group"),
        ({"type": "float", "num_bits": 8, "strategy": "group"}, TOKENS, "fp8 with scales by group"),
        (
            {"type": "int", "num_bits": 4, "group_size": 128},
            TOKENS | {"num_bits": 4},
            "activations of 4 bits",
        ),
        (
            {"type": "int", "num_bits": 8, "strategy": "channel"},
            TOKENS | {"strategy": "tensor"},
            "activations that are not scaled token by token",
        ),
    ],
)
def test_linear_layers_are_loaded_with_the_scales_that_the_engine_has_a_scheme_for(
    weights: dict[str, Any], activations: dict[str, Any], says: str | None
) -> None:
    groups = {"group_0": {"weights": weights, "input_activations": activations}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    shape = shape_of("Qwen/Qwen3-8B", {"quantization_config": config})
    if says is None:
        engine_sizes({}, shape)
        return
    with pytest.raises(ConfigError, match=f"{says}, which tpu-inference does not load"):
        engine_sizes({}, shape)


def experts_in(weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights, "input_activations": {"dynamic": True}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("model", "config", "engine", "says"),
    [
        (
            "Qwen/Qwen3-30B-A3B",
            experts_in({"type": "int", "num_bits": 8}),
            {},
            "experts are int8 by compressed",
        ),
        ("Qwen/Qwen3-30B-A3B", experts_in({"type": "float", "num_bits": 4}), {}, "experts are nvfp4"),
        (
            "Qwen/Qwen3-8B",
            {"quant_method": "mxfp4"},
            {},
            "MXFP4, which tpu-inference 0.26 loads for gpt-oss alone",
        ),
        (
            "Qwen/Qwen3-8B",
            {"quant_method": "fp8"},
            {"quantization": "awq"},
            "quantised with fp8, vLLM refuses 'awq'",
        ),
    ],
)
def test_a_format_that_these_layers_are_not_loaded_in_is_refused(
    model: str, config: dict[str, Any], engine: dict[str, Any], says: str
) -> None:
    shape = shape_of(model, {"quantization_config": config})
    with pytest.raises(ConfigError, match=says):
        engine_sizes(engine, shape)


def test_formats_of_experts_and_options_that_agree_are_taken() -> None:
    for kind, bits in (("int", 4), ("float", 8)):
        config = experts_in({"type": kind, "num_bits": bits})
        engine_sizes({}, shape_of("Qwen/Qwen3-30B-A3B", {"quantization_config": config}))
    awq = shape_of("Qwen/Qwen3-8B", {"quantization_config": {"quant_method": "awq", "group_size": 128}})
    engine_sizes({"quantization": "auto_awq"}, awq)


def test_gemma_4_in_fp8_blocks_of_compressed_tensors_runs_as_vllm_s() -> None:
    weights = {"type": "float", "num_bits": 8, "strategy": "block"}
    shape = shape_of("google/gemma-4-31B-it", {"quantization_config": experts_in(weights)})
    assert engine_sizes({}, shape).by_vllm
    per_channel = experts_in(weights | {"strategy": "channel"})
    assert not engine_sizes(
        {}, shape_of("google/gemma-4-31B-it", {"quantization_config": per_channel})
    ).by_vllm


def test_the_older_key_of_compressed_tensors_is_read() -> None:
    overrides = {"compression_config": int_weights(8)}
    found = shape_of("meta-llama/Llama-3.1-8B-Instruct", overrides).quantization
    assert found is not None
    assert (found.method, found.format) == ("compressed-tensors", "int8")
