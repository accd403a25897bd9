import pytest

from serving.errors import ConfigError
from serving.planning import engine_options

pytestmark = pytest.mark.unit


def test_vllms_own_names_pass() -> None:
    engine_options.check(
        {"max_model_len": 1, "gpu_memory_utilization": 0.9, "kv_cache_dtype": "fp8", "hf_overrides": {}}
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tensor_parallel_size", "set parallel.tensor"),
        ("tensor-parallel-size", "set parallel.tensor"),
        ("pipeline_parallel_size", "set parallel.pipeline"),
        ("model", "set model beside engine"),
        ("served_model_name", "set name"),
        ("distributed_executor_backend", "remove it"),
        ("worker_cls", "remove it"),
        ("data_parallel_size", "set parallel.data"),
        ("data_parallel_rank", "set replicas"),
        ("port", "the replica chooses"),
        ("enable_auto_tool_choice", "not settable, set tool_call_parser"),
        ("tool-call-parser", "write tool_call_parser"),
        ("tool_parser", "did you mean 'tool_call_parser'?"),
        ("max_model_length", "did you mean 'max_model_len'?"),
        ("max-model-len", "write max_model_len"),
        (
            "tensor_parallel",
            "did you mean 'tensor_parallel_size', which is not settable: set parallel.tensor",
        ),
        ("zzz", "engine.zzz: not an option of vLLM"),
    ],
)
def test_a_derived_or_misspelt_option_names_the_right_key(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.") as refusal:
        engine_options.check({name: 1})
    assert says in refusal.value.message


def test_every_problem_is_in_one_message() -> None:
    with pytest.raises(ConfigError, match=r"engine\.model: .*; engine\.port: "):
        engine_options.check({"port": 1, "model": 1, "max_num_seqs": 1})


def test_an_option_is_derived_or_settable_not_both() -> None:
    assert not engine_options.SETTABLE & engine_options.DERIVED.keys()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("kv_cache_dtype", "fp9", "engine.kv_cache_dtype: vLLM takes auto, bfloat16, float16, fp8,"),
        ("kv_cache_dtype", "fp8_e4m4", "did you mean 'fp8_e4m3'?"),
        ("kv_cache_dtype", "nvfp4", "'nvfp4' is not for TPUs; tpu-inference takes auto, bfloat16"),
        (
            "dtype",
            "int3",
            "engine.dtype: vLLM takes auto, bfloat16, float, float16, float32, half (got 'int3'",
        ),
        ("runner", ["pooling"], "engine.runner: vLLM takes auto, draft, generate, pooling"),
        ("max_lora_rank", 7, "engine.max_lora_rank: vLLM takes 1, 8, 16"),
        ("tool_call_parser", "hermess", "did you mean 'hermes'?"),
        ("tool_call_parser", True, "engine.tool_call_parser: vLLM takes apertus, cohere_command3,"),
        ("reasoning_parser", "hermes", "engine.reasoning_parser: vLLM takes cohere_command3,"),
    ],
)
def test_a_value_that_vllm_does_not_take_is_refused_with_those_it_takes(
    name: str, value: object, says: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        engine_options.check({name: value})
    assert says in refusal.value.message


def test_an_option_left_unset_or_to_vllm_has_no_wrong_value() -> None:
    engine_options.check({"dtype": None, "kv_cache_dtype": "auto", "max_lora_rank": 64})


def test_a_plugin_may_bring_parsers_that_vllm_does_not_know() -> None:
    engine_options.check({"reasoning_parser": "mine", "reasoning_parser_plugin": "/models/mine.py"})
