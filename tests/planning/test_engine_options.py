import pytest

from serving.errors import ConfigError
from serving.planning import engine_options
from serving.planning.engine_sizes import engine_sizes
from serving.planning.shapes import shape_of

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
        ("runner", ["pooling"], "engine.runner: vLLM takes auto, generate, pooling"),
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


def test_commits_and_versions_may_look_like_numbers() -> None:
    engine_options.check(
        {"revision": 1234567, "tokenizer_revision": 7, "show_hidden_metrics_for_version": 0.7}
    )


def test_a_plugin_may_bring_parsers_that_vllm_does_not_know() -> None:
    engine_options.check({"reasoning_parser": "mine", "reasoning_parser_plugin": "/models/mine.py"})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("enable_prefix_caching", "yes", "enable_prefix_caching: true or false (got 'yes')"),
        ("max_num_seqs", "64", "max_num_seqs: a whole number (got '64')"),
        ("max_model_len", 4096.0, "max_model_len: a whole number (got 4096.0)"),
        ("gpu_memory_utilization", "0.9", "gpu_memory_utilization: a number (got '0.9')"),
        ("download_dir", ["/a"], "download_dir: a text (got ['/a'])"),
        ("tokenizer", 5, "tokenizer: a text (got 5)"),
        ("stream_interval", 0, "stream_interval: at least 1 (got 0)"),
        ("max_logprobs", -2, "max_logprobs: at least -1 (got -2)"),
        ("watermark", 1.0, "watermark: at least 0 and below 1 (got 1.0)"),
        ("limit_mm_per_prompt", {"image": -1}, "limit_mm_per_prompt.image: a whole number of at least 0"),
        ("limit_mm_per_prompt", {"video": "3"}, "limit_mm_per_prompt.video: a whole number of at least 0"),
        ("hf_config_path", 1.5, "hf_config_path: a text (got 1.5)"),
        ("allowed_media_domains", {"a": 1}, "allowed_media_domains: a list (got {'a': 1})"),
        ("limit_mm_per_prompt", "image=3", "limit_mm_per_prompt: a mapping (got 'image=3')"),
        ("load_format", "safetensor", "did you mean 'safetensors'?"),
        ("model_impl", "flax_nnx", "model_impl: vLLM takes auto, vllm (got 'flax_nnx'"),
        ("optimization_level", 7, "optimization_level: vLLM takes 0, 1, 2, 3"),
        ("runner", "draft", "'draft' is not for TPUs; tpu-inference takes auto, generate, pooling"),
        (
            "speculative_config",
            {"method": "ngram", "num_speculative_token": 3},
            "speculative_config.num_speculative_token: vLLM 0.26 has no such key; did you mean num_speculative_tokens?",
        ),
        ("compilation_config", {"levle": 3}, "compilation_config.levle: vLLM 0.26 has no such key"),
        (
            "kv_transfer_config",
            {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
            "kv_connector: tpu-inference takes TPUConnector, TPUConnectorHMA, TPUOffloadConnector",
        ),
        ("max_num_partial_prefills", 4, "max_num_partial_prefills: vLLM 0.26 takes 1 alone (got 4)"),
        (
            "enable_sleep_mode",
            True,
            "enable_sleep_mode: not for TPUs: vLLM 0.26 has it on CUDA and ROCm only",
        ),
        (
            "kv_cache_memory_bytes",
            1,
            "kv_cache_memory_bytes: not for TPUs: tpu-inference 0.26 does not read it",
        ),
        ("enable_cumem_allocator", True, "enable_cumem_allocator: not for TPUs"),
        (
            "enable_dbo",
            True,
            "enable_dbo: not for TPUs: vLLM 0.26 splits steps for exchanges between GPUs alone",
        ),
        (
            "enable_elastic_ep",
            True,
            "enable_elastic_ep: not for TPUs: vLLM 0.26 has it with enable_eplb alone",
        ),
        ("enable_mamba_cache_stochastic_rounding", True, "not for TPUs: vLLM 0.26 has it in kernels of GPUs"),
        ("ray_workers_use_nsight", True, "ray_workers_use_nsight: not for TPUs: it is NVIDIA's profiler"),
        ("ubatch_size", 2, "ubatch_size: not for TPUs: vLLM 0.26 splits steps"),
        ("kv_cache_metrics_sample", 0, "kv_cache_metrics_sample: above 0 and at most 1 (got 0)"),
        ("kv_cache_metrics_sample", 2, "kv_cache_metrics_sample: above 0 and at most 1 (got 2)"),
        ("dcp_comm_backend", "a2a", "'a2a' is not for TPUs; tpu-inference takes ag_rs"),
        ("offload_backend", "prefetch", "'prefetch' is not for TPUs; tpu-inference takes auto, uva"),
        ("tokens_only", True, "tokens_only: not settable, vLLM 0.26 has no flag for it"),
    ],
)
def test_a_value_that_ends_an_engine_s_start_is_refused_before(name: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        engine_options.check({name: value})
    assert says in refusal.value.message


def test_values_of_the_right_kind_pass() -> None:
    engine_options.check(
        {
            "max_model_len": "auto",
            "enable_sleep_mode": False,
            "gpu_memory_utilization": 1,
            "revision": 5,
            "speculative_config": {"method": "ngram", "num-speculative-tokens": 3},
            "kv_transfer_config": {"kv_connector": "TPUConnector", "kv_role": "kv_both"},
            "lora_target_modules": ["q_proj"],
            "cpu_offload_gb": None,
            "attention_backend": "FLASH_ATTN",
            "ubatch_size": 1,
            "kv_cache_metrics_sample": 0.5,
        }
    )


def test_expert_parallelism_of_a_model_without_experts_is_refused() -> None:
    asked = {"enable_expert_parallel": True}
    with pytest.raises(ConfigError, match="vLLM refuses it for a model without experts"):
        engine_sizes(asked, shape_of("meta-llama/Llama-3.1-8B-Instruct"))
    engine_sizes(asked, shape_of("Qwen/Qwen3-30B-A3B"))
